"""The directory of a journal: files that are written at offsets, synced, and removed.

A bounded number of files stays open, however many there are. A file that was written since its last
sync is not closed: the kernel could forget that writing it out has failed.

Threading: any method from any thread; a file has one writer at an offset. `_long` is held while
much is written: the kernel lets one thread at a time do that, too, and the waiting threads spin.
"""

from __future__ import annotations

import errno
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Protocol

from fsdata.objects.contract import Buffer
from fsdata.resources.private_paths import open_private
from fsdata.staging.sync_file_range import begin_write_out
from fsmeta.runtime import Runtime

LONG_BYTES: Final = 256 << 10  # writing more can take as long as a hand-over between threads
OPEN_MAX: Final = 128  # files that stay open: 8 GiB of segments
_NO_DESCRIPTORS: Final = (errno.EMFILE, errno.ENFILE)


class StagingDisk(Protocol):
    """Files of a journal. Every method raises OSError."""

    place: str  # for people

    def names(self) -> list[str]:
        """The files there are."""

    def write(self, name: str, offset: int, pieces: Sequence[Buffer]) -> None:
        """Write at `offset` of a file, which is made if it is not there."""

    def read(self, name: str, offset: int, size: int) -> bytes:
        """What is there, fewer bytes at the end of the file."""

    def sync(self, name: str) -> None:
        """Make a file, and that it exists, survive a loss of power."""

    def sync_names(self) -> None:
        """Make it survive a loss of power which files there are: what was removed stays so."""

    def cut(self, name: str, size: int) -> None:
        """Shorten a file."""

    def rename(self, name: str, new: str) -> None:
        """Call a file `new`, which no file is called; it is synced under that name, or not."""

    def remove(self, name: str) -> None:
        """Remove a file; one that is not there is fine."""

    def close(self) -> None:
        """Let go of descriptors."""


class _Open:
    """A file that is open. Guarded by the lock of its `DirectoryDisk`, but for `fd`."""

    __slots__ = ("dirty", "fd", "gone", "users")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.users = 0  # calls that work with the descriptor
        self.dirty = False  # written since the last sync
        self.gone = False  # to be closed by the last of its users

    @property
    def is_idle(self) -> bool:
        """Whether it can be closed, and opened again later."""
        return not self.users and not self.dirty


class DirectoryDisk:
    """The files of a directory."""

    def __init__(
        self, runtime: Runtime, path: str, lock: int | None = None, open_max: int = OPEN_MAX
    ) -> None:
        """`lock` is a descriptor that says that the directory is ours; it is closed at the end."""
        self.place = path
        # No call but `open` needs a new descriptor: a sync does not fail for want of one.
        self._directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._held = lock
        self._open_max = open_max
        self._runtime = runtime
        self._long = runtime.lock()
        self._lock = runtime.lock()
        # The one that was used last is at the end. Guarded by _lock, as is what is in it.
        self._open: OrderedDict[str, _Open] = OrderedDict()
        self._entered: set[str] = set()  # whose names are synced; guarded by _lock

    @contextmanager
    def _opened(self, name: str, create: bool = False) -> Iterator[_Open]:
        """A file that is not closed while the body runs. Raises: OSError."""
        with self._lock:
            file = self._open.get(name)
            if file is None:
                if len(self._open) >= self._open_max:
                    self._close_idle(1)
                file = self._open[name] = _Open(self._open_file(name, create))
            self._open.move_to_end(name)
            file.users += 1
        try:
            yield file
        finally:
            with self._lock:
                file.users -= 1
                self._close_gone(file)

    def _open_file(self, name: str, create: bool) -> int:
        """A descriptor; the caller holds the lock."""
        flags = os.O_RDWR | (os.O_CREAT if create else 0)
        try:
            return open_private(name, flags, dir_fd=self._directory)
        except OSError as error:
            if error.errno not in _NO_DESCRIPTORS or not self._close_idle(self._open_max):
                raise
            return open_private(name, flags, dir_fd=self._directory)

    def _close_idle(self, most: int) -> int:
        """Close files that were not used for longest; how many. The caller holds the lock."""
        idle = [name for name, file in self._open.items() if file.is_idle][:most]
        for name in idle:
            os.close(self._open.pop(name).fd)
        return len(idle)

    def _close_gone(self, file: _Open) -> None:
        """Close a file that is not in the table any more; the caller holds the lock."""
        if file.gone and not file.users:
            os.close(file.fd)

    def _forget(self, name: str) -> None:
        """Close a file, or have its last user do so. The caller holds the lock."""
        file = self._open.pop(name, None)
        if file is not None:
            file.gone = True
            self._close_gone(file)

    def names(self) -> list[str]:
        return sorted(os.listdir(self._directory))

    def write(self, name: str, offset: int, pieces: Sequence[Buffer]) -> None:
        left = [memoryview(piece) for piece in pieces]
        size = sum(map(len, left))
        with self._opened(name, create=True) as file:
            file.dirty = True
            if size <= LONG_BYTES:
                _write(file.fd, left, offset)
                return
            self._runtime.will_wait()
            with self._long:
                _write(file.fd, left, offset)
            begin_write_out(file.fd, offset, offset + size)

    def read(self, name: str, offset: int, size: int) -> bytes:
        with self._opened(name) as file:
            data = os.pread(file.fd, size, offset)
            while 0 < len(data) < size:
                more = os.pread(file.fd, size - len(data), offset + len(data))
                if not more:
                    break
                data += more
            return data

    def sync(self, name: str) -> None:
        self._runtime.will_wait()
        with self._opened(name) as file:
            file.dirty = False  # before: a write meanwhile is not synced
            os.fdatasync(file.fd)
        if name not in self._entered:
            self.sync_names()
            with self._lock:
                self._entered.add(name)

    def sync_names(self) -> None:
        self._runtime.will_wait()
        os.fsync(self._directory)

    def cut(self, name: str, size: int) -> None:
        with self._opened(name) as file:
            file.dirty = True
            os.ftruncate(file.fd, size)

    def rename(self, name: str, new: str) -> None:
        os.rename(name, new, src_dir_fd=self._directory, dst_dir_fd=self._directory)
        with self._lock:
            self._entered.discard(name)
            file = self._open.pop(name, None)
            if file is not None:
                self._open[new] = file

    def remove(self, name: str) -> None:
        with self._lock:
            self._forget(name)
            self._entered.discard(name)
        try:
            os.unlink(name, dir_fd=self._directory)
        except FileNotFoundError:
            pass

    def close(self) -> None:
        with self._lock:
            for name in list(self._open):
                self._forget(name)
            for fd in (self._directory, self._held):
                if fd is not None:
                    os.close(fd)
            self._directory, self._held = -1, None


def _write(fd: int, left: list[memoryview], offset: int) -> None:
    """Write all of `left`, which is used up. Raises: OSError."""
    while left:
        done = os.pwritev(fd, left, offset)
        offset += done
        while left and done >= len(left[0]):
            done -= len(left.pop(0))
        if left:
            left[0] = left[0][done:]


_CONFORMS: Callable[[Runtime, str], StagingDisk] = DirectoryDisk

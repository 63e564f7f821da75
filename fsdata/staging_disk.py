"""The directory that a journal lies in: files that are written at offsets, synced, and removed.

Threading: any method from any thread; a file has one writer at an offset. `_long` is held while
much is written, which the kernel would let one thread do at a time, too, and others spin for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Protocol

from fsdata.objects import Buffer
from fsdata.write_out import begin_write_out
from fsmeta.runtime import Runtime

LONG_BYTES = 256 << 10  # writing more can take as long as a hand-over between threads


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

    def cut(self, name: str, size: int) -> None:
        """Shorten a file."""

    def rename(self, name: str, new: str) -> None:
        """Call a file `new`, which no file is called; it is synced under that name, or not."""

    def remove(self, name: str) -> None:
        """Remove a file; one that is not there is fine."""

    def close(self) -> None:
        """Let go of descriptors."""


class DirectoryDisk:
    """The files of a directory."""

    def __init__(self, runtime: Runtime, path: str, lock: int | None = None) -> None:
        """`lock` is a descriptor that says that the directory is ours; it is closed at the end."""
        self.place = path
        self._held = lock
        self._runtime = runtime
        self._long = runtime.lock()
        self._lock = runtime.lock()
        self._open: dict[str, int] = {}  # guarded by _lock
        self._entered: set[str] = set()  # whose names are synced; guarded by _lock

    def _descriptor(self, name: str, create: bool) -> int:
        with self._lock:
            fd = self._open.get(name)
            if fd is None:
                flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
                fd = self._open[name] = os.open(os.path.join(self.place, name), flags, 0o600)
            return fd

    def names(self) -> list[str]:
        return sorted(os.listdir(self.place))

    def write(self, name: str, offset: int, pieces: Sequence[Buffer]) -> None:
        left = [memoryview(piece) for piece in pieces]
        fd = self._descriptor(name, create=True)
        size = sum(map(len, left))
        if size <= LONG_BYTES:
            _write(fd, left, offset)
            return
        self._runtime.will_wait()
        with self._long:
            _write(fd, left, offset)
        begin_write_out(fd, offset, offset + size)

    def read(self, name: str, offset: int, size: int) -> bytes:
        fd = self._descriptor(name, create=False)
        data = os.pread(fd, size, offset)
        while 0 < len(data) < size:
            more = os.pread(fd, size - len(data), offset + len(data))
            if not more:
                break
            data += more
        return data

    def sync(self, name: str) -> None:
        self._runtime.will_wait()
        os.fdatasync(self._descriptor(name, create=False))
        if name not in self._entered:
            self._sync_directory()
            with self._lock:
                self._entered.add(name)

    def _sync_directory(self) -> None:
        fd = os.open(self.place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def cut(self, name: str, size: int) -> None:
        os.ftruncate(self._descriptor(name, create=False), size)

    def rename(self, name: str, new: str) -> None:
        os.rename(os.path.join(self.place, name), os.path.join(self.place, new))
        with self._lock:
            self._entered.discard(name)
            fd = self._open.pop(name, None)
            if fd is not None:
                self._open[new] = fd

    def remove(self, name: str) -> None:
        with self._lock:
            fd = self._open.pop(name, None)
            self._entered.discard(name)
        if fd is not None:
            os.close(fd)
        try:
            os.unlink(os.path.join(self.place, name))
        except FileNotFoundError:
            pass

    def close(self) -> None:
        with self._lock:
            for fd in self._open.values():
                os.close(fd)
            self._open.clear()
            if self._held is not None:
                os.close(self._held)
                self._held = None


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

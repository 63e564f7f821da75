"""The seam between the disk cache and a disk: all it does to files, and nothing else.

`OsFiles` is Linux. `tests/sim` has one that forgets, tears and swaps files. Everything raises
OSError as Linux does; `disk_cache/disk` is the only caller and judges what an error means.

Threading: any method from any thread. A file is closed when the last one who uses it lets go: a
descriptor's number must not become another file's under a thread that reads.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple, Protocol

from fsdata.objects.contract import Buffer
from fsdata.resources.private_paths import open_private

IOV_MAX = 1024  # linux/uio.h: buffers of one writev(2)
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW
_UNIT = 512  # of st_blocks, stat(2)


class Listed(NamedTuple):
    """A file of a directory."""

    name: str
    used_bytes: int  # what it takes on the disk
    mtime_ns: int


class Space(NamedTuple):
    """What a file system has."""

    total_bytes: int
    free_bytes: int
    free_inodes_share: float  # 1.0 where it does not count inodes


class CacheFile(Protocol):
    """An open file."""

    def read(self, size: int, at: int) -> bytes: ...
    def read_into(self, pieces: Sequence[Buffer], at: int) -> int: ...
    def write(self, pieces: Sequence[Buffer], at: int) -> None: ...
    def in_memory(self, at: int, size: int) -> bool:
        """Whether the kernel has these bytes, by a look at the first and the last one.

        A file system that can't tell, as tmpfs, is taken for one that is in memory.
        """

    def touch(self, now_ns: int) -> None: ...
    def used_bytes(self) -> int: ...
    def mtime_ns(self) -> int: ...


class CacheFiles(Protocol):
    """Files by absolute path."""

    def open(self, path: str, write: bool = False) -> CacheFile:
        """An existing file."""

    def create(self, path: str, pieces: Sequence[Buffer]) -> CacheFile:
        """A new file with this content, open to be written."""

    def rename(self, path: str, target: str) -> None: ...
    def unlink(self, path: str) -> None: ...
    def make_directory(self, path: str) -> None:
        """One that is there already is fine."""

    def list(self, path: str) -> list[Listed]:
        """The plain files of a directory; one that is not there has none."""

    def space(self, path: str) -> Space: ...
    def device(self, path: str) -> int:
        """Which file system a directory is on."""

    def locked(self, path: str) -> AbstractContextManager[CacheFile]:
        """A file, made if need be, that nobody else has locked meanwhile."""


class OsFile:
    """A descriptor that is closed with its last user."""

    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __del__(self) -> None:
        os.close(self._fd)

    def read(self, size: int, at: int) -> bytes:
        return os.pread(self._fd, size, at)

    def read_into(self, pieces: Sequence[Buffer], at: int) -> int:
        return os.preadv(self._fd, pieces, at)

    def write(self, pieces: Sequence[Buffer], at: int) -> None:
        left = [memoryview(piece) for piece in pieces]
        while left:
            wrote = os.pwritev(self._fd, left[:IOV_MAX], at)
            at += wrote
            while left and wrote >= len(left[0]):
                wrote -= len(left.pop(0))
            if wrote:
                left[0] = left[0][wrote:]

    def in_memory(self, at: int, size: int) -> bool:
        byte = bytearray(1)
        try:
            first = os.preadv(self._fd, (byte,), at, os.RWF_NOWAIT)
            return first == 1 == os.preadv(self._fd, (byte,), at + size - 1, os.RWF_NOWAIT)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno == errno.EOPNOTSUPP:
                return True
            raise

    def touch(self, now_ns: int) -> None:
        os.utime(self._fd, ns=(now_ns, now_ns))

    def used_bytes(self) -> int:
        return os.fstat(self._fd).st_blocks * _UNIT

    def mtime_ns(self) -> int:
        return os.fstat(self._fd).st_mtime_ns


class OsFiles:
    """Files of this machine. Only their owner may look into them."""

    def open(self, path: str, write: bool = False) -> CacheFile:
        return OsFile(open_private(path, _FLAGS | (os.O_RDWR if write else os.O_RDONLY)))

    def create(self, path: str, pieces: Sequence[Buffer]) -> CacheFile:
        made = OsFile(os.open(path, _FLAGS | os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        made.write(pieces, 0)
        return made

    def rename(self, path: str, target: str) -> None:
        os.rename(path, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def make_directory(self, path: str) -> None:
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            if not os.path.isdir(path):
                raise

    def list(self, path: str) -> list[Listed]:
        found: list[Listed] = []
        try:
            entries = os.scandir(path)
        except FileNotFoundError:
            return found
        with entries:
            for entry in entries:
                try:
                    what = entry.stat(follow_symlinks=False)
                except FileNotFoundError:  # another mount removed it
                    continue
                if entry.is_file(follow_symlinks=False):
                    found.append(Listed(entry.name, what.st_blocks * _UNIT, what.st_mtime_ns))
        return found

    def space(self, path: str) -> Space:
        found = os.statvfs(path)
        inodes = found.f_favail / found.f_files if found.f_files else 1.0
        return Space(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize, inodes)

    def device(self, path: str) -> int:
        found = os.stat(path)
        if not os.path.isdir(path):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        return found.st_dev

    @contextmanager
    def locked(self, path: str) -> Iterator[CacheFile]:
        # a description of its own, so that flock(2) keeps out threads of this process, too
        fd = open_private(path, _FLAGS | os.O_RDWR | os.O_CREAT)
        held = OsFile(fd)
        fcntl.flock(fd, fcntl.LOCK_EX)
        try:
            yield held
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)


_CONFORMS: Callable[[], CacheFiles] = OsFiles

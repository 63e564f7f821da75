"""The seam between the disk cache and a disk: all it does to files, and nothing else.

`OsFiles` is Linux. `tests/sim` has one that forgets, tears and swaps files. Everything raises
OSError as Linux does; `disk` is the only caller and decides what an error means.

Threading: any method from any thread. A file is closed when its last user lets go: a descriptor's
number must not become another file's under a thread that reads.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple, Protocol

from fsdata.objects.contract import Buffer
from fsdata.resources.private_paths import open_folder, open_private, require_private
from fsmeta.errors import ConfigError

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
    def lock_byte(self, at: int) -> bool:
        """Whether this open of the file has one byte of it now, and no other open has."""

    def unlock_byte(self, at: int) -> None: ...


class CacheFiles(Protocol):
    """Files by absolute path."""

    def open(self, path: str, write: bool = False) -> CacheFile:
        """An existing file."""

    def create(self, path: str, pieces: Sequence[Buffer]) -> CacheFile:
        """A new file with this content, open to be written."""

    def rename(self, path: str, target: str) -> None: ...
    def unlink(self, path: str) -> None: ...
    def make_directory(self, path: str) -> None:
        """One that is there already is fine, if no other user may change it.

        One that is below no other one that was made here is the directory of a cache.
        """

    def list(self, path: str) -> list[Listed]:
        """The plain files of a directory; one that is not there has none."""

    def space(self, path: str) -> Space: ...
    def device(self, path: str) -> int:
        """Which file system a directory is on."""

    def locked(self, path: str) -> AbstractContextManager[CacheFile]:
        """A file, made if need be, locked against other processes meanwhile."""

    def open_locks(self, path: str) -> CacheFile:
        """A file, made if need be, of which single bytes are to be locked."""


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

    def lock_byte(self, at: int) -> bool:
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _one_byte(fcntl.F_WRLCK, at))
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):  # another open has it
                return False
            raise
        return True

    def unlock_byte(self, at: int) -> None:
        fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _one_byte(fcntl.F_UNLCK, at))


class OsFiles:
    """Files of this machine. Only their owner may look into them.

    A directory of a cache may be removed, and another user may put something in its place. So what
    changes a directory goes through descriptors, from the cache's own directory down, of which
    each is this user's alone, and none is a link.
    """

    _roots: tuple[str, ...] = ()  # the directories of caches

    @contextmanager
    def _folder(self, path: str) -> Iterator[int]:
        """A descriptor of a directory. Raises: OSError, EPERM where it is not ours alone."""
        root = next((each for each in self._roots if f"{path}/".startswith(f"{each}/")), path)
        at = open_folder(root, 0)
        try:
            for name in path[len(root) :].split("/")[1:]:
                inner = open_folder(name, os.O_NOFOLLOW, at)
                os.close(at)
                at = inner
            yield at
        finally:
            os.close(at)

    @contextmanager
    def _place(self, path: str) -> Iterator[tuple[str, int]]:
        """A file's name, and a descriptor of its directory."""
        folder, _, name = path.rpartition("/")
        with self._folder(folder) as at:
            yield name, at

    def open(self, path: str, write: bool = False) -> CacheFile:
        if not write:  # what is read is judged by itself
            return OsFile(open_private(path, _FLAGS | os.O_RDONLY))
        with self._place(path) as (name, at):
            return OsFile(open_private(name, _FLAGS | os.O_RDWR, dir_fd=at))

    def create(self, path: str, pieces: Sequence[Buffer]) -> CacheFile:
        flags = _FLAGS | os.O_RDWR | os.O_CREAT | os.O_EXCL
        with self._place(path) as (name, at):
            made = OsFile(os.open(name, flags, 0o600, dir_fd=at))
        made.write(pieces, 0)
        return made

    def rename(self, path: str, target: str) -> None:
        with self._place(path) as (name, at), self._place(target) as (new_name, new_at):
            os.rename(name, new_name, src_dir_fd=at, dst_dir_fd=new_at)

    def unlink(self, path: str) -> None:
        with self._place(path) as (name, at):
            os.unlink(name, dir_fd=at)

    def make_directory(self, path: str) -> None:
        if not any(path.startswith(f"{root}/") for root in self._roots):
            self._make_root(path)
            return
        with self._place(path) as (name, at):
            try:
                os.mkdir(name, 0o700, dir_fd=at)
            except FileExistsError:
                os.close(open_folder(name, os.O_NOFOLLOW, at))

    def _make_root(self, path: str) -> None:
        """Make the directory of a cache. Raises: OSError, EPERM if other users may change it."""
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            if not os.path.isdir(path):
                raise
        try:
            require_private(path, "cache directory")
        except ConfigError as error:
            raise OSError(errno.EPERM, str(error), path) from error
        if path not in self._roots:
            self._roots = (*self._roots, path)

    def list(self, path: str) -> list[Listed]:
        try:
            with self._folder(path) as at:
                return _plain_files(at)
        except FileNotFoundError:
            return []

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
        held = OsFile(fd := self._made(path))
        fcntl.flock(fd, fcntl.LOCK_EX)
        try:
            yield held
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)

    def open_locks(self, path: str) -> CacheFile:
        return OsFile(self._made(path))

    def _made(self, path: str) -> int:
        """A descriptor of a file, which is made if need be."""
        with self._place(path) as (name, at):
            return open_private(name, _FLAGS | os.O_RDWR | os.O_CREAT, dir_fd=at)


def _one_byte(kind: int, at: int) -> bytes:
    """A struct flock, fcntl(2), of one byte from the file's begin on."""
    return struct.pack("hhqqi0q", kind, os.SEEK_SET, at, 1, 0)


def _plain_files(at: int) -> list[Listed]:
    """Those of the directory behind a descriptor."""
    found: list[Listed] = []
    with os.scandir(at) as entries:
        for entry in entries:
            try:
                what = entry.stat(follow_symlinks=False)
            except FileNotFoundError:  # another mount removed it
                continue
            if entry.is_file(follow_symlinks=False):
                found.append(Listed(entry.name, what.st_blocks * _UNIT, what.st_mtime_ns))
    return found


_CONFORMS: Callable[[], CacheFiles] = OsFiles

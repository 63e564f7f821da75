"""An object store in a local directory: key → path, written as a temporary file and renamed.

What `file://` volumes use, and the object store of tests and benchmarks. A put does not fsync;
`sync` does, for the file and the directories that lead to it. Temporary files live in `.tmp` of the
root, are named after this process's random word, and old ones are removed when a store is opened.

Threading: any method from any thread; they share a counter and a guess of how long reads take.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from errno import EDQUOT, EIO, ENOSPC
from itertools import count

from fsdata.objects.contract import Buffer, ObjectInfo, ObjectStore, Range
from fsmeta.errors import ConfigError, ObjectMissing, Unavailable
from fsmeta.runtime import Runtime

TMP_DIR = ".tmp"
TMP_AGE_NS = 86_400 * 10**9  # a put never takes a day, so an older temporary file has no owner
SLOW_S = 0.001  # reads that take longer wait for a disk; others are copies from the page cache
AVERAGE_OF = 8  # reads, so that two from a slow disk are enough
IOV_MAX = 1024  # linux/uio.h: buffers of one writev(2)
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_CLOEXEC
_PRIVATE = 0o700  # reading an object bypasses the modes of files, so only the owner may
_SHARED = 0o077  # of an existing root: it was made so by intention, and what is in it follows it
_READABLE = 0o044  # objects are never changed
log = logging.getLogger(__name__)


class FileObjects:
    """Objects as files below `root`, which is created if need be.

    Raises: ConfigError where the directory can't be used.
    """

    def __init__(self, runtime: Runtime, root: str) -> None:
        self._root = root.rstrip("/") or "/"
        self._tmp = f"{self._root}/{TMP_DIR}/{runtime.random_bits(64):016x}."
        self._count = count()
        self._runtime = runtime
        # What fsync(2) failed for: it says so once, and later succeeds though bytes are lost.
        self._doubtful: set[str] = set()  # grows with a disk's errors; each step is atomic
        self._average_s = 0.0  # of reads; threads may miss each other's
        try:
            _make_root(self._root)
            self._shared = os.stat(self._root).st_mode & _SHARED  # set by intention
            self._make_dirs(f"{self._root}/{TMP_DIR}")
            self._sweep()
        except OSError as error:
            raise ConfigError(
                f"object directory {root!r}: {error.strerror}; "
                "name a directory this user can write to"
            ) from error

        if self._shared & stat.S_IWOTH:
            log.warning(
                "any user may write to the object directory %s: run `chmod o-w` on it", self._root
            )

    def _make_dirs(self, path: str) -> None:
        """A directory below the root, and those above it, with the root's mode. Raises: OSError."""
        made = []
        while not os.path.isdir(path):
            made.append(path)
            path = os.path.dirname(path)
        for each in reversed(made):
            with suppress(FileExistsError):
                os.mkdir(each, _PRIVATE)
                if self._shared:
                    os.chmod(each, os.stat(each).st_mode & stat.S_ISGID | _PRIVATE | self._shared)

    def _sweep(self) -> None:
        """Remove temporary files that a crashed process left behind, by the directory's clock.

        That may have leapt as well: then a put finds its file gone, and is repeated.
        """
        probe = self._tmp + str(next(self._count))
        try:
            os.close(os.open(probe, _WRITE, 0o600))
            before_ns = os.stat(probe).st_mtime_ns - TMP_AGE_NS
        except OSError:
            return  # a full disk, or one that is only to be read
        finally:
            _unlink(probe)
        with os.scandir(f"{self._root}/{TMP_DIR}") as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # its owner has just renamed it
                    if entry.stat(follow_symlinks=False).st_mtime_ns < before_ns:
                        _unlink(entry.path)

    def _path(self, key: str) -> str:
        if "/." in key or key[:1] in "./":
            raise ValueError(f"object key {key!r} would leave the directory or hide in it")
        return f"{self._root}/{key}"

    def put(self, key: str, pieces: Sequence[Buffer]) -> None:
        path, tmp = self._path(key), self._tmp + str(next(self._count))
        try:
            fd = os.open(tmp, _WRITE, 0o600)
            try:
                if self._shared:
                    os.fchmod(fd, 0o600 | (self._shared & _READABLE))
                _write_all(fd, pieces)
            finally:
                os.close(fd)
            try:
                os.rename(tmp, path)
            except FileNotFoundError:  # the first object of its directory
                self._make_dirs(os.path.dirname(path))
                os.rename(tmp, path)
        except OSError as error:
            _unlink(tmp)
            if isinstance(error, FileNotFoundError):
                self._require_root()
                raise Unavailable(f"{key}: its temporary file was removed: {error}") from error
            raise self._translate(error, key) from error
        if self._doubtful:
            self._doubtful.discard(key)

    def get(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
        begun = self._begin_read()
        try:
            fd = os.open(self._path(key), _READ)
            try:
                stop = os.fstat(fd).st_size if end is None else end
                return os.pread(fd, stop - begin, begin) if stop > begin else b""
            finally:
                os.close(fd)
                self._end_read(begun)
        except OSError as error:
            raise self._translate(error, key) from error

    def get_ranges(self, key: str, ranges: Sequence[Range]) -> list[bytes]:
        return [self.get(key, begin, end) for begin, end in ranges]

    def get_into(self, key: str, pieces: Sequence[memoryview]) -> int:
        begun = self._begin_read()
        try:
            fd = os.open(self._path(key), _READ)
            try:
                return os.preadv(fd, pieces, 0)
            finally:
                os.close(fd)
                self._end_read(begun)
        except OSError as error:
            raise self._translate(error, key) from error

    def _begin_read(self) -> float:
        """When a read begins; says that it will wait, if reads have taken long of late."""
        if self._average_s > SLOW_S:
            self._runtime.will_wait()
        return self._runtime.monotonic()

    def _end_read(self, begun: float) -> None:
        self._average_s += (self._runtime.monotonic() - begun - self._average_s) / AVERAGE_OF

    def delete(self, *keys: str) -> None:
        for key in keys:
            try:
                os.unlink(self._path(key))
            except FileNotFoundError:
                self._require_root()
            except OSError as error:
                raise self._translate(error, key) from error

    def head(self, key: str) -> ObjectInfo | None:
        try:
            found = os.stat(self._path(key))
        except FileNotFoundError:
            self._require_root()
            return None
        except OSError as error:
            raise self._translate(error, key) from error
        return ObjectInfo(key, found.st_size, found.st_mtime_ns)

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        return self._walk("", prefix, after)

    def _walk(self, folder: str, prefix: str, after: str) -> Iterator[ObjectInfo]:
        """The objects below `folder` ("" or ending in `/`); a folder sorts as its keys do."""
        try:
            with os.scandir(f"{self._root}/{folder}") as entries:
                names = sorted(
                    entry.name + "/" if entry.is_dir(follow_symlinks=False) else entry.name
                    for entry in entries
                    if not entry.name.startswith(".")
                )
        except FileNotFoundError:
            self._require_root()
            return
        except OSError as error:
            raise self._translate(error, folder) from error
        for name in names:
            key = folder + name
            if name.endswith("/"):
                ahead = key > after or after.startswith(key)
                if ahead and (key.startswith(prefix) or prefix.startswith(key)):
                    yield from self._walk(key, prefix, after)
            elif key > after and key.startswith(prefix) and (info := self.head(key)) is not None:
                yield info

    def sync(self, keys: Iterable[str]) -> None:
        """fsync(2) the files, then each directory that leads to them, deepest first.

        An object that has been deleted since has nothing to lose. Raises: OSError of fsync(2), each
        time until the object is put anew.
        """
        folders: set[str] = set()
        for key in keys:
            try:
                self._fsync(key)
            except ObjectMissing:
                continue
            while "/" in key:
                key = key.rpartition("/")[0]
                folders.add(key)
        for folder in sorted(folders, reverse=True):
            self._fsync(folder)
        if folders:
            self._fsync("")

    def _fsync(self, key: str) -> None:
        try:
            fd = os.open(f"{self._root}/{key}", _READ)
        except OSError as error:
            raise self._translate(error, key) from error
        try:
            if key in self._doubtful:
                raise OSError(EIO, "it could not be synced before", key)
            os.fsync(fd)
        except OSError as error:
            self._doubtful.add(key)
            raise OSError(error.errno, error.strerror, key) from error
        finally:
            os.close(fd)

    def _require_root(self) -> None:
        """Raises: Unavailable where nothing is found because all of it has gone.

        Its mount point may still be there, so what was made with it is looked for.
        """
        if not os.path.isdir(f"{self._root}/{TMP_DIR}"):
            raise Unavailable(
                f"the object directory {self._root} has gone away: mount its disk again"
            )

    def _translate(self, error: OSError, key: str) -> Exception:
        """What a caller of an object store should see. Raises: Unavailable."""
        if isinstance(error, FileNotFoundError):
            self._require_root()
            return ObjectMissing(key)
        if error.errno in (ENOSPC, EDQUOT):
            return OSError(error.errno, error.strerror, key)
        return Unavailable(f"{key}: {error}")

    def close(self) -> None:
        """No descriptor is kept."""


def _write_all(fd: int, pieces: Sequence[Buffer]) -> None:
    """writev(2) until everything is written."""
    left = list(pieces)
    while left:
        wrote = os.writev(fd, left[:IOV_MAX])
        while left and wrote >= len(left[0]):
            wrote -= len(left.pop(0))
        if wrote:
            left[0] = memoryview(left[0])[wrote:]


def _make_root(path: str) -> None:
    """Those above it are made as the umask says. Raises: OSError."""
    with suppress(FileExistsError):
        try:
            os.mkdir(path, _PRIVATE)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.mkdir(path, _PRIVATE)


def _unlink(path: str) -> None:
    """Remove a temporary file if it is still there; the next open sweeps what can't be removed."""
    try:
        os.unlink(path)
    except OSError:
        pass


_CONFORMS: Callable[[Runtime, str], ObjectStore] = FileObjects

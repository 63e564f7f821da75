"""A tree in a directory of this host: `file:///DIR`, or a plain path, a mount's included.

A file is written under a temporary name beside its place, synced and renamed.
Threading: any method from any thread; the pool of readers starts with the first batch.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Final, cast
from uuid import uuid4

from slicefs.client.parallel import Readers
from slicefs.client.ranges import MAX_GAP_BYTES, WHOLE, Item, MergedRead, cut, plan
from slicefs.stores.tree import (
    TEMPORARY,
    BaseWriter,
    Buffer,
    Entry,
    Info,
    Tree,
    Writer,
    clean_path,
    write_all,
)

READERS: Final = 8  # local disks answer several requests at once; more only queue
BUFFER_BYTES: Final = 1 << 20


class LocalWriter(BaseWriter):
    """A file of a `LocalTree` that is being written."""

    def __init__(self, root: str, path: str) -> None:
        super().__init__()
        self._root = root
        self._path = path
        self._source: io.BufferedReader | None = None  # of copies
        folder = os.path.dirname(path)
        self._temporary = os.path.join(folder, f"{TEMPORARY}{uuid4().hex}")
        self.closed = True  # nothing to be aborted yet
        self._file = open(self._temporary, "xb", buffering=BUFFER_BYTES)  # noqa: SIM115
        self.closed = False

    def write(self, data: Buffer, /) -> int:
        """See `Writer`."""
        return self._file.write(data)

    def tell(self) -> int:
        """How much was written."""
        return self._file.tell()

    def begin_copies(self, path: str, size: int) -> bool:
        """See `RangeWriter`."""
        try:
            self._source = open(os.path.join(self._root, clean_path(path)), "rb")  # noqa: SIM115
        except FileNotFoundError:
            return False
        return os.fstat(self._source.fileno()).st_size == size

    def copy_range(self, begin: int, end: int) -> None:
        """See `RangeWriter`: by the file system, which shares the bytes if it can."""
        assert self._source is not None, "begin_copies said yes"
        self._file.flush()
        source, target = self._source.fileno(), self._file.fileno()
        while begin < end:
            try:
                count = os.copy_file_range(source, target, end - begin, begin)
            except OSError as error:
                if error.errno not in (errno.EXDEV, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                    raise
                data = os.pread(source, min(end - begin, BUFFER_BYTES), begin)
                count = self._file.write(data)
                self._file.flush()
            if not count:
                raise OSError(errno.EIO, "an earlier step became shorter", self._source.name)
            begin += count

    def _finish(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._let_go()
        os.replace(self._temporary, self._path)
        _sync_directory(os.path.dirname(self._path))

    def _let_go(self) -> None:
        if self._source is not None:
            self._source.close()

    def _drop(self) -> None:
        self._let_go()
        with suppress(OSError):
            self._file.close()  # what is buffered may not fit on the disk
        with suppress(OSError):
            os.unlink(self._temporary)


def _sync_directory(path: str) -> None:
    """Make names in a directory survive a loss of power, where its file system can."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


class LocalTree:
    """Files below a directory."""

    def __init__(self, root: str) -> None:
        self._root = os.path.abspath(root)
        self._readers = Readers(READERS)

    @property
    def url(self) -> str:
        """See `Tree`."""
        return f"file://{self._root}"

    def __reduce__(self) -> tuple[Callable[[str], LocalTree], tuple[str]]:
        return LocalTree, (self._root,)

    def _at(self, path: str) -> str:
        return os.path.join(self._root, clean_path(path))

    def open_read(self, path: str) -> io.BufferedIOBase:
        """See `Tree`."""
        return cast("io.BufferedIOBase", open(self._at(path), "rb", buffering=BUFFER_BYTES))

    def read(self, path: str, begin: int = 0, end: int | None = None) -> bytes:
        """See `Tree`."""
        with self.open_read(path) as file:  # into one buffer: it may be a large tensor
            size = os.fstat(file.fileno()).st_size
            file.seek(begin)
            return file.read(max(0, (size if end is None else min(end, size)) - begin))

    def read_ranges(self, items: Sequence[Item], max_gap: int = MAX_GAP_BYTES) -> list[memoryview]:
        """See `Tree`."""
        return self._readers.read_all(plan(items, max_gap), self._read_span, len(items))

    def _read_span(self, span: MergedRead) -> list[tuple[int, memoryview]]:
        return cut(span, _read(self._at(span.path), span.begin, span.end))

    def writer(self, path: str, *, size: int | None = None) -> Writer:
        """See `Tree`."""
        del size
        at = self._at(path)
        os.makedirs(os.path.dirname(at), exist_ok=True)
        if os.path.isdir(at):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), at)
        return LocalWriter(self._root, at)

    def write_atomic(self, path: str, chunks: Iterable[Buffer]) -> None:
        """See `Tree`."""
        write_all(self.writer(path), chunks)

    def list(self, prefix: str = "", after: str = "") -> Iterator[Info]:
        """See `Tree`. A directory that vanishes meanwhile is left out."""
        folder = prefix.rpartition("/")[0]
        return self._walk(clean_path(folder), prefix.lstrip("/"), after)

    def _walk(self, folder: str, prefix: str, after: str) -> Iterator[Info]:
        for key, entry in self._sorted(folder):
            path = f"{folder}/{key}" if folder else key
            if not (path.startswith(prefix) or prefix.startswith(path)):
                continue
            if key.endswith("/"):
                if not after or _key(after) < _key(path) or after.startswith(path):
                    yield from self._walk(path[:-1], prefix, after)
            elif path.startswith(prefix) and (not after or _key(path) > _key(after)):
                with suppress(FileNotFoundError):
                    found = entry.stat()
                    yield Info(path, found.st_size, found.st_mtime_ns)

    def _sorted(self, folder: str) -> Sequence[tuple[str, os.DirEntry[str]]]:
        """Names of a directory in the order of whole paths: a directory sorts as `name/`."""
        try:
            with os.scandir(self._at(folder)) as entries:
                found = [(_listed(each), each) for each in entries]
        except (FileNotFoundError, NotADirectoryError):
            return []
        listed = [pair for pair in found if pair[0]]
        return sorted(listed, key=lambda pair: os.fsencode(pair[0]))

    def list_dir(self, path: str = "") -> Iterator[Entry]:
        """See `Tree`."""
        with os.scandir(self._at(path)) as entries:
            found = [each for each in entries if not each.name.startswith(TEMPORARY)]
        for each in sorted(found, key=lambda entry: os.fsencode(entry.name)):
            with suppress(FileNotFoundError):
                is_dir = each.is_dir()
                yield Entry(each.name, is_dir, 0 if is_dir else each.stat().st_size)

    def stat(self, path: str) -> Info:
        """See `Tree`."""
        found = os.stat(self._at(path))
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        return Info(clean_path(path), found.st_size, found.st_mtime_ns)

    def exists(self, path: str) -> bool:
        """See `Tree`."""
        return os.path.exists(self._at(path))

    def remove(self, path: str) -> None:
        """See `Tree`."""
        os.unlink(self._at(path))

    def remove_tree(self, path: str) -> int:
        """See `Tree`. Symbolic links are removed, not followed."""
        count = sum(1 for _ in self.list(f"{clean_path(path)}/" if clean_path(path) else ""))
        with suppress(FileNotFoundError):
            shutil.rmtree(self._at(path))
        return count

    def copy(self, path: str, new_path: str) -> None:
        """See `Tree`."""
        with self.open_read(path) as source, self.writer(new_path) as target:
            shutil.copyfileobj(source, target, BUFFER_BYTES)

    def rename(self, path: str, new_path: str) -> None:
        """See `Tree`. Directories, too."""
        new = self._at(new_path)
        os.makedirs(os.path.dirname(new), exist_ok=True)
        os.replace(self._at(path), new)

    def makedirs(self, path: str) -> None:
        """See `Tree`."""
        os.makedirs(self._at(path), exist_ok=True)

    def close(self) -> None:
        """See `Tree`."""
        self._readers.close()


def _key(path: str) -> bytes:
    return os.fsencode(path)


def _listed(entry: os.DirEntry[str]) -> str:
    """The name as it sorts; "" for what no listing has. Links to directories are not followed."""
    if entry.name.startswith(TEMPORARY):
        return ""
    if entry.is_dir(follow_symlinks=False):
        return f"{entry.name}/"
    try:
        return entry.name if entry.is_file() else ""
    except OSError:
        return ""


def _read(path: str, begin: int, end: int) -> memoryview:
    """Bytes of a file, fewer past its end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        stop = found.st_size if end == WHOLE else min(end, found.st_size)
        data = bytearray(max(0, stop - begin))
        view, done = memoryview(data), 0
        while done < len(data):
            count = os.preadv(descriptor, [view[done:]], begin + done)
            if not count:
                break  # it was cut meanwhile
            done += count
        return view[:done]
    finally:
        os.close(descriptor)


_CONFORMS: Callable[[str], Tree] = LocalTree

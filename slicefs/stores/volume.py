"""A tree in a volume, through a `Client`: `slicefs://VOLUME/PATH`, `META-URL#PATH`.

Threading: any method from any thread.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import IO, Any, cast

from fsmeta.types import Slice
from slicefs.client.bulk import KnownFile
from slicefs.client.client import Client
from slicefs.client.names import DirEntry
from slicefs.client.ranges import MAX_GAP_BYTES, Item
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


class VolumeWriter(BaseWriter):
    """A file of a `VolumeTree` that is being written; it has no name before `close`."""

    def __init__(self, file: IO[bytes], open_source: Callable[[str], IO[bytes]]) -> None:
        super().__init__()
        self._file = cast("Any", file)
        self._open_source = open_source
        self._source: Any = None
        self._written = 0

    def write(self, data: Buffer, /) -> int:
        """See `Writer`."""
        count = int(self._file.write(data))
        self._written += count
        return count

    def tell(self) -> int:
        """How much was written."""
        return self._written

    def begin_copies(self, path: str, size: int) -> bool:
        """See `RangeWriter`."""
        try:
            self._source = self._open_source(path)
        except FileNotFoundError:
            return False
        return int(self._source.seek(0, os.SEEK_END)) == size

    def copy_range(self, begin: int, end: int) -> None:
        """See `RangeWriter`: metadata alone."""
        self._file.copy_from(self._source, begin, end)
        self._written += end - begin

    def _let_go(self) -> None:
        if self._source is not None:
            self._source.close()

    def _finish(self) -> None:
        self._file.close()
        self._let_go()

    def _drop(self) -> None:
        self._let_go()
        self._file.abort()


class VolumeTree:
    """Files below a directory of a volume."""

    def __init__(self, client: Client, path: str = "") -> None:
        self._client = client
        self._top = clean_path(path)

    @property
    def url(self) -> str:
        """See `Tree`; without the password of the volume's URL."""
        base = self._client.url.partition("#")[0]
        return f"{base}#{self._top}" if self._top else base

    @property
    def client(self) -> Client:
        """What it reads through."""
        return self._client

    def __reduce__(self) -> tuple[Callable[[Client, str], VolumeTree], tuple[Client, str]]:
        return VolumeTree, (self._client, self._top)

    def _at(self, path: str) -> str:
        return f"/{self._top}/{clean_path(path)}".rstrip("/") or "/"

    def open_read(self, path: str) -> io.BufferedIOBase:
        """See `Tree`."""
        return cast("io.BufferedIOBase", self._client.open(self._at(path), "rb"))

    def read(self, path: str, begin: int = 0, end: int | None = None) -> bytes:
        """See `Tree`."""
        at = self._at(path)
        item: Item = at if end is None and begin == 0 else (at, begin, -1 if end is None else end)
        return bytes(self._client.read_many([item])[0])

    def read_ranges(self, items: Sequence[Item], max_gap: int = MAX_GAP_BYTES) -> list[memoryview]:
        """See `Tree`."""
        placed: list[Item] = [
            self._at(item) if isinstance(item, str) else (self._at(item[0]), item[1], item[2])
            for item in items
        ]
        return self._client.read_many(placed, max_gap=max_gap)

    def slices(self, paths: Sequence[str]) -> list[Slice | None]:
        """Where the bytes of files of a snapshot are; None where that is more than one place.

        Raises: ConfigError where a file is of no snapshot.
        """
        return self._client.slices([self._at(path) for path in paths])

    def read_known(self, files: Sequence[KnownFile]) -> list[memoryview]:
        """Whole files, of which it is known where their bytes are. Raises: as `read_ranges`."""
        return self._client.read_known([each._replace(path=self._at(each.path)) for each in files])

    def writer(self, path: str, *, size: int | None = None) -> Writer:
        """See `Tree`."""
        del size
        at = self._at(path)
        try:
            return VolumeWriter(self._client.open(at, "wb", atomic=True), self._open_raw)
        except FileNotFoundError:
            self._client.makedirs(os.path.dirname(at), exist_ok=True)
        return VolumeWriter(self._client.open(at, "wb", atomic=True), self._open_raw)

    def _open_raw(self, path: str) -> IO[bytes]:
        return self._client.open(self._at(path), "rb", buffering=0)

    def write_atomic(self, path: str, chunks: Iterable[Buffer]) -> None:
        """See `Tree`."""
        write_all(self.writer(path), chunks)

    def list(self, prefix: str = "", after: str = "") -> Iterator[Info]:
        """See `Tree`. A directory that vanishes meanwhile is left out."""
        folder = clean_path(prefix.rpartition("/")[0])
        return self._walk(folder, prefix.lstrip("/"), after)

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

    def _sorted(self, folder: str) -> Sequence[tuple[str, DirEntry]]:
        """Names of a directory in the order of whole paths: a directory sorts as `name/`."""
        try:
            found = self._client.scandir(self._at(folder))
        except (FileNotFoundError, NotADirectoryError):
            return []
        listed = [(_listed(entry), entry) for entry in found]
        return sorted([pair for pair in listed if pair[0]], key=lambda pair: _key(pair[0]))

    def list_dir(self, path: str = "") -> Iterator[Entry]:
        """See `Tree`."""
        found = [
            e for e in self._client.scandir(self._at(path)) if not e.name.startswith(TEMPORARY)
        ]
        for each in sorted(found, key=lambda entry: _key(entry.name)):
            with suppress(FileNotFoundError):
                is_dir = each.is_dir()
                yield Entry(each.name, is_dir, 0 if is_dir else each.stat().st_size)

    def stat(self, path: str) -> Info:
        """See `Tree`."""
        found = self._client.stat(self._at(path))
        if found.st_mode & 0o170000 == 0o040000:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        return Info(clean_path(path), found.st_size, found.st_mtime_ns)

    def exists(self, path: str) -> bool:
        """See `Tree`."""
        return self._client.exists(self._at(path))

    def remove(self, path: str) -> None:
        """See `Tree`."""
        self._client.remove(self._at(path))

    def remove_tree(self, path: str) -> int:
        """See `Tree`. Symbolic links are removed, not followed."""
        clean = clean_path(path)
        count = sum(1 for _ in self.list(f"{clean}/" if clean else ""))
        at = self._at(path)
        with suppress(FileNotFoundError):
            if at != "/":
                self._client.rmtree(at)
                return count
            for entry in self._client.scandir(at):  # the root itself stays
                if entry.is_dir(follow_symlinks=False):
                    self._client.rmtree(f"/{entry.name}")
                else:
                    self._client.remove(f"/{entry.name}")
        return count

    def copy(self, path: str, new_path: str) -> None:
        """See `Tree`: metadata alone."""
        size = self.stat(path).size
        with self.writer(new_path) as target:
            assert isinstance(target, VolumeWriter)
            if not target.begin_copies(path, size):
                raise OSError(errno.ESTALE, "changes while it is copied: try again", path)
            target.copy_range(0, size)

    def rename(self, path: str, new_path: str) -> None:
        """See `Tree`. Directories, too."""
        old, new = self._at(path), self._at(new_path)
        self._client.makedirs(os.path.dirname(new), exist_ok=True)
        self._client.rename(old, new)

    def makedirs(self, path: str) -> None:
        """See `Tree`."""
        self._client.makedirs(self._at(path), exist_ok=True)

    def close(self) -> None:
        """See `Tree`: the client stays open, other trees may use it."""


def _key(path: str) -> bytes:
    return os.fsencode(path)


def _listed(entry: DirEntry) -> str:
    """The name as it sorts; "" for what no listing has. Links to directories are not followed."""
    if entry.name.startswith(TEMPORARY):
        return ""
    if entry.is_dir(follow_symlinks=False):
        return f"{entry.name}/"
    return entry.name if entry.is_file() else ""


_CONFORMS: Callable[[Client, str], Tree] = VolumeTree

"""How many bytes each shard of a volume's cache on a disk takes: a file that all its mounts share.

A file of numbers of 8 bytes, one a shard. A mount that adds or removes cache files changes the
shard's number under the same hold of the file's lock, so mounts of one host agree; a mount that
looks through a shard knows its number exactly and writes that. A crash in between leaves a number
wrong until then; one that is lost or absurd counts as 0.

Threading: any method from any thread; the file's lock orders them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from fsdata.disk_cache.directory.file_io import CacheFile, CacheFiles

SHARDS = 1024  # directories of a volume: ten thousand files each where there are ten million
CELL_BYTES: Final = 8
CELL_MAX: Final = 1 << 50  # no shard has a pebibyte: such a number is damage

assert array("Q").itemsize == CELL_BYTES


class Table:
    """The numbers, while they are locked."""

    def __init__(self, file: CacheFile) -> None:
        self._file = file
        self._cells: array[int] = array("Q")
        data = file.read(SHARDS * CELL_BYTES, 0)
        self._cells.frombytes(data.ljust(SHARDS * CELL_BYTES, b"\0"))
        if max(self._cells) >= CELL_MAX:
            self._cells = array("Q", (cell if cell < CELL_MAX else 0 for cell in self._cells))

    @property
    def total(self) -> int:
        """Bytes of all shards."""
        return sum(self._cells)

    def next_used(self, after: int) -> int | None:
        """The next shard behind `after`, in a circle, that has anything."""
        order = (*range(after + 1, SHARDS), *range(after + 1))
        return next((shard for shard in order if self._cells[shard]), None)

    def add(self, shard: int, size: int) -> None:
        """A shard has grown by `size` bytes, or shrunk."""
        self.set(shard, max(0, self._cells[shard] + size))

    def set(self, shard: int, size: int) -> None:
        """A shard has exactly `size` bytes."""
        if self._cells[shard] != size:
            self._cells[shard] = size
            self._file.write((array("Q", (size,)).tobytes(),), shard * CELL_BYTES)


class UsageFile:
    """The file. `seen` is the sum when it was last looked at."""

    def __init__(self, files: CacheFiles, path: str) -> None:
        self._files = files
        self._path = path
        self.seen = 0

    @contextmanager
    def locked(self) -> Iterator[Table]:
        """The numbers, locked against other mounts meanwhile. Raises: OSError."""
        with self._files.locked(self._path) as file:
            table = Table(file)
            try:
                yield table
            finally:
                self.seen = table.total

"""Reading files of a step, verified: each chunk is compared with the CRC in the manifest.

Called by `Step.open` and by the commands that verify. A reader belongs to one thread.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from slicefs.checkpoint.manifest import FileEntry
from slicefs.stores.tree import Tree

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

WINDOW_CHUNKS: Final = 8  # read ahead at most by a sequential reader: 32 MiB
APART: Final = -1  # of `read_ranges`: neighbours are requested at the same time, not merged


class VerifiedReader(io.RawIOBase):
    """A file of a step: seekable, with `readinto`. A damaged chunk is EIO, never wrong bytes."""

    def __init__(self, tree: Tree, path: str, entry: FileEntry) -> None:
        super().__init__()
        self._tree = tree
        self._path = path
        self._entry = entry
        self._at = 0
        self._chunks: dict[int, memoryview] = {}  # the window
        self._ahead = 1
        self.name = path

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def tell(self) -> int:
        """Where the next read begins."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move there. Raises: ValueError for a place before the begin."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._entry.size}[whence]
        if base + offset < 0:
            raise ValueError(f"{self._path}: seek to {base + offset}")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Fill `buffer` as far as the window goes. Raises: EIO for damaged bytes."""
        view = memoryview(buffer).cast("B")
        if not len(view) or self._at >= self._entry.size:
            return 0
        index = self._at // self._entry.chunk_bytes
        inside = self._at - index * self._entry.chunk_bytes
        part = self._chunk(index)[inside : inside + len(view)]
        view[: len(part)] = part
        self._at += len(part)
        return len(part)

    def _chunk(self, index: int) -> memoryview:
        if index not in self._chunks:
            follows = index - 1 in self._chunks
            self._ahead = min(2 * self._ahead, WINDOW_CHUNKS) if follows else 1
            self._chunks = {}
            end = min(index + self._ahead, len(self._entry.crcs))
            self._chunks = dict(read_chunks(self._tree, self._path, self._entry, index, end))
        return self._chunks[index]


def read_chunks(
    tree: Tree, path: str, entry: FileEntry, begin: int, end: int
) -> Iterator[tuple[int, memoryview]]:
    """Chunks `begin..end` of a file, verified, read at the same time. Raises: EIO."""
    wanted = [(path, *entry.bounds(index)) for index in range(begin, end)]
    for index, data in zip(range(begin, end), tree.read_ranges(wanted, APART), strict=True):
        entry.check(path, index, data)
        yield index, data


def read_verified(
    tree: Tree, path: str, entry: FileEntry, ranges: Sequence[tuple[int, int]]
) -> list[memoryview]:
    """Ranges `begin..end` of a file: the chunks around them, each read once. Raises: EIO."""
    size = entry.chunk_bytes
    spans = [
        range(begin // size, -(-end // size)) if begin < end else range(0) for begin, end in ranges
    ]
    wanted = sorted({index for span in spans for index in span})
    items = [(path, *entry.bounds(index)) for index in wanted]
    chunks = dict(zip(wanted, tree.read_ranges(items, APART), strict=True))
    for index, data in chunks.items():
        entry.check(path, index, data)
    return [
        _cut([chunks[index] for index in span], begin - span.start * size, end - begin)
        for span, (begin, end) in zip(spans, ranges, strict=True)
    ]


def _cut(chunks: Sequence[memoryview], begin: int, length: int) -> memoryview:
    whole = chunks[0] if len(chunks) == 1 else memoryview(b"".join(chunks))
    return whole[begin : begin + length]


def verify_file(tree: Tree, path: str, entry: FileEntry) -> None:
    """Read a whole file and compare each chunk. Raises: EIO."""
    for begin in range(0, len(entry.crcs), WINDOW_CHUNKS):
        end = min(begin + WINDOW_CHUNKS, len(entry.crcs))
        for _ in read_chunks(tree, path, entry, begin, end):
            pass

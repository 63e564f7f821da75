"""Reading files of a step, verified: each chunk is compared with the CRC in the manifest.

Called by `Step.open` and by the commands that verify. A reader belongs to one thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from slicefs.checkpoint.manifest import FileEntry
from slicefs.stores.seekable import SeekableReader
from slicefs.stores.tree import Tree

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

WINDOW_BYTES: Final = 32 << 20  # read ahead at most by a sequential reader
GROWTH: Final = 4  # of the window, while reads follow each other
REQUEST_BYTES: Final = 4 << 20  # of neighbouring chunks
APART: Final = -1  # of `read_ranges`: neighbours are requested at the same time, not merged


class FileRange(NamedTuple):
    """Bytes `begin..end` of a file."""

    path: str
    entry: FileEntry
    begin: int
    end: int


class VerifiedReader(SeekableReader):
    """A file of a step: seekable, with `readinto`. A damaged chunk is EIO, never wrong bytes."""

    def __init__(self, tree: Tree, path: str, entry: FileEntry) -> None:
        super().__init__(entry.size)
        self._tree = tree
        self._path = path
        self._entry = entry
        self._chunks: dict[int, memoryview] = {}  # the window
        self._ahead = 1
        self.name = path

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Fill `buffer` as far as the window goes. Raises: EIO for damaged bytes."""
        view = memoryview(buffer).cast("B")
        if not len(view) or self._at >= self._size:
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
            most = max(1, WINDOW_BYTES // self._entry.chunk_bytes)
            self._ahead = min(GROWTH * self._ahead, most) if follows else 1
            self._chunks = {}
            end = min(index + self._ahead, len(self._entry.crcs))
            self._chunks = read_chunks(self._tree, self._path, self._entry, index, end)
        return self._chunks[index]


def read_chunks(
    tree: Tree, path: str, entry: FileEntry, begin: int, end: int
) -> dict[int, memoryview]:
    """Chunks `begin..end` of a file, verified, by their numbers. Raises: EIO."""
    found = _read_chunks(tree, {path: entry}, [(path, index) for index in range(begin, end)])
    return {index: data for (_, index), data in found.items()}


def read_verified(tree: Tree, ranges: Sequence[FileRange]) -> list[memoryview]:
    """These ranges: the chunks around them, each read once, all at the same time. Raises: EIO."""
    spans = [_chunks_of(each) for each in ranges]
    wanted = sorted({key for span in spans for key in span})
    chunks = _read_chunks(tree, {each.path: each.entry for each in ranges}, wanted)
    cuts = []
    for each, span in zip(ranges, spans, strict=True):
        skipped = each.begin % each.entry.chunk_bytes
        cuts.append(_cut([chunks[key] for key in span], skipped, each.end - each.begin))
    return cuts


def _chunks_of(wanted: FileRange) -> list[tuple[str, int]]:
    if wanted.begin >= wanted.end:
        return []
    size = wanted.entry.chunk_bytes
    return [(wanted.path, at) for at in range(wanted.begin // size, -(-wanted.end // size))]


def _read_chunks(
    tree: Tree, entries: Mapping[str, FileEntry], wanted: Sequence[tuple[str, int]]
) -> dict[tuple[str, int], memoryview]:
    """Chunks by path and number, in order: neighbours in one request, up to some MiB."""
    runs: list[tuple[str, int, int]] = []
    for path, index in wanted:
        last = runs[-1] if runs else None
        longest = max(1, REQUEST_BYTES // entries[path].chunk_bytes)
        if last and last[0] == path and last[2] == index and index - last[1] < longest:
            runs[-1] = (path, last[1], index + 1)
        else:
            runs.append((path, index, index + 1))
    items = [
        (path, entries[path].bounds(begin)[0], entries[path].bounds(end - 1)[1])
        for path, begin, end in runs
    ]
    found = {}
    for (path, begin, end), data in zip(runs, tree.read_ranges(items, APART), strict=True):
        entry = entries[path]
        for index in range(begin, end):
            at = (index - begin) * entry.chunk_bytes
            chunk = data[at : at + entry.chunk_bytes]
            entry.check(path, index, chunk)
            found[path, index] = chunk
    return found


def _cut(chunks: Sequence[memoryview], begin: int, length: int) -> memoryview:
    whole = chunks[0] if len(chunks) == 1 else memoryview(b"".join(chunks))
    return whole[begin : begin + length]


def verify_file(tree: Tree, path: str, entry: FileEntry) -> None:
    """Read a whole file and compare each chunk. Raises: EIO."""
    window = max(1, WINDOW_BYTES // entry.chunk_bytes)
    for begin in range(0, len(entry.crcs), window):
        read_chunks(tree, path, entry, begin, min(begin + window, len(entry.crcs)))

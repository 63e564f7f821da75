"""Where the bytes of a file are: file range → chunk → slice → block. Pure functions, no I/O.

Called by reader, writer, compact and fsck. What of a chunk's slices shows is in `fsmeta.slices`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import nlargest
from typing import NamedTuple

from fsmeta.slices import ChunkView, Extent
from fsmeta.types import BLOCK_BYTES_MAX, CHUNK_BYTES, Slice, SliceId, SliceKind

COMPACT_SLICES = 48  # a chunk read through more records than this costs more than rewriting it
# A rewrite moves all of the chunk. So that small writes into a large one pay for it once in a while
# and not with every 48, it waits for a record for each so many bytes: 1,024 in a full chunk. These
# are 25 KiB of metadata, and 16 ms to move 64 MiB for a program that wrote 4 MiB in pages.
COMPACT_BYTES = 64 << 10
COMPACT_HIDDEN_MIN = 8  # fewer slices are never worth a rewrite, however much they hide

# Compaction keeps a hole as a gap between two records, or fills it with zeros, which take space in
# the volume. A record more is 25 bytes of metadata and 0.7 µs of each read of the chunk. So a hole
# stays if it is as large as what one checksum guards (a reader of the data beside it fetches up to
# that much anyway), and the chunk has no more than 127 larger ones: 3 KiB of metadata, 0.1 ms.
HOLE_MIN_BYTES = 64 << 10
HOLES_MAX = 127


class BlockRange(NamedTuple):
    """The part `begin..end` of one block of a slice."""

    block: int  # its index in the slice
    begin: int
    end: int
    length: int  # of the whole block


def chunk_ranges(offset: int, length: int) -> Iterator[tuple[int, int, int]]:
    """The chunks a file range touches: (chunk index, position in it, length)."""
    index, pos = divmod(offset, CHUNK_BYTES)
    while length > 0:
        part = min(length, CHUNK_BYTES - pos)
        yield index, pos, part
        length -= part
        index, pos = index + 1, 0


def block_count(size: int, block_bytes: int = BLOCK_BYTES_MAX) -> int:
    """Blocks of a slice of `size` bytes."""
    return -(-size // block_bytes)


def block_length(size: int, index: int, block_bytes: int = BLOCK_BYTES_MAX) -> int:
    """Bytes of block `index` of a slice of `size` bytes."""
    return min(block_bytes, size - index * block_bytes)


def block_ranges(
    piece: Slice, off: int, length: int, block_bytes: int = BLOCK_BYTES_MAX
) -> Iterator[BlockRange]:
    """The blocks that bytes `off..off + length` of a slice lie in."""
    assert 0 <= off <= off + length <= piece.size, (piece, off, length)
    end = off + length
    while off < end:
        block, begin = divmod(off, block_bytes)
        stop = min(block_bytes, begin + end - off)
        yield BlockRange(block, begin, stop, block_length(piece.size, block, block_bytes))
        off += stop - begin


def should_compact(slices: Sequence[Slice]) -> bool:
    """Whether a rewrite as one slice pays.

    It does where it at least halves many records, for no more than COMPACT_BYTES moved for each, or
    more bytes are hidden than visible. What is reserved takes no room in the store.
    """
    if len(slices) < COMPACT_HIDDEN_MIN:
        return False
    view = ChunkView(slices)
    shown = view.segments()
    used = sum(part.length for part in shown if part.slice is not None)
    if sum(piece.length for piece in slices if piece.kind is not SliceKind.RESERVED) > 2 * used:
        return True
    if len(slices) < COMPACT_SLICES or len(slices) * COMPACT_BYTES < used:
        return False
    runs = runs_of(shown)
    return len(slices) >= 2 * (len(runs) + len(reservations(view, runs)))


def runs_of(view: Sequence[Extent]) -> list[list[Extent]]:
    """What compaction makes one record of each: the view's data, parted by the holes that stay.

    Each run begins and ends with data.
    """
    holes = [part for part in view if part.slice is None and part.length >= HOLE_MIN_BYTES]
    stay = {hole.pos for hole in nlargest(HOLES_MAX, holes, key=_length)}
    runs: list[list[Extent]] = []
    hole: Extent | None = None
    for part in view:
        if part.slice is None:
            hole = part
            continue
        if not runs or (hole is not None and hole.pos in stay):
            runs.append([part])
        else:
            runs[-1] += [part] if hole is None else [hole, part]
        hole = None
    return runs


def reservations(view: ChunkView, runs: Sequence[Sequence[Extent]]) -> list[Slice]:
    """The records that go below those of `runs`, so that what is covered stays covered."""
    wholes = [(run[0].pos, run[-1].end) for run in runs]
    return [
        Slice(begin, SliceId(0), end - begin, 0, end - begin, SliceKind.RESERVED)
        for begin, end in view.covered_ranges(reserved=True)
        if not any(first <= begin and end <= last for first, last in wholes)
    ]


def _length(part: Extent) -> int:
    return part.length

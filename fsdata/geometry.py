"""Where the bytes of a file are: file range → chunk → slice → block. Pure functions, no I/O.

Called by reader, writer, compact and fsck. What of a chunk's slices shows is in `fsmeta.slices`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fsmeta.slices import covered
from fsmeta.types import BLOCK_BYTES_MAX, CHUNK_BYTES, Slice

COMPACT_SLICES = 48  # a chunk read through more records than this costs more than rewriting it
COMPACT_HIDDEN_MIN = 8  # fewer slices are never worth a rewrite, however much they hide


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
    """Whether a rewrite as one slice pays: many records, or more hidden bytes than visible."""
    if len(slices) >= COMPACT_SLICES:
        return True
    if len(slices) < COMPACT_HIDDEN_MIN:
        return False
    return sum(piece.length for piece in slices) > 2 * covered(slices)

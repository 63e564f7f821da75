"""Slices to views: against an oracle that paints every byte."""

from __future__ import annotations

import itertools

from hypothesis import given, strategies as st

from fsdata.format.geometry import COMPACT_SLICES, block_ranges, chunk_ranges, should_compact
from fsmeta.slices import ChunkView, Extent, covered, reserved_end, resolve
from fsmeta.types import CHUNK_BYTES, Slice, SliceId, SliceKind

SIZE = 60
UNSTORED = (SliceKind.HOLE, SliceKind.RESERVED)
RESERVED = (0, 0)


@st.composite
def slice_lists(draw: st.DrawFn) -> list[Slice]:
    out = []
    for number in range(draw(st.integers(0, 12))):
        pos = draw(st.integers(0, SIZE - 1))
        length = draw(st.integers(0, SIZE - pos))
        off = draw(st.integers(0, 5))
        kind = draw(st.sampled_from([SliceKind.BLOCKS, SliceKind.BLOCKS, *UNSTORED]))
        out.append(Slice(pos, SliceId(number + 1), off + length + 2, off, length, kind))
    return out


def paint(slices: list[Slice]) -> list[tuple[int, int] | None]:
    """For each byte: slice id and offset in the slice, RESERVED, or None."""
    cells: list[tuple[int, int] | None] = [None] * SIZE
    for piece in slices:
        for at in range(piece.length):
            stored = (piece.id, piece.off + at) if piece.stored else None
            reserved = piece.kind is SliceKind.RESERVED
            cells[piece.pos + at] = RESERVED if reserved else stored
    return cells


@given(slice_lists())
def test_resolve_shows_what_painting_shows(slices: list[Slice]) -> None:
    view = resolve(slices)
    cells: list[tuple[int, int] | None] = []
    for part in view:
        assert part.pos == len(cells), "contiguous from 0"
        assert part.length > 0
        for at in range(part.length):
            cells.append(None if part.slice is None else (part.slice.id, part.off + at))
    ends = [piece.end for piece in slices if piece.length]
    assert len(cells) == max(ends, default=0)
    painted = paint(slices)
    assert cells == [None if cell == RESERVED else cell for cell in painted[: len(cells)]]
    assert covered(slices) == sum(cell is not None for cell in painted)


@given(slice_lists(), st.integers(0, SIZE), st.integers(0, SIZE))
def test_ranges_that_are_covered(slices: list[Slice], begin: int, end: int) -> None:
    """Apart from each other, and those that have a part reserved; and what is between them."""
    view, painted = ChunkView(slices), paint(slices)
    ranges = view.covered_ranges()
    inside = [any(first <= at < last for first, last in ranges) for at in range(SIZE)]
    assert inside == [cell is not None for cell in painted]
    assert all(left.end < right.begin for left, right in itertools.pairwise(ranges))
    kept = [each for each in ranges if RESERVED in painted[each.begin : each.end]]
    assert view.covered_ranges(reserved=True) == kept
    assert reserved_end(slices) == (kept[-1].end if kept else 0)
    gaps = view.uncovered(begin, end)
    bare = [any(first <= at < last for first, last in gaps) for at in range(SIZE)]
    assert bare == [begin <= at < end and cell is None for at, cell in enumerate(painted)]
    assert all(left.end < right.begin for left, right in itertools.pairwise(gaps))


@given(slice_lists())
def test_neighbours_are_merged(slices: list[Slice]) -> None:
    view = resolve(slices)
    for left, right in itertools.pairwise(view):
        if left.slice is None or right.slice is None:
            assert left.slice is not right.slice
        else:
            assert (left.slice.id, left.off + left.length) != (right.slice.id, right.off)


def test_appended_and_split_slices() -> None:
    a, b = Slice(0, SliceId(1), 10, 0, 10), Slice(10, SliceId(2), 5, 0, 5)
    assert resolve([a, b]) == [Extent(0, 10, a, 0), Extent(10, 5, b, 0)]
    c = Slice(3, SliceId(3), 2, 0, 2)
    assert resolve([a, c]) == [Extent(0, 3, a, 0), Extent(3, 2, c, 0), Extent(5, 5, a, 5)]
    halves = [a._replace(length=4), a._replace(pos=4, off=4, length=6)]
    assert [(part.pos, part.length) for part in resolve(halves)] == [(0, 10)]


@given(st.integers(0, 3 * CHUNK_BYTES), st.integers(0, 3 * CHUNK_BYTES))
def test_chunk_ranges_cover_the_range(offset: int, length: int) -> None:
    at = offset
    for chunk, pos, size in chunk_ranges(offset, length):
        assert chunk * CHUNK_BYTES + pos == at
        assert 0 < size <= CHUNK_BYTES - pos
        at += size
    assert at == offset + length


@given(st.integers(1, 100), st.data())
def test_block_ranges_cover_the_range(size: int, data: st.DataObject) -> None:
    off = data.draw(st.integers(0, size))
    length = data.draw(st.integers(0, size - off))
    piece = Slice(0, SliceId(1), size, 0, size)
    at = off
    for block, begin, end, whole in block_ranges(piece, off, length, 16):
        assert block * 16 + begin == at
        assert begin < end <= whole == min(16, size - block * 16)
        at += end - begin
    assert at == off + length


def test_should_compact() -> None:
    one = Slice(0, SliceId(1), 10, 0, 10)
    assert not should_compact([one])
    assert not should_compact([one._replace(pos=10 * n) for n in range(20)])
    assert should_compact([one] * 8), "most bytes are hidden"
    assert should_compact([one._replace(pos=10 * n) for n in range(COMPACT_SLICES)])

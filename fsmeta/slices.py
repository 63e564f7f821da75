"""The arithmetic of a chunk's slices: which bytes are visible, and how many. No I/O.

A chunk's slice list is in order of commit and a later slice hides earlier ones. `fsmeta` needs the
number of bytes covered, `fsdata` the view itself, so both use this module. What is reserved is
covered, and for a reader it is a hole.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fsmeta.types import Slice, SliceKind


class Extent(NamedTuple):
    """A visible range of a chunk; `slice` is None where it reads as zeros, reserved or not."""

    pos: int
    length: int
    slice: Slice | None
    off: int  # where in the slice's bytes the range begins; 0 for a hole

    @property
    def end(self) -> int:
        """Where the range ends in the chunk."""
        return self.pos + self.length


class ChunkRange(NamedTuple):
    """Bytes of a chunk."""

    begin: int
    end: int


class ChunkView:
    """What shows of a chunk while slices are laid over each other, oldest first.

    One more slice costs a search and the segments that it hides, however many there are. Not for
    several threads at once.
    """

    __slots__ = ("_begins", "_parts", "end", "used")

    def __init__(self, slices: Iterable[Slice] = ()) -> None:
        self._begins: list[int] = []  # of _parts
        self._parts: list[Extent] = []  # what is covered: disjoint, sorted, neighbours joined
        self.end = 0  # of the furthest slice, holes included
        self.used = 0  # bytes that are covered
        for piece in slices:
            self.lay(piece)

    def lay(self, piece: Slice) -> None:
        """A further slice hides what it covers."""
        begin, end = piece.pos, piece.pos + piece.length
        if begin == end:
            return
        self.end = max(self.end, end)
        begins, parts = self._begins, self._parts
        first = bisect_right(begins, begin)
        if first and parts[first - 1].end > begin:
            first -= 1
        last = bisect_left(begins, end, first)
        shown: list[Extent] = []
        if first < last:
            left, right = parts[first], parts[last - 1]
            self.used -= sum([part.length for part in parts[first:last]])
            if left.pos < begin:
                shown.append(left._replace(length=begin - left.pos))
            if piece.kind is not SliceKind.HOLE:
                shown.append(Extent(begin, end - begin, piece, piece.off))
            if right.end > end:
                shown.append(_from(right, end))
            self.used += sum([part.length for part in shown])
        elif piece.kind is not SliceKind.HOLE:
            shown.append(Extent(begin, end - begin, piece, piece.off))
            self.used += end - begin
        if first and shown and _joins(parts[first - 1], shown[0]):
            first -= 1
            shown.insert(0, parts[first])
        if last < len(parts) and shown and _joins(shown[-1], parts[last]):
            shown.append(parts[last])
            last += 1
        if len(shown) > 1:
            shown = _joined(shown)
        parts[first:last] = shown
        begins[first:last] = [part.pos for part in shown]

    def between(self, begin: int, end: int) -> list[Extent]:
        """The data that touch `begin..end`, in whole, and the holes between and before them."""
        first = bisect_right(self._begins, begin) - 1
        if first < 0 or self._parts[first].end <= begin:
            first += 1
        at = self._parts[first - 1].end if first else 0
        out: list[Extent] = []
        for part in self._parts[first : bisect_left(self._begins, end, first)]:
            if part.slice is not None and part.slice.kind is SliceKind.RESERVED:
                continue
            if part.pos > at:
                out.append(Extent(at, part.pos - at, None, 0))
            out.append(part)
            at = part.end
        return out

    def uncovered(self, begin: int, end: int) -> list[ChunkRange]:
        """The ranges of `begin..end` that nothing covers."""
        out: list[ChunkRange] = []
        for at, stop in self._covered():
            if begin < min(at, end):
                out.append(ChunkRange(begin, min(at, end)))
            begin = max(begin, stop)
        if begin < end:
            out.append(ChunkRange(begin, end))
        return out

    def covered_ranges(self, reserved: bool = False) -> list[ChunkRange]:
        """What is covered, whole ranges between holes; `reserved`: those with a part that is."""
        found = [
            part.pos
            for part in self._parts
            if part.slice is not None and part.slice.kind is SliceKind.RESERVED
        ]
        if reserved and not found:
            return []
        return [
            each
            for each in self._covered()
            if not reserved or bisect_left(found, each.end) > bisect_left(found, each.begin)
        ]

    def _covered(self) -> list[ChunkRange]:
        out: list[ChunkRange] = []
        for part in self._parts:
            if out and out[-1].end == part.pos:
                out[-1] = ChunkRange(out[-1].begin, part.end)
            else:
                out.append(ChunkRange(part.pos, part.end))
        return out

    def segments(self) -> list[Extent]:
        """All that shows, without gaps from 0 to the furthest slice's end."""
        out = self.between(0, self.end)
        at = out[-1].end if out else 0
        if at < self.end:
            out.append(Extent(at, self.end - at, None, 0))
        return out


def resolve(slices: Sequence[Slice]) -> list[Extent]:
    """The chunk as a reader sees it: contiguous segments from 0 to the furthest slice's end."""
    if len(slices) == 1 and slices[0].pos == 0 < slices[0].length:  # as most files are
        only = slices[0]
        if not only.stored:
            return [Extent(0, only.length, None, 0)]
        return [Extent(0, only.length, only, only.off)]
    return ChunkView(slices).segments()


def _from(part: Extent, begin: int) -> Extent:
    """The rest of a segment of data, from `begin` on."""
    skip = begin - part.pos
    return Extent(begin, part.length - skip, part.slice, part.off + skip)


def _joins(left: Extent, right: Extent) -> bool:
    """Whether two segments of data are one run of bytes."""
    if left.pos + left.length != right.pos or left.off + left.length != right.off:
        return False
    a, b = left.slice, right.slice
    return a is b or (a is not None and b is not None and _source(a) == _source(b))


def _joined(parts: list[Extent]) -> list[Extent]:
    """`parts` (sorted, disjoint), with neighbours that are one run of bytes as one."""
    out: list[Extent] = []
    for part in parts:
        if out and _joins(out[-1], part):
            out[-1] = out[-1]._replace(length=out[-1].length + part.length)
        else:
            out.append(part)
    return out


def _source(piece: Slice) -> tuple[int, int, int]:
    return piece.id, piece.size, piece.kind


def covered(slices: Sequence[Slice]) -> int:
    """Bytes of the chunk that hold data or are reserved; holes do not count (`st_blocks`)."""
    if len(slices) == 1:
        return 0 if slices[0].kind is SliceKind.HOLE else slices[0].length
    return ChunkView(slices).used


def reserved_end(slices: Sequence[Slice]) -> int:
    """Where in the chunk the last range ends that is covered and has a part reserved; or 0."""
    if all(piece.kind is not SliceKind.RESERVED for piece in slices):
        return 0
    ranges = ChunkView(slices).covered_ranges(reserved=True)
    return ranges[-1].end if ranges else 0


def growth(old: Sequence[Slice], piece: Slice) -> int:
    """How many bytes more of a chunk are covered with `piece`."""
    return covered([*old, piece]) - covered(old)


def fitting(old: Sequence[Slice], piece: Slice, room: int) -> int:
    """How many of the first bytes of `piece` cover at most `room` bytes more of a chunk."""
    low, high = 0, piece.length
    while low < high:
        middle = (low + high + 1) // 2
        if growth(old, piece._replace(length=middle)) <= room:
            low = middle
        else:
            high = middle - 1
    return low

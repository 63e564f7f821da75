"""The arithmetic of a chunk's slices: what shows, and how much. Pure functions.

A chunk's slice list is in order of commit and a later slice hides earlier ones. Metadata needs the
bytes covered, data the view itself, so this page belongs to both.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from fsmeta.types import Slice, SliceKind


class Segment(NamedTuple):
    """A visible range of a chunk; `slice` is None where it reads as zeros."""

    pos: int
    length: int
    slice: Slice | None
    off: int  # where in the slice's bytes the range begins; 0 for a hole

    @property
    def end(self) -> int:
        """Where the range ends in the chunk."""
        return self.pos + self.length


def resolve(slices: Sequence[Slice]) -> list[Segment]:
    """The chunk as a reader sees it: contiguous segments from 0 to the furthest slice's end."""
    if len(slices) == 1 and slices[0].pos == 0 < slices[0].length:
        return [_segment(slices[0], 0, slices[0].length)]  # as most files are
    end = 0
    for piece in slices:
        if piece.pos < end:
            return _join(_paint(slices))
        end = piece.pos + piece.length
    return _join([_segment(piece, piece.pos, piece.end) for piece in slices if piece.length])


def _segment(piece: Slice, begin: int, end: int) -> Segment:
    """The part of `piece` that shows at `begin..end` of the chunk."""
    if piece.kind is SliceKind.HOLE:
        return Segment(begin, end - begin, None, 0)
    return Segment(begin, end - begin, piece, piece.off + begin - piece.pos)


def _paint(slices: Sequence[Slice]) -> list[Segment]:
    """Newest first, each slice shows where nothing newer is; sorted by position."""
    begins: list[int] = []  # disjoint painted ranges, sorted
    ends: list[int] = []
    shown: list[Segment] = []
    for piece in reversed(slices):
        begin, end = piece.pos, piece.end
        if begin == end:
            continue
        first, last = bisect_left(ends, begin), bisect_right(begins, end)
        at = begin
        for painted in range(first, last):  # these become one range: each is passed once
            if at < begins[painted]:
                shown.append(_segment(piece, at, begins[painted]))
            at = max(at, ends[painted])
        if at < end:
            shown.append(_segment(piece, at, end))
        if first < last:
            begin, end = min(begin, begins[first]), max(end, ends[last - 1])
        begins[first:last] = [begin]
        ends[first:last] = [end]
    shown.sort()
    return shown


def _join(parts: list[Segment]) -> list[Segment]:
    """`parts` (sorted, disjoint) with gaps as holes and neighbours of one slice merged."""
    out: list[Segment] = []
    end = 0
    for part in parts:
        if part.pos > end:
            _add(out, Segment(end, part.pos - end, None, 0))
        _add(out, part)
        end = part.end
    return out


def _add(out: list[Segment], part: Segment) -> None:
    """Append `part`, merged into the last one where both are one run of bytes."""
    if out:
        last = out[-1]
        if last.slice is None or part.slice is None:
            same = last.slice is part.slice
        else:
            same = _source(last.slice) == _source(part.slice)
            same = same and last.off + last.length == part.off
        if same:
            out[-1] = last._replace(length=last.length + part.length)
            return
    out.append(part)


def _source(piece: Slice) -> tuple[int, int, int]:
    return piece.id, piece.size, piece.kind


def covered(slices: Sequence[Slice]) -> int:
    """Bytes of the chunk that hold data; holes do not count (`st_blocks`)."""
    if len(slices) == 1:
        return 0 if slices[0].kind is SliceKind.HOLE else slices[0].length
    return sum(part.length for part in resolve(slices) if part.slice is not None)


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

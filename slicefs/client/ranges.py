"""Which reads serve a batch of wanted ranges: neighbours in one file are read together.

Called by `Client.read_many` and by the trees of `slicefs/stores`. Pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

MAX_GAP_BYTES: Final = 1 << 20  # unwanted bytes that cost less than another request
WHOLE: Final = -1  # in place of an end: wherever the file ends
SPAN_BYTES_MAX: Final = 64 << 20  # of one merged read: it is held in memory in one piece
Item: TypeAlias = "str | tuple[str, int, int]"
"""A whole file, or its bytes `begin..end`."""


class WantedRange(NamedTuple):
    """One wanted range; `place` is where it stands in the batch."""

    place: int
    begin: int
    end: int


class MergedRead(NamedTuple):
    """One read of a file, and the wanted ranges in it."""

    path: str
    begin: int
    end: int  # or WHOLE
    parts: tuple[WantedRange, ...]


def plan(items: Sequence[Item], max_gap: int = MAX_GAP_BYTES) -> list[MergedRead]:
    """The reads that serve `items`, each file's in order. Raises: ValueError for a bad range."""
    by_path: dict[str, list[WantedRange]] = {}
    for index, item in enumerate(items):
        path, begin, end = (item, 0, WHOLE) if isinstance(item, str) else item
        if begin < 0 or (end < begin and end != WHOLE):
            raise ValueError(f"bytes {begin}..{end} of {path!r}: a range begins before it ends")
        by_path.setdefault(path, []).append(WantedRange(index, begin, end))
    spans: list[MergedRead] = []
    for path, parts in by_path.items():
        spans += _merged(path, sorted(parts, key=lambda part: part.begin), max_gap)
    return spans


def _merged(path: str, parts: Sequence[WantedRange], max_gap: int) -> list[MergedRead]:
    """`parts` of one file, sorted by their begin, as few reads."""
    if any(part.end == WHOLE for part in parts):
        return [MergedRead(path, parts[0].begin, WHOLE, tuple(parts))]
    spans: list[MergedRead] = []
    for part in parts:
        last = spans[-1] if spans else None
        if last is not None and part.begin <= last.end + max_gap:
            end = max(last.end, part.end)
            if end - last.begin <= SPAN_BYTES_MAX or part.end <= last.end:
                spans[-1] = MergedRead(path, last.begin, end, (*last.parts, part))
                continue
        spans.append(MergedRead(path, part.begin, part.end, (part,)))
    return spans


def cut(span: MergedRead, data: memoryview) -> list[tuple[int, memoryview]]:
    """The wanted ranges in what a span's read brought; short where the file ends."""
    cuts = []
    for part in span.parts:
        begin = part.begin - span.begin
        end = len(data) if part.end == WHOLE else part.end - span.begin
        cuts.append((part.place, data[begin:end]))
    return cuts

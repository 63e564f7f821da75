"""Compaction: the same bytes in one slice."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings, strategies as st

from fsdata.files.compact import rewrite
from fsdata.format.geometry import HOLE_MIN_BYTES, HOLES_MAX, should_compact
from fsmeta.slices import ChunkView, covered, resolve
from fsmeta.types import CHUNK_BYTES, Ino, Slice, SliceId, SliceKind
from tests.fsdata.files.test_reader import store
from tests.fsdata.world import BLOCK, World, pattern

INO = Ino(7)
NEW = SliceId(1000)


def shown(world: World, slices: list[Slice]) -> bytes:
    world.sink.chunks[INO, 0] = slices
    end = max((piece.end for piece in slices), default=0)
    return b"".join(world.reader().read(0, end, end))


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 3 * BLOCK),
            st.integers(1, 2 * BLOCK),
            st.sampled_from([*SliceKind]),
        ),
        max_size=9,
    )
)
def test_rewrite_shows_the_same(parts: list[tuple[int, int, SliceKind]]) -> None:
    world = World()
    slices = []
    for number, (pos, length, kind) in enumerate(parts):
        if kind in (SliceKind.HOLE, SliceKind.RESERVED):
            slices.append(Slice(pos, SliceId(0), length, 0, length, kind))
        else:
            data = pattern(length, number)
            slices.append(Slice(pos, store(world, number + 1, data), length, 0, length))
    before = shown(world, slices)
    records = rewrite(world.blocks, slices, NEW)
    assert shown(world, records) == before.rstrip(b"\0") or before.startswith(shown(world, records))
    assert len(shown(world, records)) >= len(before.rstrip(b"\0"))
    assert sum(each.stored for each in records) <= 4
    assert covered(records) <= covered(slices) + len(slices) * HOLE_MIN_BYTES
    was, now = ChunkView(slices), ChunkView(records)
    for begin, end in was.covered_ranges():
        assert now.uncovered(begin, end) == [], "what was covered costs nothing to write"
    assert not should_compact(records)
    world.close()


def test_large_inner_holes_stay_holes(world: World) -> None:
    a, b, c = (pattern(1000, seed) for seed in (1, 2, 3))
    gap = HOLE_MIN_BYTES + 500
    slices = [
        Slice(gap, store(world, 1, a), 1000, 0, 1000),
        Slice(gap + 1100, store(world, 2, b), 1000, 0, 1000),
        Slice(2 * gap + 2100, store(world, 3, c), 1000, 0, 1000),
        Slice(CHUNK_BYTES - 10, SliceId(0), 10, 0, 10, SliceKind.HOLE),
    ]
    before = shown(world, slices)
    records = rewrite(world.blocks, slices, NEW)
    assert records == [
        Slice(gap, NEW, 3100, 0, 2100),
        Slice(2 * gap + 2100, NEW, 3100, 2100, 1000),
    ]
    after = shown(world, records)
    assert after == before[: len(after)]
    assert not any(before[len(after) :])
    assert [part.slice is None for part in resolve(records)] == [True, False, True, False]


def test_sparse_files_stay_sparse(world: World) -> None:
    """4 KiB in each 128 KiB: the same space as before, and no rewrite that makes no fewer."""
    count, step, length = 100, 128 << 10, 4096
    slices = [
        Slice(step * n, store(world, n + 1, pattern(length, n)), length, 0, length)
        for n in range(count)
    ]
    assert not should_compact(slices)
    twice = [*slices, *(each._replace(pos=each.pos + length) for each in slices)]
    assert should_compact(twice)
    before = shown(world, twice)
    records = rewrite(world.blocks, twice, NEW)
    assert len(records) == count
    assert covered(records) == covered(twice) == 2 * count * length
    assert shown(world, records) == before
    assert not should_compact(records)


def test_the_largest_holes_stay(world: World) -> None:
    """Of more than there may be; what is left is no reason to compact again."""
    count = 2 * HOLES_MAX
    piece = Slice(0, store(world, 1, pattern(8, 1)), 8, 0, 8)
    gaps = [HOLE_MIN_BYTES + n % 7 * 8192 for n in range(count)]
    slices = [piece._replace(pos=8 * n + sum(gaps[:n])) for n in range(count + 1)]
    assert slices[-1].end <= CHUNK_BYTES
    before = shown(world, slices)
    records = rewrite(world.blocks, slices, NEW)
    assert len(records) == HOLES_MAX + 1
    kept = [right.pos - left.end for left, right in pairwise(records)]
    assert sorted(kept) == sorted(gaps)[-HOLES_MAX:]
    assert shown(world, records) == before
    assert not should_compact(records)


def test_all_holes_become_nothing(world: World) -> None:
    hole = Slice(0, SliceId(0), 50, 0, 50, SliceKind.HOLE)
    assert rewrite(world.blocks, [hole], NEW) == []
    assert rewrite(world.blocks, [], NEW) == []
    assert world.objects.puts == []

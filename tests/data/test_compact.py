"""Compaction: the same bytes in one slice."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from fsdata.compact import HOLE_MIN_BYTES, rewrite
from fsmeta.slices import covered, resolve
from fsmeta.types import CHUNK_BYTES, Ino, Slice, SliceId, SliceKind
from tests.data.test_reader import store
from tests.data.world import BLOCK, World, pattern

INO = Ino(7)
NEW = SliceId(1000)


def shown(world: World, slices: list[Slice]) -> bytes:
    world.sink.chunks[INO, 0] = slices
    end = max((piece.end for piece in slices), default=0)
    return b"".join(world.reader().read(0, end, end))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 3 * BLOCK), st.integers(1, 2 * BLOCK), st.booleans()), max_size=9
    )
)
def test_rewrite_shows_the_same(parts: list[tuple[int, int, bool]]) -> None:
    world = World()
    slices = []
    for number, (pos, length, hole) in enumerate(parts):
        if hole:
            slices.append(Slice(pos, SliceId(0), length, 0, length, SliceKind.HOLE))
        else:
            data = pattern(length, number)
            slices.append(Slice(pos, store(world, number + 1, data), length, 0, length))
    before = shown(world, slices)
    records = rewrite(world.blocks, slices, NEW)
    assert shown(world, records) == before.rstrip(b"\0") or before.startswith(shown(world, records))
    assert len(shown(world, records)) >= len(before.rstrip(b"\0"))
    assert len(records) <= 1
    assert covered(records) <= len(before)
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


def test_all_holes_become_nothing(world: World) -> None:
    hole = Slice(0, SliceId(0), 50, 0, 50, SliceKind.HOLE)
    assert rewrite(world.blocks, [hole], NEW) == []
    assert rewrite(world.blocks, [], NEW) == []
    assert world.objects.puts == []

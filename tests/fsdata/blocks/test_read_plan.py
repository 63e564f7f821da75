"""The plan of a read: it covers what is asked for, and fetches no more than it says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
from hypothesis import given, strategies as st

from fsdata.blocks.blocks import BlockStore
from fsdata.blocks.fetch_range import HEAD_BYTES
from fsdata.blocks.layout import BlockLayout
from fsdata.blocks.read_plan import (
    STEP_BYTES,
    WHOLE_BYTES,
    Access,
    BlockRead,
    Residency,
    Sharing,
    Source,
    plan,
    range_reads,
)
from fsdata.format.block_v1 import head_bytes
from fsdata.objects.mem import MemObjects
from fsdata.resources.block_cache import BlockCache
from fsdata.resources.memory_budget import MemoryBudget
from fsmeta.runtime import SystemRuntime
from fsmeta.slices import resolve
from fsmeta.types import FRAME_BYTES, Slice, SliceId, SliceKind
from tests.fsdata.faults import FaultyObjects
from tests.fsdata.world import pattern

DATA = pattern(1 << 20)
READERS = (Access.RANDOM, Access.STREAM, Access.SEGMENT)
BLOCK = 1 << 20


class Held(NamedTuple):
    """What is known of a block."""

    has_disks: bool = False
    memory: bool = False
    all_near: bool = False
    begin: bool = False
    ranges: bool = False
    block: bool | None = False
    flying: bool = False
    ranged: int = 0
    before: bool = False

    def in_memory(self, read: BlockRead) -> bool:
        return self.memory and read.length > 0

    def near(self, read: BlockRead) -> bool:
        return self.has_disks and self.all_near and read.length > 0

    def begins_on_disk(self, read: BlockRead) -> bool:
        return self.has_disks and self.begin and read.length > 0

    def keeps_ranges(self, read: BlockRead) -> bool:
        return self.has_disks and self.ranges and read.length > 0

    def keeps_block(self, read: BlockRead) -> bool | None:
        return self.block if self.has_disks and read.length else False

    def is_fetched(self, read: BlockRead) -> bool:
        return self.flying and read.length > 0

    def ranged_bytes(self, read: BlockRead) -> int:
        return min(self.ranged, read.length)

    def was_fetched(self, read: BlockRead) -> bool:
        return self.before and read.length > 0


def _conforms(held: Held) -> Residency:
    return held


@st.composite
def _reads(draw: st.DrawFn) -> BlockRead:
    edges = [1, 2, STEP_BYTES - 1, STEP_BYTES, WHOLE_BYTES, WHOLE_BYTES + 1, BLOCK, 4 * BLOCK]
    length = draw(st.sampled_from(edges) | st.integers(1, 4 * BLOCK))
    begin = draw(st.integers(0, length - 1))
    end = draw(st.integers(begin + 1, length))
    more = draw(st.sampled_from([0, 4096, BLOCK]))
    return BlockRead((SliceId(1), 0), length, begin, end, draw(st.sampled_from(Access)), more)


def _helds() -> st.SearchStrategy[Held]:
    yes = st.booleans()
    block = st.sampled_from([None, False, True])
    return st.builds(Held, yes, yes, yes, yes, yes, block, yes, st.integers(0, 4 * BLOCK), yes)


@given(_reads(), _helds())
def test_a_plan_covers_its_read_and_fetches_no_more_than_it_says(
    read: BlockRead, held: Held
) -> None:
    steps = list(plan(read, held))
    for step in steps:
        assert 0 <= step.begin <= read.begin < read.end <= step.end <= read.length
        if step.source is Source.BLOCK:
            assert (step.begin, step.end) == (0, read.length)
        else:
            assert step.begin == read.begin
            assert step.end <= read.end + (read.more if step.source is Source.RANGE else 0)
    sources = [step.source for step in steps]
    assert sources == sorted(set(sources), key=list(Source).index), "each once, the nearest first"
    if read.access in READERS:
        assert sources[-1] is Source.BLOCK, "that always brings bytes"
        assert steps[-1].sharing is Sharing.JOIN
    else:
        assert len(steps) <= 1
        assert not (held.memory and steps), "a block in memory is not fetched"


def _before(read: BlockRead, held: Held) -> Iterator[tuple[Source, bool]]:
    """What the six methods of which the plan was made have tried, and whether a block was kept."""
    _, length, begin, end, access, _ = read
    size = end - begin
    if access is Access.SEGMENT:
        if held.has_disks:
            yield Source.DISK, False
        if held.begins_on_disk(read) or (held.was_fetched(read) and not held.keeps_ranges(read)):
            yield Source.RANGE, False
        yield Source.BLOCK, True
    elif access in READERS:
        whole = access is Access.STREAM
        if length > WHOLE_BYTES and not (whole and size < STEP_BYTES):
            ranged = False
            if not whole and 2 * size < length:
                yield Source.PIECE, False
                known = 2 * held.ranged_bytes(read) >= length and not held.keeps_ranges(read)
                ranged = not held.is_fetched(read) and not known
                if ranged:
                    yield Source.RANGE, False
            if held.has_disks and not ranged:
                yield Source.DISK, False
        yield Source.BLOCK, size < length
    elif access is Access.STRIDE and length > WHOLE_BYTES and 2 * size < length:
        if held.keeps_ranges(read) and not held.memory and not held.flying:
            yield Source.RANGE, False
    elif not held.memory:
        if access is Access.PROMOTE:
            on_disk = held.keeps_block(read)
            if on_disk is not None:
                yield Source.BLOCK, not on_disk
        elif access is Access.WARM or not (length > WHOLE_BYTES and held.near(read)):
            yield Source.BLOCK, True


@given(_reads(), _helds())
def test_a_plan_tries_what_the_ways_before_it_tried(read: BlockRead, held: Held) -> None:
    assert [(step.source, step.keep) for step in plan(read, held)] == list(_before(read, held))


@pytest.mark.parametrize("access", list(Access))
def test_a_plan_looks_at_no_disk_that_it_does_not_need(access: Access) -> None:
    """What a step depends on is looked up when the steps before it have brought nothing."""
    looks: list[str] = []

    class Looking(Held):
        def begins_on_disk(self, read: BlockRead) -> bool:
            looks.append("begin")
            return super().begins_on_disk(read)

        def keeps_ranges(self, read: BlockRead) -> bool:
            looks.append("ranges")
            return super().keeps_ranges(read)

    steps = plan(BlockRead((SliceId(1), 0), BLOCK, 0, 4096, access), Looking(has_disks=True))
    first = next(steps, None)
    if access in READERS:
        assert first is not None
        assert looks == []


@st.composite
def _slices(draw: st.DrawFn) -> list[Slice]:
    out: list[Slice] = []
    for number in range(draw(st.integers(0, 8))):
        pos, length = draw(st.integers(0, 90)), draw(st.integers(1, 40))
        off = draw(st.integers(0, 20))
        kind = draw(st.sampled_from([SliceKind.BLOCKS, SliceKind.HOLE, SliceKind.SEGMENT]))
        size = off + length + draw(st.integers(0, 20))
        if kind is SliceKind.HOLE:
            off, size = 0, length
        out.append(Slice(pos, SliceId(number + 1), size, off, length, kind))
    return out


@given(
    _slices(),
    st.integers(0, 140),
    st.integers(1, 140),
    st.sampled_from([Access.RANDOM, Access.STREAM, Access.AHEAD, Access.STRIDE]),
    st.sampled_from([0, 5, 1000]),
    st.sampled_from([7, 16, 64]),
)
def test_reads_of_a_range_are_its_bytes_in_order(
    slices: list[Slice], pos: int, size: int, access: Access, more: int, block_bytes: int
) -> None:
    file: dict[int, tuple[int, int]] = {}  # by position: slice and offset; zeros are not there
    kinds = {piece.id: piece for piece in slices}
    for piece in slices:
        for at in range(piece.length):
            if piece.kind is SliceKind.HOLE:
                file.pop(piece.pos + at, None)
            else:
                file[piece.pos + at] = piece.id, piece.off + at
    found: list[tuple[int, int] | None] = []
    for part in range_reads(resolve(slices), pos, size, access, more, block_bytes):
        if isinstance(part, int):
            assert part > 0
            found += [None] * part
            continue
        (slice_id, block), length, begin, end, how, after = part
        piece = kinds[slice_id]
        assert length == min(block_bytes, piece.size - block * block_bytes)
        assert 0 <= begin < end <= length
        assert 0 <= after <= more
        waits = access in READERS and piece.kind is SliceKind.SEGMENT
        assert how is (Access.SEGMENT if waits else access)
        first = block * block_bytes
        found += [(slice_id, first + at) for at in range(begin, end)]
    assert found == [file.get(at) for at in range(pos, pos + size)]


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.integers(0, BLOCK - 1),
            st.integers(1, BLOCK),
            st.sampled_from(READERS),
        ),
        max_size=12,
    )
)
def test_what_is_fetched_is_what_the_plan_says(
    wanted: list[tuple[int, int, int, Access]],
) -> None:
    """Frames, which checksums cover, are all that comes on top."""
    runtime = SystemRuntime()
    objects = FaultyObjects(runtime, MemObjects(runtime))
    cache = BlockCache(runtime, MemoryBudget(runtime), BLOCK)
    blocks = BlockStore(runtime, objects, cache, BlockLayout(block_bytes=BLOCK))
    for number in range(3):
        blocks.put_block(SliceId(1), number, bytearray(DATA))
    head = head_bytes(BLOCK, FRAME_BYTES)
    for number, begin, size, access in wanted:
        end = min(BLOCK, begin + size)
        read = BlockRead((SliceId(1), number), BLOCK, begin, end, access)
        in_memory, before = blocks.is_in_memory(read.key), len(objects.gets)
        sources = [step.source for step in plan(read, blocks._reads)]
        piece = cache.get_piece(read.key, begin, end) if Source.PIECE in sources else None
        assert blocks.read(read) == DATA[begin:end]
        asked = objects.gets[before:]
        if in_memory or piece is not None:
            assert asked == []
        elif Source.RANGE in sources:
            fetched = sum(stop - start for _, start, stop in asked if stop is not None)
            assert len(asked) <= 2, "the range, and the head that verifies it"
            first, last = begin & -FRAME_BYTES, -(-end & -FRAME_BYTES)
            skipped = first if first <= HEAD_BYTES else 0  # cheaper than a request of its own
            assert fetched <= head + skipped + last - first
        else:
            assert len(asked) == 1

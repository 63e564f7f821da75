"""O3, O4: blocks of volumes that compress or encrypt: ranges, buffers, damage that passes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from fsdata.blocks.blocks import BlockStore
from fsdata.blocks.layout import BlockLayout
from fsdata.format.block_v1 import Codec
from fsdata.format.block_v2 import UNIT_BYTES
from fsdata.format.encryption import Sealer
from fsdata.format.object_keys import object_key
from fsdata.objects.mem import MemObjects
from fsdata.resources.block_cache import BlockCache
from fsdata.resources.memory_budget import MemoryBudget
from fsmeta.errors import ObjectDamaged
from fsmeta.runtime import SystemRuntime
from fsmeta.types import SliceId
from tests.fsdata.faults import FaultyObjects
from tests.fsdata.reads import read_block
from tests.fsdata.world import pattern

RUNTIME = SystemRuntime()
BLOCK = 1 << 20
ONE = SliceId(77)
DATA = pattern(BLOCK // 2) + b"a line of words\n" * (BLOCK // 32) + pattern(900_000, 2)
LOCKED = Sealer(RUNTIME, bytes(range(32)))


class Store:
    """A block store with a slice of two blocks in it, nothing cached."""

    def __init__(self, codec: Codec, sealer: Sealer | None) -> None:
        self.objects = FaultyObjects(RUNTIME, MemObjects(RUNTIME))
        self.cache = BlockCache(RUNTIME, MemoryBudget(RUNTIME), BLOCK)
        self.blocks = BlockStore(
            RUNTIME, self.objects, self.cache, BlockLayout(codec, BLOCK, sealer)
        )
        for index in range(2):
            data = DATA[index * BLOCK : (index + 1) * BLOCK]
            self.blocks.put_block(ONE, index, bytearray(data))

    def read(self, begin: int, end: int, whole: bool = False) -> bytes:
        """Bytes of the slice, within one block."""
        index = begin // BLOCK
        at = index * BLOCK
        return bytes(read_block(self.blocks, ONE, len(DATA), index, begin - at, end - at, whole))


KINDS = [(codec, sealer) for codec in Codec for sealer in (None, LOCKED)]


@pytest.mark.parametrize(("codec", "sealer"), KINDS)
def test_a_small_read_fetches_its_units_only(codec: Codec, sealer: Sealer | None) -> None:
    store = Store(codec, sealer)
    assert store.read(100, 5000) == DATA[100:5000]
    assert len(store.objects.gets) == 1, "the head comes along"
    far = BLOCK - 3 * UNIT_BYTES + 10
    assert store.read(far, far + 10) == DATA[far : far + 10]
    assert len(store.objects.gets) == 2, "the head is known by now"
    _, begin, end = store.objects.gets[-1]
    assert end is not None
    assert end - begin <= UNIT_BYTES + 16
    if codec is not Codec.NONE:
        assert end - begin < UNIT_BYTES // 4, "words are packed"
    assert store.blocks.stats().ranges == 2
    assert store.blocks.stats().whole == 0


@pytest.mark.parametrize(("codec", "sealer"), KINDS)
@pytest.mark.parametrize("at", [5 * UNIT_BYTES + 7, BLOCK - 9])
def test_a_far_range_is_one_round_trip_where_units_are_not_packed(
    codec: Codec, sealer: Sealer | None, at: int
) -> None:
    store = Store(codec, sealer)
    assert store.read(at, at + 9) == DATA[at : at + 9]
    assert len(store.objects.gets) == 2
    assert store.objects.together == ([2] if codec is Codec.NONE else [])


@pytest.mark.parametrize(("codec", "sealer"), KINDS)
def test_whole_blocks(codec: Codec, sealer: Sealer | None) -> None:
    store = Store(codec, sealer)
    assert store.read(0, BLOCK, whole=True) == DATA[:BLOCK]
    assert store.read(BLOCK, len(DATA), whole=True) == DATA[BLOCK:]
    key = object_key(ONE, 0, BLOCK)
    stored = store.objects.inner.get(key)
    if sealer is not None:
        assert DATA[:50] not in stored, "what is encrypted can't be read"
        assert b"line of words" not in stored


@settings(max_examples=60)
@given(st.sampled_from(KINDS), st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=12))
def test_any_ranges(kind: tuple[Codec, Sealer | None], pairs: list[tuple[float, float]]) -> None:
    store = Store(*kind)
    for block in range(2):
        for one, other in pairs:
            length = min(BLOCK, len(DATA) - block * BLOCK)
            begin, end = sorted((int(one * (length - 1)), 1 + int(other * (length - 1))))
            end = max(end, begin + 1)
            at = block * BLOCK
            assert store.read(at + begin, at + end) == DATA[at + begin : at + end]


@pytest.mark.parametrize(("codec", "sealer"), KINDS)
@pytest.mark.parametrize("whole", [True, False])
def test_damage_on_the_way_is_asked_for_once_more(
    codec: Codec, sealer: Sealer | None, whole: bool
) -> None:
    store = Store(codec, sealer)
    for region in (1, 8 * 14, 8 * 30, 8 * 300, 8 * 5_000):  # magic, head, table, payload
        for lost in (store.cache, store.blocks._reads._ranges._heads):
            lost.drop((ONE, 0)) if isinstance(lost, BlockCache) else lost.clear()
        before = store.blocks.stats()
        store.objects.flip_at, store.objects.flips = region, 1
        assert store.read(1_000, 80_000, whole) == DATA[1_000:80_000]
        after = store.blocks.stats()
        assert (after.repeated - before.repeated, after.damaged) == (1, 0)


@pytest.mark.parametrize(("codec", "sealer"), KINDS)
def test_damage_that_stays_is_an_error_once_it_was_asked_for_again(
    codec: Codec, sealer: Sealer | None
) -> None:
    store = Store(codec, sealer)
    store.objects.flip_at = 8 * 30_000
    for whole in (True, False):
        with pytest.raises(ObjectDamaged, match="77_0"):
            store.read(0, 60_000, whole)
    stats = store.blocks.stats()
    assert (stats.repeated, stats.damaged) == (2, 2)


def test_objects_of_each_other_s_place_are_damage() -> None:
    store = Store(Codec.NONE, LOCKED)
    inner = store.objects.inner
    inner.put(object_key(SliceId(78), 0, BLOCK), (inner.get(object_key(ONE, 0, BLOCK)),))
    for whole in (True, False):
        with pytest.raises(ObjectDamaged, match="with another key"):
            read_block(store.blocks, SliceId(78), BLOCK, 0, 0, 10, whole)


def test_buffers_of_sealed_blocks_are_used_again() -> None:
    store = Store(Codec.LZ4, LOCKED)
    first = read_block(store.blocks, ONE, len(DATA), 0, 0, BLOCK, whole=True)
    buffer = first.obj
    assert isinstance(buffer, bytearray)
    del first
    again = read_block(store.blocks, ONE, len(DATA), 0, 0, BLOCK, whole=True)
    assert again.obj is buffer
    assert again == DATA[:BLOCK]


@pytest.mark.parametrize("codec", Codec)
def test_o3_a_late_put_of_the_same_bytes_is_read_in_ranges(codec: Codec) -> None:
    """An earlier attempt arrives after all: it was sealed with a salt of its own, and the head that
    is remembered is not of the object that is there.
    """
    store = Store(codec, LOCKED)
    assert store.read(100, 5000) == DATA[100:5000]
    store.blocks.put_block(ONE, 0, bytearray(DATA[:BLOCK]))
    far = 9 * UNIT_BYTES + 10
    assert store.read(far, far + 10) == DATA[far : far + 10]
    assert store.read(far + UNIT_BYTES, far + UNIT_BYTES + 9) == DATA[far + UNIT_BYTES :][:9]
    assert store.blocks.stats().damaged == 0
    assert store.blocks.stats().repeated == 1

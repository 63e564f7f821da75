"""Blocks: names, ranges against whole fetches, single flight, damage."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from fsdata.blocks import fetch_range as ranges_module
from fsdata.blocks.blocks import BlockStore
from fsdata.blocks.layout import BlockLayout
from fsdata.format.block_v1 import Codec, head_bytes
from fsdata.format.object_keys import object_key, parse_key
from fsdata.objects.mem import MemObjects
from fsdata.resources.block_cache import BlockCache
from fsdata.resources.memory_budget import MemoryBudget
from fsmeta.errors import ObjectDamaged, ObjectMissing, StoreError, Unavailable
from fsmeta.runtime import Event, Runtime, SystemRuntime
from fsmeta.types import FRAME_BYTES, SliceId
from tests.fsdata.faults import FaultyObjects
from tests.fsdata.reads import fetch_ahead, read_block, read_packed
from tests.fsdata.world import pattern

RUNTIME = SystemRuntime()
BLOCK = 1 << 20
HEAD = head_bytes(BLOCK, FRAME_BYTES)
ONE = SliceId(1_234_567)
DATA = pattern(2 * BLOCK + 1000)


class Joining(SystemRuntime):
    """Tells when somebody asks for an event, which is to wait for another's fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = super().event()

    def event(self) -> Event:
        self.asked.set()
        return super().event()


class Store:
    """A block store with one slice in it, nothing cached."""

    def __init__(
        self,
        codec: Codec = Codec.NONE,
        write_codec: Codec | None = None,
        runtime: Runtime = RUNTIME,
    ) -> None:
        self.runtime = runtime
        self.objects = FaultyObjects(RUNTIME, MemObjects(RUNTIME))
        self.open(codec if write_codec is None else write_codec)
        for index in range(3):
            data = DATA[index * BLOCK : (index + 1) * BLOCK]
            self.blocks.put_block(ONE, index, bytearray(data))
        self.open(codec)

    def open(self, codec: Codec) -> None:
        self.budget = MemoryBudget(RUNTIME)
        self.cache = BlockCache(RUNTIME, self.budget, BLOCK)
        self.idle = self.budget.gauges().cached  # the room for spares
        self.blocks = BlockStore(self.runtime, self.objects, self.cache, BlockLayout(codec, BLOCK))

    def read(self, index: int, begin: int, end: int, whole: bool = False) -> bytes:
        return bytes(read_block(self.blocks, ONE, len(DATA), index, begin, end, whole))


@given(st.integers(0, 2**62), st.integers(0, 15), st.integers(1, 1 << 22))
def test_keys_parse_back(slice_id: int, block: int, length: int) -> None:
    key = object_key(SliceId(slice_id), block, length)
    assert parse_key(key) == (slice_id, block, length)


@pytest.mark.parametrize(
    "key", ["", "x", "chunks/0/0/1_2", "chunks/0/1/1_2_3", "chunks/0/0/01_2_3", "chunks/0/0/²_2_3"]
)
def test_other_keys_do_not(key: str) -> None:
    assert parse_key(key) is None


def test_key_layout() -> None:
    assert object_key(ONE, 2, 1000) == "chunks/1/1234/1234567_2_1000"


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("write_codec", list(Codec))
def test_any_codec_reads_any(codec: Codec, write_codec: Codec) -> None:
    store = Store(codec, write_codec)
    assert store.read(0, 5, 100) == DATA[5:100]
    assert store.read(1, 0, BLOCK) == DATA[BLOCK : 2 * BLOCK]
    assert store.read(2, 10, 1000) == DATA[2 * BLOCK + 10 :]


@pytest.mark.parametrize("write_codec", list(Codec))
def test_no_buffer_is_filled_with_what_a_store_has_made_of_its_own(write_codec: Codec) -> None:
    store = Store(write_codec=write_codec)
    layout = BlockLayout(block_bytes=BLOCK, fills=False)
    blocks = BlockStore(RUNTIME, store.objects, store.cache, layout)
    spare = bytearray(BLOCK)
    store.cache.pass_by(spare)
    for index in range(3):
        begin, end = index * BLOCK, min(len(DATA), (index + 1) * BLOCK)
        assert (
            bytes(read_block(blocks, ONE, len(DATA), index, 0, end - begin, True))
            == DATA[begin:end]
        )
    assert store.cache.take_spare() is spare
    assert spare == bytes(BLOCK)
    store.cache.shrink(1 << 30)
    store.objects.flip_at = 8 * 70_000
    with pytest.raises(ObjectDamaged, match="1234567_0"):
        read_block(blocks, ONE, len(DATA), 0, 0, BLOCK, True)


def test_a_block_that_a_writer_put_is_behind() -> None:
    store = Store()
    store.budget.reserve(5)
    store.blocks.put_block(SliceId(5), 0, bytearray(b"hello"), reserved=True)
    assert bytes(read_block(store.blocks, SliceId(5), 5, 0, 1, 3)) == b"el"
    assert store.objects.gets == []
    gauges = store.budget.gauges()
    assert (gauges.writing, gauges.cached - store.idle) == (0, 5)
    store.blocks.delete([(SliceId(5), 5)])
    assert store.budget.gauges().cached == store.idle


def test_other_blocks_that_are_put_are_not_cached() -> None:
    store = Store()
    store.blocks.put_block(SliceId(5), 0, bytearray(b"hello"))
    assert store.cache.stats().blocks == 0
    assert store.budget.gauges().cached == store.idle


def test_a_failed_put_leaves_the_buffer_to_the_writer() -> None:
    store = Store()
    store.budget.reserve(5)
    store.objects.fail("put", 1)
    with pytest.raises(Unavailable):
        store.blocks.put_block(SliceId(5), 0, bytearray(b"hello"), reserved=True)
    assert store.cache.stats().blocks == 0
    assert store.budget.gauges().writing == 5


def test_c3_the_pages_of_a_frame_are_fetched_once() -> None:
    """Without a cache disk, too: who maps a file asks for one after the other."""
    store = Store()
    for at in range(5 * FRAME_BYTES, 7 * FRAME_BYTES, 4096):
        assert store.read(1, at, at + 4096) == DATA[BLOCK + at : BLOCK + at + 4096]
    assert store.blocks.stats().ranges == 2
    store.cache.shrink(1)
    assert store.cache.stats().bytes < 2 * FRAME_BYTES, "they go first where room is short"
    store.cache.shrink(1 << 40)
    assert store.cache.stats().bytes == 0
    at = 6 * FRAME_BYTES
    assert store.read(1, at, at + 9) == DATA[BLOCK + at : BLOCK + at + 9]
    assert store.blocks.stats().ranges == 3


def test_c3_pieces_of_blocks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsdata.resources.block_cache.PIECES_BYTES_MAX", 3 * FRAME_BYTES)
    store = Store()
    before = store.cache.stats().bytes
    for at in (*range(0, 7 * FRAME_BYTES, FRAME_BYTES), 6 * FRAME_BYTES + 4096):
        store.read(0, at, at + 4096)
        assert store.cache.stats().bytes <= before + 3 * FRAME_BYTES
    assert store.blocks.stats().ranges == 7
    store.read(0, 0, 4096)
    assert store.blocks.stats().ranges == 8


@pytest.mark.parametrize("whole", [True, False])
def test_a_block_read_as_a_whole_is_not_cached(whole: bool) -> None:
    store = Store()
    for index, length in enumerate((BLOCK, BLOCK, 1000)):
        assert store.read(index, 0, length, whole) == DATA[index * BLOCK :][:length]
        assert store.cache.stats().blocks == 0
    assert store.budget.gauges().cached == store.idle
    assert len(store.objects.gets) == store.blocks.stats().whole == 3


def test_a_block_read_in_parts_is_fetched_once_and_left_behind() -> None:
    store = Store()
    for begin in range(0, BLOCK, BLOCK // 4):
        assert list(store.cache._behind.blocks) == []
        end = begin + BLOCK // 4
        assert store.read(0, begin, end, whole=True) == DATA[begin:end]
    assert list(store.cache._behind.blocks) == [(ONE, 0)]
    assert list(store.cache._blocks) == []
    assert len(store.objects.gets) == 1
    assert store.budget.gauges().cached - store.idle == BLOCK == store.cache.stats().bytes


def test_only_a_sequential_reader_leaves_blocks_behind() -> None:
    store = Store()
    fetch_ahead(store.blocks, ONE, len(DATA), 0)
    store.read(0, 0, BLOCK)
    store.read(0, 5, BLOCK)
    store.read(0, 0, BLOCK - 1, whole=True)
    assert list(store.cache._blocks) == [(ONE, 0)]
    store.read(0, BLOCK - 1, BLOCK, whole=True)
    assert list(store.cache._behind.blocks) == [(ONE, 0)]


def test_a_cold_small_read_fetches_one_range_once() -> None:
    store = Store()
    assert store.read(0, 100, 5000) == DATA[100:5000]
    assert store.objects.gets == [(object_key(ONE, 0, BLOCK), 0, HEAD + FRAME_BYTES)]
    assert store.blocks.stats().ranges == 1
    at = 700_000
    assert store.read(0, at, at + 10) == DATA[at : at + 10]
    assert len(store.objects.gets) == 2, "the head is known by now"
    frame = HEAD + at // FRAME_BYTES * FRAME_BYTES
    assert store.objects.gets[1][1:] == (frame, frame + FRAME_BYTES)
    assert store.cache.stats().blocks == 0


def test_a_far_range_costs_its_head_once() -> None:
    store = Store()
    for at in (500_000, 900_000, BLOCK - 10):
        assert store.read(1, at, at + 10) == DATA[BLOCK + at : BLOCK + at + 10]
    assert len(store.objects.gets) == 4
    assert store.objects.together == [2], "the first range, with the head"
    assert [end - begin for _, begin, end in store.objects.gets if end] == [
        HEAD,
        *3 * [FRAME_BYTES],
    ]


def test_a_block_that_is_not_as_new_ones_are_costs_one_request_more() -> None:
    """Its range is not where that of a new block would be: the head says so."""
    store = Store()
    old = Store(Codec.LZ4)
    words = b"some words that can be packed " * (BLOCK // 30 + 1)
    old.blocks.put_block(SliceId(77), 0, bytearray(words[:BLOCK]))
    key = object_key(SliceId(77), 0, BLOCK)
    store.objects.inner.put(key, (old.objects.inner.get(key),))
    at = 700_000
    for _ in range(2):
        assert read_block(store.blocks, SliceId(77), BLOCK, 0, at, at + 9) == words[at : at + 9]
    assert store.objects.together == [2]


def test_whole_blocks_are_fetched_where_it_pays() -> None:
    store = Store()
    store.read(0, 0, 10, whole=True)
    store.read(1, 0, BLOCK // 2)
    store.read(2, 0, 10)
    assert store.blocks.stats().whole == 3
    assert len(store.objects.gets) == 3
    store.read(0, 10, 20)
    assert len(store.objects.gets) == 3


def test_many_ranges_of_a_block_become_the_block() -> None:
    store = Store()
    for at in range(0, BLOCK, FRAME_BYTES):
        assert store.read(0, at, at + 9) == DATA[at : at + 9]
    stats = store.blocks.stats()
    assert (stats.ranges, stats.whole) == (BLOCK // FRAME_BYTES // 2, 1)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("bit", [3, 8 * 30, 8 * 200, 8 * 70_000])
def test_wrong_bytes_are_an_error_and_counted(whole: bool, bit: int) -> None:
    store = Store()
    store.objects.flip_at = bit
    with pytest.raises(ObjectDamaged, match="1234567_0"):
        store.read(0, 60_000, 80_000, whole)
    assert store.blocks.stats().damaged == 1
    store.objects.flip_at = None
    assert store.read(0, 60_000, 80_000, whole) == DATA[60_000:80_000], "never cached"


def test_another_block_under_the_key_is_damage() -> None:
    store = Store()
    short = store.objects.inner.get(object_key(ONE, 2, 1000))
    store.objects.inner.put(object_key(ONE, 0, BLOCK), (short,))
    for whole in (True, False):
        with pytest.raises(ObjectDamaged):
            store.read(0, 0, 10, whole)


@pytest.mark.parametrize("whole", [True, False])
def test_missing_and_unavailable(whole: bool) -> None:
    store = Store()
    store.objects.fail("get", 1)
    with pytest.raises(Unavailable):
        store.read(0, 0, 10, whole)
    store.blocks.delete([(ONE, len(DATA))])
    store.blocks.delete([(ONE, len(DATA))])
    assert list(store.objects.inner.list("")) == []
    with pytest.raises(ObjectMissing):
        store.read(0, 0, 10, whole)
    stats = store.blocks.stats()
    assert (stats.missing, stats.damaged) == (1, 0)


def test_deleted_blocks_leave_the_cache() -> None:
    store = Store()
    store.read(0, 0, 10, whole=True)
    store.blocks.delete([(ONE, len(DATA))])
    with pytest.raises(ObjectMissing):
        store.read(0, 0, 10)


@pytest.mark.parametrize("damaged", [False, True])
def test_one_thread_fetches_and_the_others_wait(damaged: bool) -> None:
    runtime = Joining()
    store = Store(runtime=runtime)
    store.objects.gate = RUNTIME.event()
    store.objects.flip_at = 9999 if damaged else None
    answers: list[bytes | StoreError] = []

    def read() -> None:
        try:
            answers.append(store.read(0, 5, 50, whole=True))
        except StoreError as error:
            answers.append(error)

    first = RUNTIME.spawn("first", read)
    store.objects.arrived.wait()
    others = [RUNTIME.spawn("other", read) for _ in range(3)]
    runtime.asked.wait()
    store.objects.gate.set()
    for thread in (first, *others):
        thread.join()
    assert len(answers) == 4
    if damaged:  # those that came too late to join have fetched it themselves
        assert all(isinstance(answer, ObjectDamaged) for answer in answers)
    else:
        assert answers == [DATA[5:50]] * 4
        assert len(store.objects.gets) == 1
    assert store.blocks._reads._flights.count() == 0


def test_a_block_whose_read_ahead_was_joined_is_left_behind() -> None:
    runtime = Joining()
    store = Store(runtime=runtime)
    store.objects.gate = RUNTIME.event()
    ahead = RUNTIME.spawn("ahead", lambda: fetch_ahead(store.blocks, ONE, len(DATA), 0))
    store.objects.arrived.wait()
    views: list[memoryview] = []
    reader = RUNTIME.spawn(
        "reader",
        lambda: views.append(read_block(store.blocks, ONE, len(DATA), 0, 0, BLOCK, whole=True)),
    )
    runtime.asked.wait()
    store.objects.gate.set()
    for thread in (ahead, reader):
        thread.join()
    assert views == [DATA[:BLOCK]]
    assert len(store.objects.gets) == 1
    assert list(store.cache._behind.blocks) == [(ONE, 0)]
    assert list(store.cache._blocks) == []


def test_buffers_of_evicted_blocks_are_used_again() -> None:
    store = Store()
    fetch_ahead(store.blocks, ONE, len(DATA), 0)
    view = read_block(store.blocks, ONE, len(DATA), 0, 0, BLOCK)
    store.cache.shrink(BLOCK)
    other = read_block(store.blocks, ONE, len(DATA), 1, 0, 9, whole=True)
    assert other.obj is not view.obj
    assert view == DATA[:BLOCK], "still read, so not used again"
    buffer = other.obj
    del other
    store.cache.shrink(BLOCK)
    again = read_block(store.blocks, ONE, len(DATA), 1, 0, 9, whole=True)
    assert again.obj is buffer
    assert again == DATA[BLOCK : BLOCK + 9]


def test_buffers_of_blocks_read_as_a_whole_are_used_again() -> None:
    store = Store()
    view = read_block(store.blocks, ONE, len(DATA), 0, 0, BLOCK)
    other = read_block(store.blocks, ONE, len(DATA), 1, 0, BLOCK)
    assert view.obj is not other.obj
    assert view == DATA[:BLOCK], "still read, so not used again"
    buffer = view.obj
    del view
    again = read_block(store.blocks, ONE, len(DATA), 0, 0, BLOCK)
    assert again.obj is buffer
    assert again == DATA[:BLOCK]
    assert other == DATA[BLOCK : 2 * BLOCK]
    assert store.budget.gauges().cached == store.idle


def test_heads_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges_module, "HEADS_BYTES_MAX", 2 * HEAD - 1)
    store = Store()
    for index in (0, 1, 0, 1):
        store.read(index, 0, 10)
        assert len(store.blocks._reads._ranges._heads) == 1
    store.blocks.delete([(ONE, len(DATA))])
    assert store.blocks._reads._ranges._heads_bytes == 0


def test_sync_names_every_block() -> None:
    store = Store()
    store.blocks.sync([(ONE, len(DATA))])
    assert store.objects.synced == [
        object_key(ONE, index, length) for index, length in enumerate((BLOCK, BLOCK, 1000))
    ]


def test_o6_a_block_of_a_segment_is_fetched_whole_once() -> None:
    store = Store()
    assert bytes(read_packed(store.blocks, ONE, len(DATA), 0, 5, 100)) == DATA[5:100]
    assert (
        bytes(read_packed(store.blocks, ONE, len(DATA), 0, 900_000, 900_010))
        == (DATA[900_000:900_010])
    )
    assert store.blocks.stats()[2:4] == (1, 0)
    store.cache.shrink(1 << 30)
    for begin in (0, 300_000, 600_000, 300_000, 600_000):  # more is read than memory holds
        part = read_packed(store.blocks, ONE, len(DATA), 0, begin, begin + 300_000)
        assert bytes(part) == DATA[begin : begin + 300_000]
    assert store.blocks.stats()[2:4] == (1, 5)


def test_o6_a_block_of_a_segment_that_is_on_a_disk_is_read_in_part() -> None:
    class Copies:
        """A disk that has everything."""

        def suspect(self, key: str) -> None: ...
        def settle(self, key: str, right: bool) -> None: ...
        def keeps(self, key: str) -> bool:
            return bool(key)

        def read(self, key: str, begin: int, end: int) -> bytes | None:
            return b"" if not key or begin > end else None  # nobody knows

        def lacks(self, key: str, size: int) -> bool | None:
            raise NotImplementedError

        def is_near(self, key: str) -> bool:
            return not key

        def has(self, key: str, at: int) -> bool:
            return here and bool(key) and at >= 0

    here = True
    store = Store()
    layout = BlockLayout(block_bytes=BLOCK)
    blocks = BlockStore(RUNTIME, store.objects, store.cache, layout, Copies())
    assert bytes(read_packed(blocks, ONE, len(DATA), 1, 5, 100)) == DATA[BLOCK + 5 : BLOCK + 100]
    assert blocks.stats()[2:4] == (0, 1)
    here = False
    for _ in range(2):  # it will be on the disk
        store.cache.shrink(1 << 30)
        assert bytes(read_packed(blocks, ONE, len(DATA), 1, 5, 9)) == DATA[BLOCK + 5 : BLOCK + 9]
    assert blocks.stats()[2:4] == (2, 1)

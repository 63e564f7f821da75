"""The budget and the memory cache."""

from __future__ import annotations

import pytest

from fsdata.resources.block_cache import BEHIND_BYTES_MAX, SMALL_SHARE, SPARES_MAX, BlockCache
from fsdata.resources.memory_budget import AHEAD_SHARE, BUFFER_BYTES_MIN, WAIT_S_MAX, MemoryBudget
from fsmeta.errors import Unavailable
from fsmeta.runtime import SystemRuntime
from fsmeta.types import SliceId

RUNTIME = SystemRuntime()
MIB = 1 << 20
LIMIT = BUFFER_BYTES_MIN


def key(number: int) -> tuple[SliceId, int]:
    return SliceId(number), 0


def test_least_recently_used_goes_first() -> None:
    budget = MemoryBudget(RUNTIME, LIMIT)
    cache = BlockCache(RUNTIME, budget, MIB)
    room = LIMIT - budget.gauges().cached
    for number in range(room // MIB):
        cache.put(key(number), bytes(MIB))
    assert cache.get(key(0), 0, 1) is not None
    cache.put(key(99), bytes(MIB))
    assert cache.get(key(1), 0, 1) is None
    assert cache.get(key(0), 0, 1) is not None
    stats = cache.stats()
    assert (stats.hits, stats.misses) == (2, 1)
    assert stats.bytes == room == stats.blocks * MIB
    assert budget.gauges().cached == LIMIT
    cache.drop(key(0))
    cache.drop(key(0))
    assert budget.gauges().cached == LIMIT - MIB
    cache.put(key(5), bytes(10))
    assert cache.stats().bytes == room - 2 * MIB + 10, "replaced"


def test_a_buffer_is_used_again_only_when_nobody_reads_it() -> None:
    budget = MemoryBudget(RUNTIME, LIMIT)
    cache = BlockCache(RUNTIME, budget, MIB)
    assert cache.take_spare() is None
    first, second = bytearray(MIB), bytearray(MIB)
    cache.put(key(1), first)
    cache.put(key(2), second)
    cache.put(key(3), bytes(MIB))
    view = cache.get(key(1), 5, 6)
    cache.shrink(LIMIT)
    assert cache.stats().blocks == 0
    assert cache.take_spare() is second
    assert cache.take_spare() is None
    assert view is not None
    assert bytes(view) == b"\0"
    cache.pass_by(first)
    assert cache.take_spare() is None
    view.release()
    assert cache.take_spare() is first, "nobody reads it any more"


def test_spares_are_bounded_and_of_full_size() -> None:
    budget = MemoryBudget(RUNTIME)
    cache = BlockCache(RUNTIME, budget, MIB)
    idle = budget.gauges().cached
    assert idle == SPARES_MAX * MIB, "their room is charged from the start"
    buffers = [bytearray(MIB) for _ in range(SPARES_MAX + 1)]
    for buffer in buffers:
        cache.pass_by(buffer)
    cache.pass_by(bytearray(MIB - 1))
    cache.pass_by(bytes(MIB))
    assert cache.stats().bytes == 0
    spares = [cache.take_spare() for _ in range(SPARES_MAX)]
    assert all(spare is buffer for spare, buffer in zip(spares, buffers[:0:-1], strict=True))
    assert cache.take_spare() is None
    assert budget.gauges().cached == idle


def test_what_is_behind_is_bounded_and_its_buffers_are_used_again() -> None:
    budget = MemoryBudget(RUNTIME)
    cache = BlockCache(RUNTIME, budget, MIB)
    idle = budget.gauges().cached
    cache.put(key(0), bytes(10))
    count = BEHIND_BYTES_MAX // MIB
    buffers = [bytearray(MIB) for _ in range(count + 2)]
    for number, buffer in enumerate(buffers, 1):
        budget.reserve(MIB)
        cache.put_behind(key(number), buffer)
        gauges, stats = budget.gauges(), cache.stats()
        assert (gauges.writing, gauges.cached - idle) == (0, stats.bytes)
        assert stats.bytes == 10 + min(number, count) * MIB
        assert stats.blocks == 1 + min(number, count)
    assert [cache.has(key(number)) for number in range(5)] == [True, False, False, True, True]
    assert cache.take_spare() is buffers[1]
    assert cache.take_spare() is buffers[0]
    assert cache.take_spare() is None


def test_what_is_behind_goes_before_what_is_cached() -> None:
    budget = MemoryBudget(RUNTIME)
    cache = BlockCache(RUNTIME, budget, MIB)
    idle = budget.gauges().cached
    for number in (1, 2, 3):
        cache.put(key(number), bytes(MIB))
    cache.leave_behind(key(2))
    cache.leave_behind(key(2))
    cache.leave_behind(key(9))
    assert cache.stats().bytes == 3 * MIB == budget.gauges().cached - idle
    assert cache.get(key(2), 0, 5) is not None, "it is still here"
    cache.shrink(1)
    assert [cache.has(key(number)) for number in (1, 2, 3)] == [True, False, True]
    cache.shrink(MIB + 1)
    assert cache.stats().blocks == 0
    assert budget.gauges().cached == idle


def test_o6_small_files_stay_until_they_are_packed() -> None:
    """A quarter of the budget is theirs: large files pass them by, and readers come after them."""
    budget = MemoryBudget(RUNTIME, 128 * MIB)
    cache = BlockCache(RUNTIME, budget, 4 * MIB, small=100_000)

    def write(number: int, size: int) -> None:
        budget.reserve(size)
        cache.put_behind(key(number), bytes(size))

    count = 128 * MIB // SMALL_SHARE // 100_000
    for number in range(count + 20):
        write(number, 100_000)
        write(10_000 + number, MIB)
    found = [number for number in range(count + 20) if cache.has(key(number))]
    assert found == list(range(20, count + 20))
    assert sum(cache.has(key(10_000 + number)) for number in range(count + 20)) == 32
    cache.drop(key(20))
    write(count + 20, 100_000)
    assert cache.has(key(21)), "dropping has made room"
    cache.shrink(33 * MIB)
    assert [cache.has(key(number)) for number in (21, count + 20)] == [False, True]
    cache.shrink(128 * MIB)
    assert cache.stats().bytes == cache.stats().blocks == 0


@pytest.mark.parametrize("small", [0, 50])
def test_a_key_is_in_one_place_and_counted_once(small: int) -> None:
    budget = MemoryBudget(RUNTIME)
    cache = BlockCache(RUNTIME, budget, MIB, small)
    idle = budget.gauges().cached

    def behind(size: int) -> None:
        budget.reserve(size)
        cache.put_behind(key(1), bytes(size))

    def cached(size: int) -> None:
        cache.put(key(1), bytes(size))

    for first in (behind, cached):
        for second in (behind, cached):
            first(100)
            second(7)
            assert budget.gauges() == (budget.gauges().limit, 0, idle + 7, 0)
            assert cache.stats().bytes == 7
            assert cache.stats().blocks == 1
            view = cache.get(key(1), 0, 100)
            assert view is not None
            assert len(view) == 7, "the latter"
            cache.drop(key(1))
            cache.drop(key(1))
            assert not cache.has(key(1))
            assert budget.gauges().cached == idle
            assert cache.stats().bytes == 0


def test_writers_come_before_the_cache() -> None:
    budget = MemoryBudget(RUNTIME, LIMIT)
    cache = BlockCache(RUNTIME, budget, 8 * LIMIT)  # no spares: every byte can be written
    cache.put(key(1), bytes(LIMIT // 2))
    cache.put(key(2), bytes(LIMIT // 2))
    budget.reserve(LIMIT // 2)
    assert cache.stats().blocks == 1
    budget.reserve(LIMIT // 2)
    assert cache.stats().blocks == 0
    cache.put(key(3), bytes(1))
    assert cache.stats().blocks == 0, "no room, and that is fine"
    assert not budget.hold(1)
    budget.retire(LIMIT // 2)
    assert budget.gauges().cached == LIMIT // 2
    budget.uncharge(LIMIT // 2)
    budget.release(LIMIT // 2)
    assert budget.gauges() == (LIMIT, 0, 0, 0)


def test_a_writer_waits_until_there_is_room() -> None:
    budget = MemoryBudget(RUNTIME, LIMIT)
    budget.reserve(LIMIT)
    pushed, done = RUNTIME.event(), RUNTIME.event()
    budget.on_push(pushed.set)

    def write() -> None:
        budget.reserve(10)
        done.set()

    thread = RUNTIME.spawn("writer", write)
    pushed.wait()
    assert not done.is_set()
    assert not budget.charge(1)
    budget.release(5)
    assert not done.is_set()
    budget.release(5)
    thread.join()
    assert budget.gauges().writing == LIMIT
    assert not budget.charge(1)


def test_a_writer_gives_up() -> None:
    class Late(SystemRuntime):
        def __init__(self) -> None:
            super().__init__()
            times = iter((0.0, WAIT_S_MAX + 1))
            self.monotonic = lambda: next(times)

    budget = MemoryBudget(Late(), LIMIT)
    budget.reserve(LIMIT)
    with pytest.raises(Unavailable):
        budget.reserve(1)
    failing = MemoryBudget(RUNTIME, LIMIT)
    failing.reserve(LIMIT)

    def check() -> None:
        raise OSError(28, "full")

    with pytest.raises(OSError, match="full"):
        failing.reserve(1, check)
    failing.release(LIMIT)
    assert failing.charge(1), "nobody waits any more"


def test_read_ahead_takes_its_share_and_no_more() -> None:
    budget = MemoryBudget(RUNTIME, LIMIT)
    cache = BlockCache(RUNTIME, budget, LIMIT)
    for number in range(LIMIT // MIB):
        cache.put(key(number), bytes(MIB))
    share = LIMIT // AHEAD_SHARE
    assert budget.hold(share), "old blocks make room"
    assert not budget.hold(1)
    budget.unhold(share)
    assert budget.gauges().ahead == 0

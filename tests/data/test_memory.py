"""The budget and the memory cache."""

from __future__ import annotations

import pytest

from fsdata.budget import AHEAD_SHARE, BUFFER_BYTES_MIN, WAIT_S_MAX, Budget
from fsdata.mem_cache import MemCache
from fsmeta.errors import Unavailable
from fsmeta.runtime import SystemRuntime
from fsmeta.types import SliceId

RUNTIME = SystemRuntime()
MIB = 1 << 20
LIMIT = BUFFER_BYTES_MIN


def key(number: int) -> tuple[SliceId, int]:
    return SliceId(number), 0


def test_least_recently_used_goes_first() -> None:
    budget = Budget(RUNTIME, LIMIT)
    cache = MemCache(RUNTIME, budget, MIB)
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
    budget = Budget(RUNTIME, LIMIT)
    cache = MemCache(RUNTIME, budget, MIB)
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


def test_writers_come_before_the_cache() -> None:
    budget = Budget(RUNTIME, LIMIT)
    cache = MemCache(RUNTIME, budget, 8 * LIMIT)  # no spares: every byte can be written
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
    budget = Budget(RUNTIME, LIMIT)
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

    budget = Budget(Late(), LIMIT)
    budget.reserve(LIMIT)
    with pytest.raises(Unavailable):
        budget.reserve(1)
    failing = Budget(RUNTIME, LIMIT)
    failing.reserve(LIMIT)

    def check() -> None:
        raise OSError(28, "full")

    with pytest.raises(OSError, match="full"):
        failing.reserve(1, check)
    failing.release(LIMIT)
    assert failing.charge(1), "nobody waits any more"


def test_read_ahead_takes_its_share_and_no_more() -> None:
    budget = Budget(RUNTIME, LIMIT)
    cache = MemCache(RUNTIME, budget, LIMIT)
    for number in range(LIMIT // MIB):
        cache.put(key(number), bytes(MIB))
    share = LIMIT // AHEAD_SHARE
    assert budget.hold(share), "old blocks make room"
    assert not budget.hold(1)
    budget.unhold(share)
    assert budget.gauges().ahead == 0

"""Fewer requests at a time when the store complains, and fewer bytes a second when users ask."""

from __future__ import annotations

import pytest

from fsdata.objects.contract import NoPlace, Throttled
from fsdata.objects.mem import MemObjects
from fsdata.objects.rate_limit import Adaptive, Limited
from fsdata.objects.shards import HASH_PREFIXES, Sharded, hashed
from fsdata.objects.wrappers import Backoff, Retrying
from fsmeta.errors import ObjectMissing, Unavailable
from fsmeta.runtime import Runtime, SystemRuntime
from tests.fsdata.faults import FaultyObjects, unavailable
from tests.fsdata.objects.test_objects import Clock
from tests.sim.world.harness import simulate
from tests.sim.world.scheduler import SimRuntime


def throttled() -> Exception:
    return Throttled("injected: slow down")


class Narrow(MemObjects):
    """A store that turns away more than `room` requests at a time."""

    def __init__(self, runtime: Runtime, room: int) -> None:
        super().__init__(runtime)
        self.room = room
        self.now = self.turned_away = self.served = 0
        self._counting = runtime.lock()

    def get(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
        with self._counting:
            self.now += 1
            refuse = self.now > self.room
            self.turned_away += refuse
            self.served += not refuse
        try:
            self._runtime.sleep(0.002)
            if refuse:
                raise throttled()
            return super().get(key, begin, end)
        finally:
            with self._counting:
                self.now -= 1


def test_the_window_is_cut_once_a_round_and_grows_by_one() -> None:
    clock = Clock()
    faulty = FaultyObjects(clock, MemObjects(clock))
    faulty.inner.put("k", (b"v",))
    store = Adaptive(clock, faulty, 16)
    assert store.window() == (16.0, 0, 0)
    faulty.fail("get", 1, throttled)
    with pytest.raises(Throttled):
        store.get("k")
    assert store.window() == (1.0, 0, 1)  # one request was under way: half of it is one
    sizes = []
    for _ in range(10):
        store.get("k")
        sizes.append(store.window().size)
    assert sizes == sorted(sizes)
    assert 4 < sizes[-1] < 6  # 1 + 1, and then one for each round of 2, 3, 4
    for _ in range(200):
        store.get("k")
    assert store.window().size == 16.0


def test_other_failures_do_not_cut() -> None:
    clock = Clock()
    faulty = FaultyObjects(clock, MemObjects(clock))
    store = Adaptive(clock, faulty, 4)
    faulty.fail("get", 1, unavailable)
    for _ in range(2):
        with pytest.raises((Unavailable, ObjectMissing)):
            store.get("k")
    assert store.window() == (4.0, 0, 0)


def test_ranges_take_a_place_each_or_go_one_after_the_other() -> None:
    clock = Clock()
    faulty = FaultyObjects(clock, MemObjects(clock))
    faulty.inner.put("k", (b"0123456789",))
    ranges, found = [(1, 3), (4, 5), (6, 9)], [b"12", b"4", b"678"]
    for most, together in ((2, []), (3, [3])):
        store = Adaptive(clock, faulty, most)
        assert store.get_ranges("k", ranges) == found
        assert faulty.together == together
        assert store.window() == (float(most), 0, 0)
        faulty.fail("get", 1)
        with pytest.raises(Unavailable):
            store.get_ranges("k", ranges)
        assert store.window() == (float(most), 0, 0)
    faulty.fail("get", 1, throttled)
    with pytest.raises(Throttled):
        store.get_ranges("k", ranges)
    assert store.window() == (1.0, 0, 1)


def test_many_clients_settle_at_what_a_store_can_do() -> None:
    """Sixteen threads against a store for three: nobody fails, and few are turned away."""

    def body(sim: SimRuntime) -> None:
        narrow = Narrow(sim, 3)
        narrow.put("k", (b"v",))
        adaptive = Adaptive(sim, narrow, 64)
        store = Retrying(sim, adaptive, Backoff(0.001, 0.01, 60.0))

        def work() -> None:
            for _ in range(40):
                assert store.get("k") == b"v"

        threads = [sim.spawn(f"client-{n}", work) for n in range(16)]
        for thread in threads:
            thread.join()
        assert narrow.served == 16 * 40
        assert narrow.turned_away < narrow.served / 2
        assert adaptive.window().size < 16
        assert adaptive.window().throttled == narrow.turned_away > 0
        assert store.repeats() == narrow.turned_away

    for seed in range(5):
        simulate(seed, body)


def test_limits_are_kept_to_the_byte() -> None:
    clock = Clock()
    store = Limited(clock, MemObjects(clock), 1000, 500)
    for n in range(10):
        store.put(f"k{n}", (b"x" * 200, b"y" * 300))
    assert clock.at == pytest.approx(4.5)  # the last one is under way
    begun = clock.at
    for _ in range(4):
        store.get("k0", 0, 100)
    assert store.get_into("k1", (memoryview(bytearray(100)),)) == 100
    assert clock.at - begun == pytest.approx(0.8)
    store.get("k2")  # nobody knows its size before, so what comes next waits for it
    assert clock.at - begun == pytest.approx(1.0)
    store.get("k2", 0, 1)
    assert store.head("k2") is not None
    assert clock.at - begun == pytest.approx(2.0)


def test_w4_a_limit_holds_up_nobody_who_leaves() -> None:
    clock = Clock()
    leaving = clock.event()
    store = Limited(clock, MemObjects(clock), 1000, 0, leaving)
    store.put("k0", (bytes(500),))
    leaving.set()
    with pytest.raises(Unavailable, match="leaving"):
        store.put("k1", (bytes(500),))
    assert clock.slept == []


def test_no_limit_never_waits() -> None:
    clock = Clock()
    store = Limited(clock, MemObjects(clock), 0, 0)
    store.put("k", (bytes(1 << 20),))
    store.get("k")
    assert clock.slept == []


def test_shards_share_evenly_and_for_ever() -> None:
    runtime = SystemRuntime()
    parts = [MemObjects(runtime) for _ in range(4)]
    store = Sharded(parts)
    for n in range(400):
        store.put(f"chunks/0/0/{n}_0_1", (b"x",))
    sizes = [len(list(part.list(""))) for part in parts]
    assert sum(sizes) == 400
    assert min(sizes) > 60
    # which part an object is in is part of the format
    assert [n for n in range(12) if parts[0].head(f"chunks/0/0/{n}_0_1")] == [8, 9, 10, 11]


def test_every_shard_uses_every_prefix() -> None:
    buckets = [MemObjects(SystemRuntime()) for _ in range(16)]
    store = Sharded([hashed(bucket) for bucket in buckets])
    for n in range(4000):
        store.put(f"chunks/0/{n // 1000}/{n}_0_1", (b"x",))
    for bucket in buckets:
        assert len({info.key[0] for info in bucket.list("")}) == HASH_PREFIXES


def test_hash_prefixes_come_first() -> None:
    mem = MemObjects(SystemRuntime())
    store = hashed(mem)
    for n in range(400):
        store.put(f"chunks/0/0/{n}_0_1", (b"x",))
    first = {info.key[0] for info in mem.list("")}
    assert len(first) == HASH_PREFIXES
    assert mem.head("d/chunks/0/0/1_0_1") is not None


def test_o1_the_wait_for_a_place_ends_with_the_timeout_and_when_the_client_leaves() -> None:
    """A window of one, whose place is taken by a request that hangs."""

    def body(sim: SimRuntime) -> None:
        faulty = FaultyObjects(sim, MemObjects(sim))
        faulty.inner.put("k", (b"v",))
        faulty.gate = gate = sim.event()
        leaving = sim.event()
        adaptive = Adaptive(sim, faulty, 1, patience_s=5.0, leaving=leaving)
        store = Retrying(sim, adaptive, Backoff(total_s=5.0), leaving)

        def hang() -> None:
            store.get("k")

        first = sim.spawn("first", hang)
        faulty.arrived.wait()
        begun = sim.monotonic()
        with pytest.raises(NoPlace, match="too many requests"):
            store.get("k")
        assert 5.0 <= sim.monotonic() - begun < 6.0

        def leave() -> None:
            sim.sleep(1.0)
            leaving.set()

        leaver = sim.spawn("leaver", leave)
        begun = sim.monotonic()
        with pytest.raises(NoPlace, match="leaving"):
            store.get("k")
        assert sim.monotonic() - begun < 2.0
        gate.set()
        first.join()
        leaver.join()
        assert adaptive.window().busy == 0

    simulate(1, body)

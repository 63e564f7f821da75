"""The faults themselves: what they lose is lost, what they keep is kept, and healing heals."""

from __future__ import annotations

from functools import partial

import pytest

from fsdata.objects.mem import MemObjects
from fsmeta.errors import Ambiguous, Conflict, ObjectMissing, Unavailable
from fsmeta.store.contract import EDITION, FENCE_FIELD, Commit, Store
from fsmeta.store.mem import MemBackend, MemStore
from fsmeta.store.writes import Put
from tests.sim.world.fault_objects import Damage, FaultObjects
from tests.sim.world.faults import CALM, Faults, FaultStore
from tests.sim.world.harness import simulate
from tests.sim.world.scheduler import SimProcess, SimRuntime

ROW, FIELD, FENCE = b"i1", b"count", b"s1"
ROUGH = Faults(refused=0.1, reply_lost=0.2, request_lost=0.2, slow=0.1)


def _commit(store: Store, worker: bytes, sequence: int, old: bytes | None, new: bytes) -> None:
    """Send one commit until its fate is known. Raises: Conflict."""
    commit = Commit(FENCE, worker, sequence, [(ROW, FIELD, old)], [], [Put(ROW, FIELD, new)])
    while True:
        try:
            store.commit(commit)
        except (Unavailable, Ambiguous):
            continue
        return


def _read(store: Store) -> bytes | None:
    while True:
        try:
            return store.read([(ROW, FIELD)])[0]
        except Unavailable:
            continue


def _increase(store: Store, worker: bytes, times: int) -> None:
    for sequence in range(1, times + 1):
        while True:
            old = _read(store)
            try:
                _commit(store, worker, sequence, old, b"%d" % (int(old or 0) + 1))
            except Conflict:
                continue
            break


def _world(sim: SimRuntime) -> MemBackend:
    backend = MemBackend(sim)
    MemStore(backend).commit(Commit(None, b"", 0, [], [], [Put(FENCE, FENCE_FIELD, EDITION)]))
    return backend


@pytest.mark.sim_seeds(20)
def test_every_increase_counts_once(sim_seed: int) -> None:
    def body(sim: SimRuntime) -> bytes | None:
        backend = _world(sim)
        threads = []
        for n in range(3):
            store = FaultStore(MemStore(backend), sim, sim_seed + n, ROUGH)
            threads.append(sim.spawn(f"w{n}", partial(_increase, store, b"w%d" % n, 10)))
        for thread in threads:
            thread.join()
        return _read(MemStore(backend))

    assert simulate(sim_seed, body) == b"30"


def _crash_while_counting(sim: SimRuntime, seed: int) -> int:
    backend = _world(sim)
    victim = sim.process("victim")
    store = FaultStore(MemStore(backend), sim, seed, ROUGH, victim)
    victim.spawn("w", lambda: _increase(store, b"w", 1000))
    sim.sleep(1 + sim.random())
    victim.crash()
    counted = _read(MemStore(backend))
    _increase(FaultStore(MemStore(backend), sim, seed, CALM), b"x", 1)
    assert _read(MemStore(backend)) == b"%d" % (int(counted or 0) + 1)
    return int(counted or 0)


@pytest.mark.sim_seeds(20)
def test_crash_leaves_the_server_whole(sim_seed: int) -> None:
    assert simulate(sim_seed, lambda sim: _crash_while_counting(sim, sim_seed)) > 0


def _follow(sim: SimRuntime, seed: int) -> None:
    """A client that believes its cache while the store vouches ends with the truth."""
    backend = _world(sim)
    process: SimProcess = sim.process("reader")
    faults = Faults(refused=0, reply_lost=0, request_lost=0, news_lost=0.2)
    reader = FaultStore(MemStore(backend), sim, seed, faults, process)
    told = sim.event()
    reader.watch(lambda _: told.set())
    writer = FaultStore(MemStore(backend), sim, seed, CALM)
    writing = sim.spawn("writer", lambda: _increase(writer, b"w", 20))
    seen: bytes | None = None
    while seen != b"20":
        told.clear()
        seen = _read(reader)
        if seen != b"20":
            assert told.wait(60), f"no news after {seen!r}"
    writing.join()


@pytest.mark.sim_seeds(20)
def test_news_arrive_or_the_link_says_so(sim_seed: int) -> None:
    simulate(sim_seed, lambda sim: _follow(sim, sim_seed))


def _late_put(sim: SimRuntime, seed: int) -> bool:
    """Whether an object appears after its writer was told that it would not."""
    faults = Faults(refused=0, reply_lost=0, request_lost=0, late=0.5)
    inner = MemObjects(sim)
    store = FaultObjects(inner, sim, seed, faults)
    try:
        store.put("a", [b"x" * 100])
    except Unavailable:
        with pytest.raises(ObjectMissing):
            inner.get("a")
        sim.sleep(10)
        assert inner.get("a") == b"x" * 100
        return True
    return False


def test_puts_can_be_late() -> None:
    results = {simulate(seed, partial(_late_put, seed=seed)) for seed in range(10)}
    assert results == {True, False}


def test_damage_and_healing() -> None:
    def body(sim: SimRuntime) -> None:
        store = FaultObjects(MemObjects(sim), sim, 0, CALM, Damage(flipped=0.5, shortened=0.3))
        data = bytes(1000)
        store.put("a", [data])
        assert len({store.get("a") for _ in range(20)}) > 5
        store.heal()
        assert {store.get("a") for _ in range(20)} == {data}
        store.network.cut = True
        with pytest.raises(Unavailable):
            store.get("a")

    simulate(0, body)

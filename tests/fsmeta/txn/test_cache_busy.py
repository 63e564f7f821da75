"""M6: what is vouched for, or was granted to a kernel, stays true where directories become busy.

As `test_cache`, with rows that count as directories and their inodes, which are busy for a moment
again and again: commits then end the watch that others of the same client may just have begun.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from fsmeta.store.contract import FENCE_FIELD
from fsmeta.store.mem import MemBackend, MemStore
from fsmeta.store.writes import Put, Write
from fsmeta.txn import applied_commits, cached_fields, contended_dirs, row_cache
from fsmeta.txn.cached_fields import Mark, Missing
from fsmeta.txn.retry import Notices, Transactor
from fsmeta.txn.row_cache import RowCache
from tests.conftest import assert_clean
from tests.fsmeta.engines import change, make_volume
from tests.fsmeta.txn import test_cache
from tests.fsmeta.txn.test_cache import FIELDS, NETWORKS, SETTLED_S
from tests.sim.world.faults import FaultStore
from tests.sim.world.harness import simulate
from tests.sim.world.scheduler import SimRuntime

ROWS = [b"t0", b"u0", b"t1", b"u1"]  # t: names, u: the same directory's inode


class Client:
    """A client, and what its kernel has been granted."""

    def __init__(self, store: FaultStore, sim: SimRuntime) -> None:
        self.run = Transactor(store, sim, RowCache(sim), 10, notices=Notices(ended=self._end))
        self.granted = 0
        self._held: dict[bytes, dict[bytes, bytes | None]] = {}
        store.watch(lambda rows: self._end(self.run.cache.apply_invalidations(rows)))
        self._settle = self.run.cache.settle
        self.run.cache.settle = self._settled  # type: ignore[assignment]

    def _settled(
        self, mark: Mark, empties: Sequence[bytes], writes: Sequence[Write], *more: Any
    ) -> list[bytes]:
        """What a kernel has changed itself it knows."""
        ended = self._settle(mark, empties, writes, *more)
        self._end([*empties, *(write.row for write in writes)])
        return ended

    def work(self, chance: random.Random, turns: int) -> None:
        for _ in range(turns):
            test_cache._work(self.run, chance, 1)
            self._grant(chance.choice(ROWS), chance.choice(FIELDS))

    def _grant(self, row: bytes, field: bytes) -> None:
        """As `CacheLeases`: noted before the promise is looked at."""
        held = self._held.setdefault(row, {})
        held.pop(field, None)
        value = self.run.cache.get(row, field, need_vouched=True)
        if not isinstance(value, Missing) and self.run.cache.is_leased(row):
            held[field] = value
            self.granted += 1

    def _end(self, rows: Sequence[bytes] | None) -> None:
        for row in list(self._held) if rows is None else rows:
            self._held[row] = {}

    def require_true(self, backend: MemBackend) -> None:
        for row, held in self._held.items():
            for field, value in held.items():
                found = backend.rows.get(row, {}).get(field)
                assert value == found, f"{row!r} {field!r} is believed to be {value!r}"


def _world(sim: SimRuntime, seed: int, network: str) -> tuple[int, int]:
    """How much was remembered and granted, and how many directories were busy."""
    backend = MemBackend(sim)
    make_volume(MemStore(backend), sim)
    clients = []
    for n in range(2):
        client = Client(FaultStore(MemStore(backend), sim, seed + n, NETWORKS[network]), sim)
        fence = b"tsession%d" % n
        client.run.fence = fence
        MemStore(backend).commit(change(Put(fence, FENCE_FIELD, b"1")))
        clients.append(client)
    workers = [
        sim.spawn(f"c{n % 2}t{n}", partial(clients[n % 2].work, random.Random(seed + n), 12))
        for n in range(4)
    ]
    for worker in workers:
        worker.join()
    sim.sleep(SETTLED_S)
    used = 0
    for client in clients:
        client.require_true(backend)
        used += test_cache._known(client.run.cache, backend, ROWS) + client.granted
    assert_clean(MemStore(backend))
    dirs = [each for client in clients for each in client.run.cache.busy._dirs.values()]
    return used, sum(each.until > 0 for each in dirs)


@pytest.fixture(autouse=True)
def rows_of_directories(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (contended_dirs, cached_fields):
        monkeypatch.setattr(module, "DIR_PREFIX", b"t")
    for module in (applied_commits, contended_dirs, cached_fields, row_cache):
        monkeypatch.setattr(module, "INODE_PREFIX", b"u")
    monkeypatch.setattr(contended_dirs, "_PREFIXES", (b"t", b"u"))
    monkeypatch.setattr(cached_fields, "ATTR_FIELD", FIELDS[0])
    monkeypatch.setattr(contended_dirs, "GAP_S", 0.01)
    monkeypatch.setattr(contended_dirs, "BUSY_S", 0.0002)  # some ten requests of a fast network
    monkeypatch.setattr(test_cache, "ROWS", ROWS)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("seed", range(60))
def test_m6_what_is_believed_is_true(seed: int, network: str) -> None:
    simulate(seed, partial(_world, seed=seed, network=network))


def test_m6_there_are_busy_directories() -> None:
    worlds = [simulate(seed, partial(_world, seed=seed, network="fast")) for seed in range(20)]
    assert sum(used for used, _ in worlds) > 200
    assert sum(many for _, many in worlds) > 20

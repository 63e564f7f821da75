"""Records of inodes that listings bring: kept in one piece, and true as all that is remembered."""

from __future__ import annotations

import random
from functools import partial

import pytest

from fsmeta.errors import StoreError
from fsmeta.ops.names import directory
from fsmeta.schema import inode, keys
from fsmeta.store.contract import FENCE_FIELD
from fsmeta.store.mem import MemBackend, MemStore
from fsmeta.store.writes import Put
from fsmeta.txn.cached_fields import Missing
from fsmeta.txn.retry import Transactor
from fsmeta.txn.row_cache import RowCache
from fsmeta.txn.txn import Txn
from fsmeta.types import ROOT_INO, Ino
from tests.fsmeta.engines import RUNTIME, change, make_volume, transactor
from tests.fsmeta.txn.test_cache import NETWORKS, SETTLED_S
from tests.sim.world.faults import Faults, FaultStore
from tests.sim.world.harness import simulate
from tests.sim.world.scheduler import SimRuntime

INOS = [Ino(n) for n in range(5, 9)]
ROWS = keys.inode_rows(INOS)
A, V = keys.ATTR_FIELDS


def _attr_bytes(chance: random.Random) -> tuple[bytes, bytes]:
    """Both records of an inode; sometimes `a` has a tail."""
    owner = (chance.randrange(9), 0)
    attr = inode.new_attr(INOS[0], 0o100644, owner, ROOT_INO, chance.randrange(9))
    attr = attr._replace(flags=chance.choice([0, 0, 16]))
    return inode.pack_attr(attr), inode.pack_volatile(attr)


def _make(txn: Txn, row: bytes, seed: float) -> None:
    for field, value in zip((A, V), _attr_bytes(random.Random(seed)), strict=True):
        txn.put(row, field, value)


def _begin(txn: Txn, row: bytes, seed: float) -> None:
    """As create: the row must be empty."""
    txn.require_empty(row)
    _make(txn, row, seed)


def _change_mode(txn: Txn, row: bytes, seed: float) -> None:
    if txn.get(row, A) is not None:
        txn.put(row, A, _attr_bytes(random.Random(seed))[0])


def _touch(txn: Txn, row: bytes, seed: float) -> None:
    if txn.get(row, V) is not None:
        txn.merge(row, V, inode.touch_parts(int(seed * 9), 1))


def _remove(txn: Txn, row: bytes, seed: float) -> None:
    del seed
    txn.delete_row(row)


def _list(client: Transactor, chance: random.Random) -> None:
    """As a listing: some inodes, and perhaps others that are told next."""
    first = chance.randrange(len(INOS))
    rows, ahead = ROWS[first:], INOS[: chance.randrange(first + 1)]

    def read(txn: Txn) -> list[bytes]:
        del txn
        return directory.records(client.store, client.cache, rows, ahead)

    assert len(client.view(read)) == len(rows)


def _work(run: Transactor, chance: random.Random, turns: int) -> None:
    for _ in range(turns):
        try:
            if chance.random() < 0.5:
                _list(run, chance)
                continue
            verb = chance.choice([_make, _begin, _begin, _change_mode, _touch, _touch, _remove])
            run.run(partial(verb, row=chance.choice(ROWS), seed=chance.random()))
        except (OSError, StoreError):
            pass  # ENOTEMPTY; or the store stayed away


def _known(cache: RowCache, backend: MemBackend) -> int:
    """How many vouched values and records the cache gives; each must be the store's."""
    known = 0
    for row, record in zip(ROWS, cache.attr_records(ROWS), strict=True):
        stored = backend.rows.get(row, {})
        if record is not None:
            known += 1
            assert record == stored.get(A, b"") + stored.get(V, b"")
        for field in (A, V):
            value = cache.get(row, field, need_vouched=True)
            if not isinstance(value, Missing):
                assert value == stored.get(field)
    return known


def _world(sim: SimRuntime, seed: int, faults: Faults) -> int:
    backend = MemBackend(sim)
    make_volume(MemStore(backend), sim)
    clients = []
    for n in range(2):
        client = transactor(FaultStore(MemStore(backend), sim, seed + n, faults), sim)
        client.fence = b"tsession%d" % n
        MemStore(backend).commit(change(Put(client.fence, FENCE_FIELD, b"1")))
        clients.append(client)
    workers = [
        sim.spawn(f"c{n % 2}t{n}", partial(_work, clients[n % 2], random.Random(seed + n), 10))
        for n in range(4)
    ]
    for worker in workers:
        worker.join()
    sim.sleep(SETTLED_S)
    return sum(_known(client.cache, backend) for client in clients)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("seed", range(40))
def test_what_is_remembered_of_listed_inodes_is_true(seed: int, network: str) -> None:
    simulate(seed, partial(_world, seed=seed, faults=NETWORKS[network]))


def test_something_is_remembered() -> None:
    known = [
        simulate(seed, partial(_world, seed=seed, faults=NETWORKS["fast"])) for seed in range(20)
    ]
    assert sum(known) / len(known) > 2


def _filled(rows_max: int) -> tuple[RowCache, list[bytes]]:
    """A cache to which several listings have brought more inodes than it has room for."""
    cache = RowCache(RUNTIME, rows_max=rows_max)
    rows = keys.inode_rows(range(100, 100 + 4 * rows_max))
    a, v = _attr_bytes(random.Random(1))
    for begin in range(0, len(rows), rows_max // 2):
        page = rows[begin : begin + rows_max // 2]
        cache.fill_records(cache.mark(), page, [a + v] * len(page), True)
        assert cache.get(page[0], V, need_vouched=True) == v
    return cache, rows


def test_their_number_is_bounded() -> None:
    cache, rows = _filled(rows_max=80)
    known = [record for record in cache.attr_records(rows) if record is not None]
    assert 40 <= len(known) <= 80
    assert cache.attr_records(rows[-1:]) != [None]
    assert cache.attr_records(rows[:1]) == [None]


def test_a_row_that_is_found_empty_begins_anew() -> None:
    cache = RowCache(RUNTIME)
    a, v = _attr_bytes(random.Random(1))
    cache.fill_records(cache.mark(), ROWS, [a + v] * len(ROWS), True)
    cache.settle(cache.mark(), ROWS[:1], [Put(ROWS[0], V, bytes(45))], True)
    assert cache.get(ROWS[0], V, need_vouched=True) == bytes(45)
    assert cache.get(ROWS[0], A, need_vouched=True) is None
    assert cache.attr_records(ROWS[:2]) == [None, a + v]


def test_what_others_change_is_no_longer_told() -> None:
    """But what seldom changes still informs commits, whether it was looked at before or not."""
    cache = RowCache(RUNTIME)
    a, v = _attr_bytes(random.Random(1))
    cache.fill_records(cache.mark(), ROWS, [a + v] * len(ROWS), True)
    assert cache.several(ROWS[0], [V, A]) == [v, a]
    cache.apply_invalidations(ROWS[:2])
    assert cache.attr_records(ROWS) == [None, None, a + v, a + v]
    for row in ROWS[:2]:
        assert cache.get(row, A, need_vouched=False) == a
        assert isinstance(cache.get(row, V, need_vouched=False), Missing)
    cache.forget()
    assert cache.attr_records(ROWS) == [None] * len(ROWS)


def test_a_row_that_a_commit_has_begun_stays() -> None:
    """Also where all others are records: what is said of it next must not be said of nothing."""
    cache = RowCache(RUNTIME, rows_max=8)
    rows = keys.inode_rows(range(1, 9))
    record = b"".join(_attr_bytes(random.Random(1)))
    cache.fill_records(cache.mark(), rows, [record] * len(rows), leased=True)
    made = keys.dir_row(99)
    cache.settle(cache.mark(), [made], [], leased=True)
    assert cache.get(made, b"name", need_vouched=True) is None, "it is known to be empty"
    assert cache.complete(made) == {}
    assert len([row for row in rows if cache.is_leased(row)]) == 6

"""M2: TiKV among others: no skewed reads, shared transactions, counters in parts, size."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from fsmeta.errors import Conflict, Fenced, StoreError
from fsmeta.store.contract import Commit, Store
from fsmeta.store.tikv.engine import TikvStore
from fsmeta.store.tikv.group_commit import Committer
from fsmeta.store.writes import Delete, DeleteRow, Merge, Put
from fsmeta.types import ROOT_CALLER as ROOT, ROOT_INO, Ino, SpaceUsage
from tests.fsmeta.engines import RUNTIME, Engine, add, change, dump
from tests.fsmeta.sessions import FENCE, A, B, fenced, outcome_of, put
from tests.support.tikv_server import TikvServer, serving
from tests.support.traced import traced, tracing
from tests.support.waiting import wait_until

pytestmark = pytest.mark.parametrize("engine", ["tikv"], indirect=True)
BOTH_MS = 150  # by then the other has begun, too
GATHER_MS = 20  # while one commit is written the others come together


@pytest.fixture(scope="module")
def tikv_cluster() -> Iterator[TikvServer]:
    """A server of this file's own: nobody who was here before still asks it for anything."""
    yield from serving()


def _at_once(server: TikvServer, *works: tuple[Store, Commit]) -> list[str]:
    """Commit each from a thread of its own; all have read before the first one writes."""
    server.fault("KvPrewrite", "delay", count=len(works), millis=BOTH_MS)
    with ThreadPoolExecutor(len(works)) as pool:
        futures = [pool.submit(store.commit, commit) for store, commit in works]
    return sorted(outcome_of(future) for future in futures)


def _has_waiting(committer: Committer, count: int) -> bool:
    return len(committer._waiting) == count


@pytest.fixture
def store(engine: Engine) -> Store:
    opened = engine.open()
    put(opened, FENCE, a=b"1")
    return opened


# --- two at once ---------------------------------------------------------------------------------


def test_reads_are_not_skewed(engine: Engine, store: Store, tikv_server: TikvServer) -> None:
    """Each relies on what the other changes: both together are what neither would have allowed."""
    put(store, A, x=b"1")
    put(store, B, x=b"1")
    one = change(Put(A, b"x", b"0"), checks=[(B, b"x", b"1")])
    two = change(Put(B, b"x", b"0"), checks=[(A, b"x", b"1")])
    outcomes = _at_once(tikv_server, (store, one), (engine.open(), two))
    assert outcomes == ["Conflict", "applied"]


def test_what_is_absent_is_not_skewed(
    engine: Engine, store: Store, tikv_server: TikvServer
) -> None:
    one = change(Put(A, b"x", b"1"), checks=[(B, b"x", None)])
    two = change(Put(B, b"x", b"1"), checks=[(A, b"x", None)])
    outcomes = _at_once(tikv_server, (store, one), (engine.open(), two))
    assert outcomes == ["Conflict", "applied"]


def test_what_only_one_relies_on_is_not_skewed(
    engine: Engine, store: Store, tikv_server: TikvServer
) -> None:
    """One deletes what the other has only checked: a directory, and a name made in it."""
    for _ in range(5):
        put(store, A, a=b"1")
        create = change(Put(B, b"name", b"1"), checks=[(A, b"a", b"1")])
        rmdir = change(DeleteRow(A), checks=[(A, b"a", b"1")], empties=[B])
        outcomes = _at_once(tikv_server, (store, create), (engine.open(), rmdir))
        assert outcomes in (["Conflict", "applied"], ["NotEmpty", "applied"])
        assert store.read_rows([A, B]) in ([{b"a": b"1"}, {b"name": b"1"}], [{}, {}])
        store.commit(change(DeleteRow(A), DeleteRow(B)))


@pytest.mark.parametrize("is_known", [True, False], ids=["known worker", "new worker"])
def test_a_session_that_ends_meets_its_commits(
    engine: Engine, store: Store, tikv_server: TikvServer, is_known: bool
) -> None:
    """A commit that began while the session lived is not applied after its end."""
    other = engine.open()
    if is_known:
        store.commit(fenced(A, b"0", 1))
    before, written = dump(store, A), tikv_server.counts()["KvPrewrite"]
    tikv_server.fault("KvPrewrite", "freeze", count=1)
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(store.commit, fenced(A, b"late", 2))
        wait_until(lambda: tikv_server.counts()["KvPrewrite"] > written)
        other.commit(change(DeleteRow(FENCE)))
        tikv_server.heal()
        with pytest.raises(Fenced):
            late.result()
    assert dump(store, A) == before
    assert dump(store, FENCE) == {}


def test_clients_at_once_lose_no_update(engine: Engine, store: Store) -> None:
    """Merges of one field by many clients: tried again until they are in."""
    put(store, A, x=b"\0\0\0\0")
    stores = [engine.open() for _ in range(4)]

    def work(mine: Store) -> None:
        for _ in range(25):
            mine.commit(change(Merge(A, b"x", (0, 1)), add(A, b"n", 1), add(b"U", b"space", 2)))

    threads = [threading.Thread(target=work, args=(mine,)) for mine in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.read([(A, b"x"), (A, b"n")]) == [b"\0\0\0\x64", b"100"]
    space = store.read([(b"U", b"space")])[0]
    assert space == b"200"
    store.commit(change(add(b"U", b"space", -200)))


def test_creates_of_one_client_share_transactions(engine: Engine, tikv_server: TikvServer) -> None:
    """They all write the directory's times, so one at a time is all that TiKV would take."""
    meta, names, threads = engine.meta(), 40, 8
    directory = meta.create(ROOT, ROOT_INO, b"shared", 0o40777).ino

    def work(thread: int) -> None:
        for n in range(names):
            meta.create(ROOT, directory, b"%d.%d" % (thread, n), 0o100644)

    work(threads)  # takes its ids
    meta.transactor.counters.conflicts = 0
    before = tikv_server.counts()["KvPrewrite"]
    tikv_server.fault("KvPrewrite", "delay", millis=GATHER_MS)
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(work, thread) for thread in range(threads)]:
            done.result()
    assert meta.transactor.counters.conflicts == 0
    assert tikv_server.counts()["KvPrewrite"] - before < names * threads / 2
    assert len(meta.names(directory)[0]) == names * (threads + 1)


def test_creates_in_directories_of_their_own_do_not_meet(
    engine: Engine, tikv_server: TikvServer
) -> None:
    """Regression: transactions under way at once took the same part of the volume's usage."""
    meta, names, threads = engine.meta(), 20, 6
    directories = [meta.create(ROOT, ROOT_INO, b"%d" % n, 0o40777).ino for n in range(threads)]

    def work(directory: int, turn: int) -> None:
        for n in range(names):
            meta.create(ROOT, Ino(directory), b"%d.%d" % (turn, n), 0o100644)

    for turn in range(2):  # in the first one new workers meet at their session, once each
        before = tikv_server.counts()
        with ThreadPoolExecutor(threads) as pool:
            for done in [pool.submit(work, directory, turn) for directory in directories]:
                done.result()
        after = tikv_server.counts()
    assert after["KvPrewrite"] - before["KvPrewrite"] == names * threads
    assert after.get("KvBatchRollback", 0) == before.get("KvBatchRollback", 0)


def test_one_refusal_does_not_spoil_the_others(store: Store, tikv_server: TikvServer) -> None:
    """Commits that share a transaction are judged one by one, each after the one before it."""
    put(store, A, x=b"0")
    first = change(Put(A, b"first", b"1"))
    steps = [change(Put(A, b"x", b"%d" % (n + 1)), checks=[(A, b"x", b"%d" % n)]) for n in (0, 1)]
    wrong = change(Put(A, b"wrong", b"1"), checks=[(A, b"x", b"7")])
    limited = change(Put(A, b"limited", b"1"), add(A, b"n", 9, 5, "ENOSPC"))
    full = change(Put(A, b"full", b"1"), empties=[A])
    before = tikv_server.counts()["KvPrewrite"]
    tikv_server.fault("KvPrewrite", "freeze", count=1)
    assert isinstance(store, TikvStore)
    committer = store._committer
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(store.commit, first)]
        wait_until(lambda: tikv_server.counts()["KvPrewrite"] > before)
        for n, commit in enumerate((steps[0], wrong, limited, full, steps[1]), 1):
            futures.append(pool.submit(store.commit, commit))
            wait_until(partial(_has_waiting, committer, n))
        tikv_server.heal()
    outcomes = [outcome_of(future) for future in futures]
    expected = ["applied", "applied", "Conflict", "LimitExceeded", "NotEmpty", "applied"]
    assert outcomes == expected
    assert tikv_server.counts()["KvPrewrite"] - before == 2
    assert store.read_rows([A]) == [{b"x": b"2", b"first": b"1"}]


# --- counters in parts ---------------------------------------------------------------------------


def test_sums_are_read_whole_wherever_their_parts_are(engine: Engine) -> None:
    stores = [engine.open() for _ in range(3)]
    begin = engine.first.read([(b"U", b"inodes"), (b"U", b"space")])
    assert begin == [b"1", None]
    for n, each in enumerate(stores * 4):
        each.commit(change(add(b"U", b"inodes", n), add(b"U", b"space", -1)))
    for each in stores:
        assert each.read([(b"U", b"space"), (b"U", b"inodes"), (b"U", b"?")]) == [
            b"-12",
            b"67",
            None,
        ]
        assert each.read_rows([b"U"]) == [{b"inodes": b"67", b"space": b"-12"}]
        assert sorted(each.scan(b"U").items) == [(b"inodes", b"67"), (b"space", b"-12")]
        assert each.scan_rows(b"U").rows == [b"U"]
    with pytest.raises(StoreError, match="ENOSPC"):
        stores[0].commit(change(add(b"U", b"inodes", 4, 70, "ENOSPC")))
    stores[0].commit(change(add(b"U", b"inodes", 3, 70, "ENOSPC")))
    with pytest.raises(Conflict):
        stores[1].commit(change(Put(A, b"x", b"1"), checks=[(b"U", b"inodes", b"67")]))
    stores[1].commit(change(Put(A, b"x", b"1"), checks=[(b"U", b"inodes", b"70")]))
    stores[1].commit(change(Put(b"U", b"inodes", b"1"), Delete(b"U", b"space")))
    assert stores[2].read_rows([b"U"]) == [{b"inodes": b"1"}]


def test_a_sum_that_is_relied_on_is_not_skewed(
    engine: Engine, store: Store, tikv_server: TikvServer
) -> None:
    for _ in range(3):  # some parts
        store.commit(change(add(b"U", b"space", 1)))
    one = change(Put(A, b"x", b"1"), checks=[(b"U", b"space", b"3")])
    moved = add(b"U", b"space", 5, 8, "ENOSPC")
    two = change(moved, Put(B, b"x", b"1"), checks=[(A, b"x", None)])
    outcomes = _at_once(tikv_server, (store, one), (engine.open(), two))
    assert outcomes == ["Conflict", "applied"]
    store.commit(change(Delete(b"U", b"space")))


# --- size ----------------------------------------------------------------------------------------

MEMORY_BYTES = 24 << 20  # of Python's objects, whatever the row's size


def peak_of_a_large_row(url: str, count: int) -> int:
    """What it allocates to list a row of so many fields in pages, and to delete it in steps."""
    store = TikvStore(url, RUNTIME)
    with tracing() as peak:
        seen = 0
        cursor: bytes | None = b""
        while cursor is not None:
            page = store.scan(A, cursor)
            seen += len(page.items)
            cursor = page.cursor
        assert seen == count
        with pytest.raises(Conflict):
            store.commit(change(DeleteRow(A), checks=[(B, b"x", b"?")]))
        assert len(store.scan(A, b"", 2000).items) == 2000
        store.commit(change(DeleteRow(A), Put(B, b"x", b"1"), checks=[(B, b"x", None)]))
        most = peak()
    store.close()
    return most


@pytest.mark.timeout(1800)  # a million fields take six minutes
def test_a_large_row_in_bounded_memory(engine: Engine, pytestconfig: pytest.Config) -> None:
    """Listed in pages and deleted in steps; a million fields with --soak."""
    store, count = engine.open(), 1_000_000 if pytestconfig.getoption("--soak") else 12_000
    for begin in range(0, count, 1000):
        numbers = range(begin, min(begin + 1000, count))
        store.commit(change(*(Put(A, b"%07d" % n, b"%d" % n) for n in numbers)))
    peak = traced(peak_of_a_large_row, engine.url, count)
    assert store.read_rows([A, B]) == [{}, {b"x": b"1"}]
    assert peak < MEMORY_BYTES, f"{peak >> 20} MiB"


# --- limits, and what users write ----------------------------------------------------------------


def test_a_limit_is_exact_at_many_clients(engine: Engine) -> None:
    """Near a limit the counter is one key, and everybody meets there."""
    stores = [engine.open() for _ in range(3)]
    applied: list[int] = []

    def work(mine: Store) -> None:
        for _ in range(10):
            try:
                mine.commit(change(add(b"U", b"space", 10, 155, "ENOSPC")))
                applied.append(1)
            except StoreError as error:
                assert str(error) == "ENOSPC", error

    threads = [threading.Thread(target=work, args=(mine,)) for mine in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(applied) == 15
    assert stores[0].read([(b"U", b"space")]) == [b"150"]
    stores[0].commit(change(add(b"U", b"space", -150)))


def test_a_full_volume_says_so(engine: Engine) -> None:
    engine.first.commit(change(DeleteRow(b"F"), DeleteRow(b"C"), DeleteRow(b"U")))
    engine.format(SpaceUsage(0, 3))
    meta = engine.meta()
    for name in (b"a", b"b"):
        meta.create(ROOT, ROOT_INO, name, 0o100644)
    with pytest.raises(OSError, match="full") as caught:
        meta.create(ROOT, ROOT_INO, b"c", 0o100644)
    assert caught.value.errno == errno.ENOSPC


def test_volumes_of_one_cluster_do_not_meet(engine: Engine) -> None:
    """Not even where one prefix begins with another."""
    others = [TikvStore(engine.url + more, RUNTIME) for more in ("-", "0", ".a")]
    before = dump(engine.first)
    for n, each in enumerate(others):
        assert dump(each) == {}
        put(each, A, x=b"%d" % n)
    assert [dump(each) for each in others] == [{A: {b"x": b"%d" % n}} for n in range(3)]
    assert dump(engine.first) == before
    for each in others:
        each.close()

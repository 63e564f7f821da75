"""What a client remembers is what the store holds, once all news have come and all calls ended.

Threads of two clients run random verbs on few rows, with every schedule of requests, answers, news
and the cache's own steps that a seed may choose.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from functools import partial

import pytest

from fsmeta.errors import StoreError
from fsmeta.ops.names import directory
from fsmeta.store.contract import FENCE_FIELD
from fsmeta.store.mem import MemBackend, MemStore
from fsmeta.store.writes import Append, Delete, Merge, Put, Write
from fsmeta.txn.cached_fields import MISSING, Missing
from fsmeta.txn.retry import Transactor
from fsmeta.txn.row_cache import RowCache
from fsmeta.txn.row_states import ROW_FIELDS_MAX
from fsmeta.txn.txn import Txn
from tests.conftest import assert_clean
from tests.fsmeta.engines import RUNTIME, change, make_volume, transactor
from tests.sim.world.faults import CALM, Faults, FaultStore
from tests.sim.world.harness import simulate
from tests.sim.world.scheduler import SimRuntime

ROWS = [b"t%d" % n for n in range(4)]
FIELDS = [b"f%d" % n for n in range(3)]
NUMBER = b"n"  # a record of one word
ALL_FIELDS = [*FIELDS, NUMBER]
SETTLED_S = 100.0  # long after the last news

Verb = Callable[[Txn], object]


# --- random verbs --------------------------------------------------------------------------------


def _put(txn: Txn, row: bytes, field: bytes, value: bytes) -> None:
    txn.put(row, field, value)


def _replace(txn: Txn, row: bytes, field: bytes, value: bytes) -> None:
    txn.get(row, field)
    txn.put(row, field, value)


def _delete(txn: Txn, row: bytes, field: bytes, value: bytes) -> None:
    del value
    txn.delete(row, field)


def _delete_row(txn: Txn, row: bytes, field: bytes, value: bytes) -> None:
    del field, value
    txn.delete_row(row)


def _append(txn: Txn, row: bytes, field: bytes, value: bytes) -> None:
    txn.append(row, field, value)


def _count(txn: Txn, row: bytes, field: bytes, value: bytes) -> None:
    del field, value
    if txn.get(row, NUMBER) is None:
        txn.put(row, NUMBER, bytes(4))
    else:
        txn.merge(row, NUMBER, (0, 1))


def _begin(txn: Txn, row: bytes, field: bytes, value: bytes) -> None:
    """As mkdir: a row that must be empty, and then is known to be."""
    txn.require_empty(row)
    txn.put(b"t-others", field, value)


def _begin_with(txn: Txn, row: bytes, field: bytes, value: bytes) -> None:
    """As create: the row that must be empty is written at once."""
    txn.require_empty(row)
    txn.put(row, field, value)


def _get(txn: Txn, row: bytes, field: bytes, value: bytes) -> None:
    del value
    txn.get(row, field)


def _get_many(txn: Txn, row: bytes, field: bytes, value: bytes) -> None:
    txn.get_many([(row, NUMBER), (row, field), (ROWS[value[0] % len(ROWS)], field)])


def _get_linked(txn: Txn, row: bytes, field: bytes, value: bytes) -> None:
    del value
    txn.get_linked(row, field, 1, b"t", [field, NUMBER])


def _read_page(txn: Txn, client: Transactor, row: bytes, cursor: bytes) -> directory.RowPart:
    del txn
    return directory.page(client.store, client.cache, row, cursor, 1)


def _list(client: Transactor, row: bytes) -> None:
    """As a listing, with one field a page."""
    cursor: bytes | None = b""
    while cursor is not None:
        read = partial(_read_page, client=client, row=row, cursor=cursor)
        cursor = client.view(read).cursor


WRITERS = [_put, _replace, _delete, _delete_row, _append, _count, _count, _begin, _begin_with]
READERS = [_get, _get_many, _get_linked]


def _work(run: Transactor, chance: random.Random, turns: int) -> None:
    for _ in range(turns):
        writes = chance.random() < 0.6
        verb = chance.choice(WRITERS if writes else READERS)
        row, field = chance.choice(ROWS), chance.choice(FIELDS)
        if chance.random() < 0.1:
            _list(run, row)
            continue
        call = partial(verb, row=row, field=field, value=b"%d" % chance.randrange(10))
        try:
            if writes or chance.random() < 0.3:
                run.run(call)
            else:
                run.view(call)
        except (OSError, StoreError):
            pass  # ENOTEMPTY; or the store stayed away


# --- the world -----------------------------------------------------------------------------------


def _known(cache: RowCache, backend: MemBackend, rows: Iterable[bytes]) -> int:
    """How many vouched values the cache gives; each must be the store's."""
    known = 0
    for row in rows:
        stored = backend.rows.get(row, {})
        for field in {*ALL_FIELDS, *stored}:
            value = cache.get(row, field, need_vouched=True)
            if not isinstance(value, Missing):
                known += 1
                assert value == stored.get(field), f"{row!r} {field!r} is remembered wrongly"
    return known


def _random_verbs(sim: SimRuntime, seed: int, faults: Faults, threads: int, turns: int) -> int:
    backend = MemBackend(sim)
    make_volume(MemStore(backend), sim)
    clients = []
    for n in range(2):
        client = transactor(FaultStore(MemStore(backend), sim, seed + n, faults), sim)
        client.fence = b"tsession%d" % n
        MemStore(backend).commit(change(Put(client.fence, FENCE_FIELD, b"1")))
        clients.append(client)
    workers = [
        sim.spawn(f"c{n % 2}t{n}", partial(_work, clients[n % 2], random.Random(seed + n), turns))
        for n in range(threads)
    ]
    for worker in workers:
        worker.join()
    sim.sleep(SETTLED_S)
    known = sum(_known(client.cache, backend, [*ROWS, b"t-others"]) for client in clients)
    assert_clean(MemStore(backend))
    return known


FAST = CALM._replace(latency_s=0.00001)  # about ten steps of a thread: everything overlaps
SLOW_NEWS = CALM._replace(slow=0.3, slow_s=0.02, latency_s=0.0001)
LOST_NEWS = FAST._replace(news_lost=0.2, news_s=0.001)
ROUGH = FAST._replace(refused=0.05, reply_lost=0.1, request_lost=0.05, late=0.05, late_s=0.001)


NETWORKS = {"fast": FAST, "slow": SLOW_NEWS, "lost": LOST_NEWS, "rough": ROUGH}


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("seed", range(60))
def test_what_is_remembered_is_true(seed: int, network: str) -> None:
    faults = NETWORKS[network]
    simulate(seed, lambda sim: _random_verbs(sim, seed, faults, threads=4, turns=10))


@pytest.mark.parametrize("seed", range(60))
def test_one_client_with_many_threads(seed: int) -> None:
    """All clients' threads on one cache: news never help it."""

    def body(sim: SimRuntime) -> int:
        backend = MemBackend(sim)
        make_volume(MemStore(backend), sim)
        client = transactor(FaultStore(MemStore(backend), sim, seed, FAST), sim)
        workers = [
            sim.spawn(f"t{n}", partial(_work, client, random.Random(seed + n), 12))
            for n in range(4)
        ]
        for worker in workers:
            worker.join()
        return _known(client.cache, backend, ROWS)

    simulate(seed, body)


def test_the_caches_are_not_empty() -> None:
    """The property would be cheap if nothing were remembered."""
    world = partial(_random_verbs, faults=FAST, threads=2, turns=10)
    known = [simulate(seed, partial(world, seed=seed)) for seed in range(20)]
    assert sum(known) / len(known) > 5


# --- the orders that seeds found, step by step ---------------------------------------------------

ROW, FIELD = ROWS[0], FIELDS[0]


def _cache() -> RowCache:
    return RowCache(RUNTIME)


def test_a_row_found_empty_may_have_been_written_since() -> None:
    """Regression: mkdir's answer overtaken by that of a create in the new directory."""
    cache = _cache()
    begun = cache.mark()  # require_empty is sent, and applied; then the put
    written = cache.mark()
    cache.settle(written, [], [Put(ROW, FIELD, b"1")], True)
    cache.settle(begun, [ROW], [], True)
    assert cache.get(ROW, FIELD, True) in (b"1", MISSING)


@pytest.mark.parametrize(
    ("write", "before", "after"),
    [
        pytest.param(Merge(ROW, FIELD, (0, 1)), b"\0\0\0\1", b"\0\0\0\2", id="merge"),
        pytest.param(Append(ROW, FIELD, b"b"), b"a", b"ab", id="append"),
    ],
)
def test_a_read_may_have_seen_a_commit_that_is_still_unanswered(
    write: Write, before: bytes, after: bytes
) -> None:
    """Regression: a merge was applied once more to a value that had it already."""
    cache = _cache()
    cache.fill(cache.mark(), ROW, {FIELD: before}, True)
    committed = cache.mark()  # sent and applied; then a read sees it and is answered first
    cache.fill(cache.mark(), ROW, {FIELD: after}, True)
    cache.settle(committed, [], [write], True)
    assert cache.get(ROW, FIELD, True) in (after, MISSING)


def test_a_read_that_a_commit_overtook_is_forgotten() -> None:
    cache = _cache()
    read = cache.mark()  # sees the old value
    cache.settle(cache.mark(), [], [Put(ROW, FIELD, b"new")], True)
    cache.fill(read, ROW, {FIELD: b"old"}, True)
    assert cache.get(ROW, FIELD, True) in (b"new", MISSING)


def test_a_read_that_news_overtook_is_forgotten() -> None:
    cache = _cache()
    read, commit = cache.mark(), cache.mark()
    cache.drop([ROW])
    cache.fill(read, ROW, {FIELD: b"old"}, True)
    cache.settle(commit, [ROWS[1]], [Put(ROW, NUMBER, b"old")], True)
    assert cache.get(ROW, FIELD, True) is MISSING
    assert cache.get(ROW, NUMBER, True) is MISSING
    assert cache.get(ROWS[1], NUMBER, True) is None
    cache.forget()
    cache.settle(commit, [ROWS[1]], [Put(ROW, NUMBER, b"old")], True)
    assert cache.get(ROWS[1], NUMBER, True) is MISSING


def test_commits_of_one_field_at_once_leave_it_unknown() -> None:
    cache = _cache()
    marks = [cache.mark(), cache.mark()]
    for mark, value in zip(marks, (b"1", b"2"), strict=True):
        cache.settle(mark, [], [Put(ROW, FIELD, value), Put(ROW, NUMBER + value, b"x")], True)
    assert cache.get(ROW, FIELD, True) is MISSING
    assert cache.get(ROW, NUMBER + b"1", True) == cache.get(ROW, NUMBER + b"2", True) == b"x"


def test_what_was_known_before_the_promise_is_not_vouched_for() -> None:
    cache = _cache()
    cache.fill(cache.mark(), ROW, {FIELD: b"1"}, False)
    assert cache.get(ROW, FIELD, True) is MISSING
    assert cache.get(ROW, FIELD, False) == b"1"
    cache.fill(cache.mark(), ROW, {NUMBER: b"2"}, True)
    assert cache.get(ROW, FIELD, True) is MISSING
    assert cache.get(ROW, NUMBER, True) == b"2"


def test_only_rows_known_to_be_empty_are_complete() -> None:
    cache = _cache()
    cache.settle(cache.mark(), [ROW], [Put(ROW, FIELD, b"1")], True)
    assert cache.get(ROW, NUMBER, True) is None
    cache.settle(cache.mark(), [], [Delete(ROW, FIELD)], True)
    assert cache.get(ROW, FIELD, True) is None
    cache.drop([ROW])
    assert cache.get(ROW, NUMBER, False) is MISSING
    cache.settle(cache.mark(), [], [Put(ROW, FIELD, b"1")], True)
    assert cache.get(ROW, NUMBER, True) is MISSING


def test_a_row_scanned_to_its_end_is_complete() -> None:
    cache = _cache()
    cache.fill_page(cache.mark(), ROW, b"", {b"a": b"1"}, b"more", True)
    assert cache.get(ROW, b"a", True) == b"1"
    assert cache.get(ROW, b"none", True) is MISSING
    cache.settle(cache.mark(), [], [Put(ROW, b"c", b"1"), Delete(ROW, b"a")], True)
    cache.fill_page(cache.mark(), ROW, b"more", {b"b": b"1"}, None, True)
    assert cache.get(ROW, b"none", False) is None  # a commit will check it
    assert cache.get(ROW, b"none", True) is MISSING  # others may have made it just now
    assert cache.complete(ROW) == {b"c": b"1", b"b": b"1"}


def test_what_was_empty_once_is_known_whole() -> None:
    cache = _cache()
    cache.settle(cache.mark(), [ROW], [Put(ROW, b"a", b"1")], True)
    assert cache.get(ROW, b"none", True) is None
    cache.drop([ROW])
    cache.fill_page(cache.mark(), ROW, b"", {b"a": b"1"}, None, True)
    assert cache.get(ROW, b"none", True) is MISSING
    assert cache.get(ROW, b"none", False) is None


@pytest.mark.parametrize("how", ["news", "commit", "another scan", "forgotten"])
def test_a_scan_that_was_disturbed_completes_nothing(how: str) -> None:
    cache = _cache()
    begun = cache.mark()
    cache.fill_page(begun, ROW, b"", {b"a": b"1"}, b"more", True)
    if how == "news":
        cache.drop([ROW])
    elif how == "commit":  # it was sent before the page was read, and deletes what is in there
        cache.settle(begun, [], [Delete(ROW, b"a")], True)
    elif how == "another scan":
        cache.fill_page(cache.mark(), ROW, b"", {b"a": b"1"}, b"elsewhere", True)
    else:
        cache.forget()
    cache.fill_page(cache.mark(), ROW, b"more", {b"b": b"1"}, None, True)
    assert cache.get(ROW, b"none", True) is MISSING
    assert cache.complete(ROW) is None


def test_a_page_that_commits_overtook_completes_nothing() -> None:
    """Regression: a name taken away and put back while the page was on its way was absent."""
    cache = _cache()
    gone, page, back = cache.mark(), cache.mark(), cache.mark()  # as the store sees them
    cache.settle(back, [], [Put(ROW, FIELD, b"1")], True)
    cache.settle(gone, [], [Delete(ROW, FIELD)], True)
    cache.fill_page(page, ROW, b"", {}, None, True)
    assert cache.get(ROW, FIELD, True) is MISSING


def test_a_listing_forgets_what_it_has_not_found_where_no_news_come() -> None:
    cache = _cache()
    cache.fill_page(cache.mark(), ROW, b"", {b"a": b"1", b"b": b"1"}, None, False)
    cache.fill_page(cache.mark(), ROW, b"", {b"a": b"1"}, None, False)
    assert cache.get(ROW, b"b", False) is None


def test_the_promise_begins_a_row_anew_in_a_read_of_many() -> None:
    """Regression: a row complete without the promise stayed so when a listing brought a few fields
    of it with the promise."""
    cache = _cache()
    cache.settle(cache.mark(), [ROW], [], False)
    cache.fill_rows(cache.mark(), {ROW: {FIELD: b"1"}}, True)
    assert cache.get(ROW, FIELD, True) == b"1"
    assert cache.get(ROW, NUMBER, True) is MISSING


def test_tables_are_not_remembered() -> None:
    cache = _cache()
    cache.fill(cache.mark(), b"T", {FIELD: b"1"}, True)
    cache.settle(cache.mark(), [], [Put(b"T", FIELD, b"1")], True)
    assert cache.get(b"T", FIELD, False) is MISSING


@pytest.mark.parametrize("grow", ["fill", "settle"])
def test_memory_is_bounded(grow: str) -> None:
    cache = RowCache(RUNTIME, rows_max=100)
    for n in range(1000):
        row = b"t%d" % n
        if grow == "fill":
            cache.fill(cache.mark(), row, {FIELD: b"1"}, True)
        else:
            cache.settle(cache.mark(), [row], [Put(row, FIELD, b"1")], True)
    known = [n for n in range(1000) if cache.get(b"t%d" % n, FIELD, True) == b"1"]
    assert 80 <= len(known) <= 100
    assert known == list(range(known[0], 1000))  # the oldest went
    for n in range(3 * ROW_FIELDS_MAX):
        field = b"%d" % n
        if grow == "fill":
            cache.fill(cache.mark(), ROW, {field: b"1"}, True)
        else:
            cache.settle(cache.mark(), [], [Put(ROW, field, b"1")], True)
    names = [b"%d" % n for n in range(3 * ROW_FIELDS_MAX)]
    assert sum(cache.get(ROW, name, True) == b"1" for name in names) <= ROW_FIELDS_MAX + 1


def test_names_of_many_directories_are_bounded() -> None:
    """Rows were, and each row was: a walk over large directories kept names by the million."""
    cache = RowCache(RUNTIME, fields_max=1000)
    rows = [b"d%08d" % n for n in range(100)]
    names: dict[bytes, bytes | None] = {b"%d" % n: b"1" for n in range(90)}
    for row in rows:
        cache.fill_page(cache.mark(), row, b"", names, None, True)
    known = [row for row in rows if cache.complete(row) is not None]
    assert 8 <= len(known) <= 12
    assert known == rows[-len(known) :]  # the oldest went, and they went whole
    assert sum(cache.has_any([row]) for row in rows) == len(known)


@pytest.mark.parametrize("grow", ["fill", "fill_rows", "put", "append"])
def test_big_values_are_bounded(grow: str) -> None:
    """Rows were, and fields were: 100,000 files with an xattr of 64 KiB each were 6 GiB."""
    cache, value = RowCache(RUNTIME, bytes_max=1 << 20), b"x" * (16 << 10)
    rows = [b"t%04d" % n for n in range(1000)]
    for row in rows:
        if grow == "fill":
            cache.fill(cache.mark(), row, {FIELD: value}, True)
        elif grow == "fill_rows":
            cache.fill_rows(cache.mark(), {row: {FIELD: value}}, True)
        elif grow == "put":
            cache.settle(cache.mark(), [row], [Put(row, FIELD, value)], True)
        else:
            cache.settle(cache.mark(), [row], [Append(row, FIELD, value)], True)
    known = [row for row in rows if cache.get(row, FIELD, True) == value]
    assert 32 <= len(known) <= 80
    assert known == rows[-len(known) :]  # the oldest went
    small = [b"s%04d" % n for n in range(2000)]
    for row in small:
        cache.fill(cache.mark(), row, {FIELD: b"1"}, True)
    assert all(cache.get(row, FIELD, True) == b"1" for row in small)


def test_a_view_that_remembered_wrongly_begins_again() -> None:
    """What it had from memory comes once more with what it asks for, all of one moment."""
    backend = MemBackend(RUNTIME)
    make_volume(MemStore(backend), RUNTIME)
    store, other = MemStore(backend), MemStore(backend)
    store.watch(lambda _: None)  # news are still on their way
    client = Transactor(store, RUNTIME, RowCache(RUNTIME))
    other.commit(change(Put(b"t1", b"x", b"old"), Put(b"t2", b"x", b"old")))
    assert client.view(lambda txn: txn.get(b"t1", b"x")) == b"old"

    def both(txn: Txn) -> list[bytes | None]:
        return txn.get_many([(row, b"x") for row in (b"t1", b"t2")])

    other.commit(change(Put(b"t1", b"x", b"new"), Put(b"t2", b"x", b"new")))
    before = store.round_trips
    assert client.view(both) == [b"new", b"new"]
    assert store.round_trips - before == 2
    assert client.counters.conflicts == 1
    assert client.view(both) == [b"new", b"new"]
    assert_clean(store)


def test_what_is_long_outdated_is_forgotten_by_a_merge() -> None:
    """A count that others have raised and we lower would go below zero in what we remember."""
    cache = RowCache(RUNTIME)
    cache.fill(cache.mark(), b"row1", {b"v": bytes(8)}, False)
    cache.settle(cache.mark(), [], [Merge(b"row1", b"v", (0, -1))], False)
    assert cache.get(b"row1", b"v", need_vouched=False) is MISSING

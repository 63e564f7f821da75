"""The store contract on every engine: large rows and many rows, page by page."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from fsmeta.store.contract import COMMIT_OPS_MAX, SCAN_PAGE, Store
from fsmeta.store.sqlite import SqliteStore
from fsmeta.store.writes import Delete, DeleteRow, Put
from tests.fsmeta.engines import Engine, change

ROW = b"tbig"
FIELDS = 200_000
FIELDS_TIKV = 2_500  # each costs 0.1 ms to write and again to delete, many times that under load
FIELDS_SOAK = 1_000_000
_BATCH = min(COMMIT_OPS_MAX, 250)  # a commit on a busy machine is to meet no deadline


def _name(number: int) -> bytes:
    return b"%x\0\xff-%07d" % (number * 0x9E3779B1 & 0xFFFF, number)


def _fill(store: Store, row: bytes, count: int) -> None:
    for begin in range(0, count, _BATCH):
        numbers = range(begin, min(begin + _BATCH, count))
        store.commit(change(*(Put(row, _name(n), b"%d" % n) for n in numbers)))


def _pages(store: Store, row: bytes, limit: int) -> Iterator[list[tuple[bytes, bytes]]]:
    cursor: bytes | None = b""
    while cursor is not None:
        page = store.scan(row, cursor, limit)
        yield page.items
        cursor = page.cursor


def _scan_all(store: Store, count: int, limit: int) -> None:
    """Every field comes, with its value, in pages of about `limit`."""
    seen = bytearray(count)
    total = 0
    for items in _pages(store, ROW, limit):
        assert len(items) <= 2 * limit, "a page is not bounded"
        total += len(items)
        for name, value in items:
            number = int(value)
            assert name == _name(number)
            seen[number] = 1
    assert sum(seen) == count
    assert total <= 1.1 * count, "too many fields come twice"


def test_a_huge_row_comes_in_pages(engine: Engine) -> None:
    store = engine.open()
    fields = FIELDS_TIKV if engine.name == "tikv" else FIELDS
    _fill(store, ROW, fields)
    # in memory each page sorts the whole row; a page of TiKV's test server takes seconds under load
    limits = {"mem": SCAN_PAGE * 20, "tikv": SCAN_PAGE // 10}
    _scan_all(store, fields, limits.get(engine.name, SCAN_PAGE))
    store.commit(change(DeleteRow(ROW)))
    assert store.scan(ROW).items == []


@pytest.mark.soak
@pytest.mark.parametrize("engine", ["sqlite", "redis"], indirect=True)
def test_a_row_of_a_million(engine: Engine) -> None:
    store = engine.open()
    _fill(store, ROW, FIELDS_SOAK)
    _scan_all(store, FIELDS_SOAK, SCAN_PAGE)
    store.commit(change(DeleteRow(ROW)))


@pytest.mark.parametrize("count", [0, 1, 99, 100, 101, 700])
def test_small_rows_end(engine: Engine, count: int) -> None:
    store = engine.open()
    _fill(store, ROW, count)
    found = [item for items in _pages(store, ROW, 100) for item in items]
    assert sorted(set(found)) == sorted((_name(n), b"%d" % n) for n in range(count))


@pytest.mark.parametrize("stable", [300, 3000])
def test_scan_keeps_what_stays_while_others_come_and_go(engine: Engine, stable: int) -> None:
    """Between pages a writer inserts and deletes, enough for the row to grow and shrink."""
    store, writer = engine.open(), engine.open()
    chance = random.Random(stable)
    _fill(store, ROW, stable)
    found: set[int] = set()
    passing: list[bytes] = []
    for turn, items in enumerate(_pages(store, ROW, 100)):
        found.update(int(value) for name, value in items if not name.startswith(b"passing"))
        # more and more up to turn 20, then ever fewer, so that a scan by name ends too
        new = [b"passing %d %d" % (turn, chance.getrandbits(40)) for _ in range(90)]
        count = len(passing) * 2 // 3 if turn > 20 else len(passing) // 4
        gone = [passing.pop(chance.randrange(len(passing))) for _ in range(count)]
        passing += new
        deletes = [Delete(ROW, name) for name in gone]
        writer.commit(change(*deletes, *(Put(ROW, name, b"1") for name in new)))
        assert turn < 1000, "the scan does not end"
    assert found == set(range(stable))


def _rows(store: Store, prefix: bytes, limit: int) -> list[bytes]:
    rows: list[bytes] = []
    cursor: bytes | None = b""
    while cursor is not None:
        page = store.scan_rows(prefix, cursor, limit)
        rows += page.rows
        cursor = page.cursor
    return rows


PREFIXES = [b"t*", b"t?", b"t[a-b]", b"t\\", b"t\xff", b"t\0", b"t^", b"t-", b"t]"]


@pytest.mark.parametrize("limit", [1, 7, SCAN_PAGE])
def test_rows_by_prefix(engine: Engine, limit: int) -> None:
    """Characters that mean something in patterns mean themselves."""
    store = engine.open()
    expected = {
        prefix: {prefix, *(prefix + b"%d" % n for n in range(20))}
        for prefix in [*PREFIXES, b"ta", b"tb"]
    }
    for rows in expected.values():
        store.commit(change(*(Put(row, b"f", b"1") for row in rows)))
    for prefix in PREFIXES:
        assert set(_rows(store, prefix, limit)) == expected[prefix]
    assert set(_rows(store, b"t", limit)) == set().union(*expected.values())
    assert _rows(store, b"nothing", limit) == []
    assert set(_rows(store, b"", limit)) > set(_rows(store, b"t", limit))


def test_scan_rows_under_change(engine: Engine) -> None:
    store, writer = engine.open(), engine.open()
    stable = {b"tstay%d" % n for n in range(1000)}
    store.commit(change(*(Put(row, b"f", b"1") for row in stable)))
    found: set[bytes] = set()
    cursor: bytes | None = b""
    turn = 0
    while cursor is not None:
        page = store.scan_rows(b"ts", cursor, 100)
        found.update(page.rows)
        cursor = page.cursor
        turn += 1
        puts = [Put(b"tsome%d %d" % (turn, n), b"f", b"1") for n in range(50 if turn < 30 else 0)]
        deletes = [DeleteRow(b"tsome%d %d" % (turn - 1, n)) for n in range(50)]
        writer.commit(change(*deletes, *puts))
    assert stable <= found


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
def test_a_scan_of_rows_does_not_read_on(engine: Engine) -> None:
    """Regression: the last page of a prefix walked through every row behind it."""
    store = engine.open()
    assert isinstance(store, SqliteStore)
    store.commit(change(*(Put(b"t%d" % n, b"f", b"1") for n in range(_BATCH))))
    store.commit(change(Put(b"s1", b"f", b"1"), Put(b"s2", b"f", b"1")))
    steps = 0

    def count() -> int:
        nonlocal steps
        steps += 1
        return 0

    store._db.set_progress_handler(count, 100)
    assert store.scan_rows(b"s").rows[-2:] == [b"s1", b"s2"]
    assert steps < 10, "hundreds of steps of SQLite's machine"

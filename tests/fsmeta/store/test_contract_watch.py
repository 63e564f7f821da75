"""The store contract on engines that tell: who hears of which changes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from fsmeta.errors import Conflict
from fsmeta.store.contract import Store
from fsmeta.store.writes import Append, Delete, DeleteRow, Merge, Put, Write
from tests.fsmeta.engines import Engine, change
from tests.support.waiting import wait_until

ROW, OTHER, LAST = b"trow\0*\xff", b"tother", b"tlast"
telling = pytest.mark.parametrize("engine", ["mem", "redis"], indirect=True)


class Client:
    """A store whose news are kept."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.news: list[bytes | None] = []
        store.watch(self._listen)
        store.read([(LAST, b"x")])  # from now on the store vouches
        wait_until(store.has_leases)
        self.news.clear()

    def _listen(self, rows: Sequence[bytes] | None) -> None:
        self.news += [None] if rows is None else rows

    def put(self, row: bytes) -> None:
        self.store.commit(change(Put(row, b"x", b"1")))

    def told(self, by: Client) -> set[bytes | None]:
        """What was told up to now: news come in order, so a last change of `by` ends them."""
        self.store.read([(LAST, b"x")])
        by.put(LAST)
        wait_until(lambda: LAST in self.news)
        rows = set(self.news) - {LAST}
        self.news.clear()
        return rows


@pytest.fixture
def clients(engine: Engine) -> tuple[Client, Client]:
    return Client(engine.open()), Client(engine.open())


WRITES: list[Write] = [
    Put(ROW, b"x", b"2"),
    Put(ROW, b"another", b"2"),
    Delete(ROW, b"x"),
    DeleteRow(ROW),
    Append(ROW, b"x", b"2"),
    Merge(ROW, b"x", (0, b"2")),
]


@telling
@pytest.mark.parametrize(
    "write", WRITES, ids=lambda write: f"{type(write).__name__} {write.field!r}"
)
def test_others_changes_are_told_once(clients: tuple[Client, Client], write: Write) -> None:
    mine, theirs = clients
    theirs.put(ROW)
    mine.store.read([(ROW, b"x"), (OTHER, b"x")])
    theirs.store.commit(change(write))
    assert mine.told(theirs) == {ROW}
    theirs.put(ROW)
    assert mine.told(theirs) == set()  # until it is read again
    mine.store.read([(ROW, b"y")])
    theirs.put(ROW)
    assert mine.told(theirs) == {ROW}


@telling
def test_own_changes_are_not_told(clients: tuple[Client, Client]) -> None:
    mine, theirs = clients
    mine.store.read([(ROW, b"x"), (OTHER, b"x")])
    for write in WRITES[:2]:
        mine.store.commit(change(write))
    assert mine.told(theirs) == set()
    theirs.put(ROW)
    assert mine.told(theirs) == {ROW}


@telling
@pytest.mark.parametrize("how", ["read", "linked", "checked", "missing", "written", "empty"])
def test_whatever_was_learnt_is_watched(clients: tuple[Client, Client], how: str) -> None:
    """Regression: rows that a commit found empty or checked were not watched in memory."""
    mine, theirs = clients
    if how in ("read", "linked", "checked"):
        theirs.put(ROW)
    row, other = (ROW, b"x"), (OTHER, b"x")
    if how in ("read", "missing"):
        mine.store.read([row, other])
    elif how == "linked":
        mine.store.read_linked(ROW, b"x", 0, b"t", [b"x"])
    elif how == "checked":
        mine.store.commit(change(Put(OTHER, b"x", b"1"), checks=[(*row, b"1"), (*other, None)]))
    elif how == "written":
        mine.store.commit(change(Put(OTHER, b"x", b"1"), Put(ROW, b"x", b"1")))
    else:
        mine.store.commit(change(Put(OTHER, b"x", b"1"), empties=[ROW]))
    theirs.put(ROW)
    assert mine.told(theirs) == {ROW}


@telling
def test_many_rows_of_one_commit_are_watched(clients: tuple[Client, Client]) -> None:
    mine, theirs = clients
    rows = [b"t%d" % n for n in range(100)]
    mine.store.commit(change(*(Put(row, b"x", b"1") for row in rows), empties=[OTHER]))
    theirs.store.commit(change(*(DeleteRow(row) for row in rows), Put(OTHER, b"x", b"1")))
    assert mine.told(theirs) == {*rows, OTHER}


@telling
def test_a_refused_commit_is_not_told(clients: tuple[Client, Client]) -> None:
    mine, theirs = clients
    mine.store.read([(ROW, b"x")])
    with pytest.raises(Conflict):
        theirs.store.commit(change(Put(ROW, b"x", b"1"), checks=[(ROW, b"x", b"?")]))
    assert mine.told(theirs) == set()


@telling
def test_tables_are_never_told(clients: tuple[Client, Client]) -> None:
    mine, theirs = clients
    mine.store.read([(b"T", b"x")])
    mine.store.read([(b"T", b"x"), (ROW, b"x")])
    mine.store.commit(change(Put(b"T", b"x", b"1"), checks=[(b"T", b"x", None)]))
    theirs.put(b"T")
    assert mine.told(theirs) == set()
    theirs.store.commit(change(DeleteRow(b"T")))
    mine.store.commit(change(Put(OTHER, b"x", b"1"), checks=[(b"T", b"x", None)]))
    theirs.put(b"T")
    assert mine.told(theirs) == set(), "nor by a server that watches what scripts read"
    theirs.store.commit(change(DeleteRow(b"T")))


@telling
def test_only_who_read_is_told(engine: Engine, clients: tuple[Client, Client]) -> None:
    mine, theirs = clients
    third = Client(engine.open())
    mine.store.read([(ROW, b"x")])
    theirs.put(ROW)
    assert third.told(theirs) == set()
    assert mine.told(theirs) == {ROW}


@telling
def test_it_vouches_only_while_it_listens(engine: Engine) -> None:
    store = engine.open()
    assert not store.has_leases()
    client = Client(store)
    assert client.store.has_leases()
    store.close()
    wait_until(lambda: not store.has_leases())


@pytest.mark.parametrize("engine", ["sqlite", "tikv"], indirect=True)
def test_some_engines_tell_nobody(engine: Engine) -> None:
    store, other = engine.open(), engine.open()
    news: list[object] = []
    store.watch(news.append)
    store.read([(ROW, b"x")])
    other.commit(change(Put(ROW, b"x", b"1")))
    assert store.read([(ROW, b"x")]) == [b"1"]
    assert not store.has_leases()
    assert news == []

"""M1–M3: the store contract on every engine: reads, checks and writes of one commit."""

from __future__ import annotations

import itertools
import threading

import pytest

from fsmeta.errors import Conflict, LimitExceeded, NotEmpty, StoreError, Unavailable
from fsmeta.store.contract import TAIL_BYTES, TAIL_FROM, Commit, Store
from fsmeta.store.writes import Append, Delete, DeleteRow, Merge, Put, Write
from tests.fsmeta.engines import Engine, add, change, dump

A, B, C = b"tA", b"tB", b"tC"
STRANGE = [
    bytes(range(256)),
    b"\0",
    b"\0\0\xff",
    b"\xff" * 9,
    b"*",
    b"a*b?[c-d]\\^e",
    b"\r\n$3\r\n",
    "ünïcode".encode(),
    b"false",
]


@pytest.fixture
def store(engine: Engine) -> Store:
    return engine.open()


def _put(store: Store, row: bytes, **fields: bytes) -> None:
    store.commit(change(*(Put(row, name.encode(), value) for name, value in fields.items())))


def _row(store: Store, row: bytes) -> dict[bytes, bytes]:
    return store.read_rows([row])[0]


# --- reads ---------------------------------------------------------------------------------------


def test_read_keeps_the_order_of_its_keys(store: Store) -> None:
    _put(store, A, x=b"1", y=b"2")
    _put(store, B, x=b"3")
    keys = [(B, b"x"), (A, b"y"), (A, b"none"), (C, b"x"), (A, b"x"), (B, b"x")]
    assert store.read(keys) == [b"3", b"2", None, None, b"1", b"3"]
    assert store.read([(A, b"x")]) == [b"1"]
    assert store.read_rows([B, C, A]) == [{b"x": b"3"}, {}, {b"x": b"1", b"y": b"2"}]


def test_reading_nothing_asks_nobody(store: Store) -> None:
    before = store.round_trips
    assert store.read([]) == []
    assert store.read_rows([]) == []
    assert store.round_trips == before


def test_read_linked_follows_the_value(store: Store) -> None:
    _put(store, A, name=b"12tB", gone=b"12tC")
    _put(store, b"tt" + b"B", x=b"1", y=b"2")
    assert store.read_linked(A, b"name", 2, b"t", [b"y", b"none", b"x"]) == (
        b"12tB",
        [b"2", None, b"1"],
    )
    assert store.read_linked(A, b"gone", 2, b"t", [b"y", b"x"]) == (b"12tC", [None, None])
    assert store.read_linked(A, b"none", 2, b"t", [b"y"]) == (None, [])
    assert store.read_linked(C, b"name", 2, b"t", [b"y"]) == (None, [])


def test_a_read_sees_one_moment(engine: Engine, store: Store) -> None:
    """A writer keeps two rows and a link equal; no read may see them differ."""
    writer = engine.open()
    stop = threading.Event()
    _put(store, A, x=b"0", link=b"0tB")
    _put(store, b"ttB", x=b"0")

    def flip() -> None:
        for turn in itertools.count(1):
            if stop.is_set():
                return
            value = b"%d" % (turn % 10)
            puts = (Put(A, b"x", value), Put(A, b"link", value + b"tB"))
            writer.commit(change(*puts, Put(b"ttB", b"x", value)))

    thread = threading.Thread(target=flip)
    thread.start()
    try:
        for _ in range(300):
            a, b = store.read([(A, b"x"), (b"ttB", b"x")])
            assert a == b
            link, found = store.read_linked(A, b"link", 1, b"t", [b"x"])
            assert link is not None
            assert [link[:1]] == found
            rows = store.read_rows([A, b"ttB"])
            assert rows[0][b"x"] == rows[1][b"x"]
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("odd", STRANGE, ids=range(len(STRANGE)))
def test_any_bytes_are_names_and_values(store: Store, odd: bytes) -> None:
    row = b"t" + odd
    store.commit(change(Put(row, odd, odd), Put(row, b"n", b"12345678"), add(row, b"c", 7)))
    other = Put(b"t" + odd + b"0", odd, b"other")
    checks = [(row, odd, odd), (row, odd + b"0", None)]
    grow = Append(row, odd, odd)
    store.commit(change(other, grow, Merge(row, b"n", (1, b"\0\xff", 4, 1)), checks=checks))
    assert _row(store, row) == {odd: odd + odd, b"n": b"1\0\xff4567" + b"9", b"c": b"7"}
    assert store.read_linked(row, odd, len(odd), b"t", [odd]) == (odd + odd, [odd + odd])
    assert dict(store.scan(row).items)[odd] == odd + odd
    assert {row, b"t" + odd + b"0"} <= dump(store, row).keys()
    with pytest.raises(Conflict):
        store.commit(change(other, checks=[(row, odd, odd)]))
    store.commit(change(Delete(row, odd)))
    assert store.read([(row, odd)]) == [None]


# --- checks --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "believed"),
    [
        pytest.param(b"x", b"0", id="changed"),
        pytest.param(b"x", b"1 ", id="longer"),
        pytest.param(b"x", None, id="appeared"),
        pytest.param(b"gone", b"1", id="vanished"),
    ],
)
@pytest.mark.parametrize("writes", [True, False])
def test_a_false_check_is_a_conflict(
    store: Store, field: bytes, believed: bytes | None, writes: bool
) -> None:
    _put(store, A, x=b"1", y=b"2")
    before = dump(store)
    commit = change(Put(A, b"y", b"3"), checks=[(A, b"y", b"2"), (A, field, believed)])
    with pytest.raises(Conflict):
        store.commit(commit if writes else commit._replace(writes=[]))
    assert dump(store) == before


def test_what_was_built_on_old_values_may_make_no_sense(store: Store) -> None:
    """Regression: rename of a directory whose remembered parent had come to lie below it."""
    _put(store, A, x=b"1")
    writes = add(A, b"n", 1), Put(A, b"n", b"5")
    with pytest.raises(Conflict):
        store.commit(change(*writes, checks=[(A, b"x", b"2")]))


def test_true_checks_let_a_commit_pass(store: Store) -> None:
    _put(store, A, x=b"1")
    checks = [(A, b"x", b"1"), (A, b"none", None), (C, b"x", None)]
    store.commit(change(checks=checks, empties=[B]))
    store.commit(change(Put(B, b"y", b"2"), checks=checks, empties=[B, C]))
    assert _row(store, B) == {b"y": b"2"}


def test_not_empty_only_where_all_checks_hold(store: Store) -> None:
    _put(store, A, x=b"1")
    write = Put(C, b"y", b"2")
    with pytest.raises(NotEmpty):
        store.commit(change(write, checks=[(A, b"x", b"1")], empties=[B, A]))
    with pytest.raises(Conflict):
        store.commit(change(write, checks=[(A, b"x", b"0")], empties=[A]))
    with pytest.raises(NotEmpty):
        store.commit(change(checks=[(A, b"x", b"1")], empties=[A]))
    store.commit(change(Delete(A, b"x")))
    store.commit(change(write, empties=[A]))
    assert _row(store, C) == {b"y": b"2"}


LONG = b"." * (TAIL_FROM - TAIL_BYTES) + b"t" * TAIL_BYTES


@pytest.mark.parametrize(
    ("there", "believed", "as_tail", "whole"),
    [
        pytest.param(LONG, LONG, True, True, id="same"),
        pytest.param(b"," + LONG[1:], LONG, True, False, id="other middle"),
        pytest.param(LONG[:-1] + b"u", LONG, False, False, id="other end"),
        pytest.param(b"." + LONG, LONG, False, False, id="longer"),
        pytest.param(LONG[1:], LONG, False, False, id="shorter"),
        pytest.param(None, LONG, False, False, id="vanished"),
        pytest.param(LONG, None, False, False, id="appeared"),
        pytest.param(b"," + LONG[2:], LONG[1:], False, False, id="short, so compared whole"),
    ],
)
@pytest.mark.parametrize("writes", [True, False])
def test_a_tail_is_a_length_and_an_end(
    store: Store,
    there: bytes | None,
    believed: bytes | None,
    as_tail: bool,
    whole: bool,
    writes: bool,
) -> None:
    _put(store, A, y=b"1", **({} if there is None else {"x": there}))
    commit = change(*([Put(B, b"z", b"2")] if writes else []), checks=[(A, b"x", believed)])
    for tails, holds in (((), whole), ({(A, b"y")}, whole), ({(A, b"x")}, as_tail)):
        if holds:
            store.commit(commit._replace(tails=tails))
            continue
        with pytest.raises(Conflict):
            store.commit(commit._replace(tails=tails))


def test_a_tail_proves_no_value() -> None:
    checks = [(A, b"x", LONG), (A, b"y", b"1")]
    commit = change(checks=checks)
    assert commit.proven() == checks
    assert commit._replace(tails={(A, b"x"), (B, b"x")}).proven() == checks[1:]


@pytest.mark.parametrize(
    ("writes", "left"),
    [
        pytest.param([Append(A, b"x", b"+")], LONG + b"+", id="append"),
        pytest.param([Append(A, b"x", b"+"), Append(A, b"x", b"-")], LONG + b"+-", id="twice"),
        pytest.param([Put(A, b"x", b"n"), Append(A, b"x", b"+")], b"n+", id="after a put"),
        pytest.param([Delete(A, b"x"), Append(A, b"x", b"+")], b"+", id="after a deletion"),
        pytest.param([DeleteRow(A), Append(A, b"x", b"+")], b"+", id="after that of the row"),
        pytest.param(
            [Append(A, b"y", b"-"), Put(A, b"z", b"1"), Append(A, b"x", b"+")],
            LONG + b"+",
            id="after others",
        ),
    ],
)
@pytest.mark.parametrize("tails", [{(A, b"x")}, {(A, b"x"), (A, b"y")}])
def test_what_is_appended_to_a_tail(
    store: Store, writes: list[Write], left: bytes, tails: set[tuple[bytes, bytes]]
) -> None:
    other = LONG.upper()
    _put(store, A, x=LONG, y=other)
    checks = [(A, b"x", LONG), (A, b"y", other)]
    store.commit(change(*writes, checks=checks)._replace(tails=tails))
    assert store.read([(A, b"x")]) == [left]
    if writes[0] == Append(A, b"y", b"-"):
        assert store.read([(A, b"y")]) == [other + b"-"]


# --- writes --------------------------------------------------------------------------------------


def test_put_and_delete(store: Store) -> None:
    store.commit(change(Put(A, b"x", b"1"), Put(A, b"y", b"2"), Put(B, b"x", b"3")))
    deletes = (Delete(A, b"y"), Delete(A, b"none"), Delete(C, b"none"))
    store.commit(change(Put(A, b"x", b"9" * 100_000), *deletes))
    assert dump(store, b"t") == {A: {b"x": b"9" * 100_000}, B: {b"x": b"3"}}
    store.commit(change(DeleteRow(A), DeleteRow(C), Delete(B, b"x")))
    assert dump(store, b"t") == {}
    assert store.scan_rows(b"t").rows == []


def test_writes_apply_in_order(store: Store) -> None:
    _put(store, A, x=b"1", y=b"2")
    store.commit(
        change(
            DeleteRow(A),
            Put(A, b"x", b"a"),
            Append(A, b"x", b"b"),
            Put(A, b"z", b"c"),
            Delete(A, b"z"),
            Append(A, b"x", b"d"),
        )
    )
    assert _row(store, A) == {b"x": b"abd"}


def test_append_begins_where_nothing_is(store: Store) -> None:
    for part in (b"\0", b"ab", b"\xff"):
        store.commit(change(Append(A, b"x", part)))
    assert _row(store, A) == {b"x": b"\0ab\xff"}


def test_merge_changes_parts(store: Store) -> None:
    _put(store, A, x=b"abc" + (2**31).to_bytes(4, "big") + b"xyz")
    store.commit(change(Merge(A, b"x", (0, b"\0B", 3, 2**31 - 1, 8, b"YZ"))))
    assert _row(store, A) == {b"x": b"\0Bc" + b"\xff" * 4 + b"xYZ"}
    store.commit(change(Merge(A, b"x", (3, -(2**32) + 1))))
    assert _row(store, A) == {b"x": b"\0Bc" + bytes(4) + b"xYZ"}


def test_merge_needs_the_record(store: Store) -> None:
    _put(store, A, x=b"1234")
    before = dump(store)
    with pytest.raises(Conflict):
        store.commit(change(Put(A, b"y", b"1"), Merge(A, b"none", (0, b"x"))))
    with pytest.raises(Conflict):
        store.commit(change(Merge(A, b"x", (0, b"x")), Merge(C, b"x", (0, 1))))
    assert dump(store) == before


_TOUCHES: dict[str, Write] = {
    "put": Put(A, b"x", b"12345678"),
    "delete": Delete(A, b"x"),
    "delete row": DeleteRow(A),
    "append": Append(A, b"x", b"9"),
    "merge": Merge(A, b"x", (2, b"3")),
    "add": add(A, b"x", 1),
}


@pytest.mark.parametrize("engine", ["mem", "sqlite"], indirect=True)
@pytest.mark.parametrize("other", _TOUCHES)
@pytest.mark.parametrize("moved", ["merge", "add"])
@pytest.mark.parametrize("first", [True, False])
def test_what_is_merged_or_added_to_is_not_touched_otherwise(
    store: Store, moved: str, other: str, first: bool
) -> None:
    """The contract forbids it, and the engines that all verbs are tested on find it out."""
    _put(store, A, x=b"1234")
    before = dump(store)
    writes = [_TOUCHES[moved], _TOUCHES[other]]
    commit = change(*(writes if first else reversed(writes)))
    if moved == other == "add":
        store.commit(commit)
        assert _row(store, A) == {b"x": b"1236"}
        return
    with pytest.raises(AssertionError):
        store.commit(commit)
    assert dump(store) == before


def test_merge_and_add_beside_other_writes(store: Store) -> None:
    """Wherever they stand among writes to other fields of the row."""
    _put(store, A, x=b"1234", y=b"1", n=b"5")
    writes: list[Write] = [Put(A, b"y", b"2"), add(A, b"n", 1), Merge(A, b"x", (0, b"_"))]
    writes += [Delete(A, b"y"), add(A, b"n", 1), Append(A, b"z", b"3")]
    for _ in range(2):
        store.commit(change(*writes))
    assert _row(store, A) == {b"x": b"_234", b"n": b"9", b"z": b"33"}


# --- counters ------------------------------------------------------------------------------------


def test_add_moves_a_counter_either_way(store: Store) -> None:
    for delta in (5, -7, 2, -1, 10):
        store.commit(change(add(A, b"n", delta)))
    assert _row(store, A) == {b"n": b"9"}
    store.commit(change(add(A, b"n", 1), add(A, b"n", 2), add(A, b"m", -3)))
    assert _row(store, A) == {b"n": b"12", b"m": b"-3"}


@pytest.mark.parametrize("start", [0, 90, 2**53 - 1, 2**53, 2**62, -(2**53) - 1])
def test_add_is_exact_at_its_limit(store: Store, start: int) -> None:
    """Doubles can't tell 2^53 from 2^53 + 1; a limit must."""
    limit = start + 10
    store.commit(change(Put(A, b"n", b"%d" % start)))
    if limit > 0:
        with pytest.raises(LimitExceeded) as caught:
            store.commit(change(add(A, b"n", 11, limit, "EDQUOT")))
        assert caught.value.tag == "EDQUOT"
    kept = store.read([(A, b"n")])[0]
    assert kept == b"%d" % start or (start == 0 and kept is None)  # absent counts as 0
    store.commit(change(add(A, b"n", 9, limit, "EDQUOT"), add(A, b"n", 1, limit, "EDQUOT")))
    assert store.read([(A, b"n")]) == [b"%d" % limit]


def test_a_limit_bounds_growth_only(store: Store) -> None:
    """What is above its limit may shrink, and 0 is no limit."""
    store.commit(change(add(A, b"n", 100)))
    store.commit(change(add(A, b"n", -1, 10, "ENOSPC")))
    with pytest.raises(LimitExceeded):
        store.commit(change(add(A, b"n", 1, 10, "ENOSPC")))
    store.commit(change(add(A, b"n", 2**40, 0)))
    assert _row(store, A) == {b"n": b"%d" % (2**40 + 99)}


# --- atomicity -----------------------------------------------------------------------------------

_REFUSED: dict[str, tuple[Commit, type[StoreError]]] = {
    "limit": (change(add(A, b"n", 1, 5, "ENOSPC")), LimitExceeded),
    "merge of nothing": (change(Merge(C, b"x", (0, b"x"))), Conflict),
    "merge beyond the end": (change(Merge(A, b"x", (3, b"ab"))), StoreError),
    "merge of a word beyond the end": (change(Merge(A, b"x", (1, 1))), StoreError),
    "merge below zero": (change(Merge(A, b"x", (0, -(2**31)))), StoreError),
    "counter that is none": (change(add(A, b"x", 1)), StoreError),
    "check": (change(checks=[(A, b"x", b"?")]), Conflict),
    "row that must be empty": (change(empties=[A]), NotEmpty),
}


@pytest.mark.parametrize("reason", _REFUSED)
@pytest.mark.parametrize("refused_first", [True, False])
def test_a_refused_commit_leaves_no_trace(store: Store, reason: str, refused_first: bool) -> None:
    _put(store, A, x=b"\0\0\0a", n=b"5", m=b"1", y=b"1")
    before = dump(store)
    commit, error = _REFUSED[reason]
    others: tuple[Write, ...] = (
        add(A, b"m", 3),
        add(A, b"m", 2**55),
        add(B, b"was absent", 3),
        add(B, b"was absent", -3),
        Put(A, b"y", b"2"),
        Put(B, b"y", b"2"),
        Delete(A, b"y"),
        Append(A, b"z", b"2"),
    )
    writes = [*commit.writes, *others] if refused_first else [*others, *commit.writes]
    with pytest.raises(error):
        store.commit(commit._replace(writes=writes))
    assert dump(store) == before


# --- the end -------------------------------------------------------------------------------------


def test_a_closed_store_is_unavailable(store: Store) -> None:
    store.close()
    store.close()
    with pytest.raises(Unavailable):
        store.read([(A, b"x")])
    with pytest.raises(Unavailable):
        store.read([(A, b"x"), (B, b"x")])
    with pytest.raises(Unavailable):
        store.read_linked(A, b"x", 0, b"t", [b"x"])
    with pytest.raises(Unavailable):
        store.read_rows([A])
    with pytest.raises(Unavailable):
        store.scan(A)
    with pytest.raises(Unavailable):
        store.scan_rows(b"t")
    with pytest.raises(Unavailable):
        store.commit(change(Put(A, b"x", b"1")))


def test_round_trips_are_counted(store: Store) -> None:
    before = store.round_trips
    store.read([(A, b"x"), (B, b"x")])
    store.read_linked(A, b"x", 0, b"t", [b"x"])
    store.read_rows([A, B])
    store.scan(A)
    store.scan_rows(b"t")
    store.commit(change(Put(A, b"x", b"1"), Put(B, b"x", b"1")))
    # on Redis each script is sent in full the first time; TiKV has timestamps, and two phases
    extra = {"redis": 4, "tikv": 9}.get(store.name, 0)
    assert 6 <= store.round_trips - before <= 6 + extra

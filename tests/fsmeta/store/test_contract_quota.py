"""Q1: the store contract on every engine: limits beside counters, SHIFT, editions of settings."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from fsmeta.errors import Conflict, Fenced, LimitExceeded, Outdated, StoreError
from fsmeta.schema import keys
from fsmeta.store.contract import FENCE_FIELD, Commit, Store
from fsmeta.store.writes import (
    BESIDE,
    Add,
    Append,
    Delete,
    DeleteRow,
    Put,
    Shift,
    Write,
    limit_field,
)
from tests.fsmeta.engines import Engine, add, change, dump

ROW, FENCE = keys.ACCOUNTS, b"tfence"  # engines may keep counters there in parts
N, M, SUM = b"n", b"m", b"sum"


@pytest.fixture
def store(engine: Engine) -> Iterator[Store]:
    opened = engine.open()
    opened.commit(change(Put(FENCE, FENCE_FIELD, b"2")))
    yield opened
    opened.commit(change(DeleteRow(ROW)))


def _counters(store: Store) -> dict[bytes, bytes]:
    return store.read_rows([ROW])[0]


def charge(field: bytes, delta: int) -> Write:
    return Add(ROW, field, delta, BESIDE, "EDQUOT")


def shift(field: bytes, source: bytes, sign: bytes = b"+") -> Write:
    return Shift(ROW, field, source, sign, BESIDE, "EDQUOT")


def limit(field: bytes, value: int) -> Write:
    return Put(ROW, limit_field(field), b"%d" % value)


def refused(store: Store, *writes: Write) -> None:
    """For a limit, and nothing has happened."""
    before = dump(store)
    with pytest.raises(LimitExceeded) as caught:
        store.commit(change(*writes))
    assert caught.value.tag == "EDQUOT"
    assert dump(store) == before


def test_the_limit_beside_a_counter(store: Store) -> None:
    store.commit(change(charge(N, 10)))  # there is none yet
    store.commit(change(limit(N, 12), limit(M, 2**60)))
    store.commit(change(charge(N, 2), charge(M, 2**60)))
    refused(store, charge(M, -1), charge(N, 1))
    refused(store, Put(ROW, b"x", b"y"), charge(M, 1))
    store.commit(change(charge(N, -1), charge(N, 1)))  # what leaves first makes room
    store.commit(change(limit(N, 3)))
    refused(store, charge(N, 1))
    store.commit(change(charge(N, -8)))  # less is always allowed, even while it is above
    store.commit(change(add(ROW, N, 5)))  # an addition that does not ask
    store.commit(change(Delete(ROW, limit_field(N))))
    store.commit(change(charge(N, 1)))
    assert _counters(store)[N] == b"10"
    assert _counters(store)[M] == b"%d" % 2**60


@pytest.mark.parametrize("amount", [0, 7, -7, 2**62, -(2**62), 2**53 + 1])
def test_shift_adds_what_another_counter_holds(store: Store, amount: int) -> None:
    if amount:
        store.commit(change(charge(N, amount)))
    store.commit(change(charge(SUM, 100), charge(M, 200)))
    store.commit(change(shift(SUM, N), shift(M, N, b"-")))
    found = _counters(store)
    assert int(found[SUM]) == 100 + amount
    assert int(found[M]) == 200 - amount
    assert int(found.get(N, b"0")) == amount
    store.commit(change(shift(SUM, N, b"-"), shift(M, N), charge(M, 1)))
    assert int(_counters(store)[SUM]) == 100
    assert int(_counters(store)[M]) == 201


def test_shift_within_a_limit(store: Store) -> None:
    store.commit(change(charge(N, 7), charge(SUM, 5), limit(SUM, 11), limit(M, 0)))
    refused(store, shift(SUM, N))
    refused(store, charge(SUM, -2), shift(SUM, N), charge(SUM, 2))
    store.commit(change(charge(SUM, -1), shift(SUM, N)))
    store.commit(change(shift(M, b"nothing")))  # nothing is never too much
    store.commit(change(shift(M, N, b"-")))
    assert _counters(store)[SUM] == b"11"


def test_counters_that_are_none(store: Store) -> None:
    store.commit(change(Put(ROW, N, b"odd"), charge(M, 1)))
    before = dump(store)
    for writes in ((charge(SUM, 1), shift(M, N)), (charge(SUM, 1), shift(N, M))):
        with pytest.raises(StoreError):
            store.commit(change(*writes))
    assert dump(store) == before


def test_two_clients_shift_and_add(engine: Engine, store: Store) -> None:
    """N lies below SUM or M, and moves while it grows: their sum is always that of N."""
    other, grown, home = engine.open(), threading.Event(), (b"tA", b"where")

    def grow() -> None:
        left = 20
        try:
            while left:
                where = other.read([home])[0] or b""
                growth = change(charge(N, 1), charge(where, 1), checks=[(*home, where)])
                with suppress(Conflict):  # it has moved: this growth is left out
                    other.commit(growth)
                    left -= 1
        finally:
            grown.set()

    source, target = SUM, M
    store.commit(change(Put(*home, source)))
    thread = threading.Thread(target=grow)
    thread.start()
    while not grown.wait(random.uniform(0, 0.003)):  # at times it grows, and at times it does not
        store.commit(change(shift(source, N, b"-"), shift(target, N), Put(*home, target)))
        source, target = target, source
    thread.join()
    found = _counters(store)
    assert int(found[source]) == int(found[N]) == 20
    assert int(found.get(target, b"0")) == 0


# --- editions ------------------------------------------------------------------------------------


def _commit(text: bytes, sequence: int, edition: bytes = b"2") -> Commit:
    made = change(Append(b"tA", b"log", text), fence=FENCE, sequence=sequence)
    return made._replace(edition=edition)


def _log(store: Store) -> bytes | None:
    return store.read([(b"tA", b"log")])[0]


def test_a_commit_under_other_settings_is_outdated(store: Store) -> None:
    store.commit(_commit(b"a", 1))
    for edition in (b"1", b"3", b"22"):
        with pytest.raises(Outdated):
            store.commit(_commit(b"!", 2, edition))
        with pytest.raises(Outdated):  # one of checks alone, too; and before all else
            store.commit(
                change(checks=[(ROW, N, b"?")], fence=FENCE, sequence=2)._replace(edition=edition)
            )
    store.commit(_commit(b"b", 2))
    assert _log(store) == b"ab"


def test_a_repeat_is_answered_whatever_the_settings_are_by_now(store: Store) -> None:
    store.commit(_commit(b"a", 1))
    store.commit(change(Put(FENCE, FENCE_FIELD, b"3")))
    store.commit(_commit(b"a", 1))
    with pytest.raises(Outdated):
        store.commit(_commit(b"!", 2))
    store.commit(_commit(b"b", 2, b"3"))
    assert _log(store) == b"ab"


def test_without_a_session_there_is_no_edition(store: Store) -> None:
    store.commit(change(Append(b"tA", b"log", b"a"))._replace(edition=b"9"))
    store.commit(change(Delete(FENCE, FENCE_FIELD)))
    with pytest.raises(Fenced):
        store.commit(_commit(b"!", 1, b"9"))
    assert _log(store) == b"a"

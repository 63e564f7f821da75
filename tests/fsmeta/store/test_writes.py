"""Writes: what `effect` and `compose` say agrees with the engines, and with the script of Redis."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TypeAlias

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from fsmeta.errors import Conflict, Corrupt, StoreError
from fsmeta.store.contract import Store
from fsmeta.store.writes import (
    Add,
    Append,
    CannotCompose,
    Delete,
    Merge,
    Parts,
    Put,
    Shift,
    Write,
    compose,
    effect,
)
from tests.fsmeta.engines import Engine, change

ROW = b"twrites"
Maker: TypeAlias = Callable[[bytes], Write]
AMOUNT = 1000  # of the counter that a Shift names
_FIELDS = map(b"%d".__mod__, itertools.count())  # one for each example: no example sees another's

_bytes = st.binary(min_size=1, max_size=12)
_part = st.one_of(_bytes, st.integers(-3, 3), st.integers(-(2**32), 2**32))
_parts = st.lists(st.tuples(st.sampled_from((0, 2, 4, 8, 13)), _part), min_size=1, max_size=3)
_merges: st.SearchStrategy[Maker] = _parts.map(
    lambda parts: lambda field: Merge(ROW, field, _flat(parts))
)
_makers: st.SearchStrategy[Maker] = st.one_of(
    _bytes.map(lambda value: lambda field: Put(ROW, field, value)),
    st.just(lambda field: Delete(ROW, field)),
    _bytes.map(lambda suffix: lambda field: Append(ROW, field, suffix)),
    st.integers(-(2**40), 2**40).map(lambda delta: lambda field: Add(ROW, field, delta)),
    st.sampled_from((b"+", b"-")).map(
        lambda sign: lambda field: Shift(ROW, field, b"source", sign, b"0")
    ),
    _merges,
)
_pairs = st.one_of(st.tuples(_makers, _makers), st.tuples(_merges, _merges))
# no number: Python reads more texts as one than Redis does
_record = st.binary(min_size=7, max_size=15).map(b"\xff".__add__)
_before = st.one_of(st.none(), st.just(b"41"), _record)
_examples = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def _flat(parts: list[tuple[int, int | bytes]]) -> Parts:
    return tuple(each for pair in parts for each in pair)


@pytest.fixture
def store(engine: Engine) -> Store:
    engine.first.commit(change(Put(ROW, b"source", b"%d" % AMOUNT)))
    return engine.first


def _begin(store: Store, before: bytes | None) -> bytes:
    """A field that holds `before`."""
    field = next(_FIELDS)
    if before is not None:
        store.commit(change(Put(ROW, field, before)))
    return field


def _outcome(store: Store, field: bytes, *writes: Write) -> bytes | type[Exception] | None:
    """What a field holds after one commit for each write, or how the first of them is refused."""
    for write in writes:
        try:
            store.commit(change(write))
        except StoreError as error:
            return Conflict if isinstance(error, Conflict) else StoreError
    return store.read([(ROW, field)])[0]


@pytest.mark.parametrize("engine", ["mem", "redis", "tikv"], indirect=True)
@_examples
@given(before=_before, maker=_makers)
def test_an_effect_is_what_the_engine_does(
    store: Store, before: bytes | None, maker: Maker
) -> None:
    field = _begin(store, before)
    write = maker(field)
    expected: bytes | type[Exception] | None
    try:
        expected = effect(write, before, AMOUNT)
    except Conflict:
        expected = Conflict
    except Corrupt:
        expected = StoreError
    assert _outcome(store, field, write) == expected


@pytest.mark.parametrize("engine", ["mem", "redis", "tikv"], indirect=True)
@_examples
@given(before=_before, makers=_pairs)
def test_a_composed_write_does_what_two_do(
    store: Store, before: bytes | None, makers: tuple[Maker, Maker]
) -> None:
    field, other = _begin(store, before), _begin(store, before)
    try:
        one = compose(*[maker(other) for maker in makers])
    except CannotCompose:
        return
    singly = _outcome(store, field, *[maker(field) for maker in makers])
    if not isinstance(singly, type):
        assert _outcome(store, other, one) == singly

"""The checker itself: it must find what is wrong, or what it says of the engines means nothing."""

from __future__ import annotations

from math import inf

from tests.linear.history import OK, UNKNOWN, Call, State, linearize


def _call(
    client: int, begin: float, end: float, words: str, answer: int | str, made: int = 0
) -> Call:
    verb, *arguments = words.split()
    return Call(client, verb, tuple(arguments), begin, end, answer, made)


def test_calls_at_once_may_have_either_order() -> None:
    put = _call(1, 0, 10, "put a", OK)
    for answer in ("", "a"):
        assert linearize([put, _call(2, 1, 9, "get", answer)])


def test_what_has_ended_is_seen() -> None:
    put = _call(1, 0, 1, "put a", OK)
    assert linearize([put, _call(2, 2, 3, "get", "a")])
    assert linearize([put, _call(2, 2, 3, "get", "")]) is None


def test_a_value_does_not_come_back() -> None:
    history = [
        _call(1, 0, 10, "put a", OK),
        _call(2, 1, 2, "get", "a"),
        _call(3, 3, 4, "get", ""),
    ]
    assert linearize(history) is None


def test_a_name_goes_to_one() -> None:
    two = [_call(1, 0, 5, "create n", 10, 10), _call(2, 0, 5, "create n", 11, 11)]
    assert linearize(two) is None
    assert linearize([two[0], _call(2, 0, 5, "create n", "EEXIST", 11)])
    assert linearize([_call(2, 0, 5, "create n", "EEXIST", 11)]) is None


def test_an_unknown_outcome_explains_either() -> None:
    lost = _call(1, 0, inf, "create n", UNKNOWN, 10)
    assert linearize([lost, _call(2, 1, 2, "lookup n", "ENOENT"), _call(2, 3, 4, "lookup n", 10)])
    assert linearize([lost, _call(2, 1, 2, "lookup n", "ENOENT")])
    back = [lost, _call(2, 1, 2, "lookup n", 10), _call(2, 3, 4, "lookup n", "ENOENT")]
    assert linearize(back) is None


def test_renames() -> None:
    begin = State(names=(("a", 1), ("b", 2)))
    assert linearize([_call(1, 0, 1, "exchange a b", OK), _call(2, 2, 3, "lookup a", 2)], begin)
    assert (
        linearize([_call(1, 0, 1, "rename a b", OK), _call(2, 2, 3, "lookup a", 1)], begin) is None
    )
    assert linearize([_call(1, 0, 1, "noreplace a b", OK)], begin) is None
    assert linearize([_call(1, 0, 1, "noreplace a b", "EEXIST")], begin)

"""Parts of the committer that need no TiKV: parts of counters, and what workers have committed."""

from __future__ import annotations

from itertools import pairwise

from fsmeta.runtime import SystemRuntime
from fsmeta.store.contract import Commit
from fsmeta.store.tikv.counter_parts import CounterParts
from fsmeta.store.tikv.keys import PARTS
from fsmeta.store.tikv.known_workers import WORKERS_MAX, KnownWorkers

FENCE = b"s\x07"


def commit(sequence: int, worker: bytes = b"w") -> Commit:
    return Commit(checks=(), empties=(), writes=(), fence=FENCE, worker=worker, sequence=sequence)


def test_transactions_at_the_same_time_have_parts_of_their_own() -> None:
    parts = CounterParts(SystemRuntime())
    taken = {parts.take(FENCE) for _ in range(PARTS)}
    assert taken == set(range(PARTS))


def test_one_after_the_other_uses_few_parts_and_not_the_last_one() -> None:
    parts = CounterParts(SystemRuntime())
    used = []
    for _ in range(20):
        used.append(parts.take(FENCE))
        parts.give_back(used[-1])
    assert len(set(used)) == 2
    assert all(before != after for before, after in pairwise(used))


def test_a_part_that_two_transactions_share_is_spare_once() -> None:
    parts = CounterParts(SystemRuntime())
    taken = [parts.take(None) for _ in range(PARTS + 2)]
    for part in taken:
        parts.give_back(part)
    again = [parts.take(None) for _ in range(PARTS)]
    assert sorted(again) == list(range(PARTS))


def test_a_record_is_not_read_where_the_last_commit_is_known() -> None:
    known = KnownWorkers()
    assert not known.blind([commit(5)])
    known.remember(commit(5))
    assert known.blind([commit(6)]) == {(FENCE, b"w")}
    assert not known.blind([commit(5)]), "it may be the same commit once more"
    known.doubt(commit(6))
    assert not known.blind([commit(6)])


def test_workers_remembered_are_bounded() -> None:
    known = KnownWorkers()
    for number in range(WORKERS_MAX + 1):
        known.remember(commit(1, b"%d" % number))
    assert not known.blind([commit(2, b"0")])
    assert known.blind([commit(2, b"1")])

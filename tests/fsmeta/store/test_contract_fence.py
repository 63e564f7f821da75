"""The store contract on every engine: sessions end, and a commit counts once however often sent."""

from __future__ import annotations

import pytest

from fsmeta.errors import Conflict, Fenced, LimitExceeded, NotEmpty
from fsmeta.store.contract import FENCE_FIELD, Commit, Store
from fsmeta.store.writes import Append, DeleteRow, Put, Write
from tests.fsmeta.engines import Engine, add, change, dump

ROW, FENCE, OTHER_FENCE = b"tA", b"tfence\0\xff", b"tfence2"
ONE, TWO = b"w\0\1", b"w\xff\xfe"


@pytest.fixture
def store(engine: Engine) -> Store:
    opened = engine.open()
    begin = change(Put(FENCE, FENCE_FIELD, b"1"), Put(OTHER_FENCE, FENCE_FIELD, b"1"))
    opened.commit(begin)
    return opened


def _log(store: Store) -> bytes | None:
    return store.read([(ROW, b"log")])[0]


def _append(text: bytes, sequence: int, worker: bytes = ONE, fence: bytes = FENCE) -> Commit:
    grow: Write = Append(ROW, b"log", text)
    return change(grow, add(ROW, b"n", 1), fence=fence, worker=worker, sequence=sequence)


def test_without_a_session_nothing_is_committed(store: Store) -> None:
    store.commit(_append(b"a", 1))
    store.commit(change(DeleteRow(FENCE)))
    before = dump(store)
    for commit in (_append(b"b", 2), _append(b"a", 1), change(fence=FENCE, sequence=2)):
        with pytest.raises(Fenced):
            store.commit(commit)
    with pytest.raises(Fenced):  # comes before everything else
        store.commit(change(checks=[(ROW, b"log", b"?")], empties=[ROW], fence=FENCE, sequence=3))
    assert dump(store) == before
    store.commit(_append(b"c", 1, fence=OTHER_FENCE))
    assert _log(store) == b"ac"


def test_a_repeat_is_answered_and_not_applied(store: Store) -> None:
    commit = _append(b"a", 1)._replace(checks=[(ROW, b"log", None)], empties=[ROW])
    store.commit(commit)
    store.commit(commit)
    store.commit(_append(b"b", 1, worker=TWO))
    store.commit(commit)
    assert dump(store, ROW) == {ROW: {b"log": b"ab", b"n": b"2"}}


def test_a_late_duplicate_is_ignored(store: Store) -> None:
    """Regression: an older sequence of a worker tripped an assertion (or was applied on Redis)."""
    commits = [_append(b"%d" % n, n) for n in range(1, 6)]
    for n, commit in enumerate(commits):
        store.commit(commit)
        for late in commits[: n + 1]:
            store.commit(late)
    assert dump(store, ROW) == {ROW: {b"log": b"12345", b"n": b"5"}}


@pytest.mark.parametrize(
    "last", [0x7F, 0xFF, 0xFFFF, 2**31 - 1, 2**32 - 1, 2**53, 2**63, 2**64 - 2]
)
def test_sequences_compare_as_numbers(store: Store, last: int) -> None:
    store.commit(_append(b"a", last))
    store.commit(_append(b"b", last + 1))
    for stale in (last + 1, last, last - 1, 1):
        store.commit(_append(b"!", stale))
    assert _log(store) == b"ab"


def test_workers_and_sessions_count_for_themselves(store: Store) -> None:
    store.commit(_append(b"a", 9, worker=ONE))
    store.commit(_append(b"b", 1, worker=TWO))
    store.commit(_append(b"c", 1, worker=ONE, fence=OTHER_FENCE))
    store.commit(_append(b"!", 8, worker=ONE))
    assert _log(store) == b"abc"


def test_a_refused_commit_is_not_remembered(store: Store) -> None:
    """Sent again it is judged again: its answer was a refusal the first time too."""
    store.commit(change(Put(ROW, b"log", b"x")))
    refused: list[tuple[Commit, type[Exception]]] = [
        (_append(b"!", 1)._replace(checks=[(ROW, b"log", b"y")]), Conflict),
        (_append(b"!", 1)._replace(empties=[ROW]), NotEmpty),
        (_append(b"!", 1)._replace(writes=[add(ROW, b"m", 2, 1, "ENOSPC")]), LimitExceeded),
    ]
    for commit, error in refused:
        for _ in range(2):
            with pytest.raises(error):
                store.commit(commit)
    store.commit(_append(b"a", 1)._replace(checks=[(ROW, b"log", b"x")]))
    assert _log(store) == b"xa"


def test_a_commit_of_checks_alone_is_always_judged(store: Store) -> None:
    """It changes nothing, so it neither uses up a sequence nor is answered from memory."""
    store.commit(_append(b"a", 5))
    for sequence in (4, 5, 6):
        store.commit(change(checks=[(ROW, b"log", b"a")], fence=FENCE, sequence=sequence))
        with pytest.raises(Conflict):
            store.commit(change(checks=[(ROW, b"log", b"b")], fence=FENCE, sequence=sequence))
    store.commit(_append(b"b", 6))
    assert _log(store) == b"ab"


def test_a_session_can_end_itself(store: Store) -> None:
    store.commit(change(DeleteRow(FENCE), Put(ROW, b"log", b"bye"), fence=FENCE, sequence=1))
    with pytest.raises(Fenced):
        store.commit(_append(b"!", 2))
    assert _log(store) == b"bye"

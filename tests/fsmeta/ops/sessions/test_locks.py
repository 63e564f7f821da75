"""P3: locks on every engine: what each request does, order, hand-over, deadlocks, dead sessions."""

from __future__ import annotations

import errno
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from fsmeta.errors import Fenced
from fsmeta.meta.locks import LockTicket, Range
from fsmeta.meta.meta import Meta
from fsmeta.ops.sessions import lock
from fsmeta.ops.sessions.lock import LockOutcome
from fsmeta.schema.locks import Kind, LockRecord, Owner
from fsmeta.store.contract import Applied, Commit
from fsmeta.types import ROOT_CALLER, ROOT_INO, Attr, Ino, SessionId, SetAttr
from tests.fsmeta.engines import Engine
from tests.support.waiting import wait_until

READ, WRITE = Range(False), Range(True)
GRANTED, QUEUED, REFUSED = LockOutcome.GRANTED, LockOutcome.QUEUED, LockOutcome.REFUSED
P, F = Kind.POSIX, Kind.FLOCK


def _file(meta: Meta, name: bytes = b"file") -> Ino:
    return meta.create(ROOT_CALLER, ROOT_INO, name, 0o100644).ino


def _over(meta: Meta, *tickets: int) -> set[int]:
    meta.cache.drop([meta.locks.news_row()])  # the news may still be on its way
    return set(meta.locks.granted(dict.fromkeys(tickets, ROOT_INO)))


def _ranges(meta: Meta, ino: Ino, kind: Kind = P) -> list[tuple[int, int, int, bool]]:
    return [
        (o.id, begin, end, write) for o, _, write, begin, end in meta.locks.locks_of(ino, kind)[0]
    ]


def _of_session(meta: Meta, session: SessionId) -> list[tuple[Ino, Kind, int, int]]:
    """Where a session has locks: how many it holds, and for how many it waits."""
    found = []
    for ino, kind in meta.transactor.view(lambda txn: lock.places(txn, session)):
        held, queue = meta.locks.locks_of(ino, kind)
        mine = sum(each.owner.session == session for each in held)
        waits = sum(each.lock.owner.session == session for each in queue)
        found.append((ino, kind, mine, waits))
    return found


def test_ranges_split_and_join(engine: Engine) -> None:
    meta = engine.meta()
    ino = _file(meta)

    def ask(owner: int, begin: int, end: int, write: bool) -> LockOutcome:
        return meta.locks.setlk(ino, P, owner, Range(write, begin, end)).outcome

    assert ask(1, 0, 100, True) is GRANTED
    assert meta.locks.unlock(ino, P, 1, 40, 60)
    assert _ranges(meta, ino) == [(1, 0, 40, True), (1, 60, 100, True)]
    assert ask(1, 30, 70, False) is GRANTED
    assert _ranges(meta, ino) == [(1, 0, 30, True), (1, 30, 70, False), (1, 70, 100, True)]
    assert ask(2, 30, 70, False) is GRANTED
    assert ask(2, 29, 70, False) is REFUSED
    assert ask(1, 0, 100, True) is REFUSED
    assert not meta.locks.unlock(ino, P, 2)
    assert ask(1, 30, 70, True) is GRANTED
    assert _ranges(meta, ino) == [(1, 0, 100, True)]
    assert meta.locks.getlk(ino, 1, WRITE) is None
    assert meta.session is not None
    barring = LockRecord(Owner(meta.session.id, 1), 0, True, 0, 100)
    assert meta.locks.getlk(ino, 2, Range(False, 99, 200)) == barring
    assert meta.locks.getlk(ino, 2, Range(False, 100, 200)) is None
    assert not meta.locks.unlock(ino, P, 1)
    assert _of_session(meta, meta.session.id) == []


def test_kinds_do_not_meet_and_flock_replaces(engine: Engine) -> None:
    """flock(2): a conversion that fails loses what there was, as in Linux."""
    one, two = engine.meta(), engine.meta()
    ino = _file(one)
    assert one.locks.setlk(ino, P, 1, WRITE).outcome is GRANTED
    assert one.locks.setlk(ino, F, 2, READ).outcome is GRANTED
    assert two.locks.setlk(ino, F, 2, READ).outcome is GRANTED
    assert one.locks.setlk(ino, F, 2, READ).outcome is GRANTED
    assert one.locks.setlk(ino, F, 2, WRITE).outcome is REFUSED
    assert two.locks.setlk(ino, F, 2, WRITE).outcome is GRANTED
    assert one.locks.setlk(ino, F, 2, READ).outcome is REFUSED
    assert two.locks.setlk(ino, F, 2, READ).outcome is GRANTED
    assert one.locks.setlk(ino, F, 2, READ).outcome is GRANTED
    for meta in (one, two):
        meta.locks.unlock(ino, F, 2)
        meta.locks.unlock(ino, P, 1)


def test_handed_over_in_order(engine: Engine) -> None:
    """A writer comes before readers that came later; both readers get it together."""
    first, others = engine.meta(), [engine.meta() for _ in range(4)]
    ino = _file(first)
    assert first.locks.setlk(ino, F, 1, READ).outcome is GRANTED
    wants = [WRITE, READ, READ, WRITE]
    for at, (meta, want) in enumerate(zip(others, wants, strict=True)):
        assert meta.locks.setlk(ino, F, 1, want, ticket=LockTicket(at + 1)).outcome is QUEUED
    assert not any(_over(meta, 1, 2, 3, 4) for meta in others)
    first.locks.unlock(ino, F, 1)
    assert [_over(meta, 1, 2, 3, 4) for meta in others] == [{1}, set(), set(), set()]
    others[0].locks.unlock(ino, F, 1)
    assert [_over(meta, 2, 3, 4) for meta in others[1:]] == [{2}, {3}, set()]
    others[2].locks.unlock(ino, F, 1)
    assert _over(others[3], 4) == set()
    assert others[1].locks.cancel(ino, F, [2]) == {2}
    others[1].locks.unlock(ino, F, 1)
    assert _over(others[3], 4) == {4}
    others[3].locks.unlock(ino, F, 1)


def test_who_gives_up_waiting_lets_others_go(engine: Engine) -> None:
    one, two, three = (engine.meta() for _ in range(3))
    ino = _file(one)
    assert one.locks.setlk(ino, P, 1, READ).outcome is GRANTED
    assert two.locks.setlk(ino, P, 1, WRITE, ticket=LockTicket(7)).outcome is QUEUED
    assert three.locks.setlk(ino, P, 1, READ, ticket=LockTicket(8)).outcome is QUEUED
    assert two.locks.cancel(ino, P, [7]) == set()
    assert _over(three, 8) == {8}
    assert one.locks.setlk(ino, P, 2, READ, ticket=LockTicket(9)).outcome is GRANTED
    for meta, owner in ((one, 1), (one, 2), (three, 1)):
        meta.locks.unlock(ino, P, owner)


def test_who_holds_some_does_not_wait_behind_its_own_waiters(engine: Engine) -> None:
    one, two = engine.meta(), engine.meta()
    ino = _file(one)
    assert one.locks.setlk(ino, P, 1, Range(False, 0, 10)).outcome is GRANTED
    assert two.locks.setlk(ino, P, 1, WRITE, ticket=LockTicket(1)).outcome is QUEUED
    assert one.locks.setlk(ino, P, 1, Range(False, 10, 20), ticket=LockTicket(1)).outcome is GRANTED
    one.locks.unlock(ino, P, 1)
    assert _over(two, 1) == {1}
    two.locks.unlock(ino, P, 1)


def test_a_ring_of_three_over_three_files_is_a_deadlock(engine: Engine) -> None:
    metas = [engine.meta() for _ in range(3)]
    inos = [_file(metas[0], b"f%d" % at) for at in range(3)]
    for meta, ino in zip(metas, inos, strict=True):
        assert meta.locks.setlk(ino, P, 5, WRITE).outcome is GRANTED
    assert metas[0].locks.setlk(inos[1], P, 5, WRITE, ticket=LockTicket(1)).outcome is QUEUED
    assert metas[1].locks.setlk(inos[2], P, 5, WRITE, ticket=LockTicket(1)).outcome is QUEUED
    with pytest.raises(OSError, match="wait for another one") as caught:
        metas[2].locks.setlk(inos[0], P, 5, WRITE, ticket=LockTicket(1))
    assert caught.value.errno == errno.EDEADLK
    # another owner of that session is not in the ring
    assert metas[2].locks.setlk(inos[0], P, 6, WRITE, ticket=LockTicket(2)).outcome is QUEUED
    metas[2].locks.unlock(inos[2], P, 5)
    assert _over(metas[1], 1) == {1}
    metas[1].locks.unlock(inos[1], P, 5)
    assert _over(metas[0], 1) == {1}
    metas[0].locks.unlock(inos[0], P, 5)
    assert _over(metas[2], 2) == {2}


def test_of_two_that_would_close_a_ring_together_one_is_told(engine: Engine) -> None:
    one, two = engine.meta(), engine.meta()
    for turn in range(5):
        a, b = _file(one, b"a%d" % turn), _file(one, b"b%d" % turn)
        assert one.locks.setlk(a, P, 1, WRITE).outcome is GRANTED
        assert two.locks.setlk(b, P, 1, WRITE).outcome is GRANTED

        def wait(meta: Meta, ino: Ino, ticket: int) -> str:
            try:
                return meta.locks.setlk(ino, P, 1, WRITE, ticket=LockTicket(ticket)).outcome.name
            except OSError as error:
                assert error.errno == errno.EDEADLK
                return "EDEADLK"

        with ThreadPoolExecutor(2) as pool:
            asked = [pool.submit(wait, one, b, turn + 1), pool.submit(wait, two, a, turn + 1)]
            assert sorted(each.result() for each in asked) == ["EDEADLK", "QUEUED"], turn
        for meta in (one, two):
            meta.locks.unlock(a, P, 1)
            meta.locks.unlock(b, P, 1)
        for meta in (one, two):
            meta.locks.unlock(a, P, 1)
            meta.locks.unlock(b, P, 1)


def test_a_session_that_ends_gives_up_its_locks(engine: Engine) -> None:
    """By its own hand or by another's; whoever waits for it goes on."""
    for own in (True, False):
        one, two = engine.meta(), engine.meta()
        assert one.session is not None
        inos = [_file(two, b"%d%d" % (own, at)) for at in range(3)]
        for ino in inos:
            assert one.locks.setlk(ino, P, 1, WRITE).outcome is GRANTED
            assert two.locks.setlk(ino, P, 1, WRITE, ticket=LockTicket(ino)).outcome is QUEUED
        assert one.locks.setlk(inos[0], F, 1, WRITE).outcome is GRANTED
        assert len(_of_session(one, one.session.id)) == 4
        assert (inos[0], F, 1, 0) in _of_session(two, one.session.id)
        ended = one.session.id
        if own:
            one.sessions.close()
        else:
            two.sessions.end(ended)
            two.sessions.end(ended)  # nothing is left to be done
        assert _over(two, *inos) == set(inos)
        assert two.locks.locks_of(inos[0], F) == ([], [])
        assert _of_session(two, ended) == []
        assert ended not in [each.id for each in two.sessions.all()]
        for ino in inos:
            two.locks.unlock(ino, P, 1)
        two.sessions.close()


@pytest.mark.parametrize("engine", ["redis", "mem"], indirect=True)
def test_news_of_a_lock_come_by_themselves(engine: Engine) -> None:
    one, two = engine.meta(), engine.meta()
    ino = _file(one)
    assert one.locks.setlk(ino, F, 1, WRITE).outcome is GRANTED
    assert two.locks.setlk(ino, F, 1, WRITE, ticket=LockTicket(3)).outcome is QUEUED
    assert two.locks.granted({3: ino}) == {}
    assert two.locks.is_told()
    heard: list[bytes] = []
    two.on_change(lambda rows: heard.extend(rows or ()))
    one.locks.unlock(ino, F, 1)
    wait_until(lambda: two.locks.news_row() in heard)
    assert not two.locks.is_told()
    assert two.locks.granted({3: ino}) == {3: one.getattr(ROOT_CALLER, ino)}
    two.locks.unlock(ino, F, 1)


@pytest.mark.parametrize("engine", ["redis"], indirect=True)
def test_a_lock_is_one_round_trip(engine: Engine) -> None:
    """Taken, given up and taken again; also the first time, also in a file that others had."""
    one, two = engine.meta(), engine.meta()
    ino = _file(one)
    one.getattr(ROOT_CALLER, ino)

    def cost(verb: Callable[..., object], *args: object, **named: object) -> int:
        before = one.store.round_trips
        verb(*args, **named)
        return one.store.round_trips - before

    for kind in (P, F):
        assert cost(one.locks.setlk, ino, kind, 1, WRITE, guess=True) == 1
        assert cost(one.locks.unlock, ino, kind, 1) == 1
        assert cost(one.locks.setlk, ino, kind, 1, WRITE, guess=True) == 1
        assert cost(one.locks.setlk, ino, kind, 1, READ, guess=True) == 1
        assert cost(one.locks.unlock, ino, kind, 1) == 1
    two.locks.setlk(ino, P, 1, WRITE)
    two.locks.unlock(ino, P, 1)
    wait_until(lambda: cost(one.locks.setlk, ino, P, 1, WRITE, guess=True) == 1)
    two.locks.setlk(ino, P, 1, WRITE, ticket=LockTicket(1))
    assert cost(one.locks.unlock, ino, P, 1) <= 3
    assert _over(two, 1) == {1}
    two.locks.unlock(ino, P, 1)


def _before_commits(
    monkeypatch: pytest.MonkeyPatch, meta: Meta, act: Callable[[int], object], times: int = 1
) -> None:
    """`act` happens before each of the next commits of `meta`, and is told which it is, from 1."""
    real, turns = meta.transactor.store.commit, iter(range(1, times + 1))

    def commit(wanted: Commit) -> Applied | None:
        turn = next(turns, 0)
        if turn:
            act(turn)
        return real(wanted)

    monkeypatch.setattr(meta.transactor.store, "commit", commit)


def test_a_lock_that_was_lent_meanwhile_brings_what_its_owner_left(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the read of the locks and the commit, which then finds them as they were."""
    meta, other = engine.meta(), engine.meta()
    ino = _file(meta)
    sizes: list[int] = []

    def lend(size: int) -> None:
        sizes.append(size)
        assert other.locks.setlk(ino, P, 1, WRITE).outcome is GRANTED
        other.setattr(ROOT_CALLER, ino, SetAttr(size=size))
        other.locks.unlock(ino, P, 1)

    _before_commits(monkeypatch, meta, lend, 2)
    answer = meta.locks.setlk(ino, P, 2, WRITE, guess=True)
    assert sizes == [1, 2], "the first attempt was to fail"
    assert answer.outcome is GRANTED
    assert answer.attr is not None
    assert answer.attr.size == 2
    meta.locks.unlock(ino, P, 2)


def test_a_session_that_ended_behind_the_grant_has_no_lock(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host was suspended while it asked what the file is now; another client has the lock."""
    meta, other = engine.meta(), engine.meta()
    ino = _file(meta)

    def suspended(ino: Ino) -> Attr:
        assert meta.session is not None
        ended = meta.session.id
        other.sessions.end(ended)
        assert other.locks.setlk(ino, P, 1, WRITE).outcome is GRANTED
        meta.sessions.open({"host": "test"}, ended)
        return meta.getattr(ROOT_CALLER, ino)

    _before_commits(monkeypatch, meta, lambda _: other.setattr(ROOT_CALLER, ino, SetAttr(size=1)))
    monkeypatch.setattr(meta.locks, "_read_attr", suspended)
    with pytest.raises(Fenced):
        meta.locks.setlk(ino, P, 2, WRITE, guess=True)


def test_a_lock_of_a_file_that_is_gone_is_not_kept(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    meta, other = engine.meta(), engine.meta()
    ino = _file(meta)

    def purged(ino: Ino) -> Attr:
        raise OSError(errno.ESTALE, f"inode {ino} is gone")

    _before_commits(monkeypatch, meta, lambda _: other.setattr(ROOT_CALLER, ino, SetAttr(size=1)))
    monkeypatch.setattr(meta.locks, "_read_attr", purged)
    with pytest.raises(OSError, match="gone"):
        meta.locks.setlk(ino, P, 2, WRITE, guess=True)
    assert _ranges(other, ino) == []

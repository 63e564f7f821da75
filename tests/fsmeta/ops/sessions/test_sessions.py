"""Sessions: what a beat costs, copies of a client, clocks that jump, two who clean up at once."""

from __future__ import annotations

import copy
import threading
import time
from functools import partial

import pytest

from fsclient.background.leadership import LEASE_S, Watch
from fsmeta.errors import Fenced, StoreRolledBack, Unavailable
from fsmeta.meta.locks import LockTicket, Range
from fsmeta.meta.meta import Meta
from fsmeta.ops.sessions.lock import LockOutcome
from fsmeta.ops.sessions.session import fence_off
from fsmeta.runtime import SystemRuntime
from fsmeta.schema.locks import Kind
from fsmeta.store.contract import Commit
from fsmeta.store.writes import DeleteRow
from fsmeta.types import ROOT_CALLER, ROOT_INO, Ino, SessionId
from tests.fsmeta.engines import Engine, change, dump

MANY = 2000
WRITE = Range(True)


class Jumpy(SystemRuntime):
    """A clock on the wall that somebody sets."""

    def __init__(self) -> None:
        super().__init__()
        self.jump_ns = 0
        self.now_ns = lambda: time.time_ns() + self.jump_ns


def _id(meta: Meta) -> SessionId:
    assert meta.session is not None
    return meta.session.id


def _file(meta: Meta, name: bytes) -> Ino:
    return meta.create(ROOT_CALLER, ROOT_INO, name, 0o100644).ino


def test_a_session_leaves_nothing_behind(engine: Engine) -> None:
    meta = engine.meta()
    _file(meta, b"file")
    assert dump(engine.first, b"s")
    meta.sessions.close()
    assert dump(engine.first, b"s") == {}
    assert engine.meta().sessions.all()[0].id > 1


@pytest.mark.parametrize("engine", ["redis"], indirect=True)
def test_a_beat_is_one_round_trip(engine: Engine) -> None:
    meta = engine.meta()
    meta.sessions.beat(0)
    for verb in (
        lambda: meta.sessions.beat(0),
        meta.sessions.round_and_floor,
        lambda: meta.deletion.leader(_id(meta)),
    ):
        before = meta.store.round_trips
        verb()
        assert meta.store.round_trips - before == 1
    assert meta.deletion.take_lead()
    before = meta.store.round_trips
    assert meta.deletion.leader(_id(meta)) == meta.session
    assert meta.store.round_trips - before == 1


def test_a_copy_of_a_client_is_noticed(engine: Engine) -> None:
    """A cloned machine, or somebody's invention: whoever notices ends the session for both."""
    meta, twin = engine.meta(), engine.meta()
    meta.sessions.beat(0)
    own, shared = _id(twin), _id(meta)
    twin.sessions.own = copy.copy(meta.session)
    twin.transactor.fence = meta.transactor.fence
    meta.sessions.beat(0)
    with pytest.raises(Fenced, match="copy of this one"):
        twin.sessions.round_and_floor()  # its commits would pass for repeats
    assert [each.id for each in meta.sessions.all()] == [own]
    for client in (meta, twin):
        with pytest.raises(Fenced):
            _file(client, b"not any more")
    meta.sessions.open({"host": "anew"}, ended=shared)
    meta.sessions.beat(0)
    if engine.name in (
        "redis",
        "cluster",
    ):  # it can't prove that all that was stored was its own doing
        with pytest.raises(StoreRolledBack):
            twin.sessions.open({"host": "anew"}, ended=shared)
    else:
        twin.sessions.open({"host": "anew"}, ended=shared)
        twin.sessions.beat(0)
    meta.sessions.end(own)


def test_a_beat_whose_answer_is_lost_is_no_copy(engine: Engine) -> None:
    """It may have been applied or not; either way the next one goes on."""
    meta = engine.meta()
    apply = meta.store.commit
    for apply_first in (True, False):

        def lose(commit: Commit, apply_first: bool = apply_first) -> None:
            if apply_first:
                apply(commit)
            raise Unavailable("the line is dead")

        meta.store.commit = lose  # type: ignore[method-assign]
        meta.transactor._deadline_s = 0.0
        with pytest.raises(Unavailable):
            meta.sessions.beat(0)
        meta.store.commit = apply  # type: ignore[method-assign]
        meta.transactor._deadline_s = 10.0
        meta.sessions.beat(0)
        meta.sessions.beat(0)


def test_clocks_may_jump(engine: Engine) -> None:
    """No decision hangs on them: beats go on, locks stay, nobody is taken for dead."""
    runtime = Jumpy()
    meta, other = Meta(engine.open(), runtime, deadline_s=10), engine.meta()
    meta.sessions.open({"host": "jumpy"})
    ino = _file(other, b"file")
    assert meta.locks.setlk(ino, Kind.POSIX, 1, WRITE).outcome is LockOutcome.GRANTED
    watch = Watch(time.monotonic, LEASE_S)
    for days in (0, 400, -400, 0):
        runtime.jump_ns = days * 86400 * 10**9
        meta.sessions.beat(0)
        assert watch.dead(other.sessions.all()) == []
        assert other.locks.setlk(ino, Kind.POSIX, 1, WRITE).outcome is LockOutcome.REFUSED
    meta.locks.unlock(ino, Kind.POSIX, 1)


def test_two_clean_up_at_once(engine: Engine) -> None:
    """Each step is done once or twice; one that dies half way leaves the rest to the other."""
    one, two = engine.meta(), engine.meta()
    for turn in range(4):
        dead = engine.meta()
        inos = [_file(dead, b"%d-%d" % (turn, at)) for at in range(8)]
        for ino in inos:
            assert dead.locks.setlk(ino, Kind.POSIX, 1, WRITE).outcome is LockOutcome.GRANTED
            assert (
                two.locks.setlk(ino, Kind.POSIX, 1, WRITE, ticket=LockTicket(ino)).outcome
                is LockOutcome.QUEUED
            )
        if turn == 3:  # somebody has begun, and died
            gone = _id(dead)
            one.transactor.run(partial(fence_off, sid=gone))
            one.locks.release_session(gone, one.transactor)
        ends = [threading.Thread(target=m.sessions.end, args=(_id(dead),)) for m in (one, two)]
        for thread in ends:
            thread.start()
        for thread in ends:
            thread.join()
        assert [each.id for each in one.sessions.all()] == [_id(one), _id(two)]
        two.cache.drop([two.locks.news_row()])
        assert two.locks.granted({ino: ino for ino in inos}).keys() == set(inos)
        with pytest.raises(Fenced):
            dead.locks.setlk(_file(two, b"free%d" % turn), Kind.POSIX, 1, WRITE)
        for ino in inos:
            two.locks.unlock(ino, Kind.POSIX, 1)


def test_belongings(engine: Engine) -> None:
    one, two = engine.meta(), engine.meta()
    ino, gone = _file(one, b"locked"), _file(one, b"gone")
    one.locks.setlk(ino, Kind.FLOCK, 1, WRITE)
    one.unlink(ROOT_CALLER, ROOT_INO, b"gone")
    one.deletion.hold_orphans([gone])
    found = two.sessions.belongings([_id(one), _id(two)])
    assert found[_id(one)] == ([gone], [(ino, Kind.FLOCK)])
    assert found[_id(two)] == ([], [])
    one.deletion.release_orphans([gone])
    one.locks.unlock(ino, Kind.FLOCK, 1)
    one.deletion.purge([gone])


@pytest.mark.parametrize("engine", ["redis"], indirect=True)
def test_thousands_of_sessions(engine: Engine) -> None:
    """A beat costs the same however many there are; who looks at all does so in few requests."""
    meta = engine.meta()
    others = []
    for _ in range(MANY):
        meta.sessions.open({"host": "h", "pid": 1, "mountpoint": "/mnt/volume", "python": "3.11"})
        others.append(_id(meta))
    began = time.monotonic()
    for _ in range(200):
        meta.sessions.beat(0)
    beat_s = (time.monotonic() - began) / 200
    before, began = meta.store.round_trips, time.monotonic()
    records = meta.sessions.all()
    has = meta.sessions.belongings([each.id for each in records])
    took = time.monotonic() - began
    assert len(records) == len(has) == MANY + 1
    assert meta.store.round_trips - before <= 3 + 2 * (1 + MANY // 200)
    print(f"{MANY} sessions: a beat {beat_s * 1e6:.0f} µs, a look at all {took * 1e3:.0f} ms")
    for sid in others[:-1]:
        meta.sessions.end(sid)


def test_another_volume_in_its_place_is_not_joined(engine: Engine) -> None:
    """Who was cut off when a volume was destroyed and made anew went on in the new one, with the
    block size and the key of the old one.
    """
    meta = engine.meta()
    with engine.first.everything() as records:
        rows = {record[0] for record in records}
    engine.first.commit(change(*[DeleteRow(row) for row in rows]))
    engine.format()
    ended = _id(meta)
    with pytest.raises((Fenced, StoreRolledBack)):
        meta.sessions.beat(0)
    with pytest.raises(StoreRolledBack):
        meta.sessions.open({"host": "anew"}, ended=ended)
    with pytest.raises(StoreRolledBack):
        _file(meta, b"file")
    assert engine.meta().sessions.all()[0].id == 1

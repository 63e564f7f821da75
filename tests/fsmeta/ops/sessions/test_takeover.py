"""A process takes over the session of one that has died, whose late commits change nothing."""

from __future__ import annotations

import pytest

from fsmeta.errors import Fenced
from fsmeta.meta.locks import Range
from fsmeta.meta.meta import Meta
from fsmeta.ops.sessions.lock import LockOutcome
from fsmeta.schema import keys
from fsmeta.schema.locks import Kind
from fsmeta.store.contract import Applied, Commit, Store
from fsmeta.store.redis.engine import RedisStore
from fsmeta.store.writes import Put
from fsmeta.types import ROOT_CALLER, ROOT_INO, Ino
from tests.fsmeta.engines import RUNTIME, Engine

TOKEN = 77


class Recorder:
    """What a client has committed last."""

    def __init__(self, store: Store) -> None:
        self.last: Commit
        self._commit = store.commit

    def commit(self, commit: Commit) -> Applied | None:
        """See `Store`."""
        self.last = commit
        return self._commit(commit)


def client(engine: Engine, generation: int) -> tuple[Meta, Store, Recorder]:
    """One of the processes that have the same session after each other."""
    store = (
        engine.open() if engine.name != "redis" else RedisStore(engine.url, RUNTIME, None, TOKEN)
    )
    recorder = Recorder(store)
    store.commit = recorder.commit  # type: ignore[method-assign]
    return Meta(store, RUNTIME, generation=generation), store, recorder


def make(meta: Meta, name: bytes) -> Ino:
    return meta.create(ROOT_CALLER, ROOT_INO, name, 0o100644).ino


@pytest.mark.parametrize("engine", ["mem", "sqlite", "redis", "tikv"], indirect=True)
def test_taken_over(engine: Engine) -> None:
    old, old_store, recorder = client(engine, 1)
    session = old.sessions.open({"host": "old"})
    ino = make(old, b"file")
    assert old.locks.setlk(ino, Kind.POSIX, 5, Range(True)).outcome is LockOutcome.GRANTED
    make(old, b"answered")
    applied = recorder.last
    new, new_store, _ = client(engine, 2)
    workers = new.sessions.take_over(session.id, old.format.uuid, {"host": "new"})
    assert workers[applied.worker] >= applied.sequence
    knows = {"metadata_version": keys.METADATA_VERSION}
    assert [each.info for each in new.sessions.all()] == [{"host": "new", **knows}]
    assert new.locks.getlk(ino, 6, Range(True)) is not None  # the lock is held still
    new.unlink(ROOT_CALLER, ROOT_INO, b"answered")
    old_store.commit(applied)  # a repeat that was long on its way
    with pytest.raises(FileNotFoundError):
        new.lookup(ROOT_CALLER, ROOT_INO, b"answered")
    if engine.name != "tikv":  # there only a transaction that has begun before meets the takeover
        make(old, b"late")  # passes for a repeat
        with pytest.raises(FileNotFoundError):
            new.lookup(ROOT_CALLER, ROOT_INO, b"late")
    make(new, b"more")
    new.sessions.beat(0)
    new.locks.unlock(ino, Kind.POSIX, 5)
    new.sessions.close()
    for store in (old_store, new_store):
        store.close()


@pytest.mark.parametrize("engine", ["mem", "sqlite", "redis", "tikv"], indirect=True)
def test_a_process_that_dies_while_it_takes_over(engine: Engine) -> None:
    """The one after it learns what the dead ones have committed, and not what was put above it."""
    old, old_store, recorder = client(engine, 1)
    session = old.sessions.open({})
    make(old, b"applied")
    applied = recorder.last
    never = applied._replace(sequence=applied.sequence + 1)
    asked = {applied.worker}
    stores = [old_store]
    for generation in (2, 3, 4):
        new, store, _ = client(engine, generation)
        stores.append(store)
        workers = new.sessions.take_over(session.id, old.format.uuid, {}, asked)
        assert applied.sequence <= workers[applied.worker] < never.sequence
        if engine.name != "tikv":  # as above
            old_store.commit(never)  # passes for a repeat
    put = Put(b"tlate", b"x", b"1")
    late = applied._replace(sequence=9 << 40, writes=[put], checks=[], empties=[], glances=())
    new.store.commit(late)  # the worker's number is used again, by a later client
    again, store, _ = client(engine, 5)
    stores.append(store)
    workers = again.sessions.take_over(session.id, old.format.uuid, {}, asked)
    assert workers[applied.worker] == late.sequence, "what was kept of an earlier one is no answer"
    row = keys.session_row(session.id)
    beside = keys.taken_over_field(applied.worker)
    assert beside in again.store.read_rows([row])[0]
    last, store, _ = client(engine, 6)
    stores.append(store)
    last.sessions.take_over(session.id, old.format.uuid, {})
    assert beside not in last.store.read_rows([row])[0]
    last.sessions.close()
    for store in stores:
        store.close()


@pytest.mark.parametrize("engine", ["mem", "sqlite", "redis"], indirect=True)
def test_ended_by_others(engine: Engine) -> None:
    """A session that others have ended is not taken over; the process joins anew."""
    old, old_store, _ = client(engine, 1)
    session = old.sessions.open({})
    make(old, b"file")
    other = engine.meta()
    other.sessions.end(session.id)
    new, new_store, _ = client(engine, 2)
    with pytest.raises(Fenced):
        new.sessions.take_over(session.id, old.format.uuid, {})
    assert new.sessions.open({}, session.id).id > session.id
    make(new, b"other")
    new.sessions.close()
    other.sessions.close()
    for store in (old_store, new_store):
        store.close()

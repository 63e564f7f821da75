"""M1: Redis goes on from an older state. Who was told what it has forgotten stops writing."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fsmeta.errors import Fenced, StoreError, StoreRolledBack
from fsmeta.meta.ids.id_allocator import INO_BATCH
from fsmeta.meta.meta import Meta
from fsmeta.ops.sessions.session import ENDED_MAX
from fsmeta.schema import keys
from fsmeta.store.redis.engine import RedisStore
from fsmeta.store.writes import Put
from fsmeta.types import ROOT_CALLER, ROOT_INO, Attr
from tests.conftest import assert_clean
from tests.fsmeta.engines import RUNTIME, change, make_volume
from tests.support.redis_server import RedisServer


class Past:
    """A volume on a Redis that can be put back to how it was."""

    def __init__(self, folder: Path) -> None:
        self._dump = folder / "dump.rdb"
        self._kept = folder / "kept.rdb"
        self.server = RedisServer(folder)
        self.server.start()
        self._stores: list[RedisStore] = []
        make_volume(self.store(), RUNTIME)

    def store(self) -> RedisStore:
        self._stores.append(RedisStore(self.server.url(), RUNTIME))
        return self._stores[-1]

    def meta(self, rolled_back: Callable[[StoreRolledBack], object] = bool) -> Meta:
        """A client with a session."""
        meta = Meta(self.store(), RUNTIME, deadline_s=10, rolled_back=rolled_back)
        meta.sessions.open({"host": "test"})
        return meta

    def keep(self) -> None:
        """Take a backup."""
        self.server.ask("SAVE")
        shutil.copy(self._dump, self._kept)

    def restart(self) -> None:
        """Start anew with all that there was."""
        self.server.ask("SAVE")
        self.server.stop()
        self.server.start()

    def go_back(self) -> None:
        """Restore the backup."""
        self.server.stop()
        shutil.copy(self._kept, self._dump)
        self.server.start()

    def close(self) -> None:
        closing = [threading.Thread(target=store.close) for store in self._stores]
        for thread in closing:
            thread.start()
        self.server.ask("CLIENT", "KILL", "TYPE", "pubsub")
        for thread in closing:
            thread.join()
        store = RedisStore(self.server.url(), RUNTIME)
        assert_clean(store)
        store.close()
        self.server.stop()


@pytest.fixture
def past(tmp_path: Path) -> Iterator[Past]:
    if not RedisServer.is_installed():
        pytest.skip("needs redis-server")
    made = Past(tmp_path)
    yield made
    made.close()


def _make(meta: Meta, name: bytes) -> Attr:
    return meta.create(ROOT_CALLER, ROOT_INO, name, 0o100644)


def _names(meta: Meta) -> set[bytes]:
    meta.cache.forget()
    return {entry.name for entry in meta.names(ROOT_INO)[0]}


def _is_stopped(meta: Meta) -> None:
    """It writes nothing any more, whoever asks, and reads on."""
    with pytest.raises(StoreRolledBack):
        _make(meta, b"refused")
    with pytest.raises(StoreRolledBack):
        meta.sessions.beat(0)
    with pytest.raises(StoreRolledBack):
        meta.setxattr(ROOT_CALLER, ROOT_INO, b"user.x", b"y")
    assert b"refused" not in _names(meta)
    assert meta.getattr(ROOT_CALLER, ROOT_INO).is_dir


def test_a_restart_that_lost_nothing_stops_nobody(past: Past) -> None:
    meta = past.meta()
    _make(meta, b"before")
    for n in range(3):
        past.restart()
        _make(meta, b"%d" % n)
    assert _names(meta) == {b"before", b"0", b"1", b"2"}


def test_who_was_told_what_is_lost_stops(past: Past) -> None:
    told: list[StoreError] = []
    one, two = past.meta(told.append), past.meta()
    _make(one, b"kept")
    _make(two, b"kept too")
    past.keep()
    _make(one, b"lost")
    past.go_back()
    with pytest.raises(StoreRolledBack, match="gone back to an older state"):
        _make(one, b"refused")
    _is_stopped(one)
    assert len(told) == 1
    _make(two, b"of who lost nothing")
    assert _names(two) == {b"kept", b"kept too", b"of who lost nothing"}


def test_another_worker_s_loss_counts(past: Past) -> None:
    """Each thread commits as a worker of its own; one that lost nothing must stop, too."""
    meta = past.meta()
    idle = meta.transactor._idle
    _make(meta, b"first")
    first = idle.pop()
    _make(meta, b"second")  # by another worker
    past.keep()
    second = idle.pop()
    idle.append(first)
    _make(meta, b"lost")
    idle[:] = [second]
    past.go_back()
    _is_stopped(meta)


def test_numbers_of_a_lost_batch_are_not_handed_out_again(past: Past) -> None:
    """Nor do two restores of one backup hand out the same."""
    handed: set[int] = set()
    past.keep()
    for _ in range(3):
        one, two = past.meta(), past.meta()
        inos = {
            _make(meta, b"%d%d" % (n, m)).ino for n, meta in enumerate((one, two)) for m in (1, 2)
        }
        slices = {meta.new_slice_id() for meta in (one, two)}
        batches = {ino // INO_BATCH for ino in inos}
        assert len(inos) == 4
        assert len(slices) == 2
        assert len(batches) >= 2
        assert not handed & (inos | slices)
        handed |= inos | slices
        past.go_back()
        for meta in (one, two):
            with pytest.raises((Fenced, StoreRolledBack)):
                _make(meta, b"refused")


def test_a_restart_during_a_batch_takes_another(past: Past) -> None:
    """What was answered before it may be lost, and be in the batch of somebody else."""
    meta = past.meta()
    seen: list[bytes] = []
    asked = meta.store.history.store_epoch

    def store_epoch() -> bytes:
        if len(seen) == 1:
            past.restart()
        seen.append(asked())
        return seen[-1]

    meta.store.history.store_epoch = store_epoch  # type: ignore[method-assign]
    ino = _make(meta, b"file").ino
    assert len(set(seen)) == 2
    assert ino > 1 << 40


def test_everything_is_gone(past: Past) -> None:
    """FLUSHALL: a session that is gone and left no proof was not ended by others."""
    meta = past.meta()
    _make(meta, b"lost")
    past.keep()
    past.server.ask("FLUSHALL")
    with pytest.raises(Fenced):
        meta.sessions.beat(0)
    assert meta.session is not None
    with pytest.raises(StoreRolledBack, match="does not know that session 1 "):
        meta.sessions.open({}, meta.session.id)
    assert past.server.ask("DBSIZE") == 0
    past.go_back()


def test_who_was_ended_after_its_lease_joins_again(past: Past) -> None:
    one, two = past.meta(), past.meta()
    _make(one, b"kept")
    assert one.session is not None
    two.sessions.end(one.session.id)
    with pytest.raises(Fenced):
        _make(one, b"refused")
    one.sessions.open({}, one.session.id)
    _make(one, b"again")
    assert _names(two) == {b"kept", b"again"}
    assert past.server.ask("EXISTS", keys.ENDED) == 0, "who is back needs no proof"


def test_who_was_ended_in_an_older_state_does_not(past: Past) -> None:
    one, two = past.meta(), past.meta()
    _make(one, b"kept")
    past.keep()
    _make(one, b"lost")
    past.go_back()
    assert one.session is not None
    two.sessions.end(one.session.id)
    with pytest.raises(Fenced):
        _make(one, b"refused")
    with pytest.raises(StoreRolledBack):
        one.sessions.open({}, one.session.id)
    _is_stopped(one)


def test_two_clients_with_one_session_id(past: Past) -> None:
    """The older state knows nothing of our session, and gives its number to somebody else."""
    past.keep()
    one = past.meta()
    _make(one, b"lost")
    past.go_back()
    two = past.meta()
    assert one.session is not None
    assert two.session is not None
    assert one.session.id == two.session.id
    _make(two, b"kept")
    _is_stopped(one)
    assert _names(two) == {b"kept"}
    _make(two, b"more")


def test_an_answer_of_a_lost_connection_is_asked_for_again(past: Past) -> None:
    """It came before the step back and is looked at after it."""
    meta = past.meta()
    store = meta.store
    assert isinstance(store, RedisStore)
    fence = meta.transactor.fence
    assert fence is not None
    writes = [Put(b"Z", b"sync", b"1")]
    store.commit(change(*writes, fence=fence, sequence=5))
    store._commits._ask_again(fence, b"w\0\1", (5).to_bytes(8, "big"))
    with pytest.raises(StoreRolledBack):
        store._commits._ask_again(fence, b"w\0\1", (6).to_bytes(8, "big"))
    with pytest.raises(StoreRolledBack):
        store._commits._ask_again(fence, b"w\0\2", (1).to_bytes(8, "big"))


def test_ended_sessions_are_remembered_up_to_a_limit(past: Past) -> None:
    meta = past.meta()
    fields = [word for n in range(ENDED_MAX + 5) for word in (keys.pack_u64(n + 10), b"1")]
    past.server.ask("HSET", keys.ENDED, *fields)
    other = past.meta()
    assert other.session is not None
    meta.sessions.end(other.session.id)
    left = past.server.ask("HKEYS", keys.ENDED)
    assert len(left) == ENDED_MAX
    assert keys.pack_u64(other.session.id) in left

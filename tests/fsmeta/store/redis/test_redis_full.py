"""M1: a Redis that has used up its memory: ENOSPC for what grows, and what frees goes on."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsmeta.admin.trash_expiry import expire, hours
from fsmeta.meta.meta import Meta
from fsmeta.ops.names.rename import DentryLocation
from fsmeta.store.contract import Commit
from fsmeta.store.redis.commit import _is_relief
from fsmeta.store.redis.engine import RedisStore
from fsmeta.store.writes import DeleteRow, Put
from fsmeta.types import AT_END, ROOT_CALLER, ROOT_INO, Ino, SetAttr, Slice
from tests.conftest import assert_clean
from tests.fsmeta.engines import RUNTIME, make_volume
from tests.support.redis_server import RedisServer

VALUE = bytes(4000)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    if not RedisServer.is_installed():
        pytest.skip("needs redis-server")
    with RedisServer(tmp_path, "--maxmemory-policy", "noeviction") as made:
        yield made


@pytest.fixture
def meta(server: RedisServer) -> Iterator[Meta]:
    store = RedisStore(server.url(), RUNTIME)
    make_volume(store, RUNTIME)
    made = Meta(store, RUNTIME, deadline_s=10)
    made.sessions.open({"host": "test"})
    yield made
    server.ask("CONFIG", "SET", "maxmemory", "0")
    assert_clean(store)
    server.ask("CLIENT", "KILL", "TYPE", "pubsub")
    store.close()


def _full(server: RedisServer) -> None:
    """There is less memory than is in use, from now on."""
    server.ask("CONFIG", "SET", "maxmemory", str(server.ask("INFO", "memory")["used_memory"] // 2))


def _has_no_room(meta: Meta, parent: Ino = ROOT_INO) -> None:
    # kept by a name, the error would keep frames, and with them a connection
    with pytest.raises(OSError, match=rf"Errno {errno.ENOSPC}.*metadata store is full"):
        meta.create(ROOT_CALLER, parent, b"more", 0o100644)


def test_what_frees_goes_on(meta: Meta, server: RedisServer) -> None:
    files = [meta.create(ROOT_CALLER, ROOT_INO, b"f%d" % n, 0o100644).ino for n in range(5)]
    for ino in files:
        slices = [(0, Slice(0, meta.new_slice_id(), 8192, 0, 8192))]
        meta.write_slices(ino, slices, 8192, RUNTIME.now_ns())
    meta.create(ROOT_CALLER, ROOT_INO, b"sub", 0o40755)
    _full(server)
    for _ in range(2):
        _has_no_room(meta)
        with pytest.raises(OSError, match="metadata store is full"):
            meta.setxattr(ROOT_CALLER, ROOT_INO, b"user.x", VALUE)
    meta.rmdir(ROOT_CALLER, ROOT_INO, b"sub")
    meta.unlink(ROOT_CALLER, ROOT_INO, b"f0")
    meta.rename(ROOT_CALLER, DentryLocation(ROOT_INO, b"f1"), DentryLocation(ROOT_INO, b"g1"))
    meta.rename(ROOT_CALLER, DentryLocation(ROOT_INO, b"f2"), DentryLocation(ROOT_INO, b"f3"))
    for size in (4096, 0):
        meta.setattr(ROOT_CALLER, files[4], SetAttr(size=size))
    meta.deletion.purge([files[0], files[3]])
    meta.deletion.forget_dead(meta.deletion.dead_slices(100))
    assert {entry.name for entry in meta.names(ROOT_INO)[0]} == {b"g1", b"f3", b"f4"}
    assert meta.getattr(ROOT_CALLER, files[4]).size == 0
    _has_no_room(meta)
    server.ask("CONFIG", "SET", "maxmemory", "0")
    meta.create(ROOT_CALLER, ROOT_INO, b"more", 0o100644)


def test_appends_have_no_more_room_than_other_writes(meta: Meta, server: RedisServer) -> None:
    """They drop a capability along, which made them pass for what frees."""
    ino = meta.create(ROOT_CALLER, ROOT_INO, b"f", 0o100644).ino
    _full(server)
    for index in (0, AT_END):
        slices = [(index, Slice(0, meta.new_slice_id(), 10, 0, 10))]
        with pytest.raises(OSError, match="metadata store is full"):
            meta.write_slices(ino, slices, 10, 1)
    assert meta.getattr(ROOT_CALLER, ino).size == 0


def test_t1_deleting_goes_on_with_a_trash(meta: Meta, server: RedisServer) -> None:
    """A name in the trash takes memory, but what is in there can be deleted for good."""
    meta.format = meta.format._replace(trash_days=1)
    for name in (b"a", b"b"):
        meta.create(ROOT_CALLER, ROOT_INO, name, 0o100644)
    meta.create(ROOT_CALLER, ROOT_INO, b"sub", 0o40755)
    _full(server)
    _has_no_room(meta)
    meta.unlink(ROOT_CALLER, ROOT_INO, b"a")
    meta.rename(ROOT_CALLER, DentryLocation(ROOT_INO, b"b"), DentryLocation(ROOT_INO, b"c"))
    meta.rmdir(ROOT_CALLER, ROOT_INO, b"sub")
    assert [entry.name for entry in meta.names(ROOT_INO)[0]] == [b"c"]
    (hour,) = hours(meta)
    assert len(meta.names(hour)[0]) == 2
    while expire(meta, hour):
        pass
    assert not meta.names(hour)[0]
    meta.deletion.purge(meta.deletion.orphans(10))
    assert meta.statfs().inodes_used == 2


def test_sessions_go_on(meta: Meta, server: RedisServer) -> None:
    """Who can't beat is taken for dead; who can't join can't delete."""
    _full(server)
    meta.sessions.beat(0)
    store = RedisStore(server.url(), RUNTIME)
    other = Meta(store, RUNTIME, deadline_s=10)
    other.sessions.open({"host": "late"})
    other.sessions.beat(0)
    assert meta.deletion.take_lead()
    _has_no_room(other)
    assert meta.session is not None
    other.sessions.end(meta.session.id)
    meta.sessions.open({}, meta.session.id)
    other.sessions.close()
    assert [each.id for each in meta.sessions.all()] == [meta.session.id]
    server.ask("CLIENT", "KILL", "TYPE", "pubsub")
    store.close()


def test_a_refused_commit_leaves_no_trace(meta: Meta, server: RedisServer) -> None:
    """What Redis refuses in the middle of a script was not begun."""
    _full(server)
    before = server.ask("HGETALL", "U")
    for _ in range(3):
        _has_no_room(meta)
    assert server.ask("HGETALL", "U") == before
    assert meta.names(ROOT_INO)[0] == []


def test_a_row_that_goes_without_a_session_is_relief() -> None:
    """An interrupted load is removed from a full store."""
    commit = Commit(None, b"", 0, (), (), [DeleteRow(b"i" + bytes(8))])
    assert _is_relief(commit)
    assert not _is_relief(
        commit._replace(writes=[*commit.writes, Put(b"i" + bytes(8), b"v", b"1")])
    )

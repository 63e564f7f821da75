"""T1, T2, R1: walks that nobody asked for meet directories of more names than a page has."""

from __future__ import annotations

import pytest

from fsclient.background.trash_expiry import TrashExpiry
from fsmeta.admin import clones, quota_admin
from fsmeta.admin.clones import CloneBuilder
from fsmeta.admin.trash_expiry import FORGET_S, hours
from fsmeta.check.repair import repair
from fsmeta.meta.meta import Meta
from fsmeta.ops.trees import clone
from fsmeta.rules.context import put_attr, put_dentry
from fsmeta.schema import inode, keys
from fsmeta.schema.trash import HOUR_NS, hour_at
from fsmeta.store.writes import Delete, DeleteRow, Put
from fsmeta.txn.txn import Txn
from fsmeta.types import ROOT_CALLER, ROOT_INO, FileType, Ino
from tests.fsmeta.engines import RUNTIME, Engine, change
from tests.fsmeta.trash_world import Clocks

ROOT = ROOT_CALLER
ROW = b"tbig"
BATCH = 1000  # inodes, or fields, that are planted at a time
# names of a directory: HSCAN's pages are of a hash, which has to be large for some to be empty
MANY = {"redis": 20_000, "cluster": 20_000}
SOME = 3000
MANY_SOAK = 50_000


def plant(meta: Meta, directory: Ino, count: int) -> None:
    """Make many empty files in a directory, quickly."""
    for begin in range(0, count, BATCH):
        inos = [meta.new_ino() for _ in range(min(BATCH, count - begin))]

        def verb(txn: Txn, inos: list[Ino] = inos) -> None:
            for ino in inos:
                attr = inode.new_attr(ino, 0o100644, (0, 0), directory, RUNTIME.now_ns())
                put_attr(txn, attr)
                put_dentry(txn, directory, b"1-%d-f" % ino, FileType.REG, ino)
            txn.add(keys.USAGE, keys.INODES, len(inos))

        meta.transactor.run(verb)


def _count(engine: Engine, request: pytest.FixtureRequest) -> int:
    soak = request.config.getoption("--soak")
    return MANY_SOAK if soak else MANY.get(engine.name, SOME)


def test_only_an_empty_row_begins_with_an_empty_page(engine: Engine) -> None:
    """Whoever deletes what the first page has comes to the end of the row, and not earlier."""
    store = engine.open()
    count = MANY.get(engine.name, SOME)
    for begin in range(0, count, BATCH):
        fields = range(begin, min(begin + BATCH, count))
        store.commit(change(*(Put(ROW, b"%d" % n, b"1") for n in fields)))
    left = count
    while items := store.scan(ROW).items:
        store.commit(change(*(Delete(ROW, field) for field, _ in items)))
        left -= len(dict(items))
    assert left == 0
    for begin in range(0, count, BATCH):
        fields = range(begin, min(begin + BATCH, count))
        store.commit(change(*(Put(ROW, b"%d" % n, b"1") for n in fields)))
    for field, _ in store.scan(ROW, limit=count // 4).items:
        store.commit(change(Delete(ROW, field)))
    assert store.scan(ROW, limit=1).items, "as whoever only wants to know asks"
    store.commit(change(DeleteRow(ROW)))


def test_a_large_hour_of_the_trash_is_emptied(
    engine: Engine, request: pytest.FixtureRequest
) -> None:
    clocks = Clocks()
    quota_admin.change_settings(engine.meta(), lambda now: now._replace(trash_days=1))
    leader = Meta(engine.open(), clocks)
    clocks.pass_for(leader)
    leader.sessions.open({"host": "test"})
    hour = Ino(hour_at(clocks.now_ns()) - 48)
    count = _count(engine, request)
    before = leader.statfs().inodes_used
    plant(leader, hour, count)
    leader.transactor.run(
        lambda txn: txn.put(keys.TRASH, keys.pack_u64(hour), keys.pack_u64(HOUR_NS))
    )
    keeper = TrashExpiry(leader, clocks, lambda: False)
    keeper.turn()
    while keeper.unfinished:  # a turn is short, other work has its own
        keeper.turn()
    assert keeper.expired == count
    assert leader.names(hour, b"") == ([], None)
    assert leader.statfs().inodes_used == before
    clocks.passed_s += FORGET_S
    keeper.turn()
    assert hours(leader) == {}


def test_a_large_directory_of_a_dead_clone_is_removed(
    engine: Engine, request: pytest.FixtureRequest
) -> None:
    builder_of, leader = engine.meta(), engine.meta()
    source = leader.create(ROOT, ROOT_INO, b"source", 0o40755).ino
    before = leader.statfs().inodes_used
    building = CloneBuilder(builder_of, ROOT, True, lambda: False).building
    builder_of.run(clone.begin, ROOT, building, source)
    plant(builder_of, building.root, _count(engine, request))
    assert builder_of.session is not None
    leader.sessions.end(builder_of.session.id)
    (left,) = clones.abandoned(leader)
    assert clones.discard(leader, left)
    assert leader.statfs().inodes_used == before
    assert clones.abandoned(leader) == []


def test_repair_sees_names_that_are_not_on_the_first_page(engine: Engine) -> None:
    """Of a directory whose record is gone."""
    meta = engine.meta()
    top = meta.create(ROOT, ROOT_INO, b"top", 0o40755).ino
    plant(meta, top, SOME)
    # the names that HSCAN brings first are gone: who looks at one bucket finds none
    first = [field for field, _ in meta.store.scan(keys.dir_row(top), limit=BATCH).items]
    inos = [int(field.split(b"-")[1]) for field in first]

    def lose(txn: Txn) -> None:
        txn.delete_row(keys.inode_row(top))
        for ino, field in zip(inos, first, strict=True):
            txn.delete(keys.dir_row(top), field)
            txn.delete_row(keys.inode_row(ino))
        txn.add(keys.USAGE, keys.INODES, -len(inos))

    meta.transactor.run(lose)
    meta.sessions.close()
    said, _ = repair(meta, RUNTIME.now_ns() // 10**9)
    assert any("made again" in line for line in said), said

"""R1, T2: what is wrong with shelves, with M and in snapshots is seen, and mended where it can be.

A volume has a directory for each damage: one by one in memory, and all at once on every engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import pytest

from fsmeta.admin import clones, snapshots
from fsmeta.admin.snapshots import Taker
from fsmeta.check.check import check
from fsmeta.check.repair import repair
from fsmeta.meta.meta import Meta
from fsmeta.schema import inode, keys
from fsmeta.schema.snapshot_inos import snapshot_dir_of
from fsmeta.schema.snapshots import SNAPSHOTS, Snapshot, pack_snapshot
from fsmeta.store.contract import Store
from fsmeta.store.writes import Delete, DeleteRow, Put
from fsmeta.types import ROOT_CALLER, ROOT_INO, SNAPSHOTS_SHIFT, FileType, Ino
from tests.conftest import assert_clean
from tests.fsmeta.check.test_repair import NOW_S
from tests.fsmeta.engines import RUNTIME, Engine, change

ROOT: Final = ROOT_CALLER
EIGHT: Final = keys.pack_u64
NOTHING: Final = Ino((1 << 60) + 1)  # in no snapshot: the root has the number 1
MANY: Final = 7 << SNAPSHOTS_SHIFT


class Kept:
    """A directory with `file` and `sub/deep`, and a snapshot of it."""

    def __init__(self, engine: Engine, meta: Meta, name: bytes) -> None:
        self.engine = engine
        self.store: Store = engine.first
        self.name = name
        self.top = meta.create(ROOT, ROOT_INO, name, 0o40755).ino
        self.file = meta.create(ROOT, self.top, b"file", 0o100644).ino
        sub = meta.create(ROOT, self.top, b"sub", 0o40755).ino
        meta.create(ROOT, sub, b"deep", 0o100644)
        meta.link(ROOT, self.file, sub, b"also")
        self.made = take(meta, self.top, b"snap")
        self.kept_file = meta.lookup(ROOT, self.made.root, b"file").ino
        self.kept_sub = meta.lookup(ROOT, self.made.root, b"sub").ino
        self.deep = meta.lookup(ROOT, self.kept_sub, b"deep").ino
        self.snapshot_dir = keys.dir_row(snapshot_dir_of(self.top))
        self.listed = EIGHT(self.made.root)

    def plant(self, row: bytes, field: bytes, value: bytes | None) -> None:
        write = Delete(row, field) if value is None else Put(row, field, value)
        self.store.commit(change(write))

    def lose_name(self) -> None:
        self.plant(self.snapshot_dir, b"snap", None)

    def lose_row(self, row: bytes) -> None:
        self.store.commit(change(DeleteRow(row)))

    def list_as(self, **changes: object) -> None:
        record = self.made._replace(**changes)  # type: ignore[arg-type]
        self.plant(SNAPSHOTS, EIGHT(record.root), pack_snapshot(record))

    def count(self, flags: int) -> None:
        """The directory says that it has so many."""
        row = keys.inode_row(self.top)
        a, v = self.store.read([(row, keys.ATTR_FIELD), (row, keys.VOLATILE_FIELD)])
        assert a is not None
        assert v is not None
        attr = inode.unpack_inode(self.top, a, v)._replace(flags=flags)
        self.plant(row, keys.ATTR_FIELD, inode.pack_attr(attr))


def take(meta: Meta, source: Ino, name: bytes) -> Snapshot:
    return Taker(meta, ROOT, RUNTIME.now_ns, lambda: False).take(source, name)


def _dentry(ino: Ino, kind: FileType = FileType.DIR) -> bytes:
    return keys.pack_dentry(kind, ino)


def _into_the_trash(kept: Kept) -> None:
    """A count that was too low let somebody remove the directory."""
    kept.count(0)
    meta = kept.engine.meta()
    meta.format = meta.format._replace(trash_days=1)
    sub = meta.lookup(ROOT, kept.top, b"sub").ino
    for parent, name in ((sub, b"deep"), (sub, b"also"), (kept.top, b"file")):
        meta.unlink(ROOT, parent, name)
    meta.rmdir(ROOT, kept.top, b"sub")
    meta.rmdir(ROOT, ROOT_INO, kept.name)
    meta.sessions.close()


def _gone(kept: Kept) -> None:
    """Or the inode is lost, with the names in it."""
    _into_the_trash(kept)
    kept.lose_row(keys.inode_row(kept.top))


def _deleted_and_listed(kept: Kept) -> None:
    meta = kept.engine.meta()
    snapshots.remove(meta, ROOT, snapshot_dir_of(kept.top), b"snap")
    meta.sessions.close()
    kept.list_as()


def _lose_all_names(kept: Kept) -> None:
    kept.lose_name()
    kept.plant(SNAPSHOTS, kept.listed, None)


def _lose_kept_file(kept: Kept) -> None:
    """Both names of a file."""
    kept.plant(keys.dir_row(kept.made.root), b"file", None)
    kept.plant(keys.dir_row(kept.kept_sub), b"also", None)


def _unreadable_and_nameless(kept: Kept) -> None:
    kept.plant(SNAPSHOTS, kept.listed, b"?")
    kept.lose_name()


def _lose_everything(kept: Kept) -> None:
    for ino in (kept.made.root, kept.kept_file, kept.kept_sub, kept.deep):
        kept.lose_row(keys.inode_row(ino))
        kept.lose_row(keys.dir_row(ino))


class Damage(NamedTuple):
    """What is done, what check says of it, and what the snapshot is called afterwards (None: it is
    gone); {} is the number of its root.
    """

    do: Callable[[Kept], object]
    said: str
    name: str | None = "snap"


DAMAGES: Final[dict[str, Damage]] = {
    "too many counted": Damage(lambda k: k.count(MANY), "counts 7 snapshots, there are 1"),
    "none counted": Damage(lambda k: k.count(0), "counts 0 snapshots, there are 1"),
    "no name": Damage(Kept.lose_name, "has no snapshot b'snap'"),
    "not listed": Damage(lambda k: k.plant(SNAPSHOTS, k.listed, None), "M does not list"),
    "unreadable": Damage(lambda k: k.plant(SNAPSHOTS, k.listed, b"?"), "M does not list"),
    "neither": Damage(_lose_all_names, "whose names are in {}", "#{}"),
    "unreadable, no name": Damage(_unreadable_and_nameless, "names are in", "#{}"),
    "listed, of nothing": Damage(lambda k: k.list_as(root=NOTHING, name=b"x"), "b'x'"),
    "listed, of a file": Damage(lambda k: k.list_as(root=k.file, name=b"x"), "b'x'"),
    "unreadable, of nothing": Damage(lambda k: k.plant(SNAPSHOTS, b"field", b"?"), "field"),
    "another name": Damage(lambda k: k.list_as(name=b"other"), "has no snapshot b'other'"),
    "another source": Damage(lambda k: k.list_as(source=ROOT_INO), "inode 1: has no snapshot"),
    "two names": Damage(
        lambda k: k.plant(k.snapshot_dir, b"more", _dentry(k.made.root)), "has a snapshot b'more'"
    ),
    "a name of nothing": Damage(
        lambda k: k.plant(k.snapshot_dir, b"more", _dentry(NOTHING)), "does not exist"
    ),
    "no name, which is taken": Damage(
        lambda k: k.plant(k.snapshot_dir, b"snap", _dentry(k.top)), "across the border", "#{}"
    ),
    "no root": Damage(lambda k: k.lose_row(keys.inode_row(k.made.root)), "does not exist"),
    "no root and no names": Damage(
        _lose_everything,
        "does not exist",
        None,
    ),
    "being removed": Damage(_deleted_and_listed, "has no snapshot b'snap'", None),
    "source in the trash": Damage(_into_the_trash, "counts 0 snapshots, there are 1"),
    "source gone": Damage(_gone, "has snapshots and does not exist"),
    "no name of a file in it": Damage(_lose_kept_file, "has 2 links and 0 names"),
    "no name of a directory in it": Damage(
        lambda k: k.plant(keys.dir_row(k.made.root), b"sub", None), "whose names are in {}"
    ),
    "a name from outside": Damage(
        lambda k: k.plant(keys.dir_row(k.top), b"in", _dentry(k.kept_sub)), "across the border"
    ),
    "a name to the outside": Damage(
        lambda k: k.plant(keys.dir_row(k.kept_sub), b"out", _dentry(k.file, FileType.REG)),
        "across the border",
    ),
}


def _expect(meta: Meta, kept: Kept, damage: Damage) -> None:
    """The snapshot is there, under its name, and shows what it had."""
    found = {each.root: each for each in snapshots.listing(meta)}
    if damage.name is None:
        assert kept.made.root not in found
        return
    known, name = found[kept.made.root], damage.name.format(kept.made.root).encode()
    assert (known.source, known.name) == (kept.top, name)
    assert known.inodes == kept.made.inodes
    root = meta.lookup(ROOT, snapshot_dir_of(kept.top), name)
    assert root.ino == kept.made.root
    assert meta.getattr(ROOT, kept.top).flags >> SNAPSHOTS_SHIFT == 1
    shown = {each.ino for each in meta.names(root.ino)[0]}
    assert {kept.kept_file, kept.kept_sub} <= shown
    assert meta.lookup(ROOT, kept.kept_sub, b"deep").ino == kept.deep


@pytest.mark.parametrize("engine", ["mem"], indirect=True)
def test_r1_t2_each_damage_is_seen_and_mended(engine: Engine) -> None:
    meta = engine.meta()
    made = {name: Kept(engine, meta, name.encode()) for name in DAMAGES}
    meta.sessions.close()
    meta = Meta(engine.open(), RUNTIME)
    assert_clean(engine.first)
    for name, damage in DAMAGES.items():
        damage.do(made[name])
        found = [str(each) for each in check(engine.first).problems]
        assert any(damage.said in each for each in found), (name, found)
        done, checked = repair(meta, NOW_S)
        assert done, name
        assert checked.problems == [], (name, done)
        _expect(Meta(engine.open(), RUNTIME), made[name], damage)
        assert repair(meta, NOW_S) == ([], checked), name


def test_r1_t2_all_damage_is_mended_at_once(engine: Engine) -> None:
    meta = engine.meta()
    made = {name: Kept(engine, meta, name.encode()) for name in DAMAGES}
    meta.sessions.close()
    for name, damage in DAMAGES.items():
        damage.do(made[name])
    assert repair(Meta(engine.open(), RUNTIME), NOW_S)[1].problems == []
    meta = engine.meta()
    for name, damage in DAMAGES.items():
        _expect(meta, made[name], damage)
    for each in clones.abandoned(meta):
        assert clones.discard(meta, each)


def test_r1_t2_what_is_not_known_is_not_claimed(engine: Engine) -> None:
    """Of a snapshot that M did not list any more nobody knows whether it is of one moment."""
    meta = engine.meta()
    kept = Kept(engine, meta, b"top")
    assert kept.made.changed == 0
    meta.sessions.close()
    kept.plant(SNAPSHOTS, kept.listed, None)
    meta = Meta(engine.open(), RUNTIME)
    assert repair(meta, NOW_S)[1].problems == []
    (found,) = snapshots.listing(meta)
    assert found == kept.made._replace(at_ns=0, changed=kept.made.inodes)


def test_r1_t2_what_has_no_place_is_named_and_left(engine: Engine) -> None:
    """Of the way to it two steps are lost; it is not thrown away for that."""
    meta = engine.meta()
    kept = Kept(engine, meta, b"top")
    meta.sessions.close()
    rows = [keys.inode_row(kept.kept_sub), keys.dir_row(kept.kept_sub)]
    before = [(row, engine.first.read_rows([row])[0]) for row in rows]
    for row in rows:
        kept.lose_row(row)
    meta = Meta(engine.open(), RUNTIME)
    _, checked = repair(meta, NOW_S)
    (left,) = {each.ino for each in checked.problems}
    assert left == kept.deep
    with pytest.raises(FileNotFoundError):
        meta.lookup(ROOT, kept.made.root, b"sub")
    for row, fields in before:
        for field, value in fields.items():
            kept.plant(row, field, value)
    kept.plant(keys.dir_row(kept.made.root), b"sub", _dentry(kept.kept_sub))
    assert repair(meta, NOW_S)[1].problems == []

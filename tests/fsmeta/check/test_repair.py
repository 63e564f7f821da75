"""R1: `repair` mends each kind of damage that can be mended, and touches nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fsmeta.admin import clones
from fsmeta.admin.trash_expiry import hours
from fsmeta.check import repair as repairs
from fsmeta.check.check import Examination, check
from fsmeta.check.repair import repair
from fsmeta.errors import ConfigError
from fsmeta.meta.meta import Meta
from fsmeta.ops.trees import clone
from fsmeta.ops.trees.clone import Building, Child
from fsmeta.schema import keys, slices
from fsmeta.schema.segments import PACKED
from fsmeta.store.writes import Append, Delete, DeleteRow, Put
from fsmeta.types import ROOT_CALLER, ROOT_INO, FileType, Ino
from tests.fsmeta.check.test_check import Tree
from tests.fsmeta.engines import RUNTIME, add

NOW_S = 1_700_000_000
GONE = Ino(4242)
SPARE = keys.pack_dentry(FileType.REG, GONE)


def ended(tree: Tree) -> Meta:
    """Everybody has left."""
    for each in tree.meta.sessions.all():
        tree.meta.sessions.end(each.id)
    return Meta(tree.store, RUNTIME)


def orphan_of(ino: int) -> bytes:
    return keys.pack_u64(ino)


DAMAGE: dict[str, Callable[[Tree], None]] = {
    "links of a file": lambda t: t.put_attr(t.f, nlink=5),
    "links of a directory": lambda t: t.put_attr(t.d, nlink=9),
    "parent of a file": lambda t: t.put_attr(t.f, parent=t.sub),
    "parent of a directory": lambda t: t.put_attr(t.sub, parent=ROOT_INO),
    "parent of what is linked": lambda t: t.put_attr(t.linked, parent=t.d),
    "counts of names": lambda t: t.plant(
        Put(keys.inode_row(t.linked), keys.parent_field(t.d), b"7")
    ),
    "counts of names elsewhere": lambda t: t.plant(
        Put(keys.inode_row(t.linked), keys.parent_field(ROOT_INO), b"1")
    ),
    "used bytes": lambda t: t.put_attr(t.f, used=1),
    "what is reserved beyond the end": lambda t: t.plant(
        Append(
            keys.inode_row(t.f),
            keys.chunk_field(0),
            slices.pack_slices([slices.reserved(9000, 100)]),
        )
    ),
    "usage of space": lambda t: t.plant(add(keys.USAGE, keys.SPACE, 999)),
    "usage of inodes": lambda t: t.plant(add(keys.USAGE, keys.INODES, -2)),
    "next inode": lambda t: t.plant(Put(keys.COUNTERS, keys.NEXT_INO, b"2")),
    "next slice": lambda t: t.plant(Put(keys.COUNTERS, keys.NEXT_SLICE, b"1")),
    "a name of nothing": lambda t: t.plant(Put(keys.dir_row(t.d), b"ghost", SPARE)),
    "a name of the wrong type": lambda t: t.plant(
        Put(keys.dir_row(t.d), b"f", keys.pack_dentry(FileType.DIR, t.f))
    ),
    "a lost name": lambda t: t.plant(Delete(keys.dir_row(t.d), b"f")),
    "a lost name of several": lambda t: t.plant(Delete(keys.dir_row(t.sub), b"l3")),
    "a lost directory": lambda t: t.plant(Delete(keys.dir_row(t.d), b"sub")),
    "an orphan not listed": lambda t: t.plant(Delete(keys.ORPHANS, orphan_of(t.orphan))),
    "an orphan directory not listed": lambda t: t.plant(
        Delete(keys.ORPHANS, orphan_of(t.orphan_dir))
    ),
    "an orphan with names": lambda t: t.plant(Put(keys.ORPHANS, orphan_of(t.f), orphan_of(NOW_S))),
    "an orphan that is gone": lambda t: t.plant(
        Put(keys.ORPHANS, orphan_of(GONE), orphan_of(NOW_S))
    ),
    "a slice in use that waits for deletion": lambda t: t.plant(
        Put(keys.DEAD_SLICES, orphan_of(1), slices.pack_dead([(1, 5000), (900, 7)]))
    ),
    "a lost inode of a directory": lambda t: t.plant(DeleteRow(keys.inode_row(t.d))),
    "a lost inode": lambda t: t.plant(DeleteRow(keys.inode_row(t.f))),
}


def _trash(tree: Tree) -> None:
    """T1: a full hour that is not listed."""
    meta = Meta(tree.store, RUNTIME)
    meta.format = meta.format._replace(trash_days=1)
    meta.unlink(ROOT_CALLER, tree.d, b"f")
    (hour,) = hours(meta)
    tree.plant(Delete(keys.TRASH, keys.pack_u64(hour)))


DAMAGE |= {
    "an hour of the trash not listed": _trash,
    "uses of a slice": lambda t: t.plant(Put(keys.SHARED_SLICES, orphan_of(1), b"3")),
    "a segment of nobody": lambda t: t.plant(Put(PACKED, orphan_of(900), orphan_of(5))),
    "a segment that can't be read": lambda t: t.plant(Put(PACKED, orphan_of(1), b"x")),
    "uses of no slice": lambda t: t.plant(Put(keys.SHARED_SLICES, orphan_of(900), b"1")),
}


def everything(tree: Tree) -> None:
    for name in DAMAGE:
        if not name.startswith(("a lost inode", "an hour")):
            DAMAGE[name](tree)


@pytest.mark.parametrize("damage", [*DAMAGE, "everything"])
def test_each_damage_is_mended(damage: str) -> None:
    tree = Tree()
    meta = ended(tree)
    sizes = {ino: tree.attr(ino).size for ino in (tree.f, tree.linked, tree.orphan)}
    DAMAGE.get(damage, everything)(tree)
    assert check(tree.store).problems, "something is wrong"
    done, checked = repair(meta, NOW_S)
    assert done
    assert checked.problems == []
    assert check(tree.store).problems == []
    assert repair(meta, NOW_S) == ([], checked)
    fresh = Meta(tree.store, RUNTIME)
    for ino, size in sizes.items():
        if damage != "a lost inode" or ino != tree.f:
            assert fresh.getattr(ROOT_CALLER, ino).size == size, "no file was touched"


def test_what_has_lost_its_name_is_in_lost_and_found() -> None:
    tree = Tree()
    meta = ended(tree)
    before = tree.attr(tree.f)
    tree.plant(Delete(keys.dir_row(tree.d), b"f"))
    tree.plant(Delete(keys.dir_row(tree.d), b"sub"))
    repair(meta, NOW_S)
    fresh = Meta(tree.store, RUNTIME)
    found = fresh.lookup(ROOT_CALLER, ROOT_INO, b"lost+found")
    file = fresh.lookup(ROOT_CALLER, found.ino, b"#%d" % tree.f)
    assert file == before._replace(parent=found.ino)
    sub = fresh.lookup(ROOT_CALLER, found.ino, b"#%d" % tree.sub)
    assert fresh.lookup(ROOT_CALLER, sub.ino, b"l3").ino == tree.linked


def test_what_does_not_decode_is_left_alone() -> None:
    tree = Tree()
    meta = ended(tree)
    row = keys.inode_row(tree.f)
    tree.plant(Put(row, keys.VOLATILE_FIELD, b"nonsense"))
    tree.plant(add(keys.USAGE, keys.INODES, 5))
    tree.put_attr(tree.linked, nlink=9)
    done, checked = repair(meta, NOW_S)
    assert done == [], "its name stays, and nobody knows the right counters"
    assert {problem.ino for problem in checked.problems} >= {tree.f}
    assert tree.store.read([(keys.dir_row(tree.d), b"f")])[0] is not None


def test_t1_what_is_in_the_trash_and_not_right_stays_there() -> None:
    tree = Tree()
    tree.meta.format = tree.meta.format._replace(trash_days=1)
    tree.meta.unlink(ROOT_CALLER, tree.d, b"f")
    (hour,) = hours(tree.meta)
    meta = ended(tree)
    tree.put_attr(tree.f, parent=tree.d)
    done, checked = repair(meta, NOW_S)
    assert done
    assert checked.problems == []
    assert tree.attr(tree.f).parent == hour


def test_t2_a_clone_that_is_being_built_is_left_to_a_mount() -> None:
    tree = Tree()
    session = tree.meta.session
    assert session is not None
    building = Building(tree.meta.new_ino(), session.id, None)
    tree.meta.run(clone.begin, ROOT_CALLER, building, tree.d)
    child = Child(b"f", tree.f, tree.meta.new_ino())
    tree.meta.run(clone.children, ROOT_CALLER, building, building.root, [child])
    meta = ended(tree)
    tree.put_attr(tree.linked, nlink=9)
    assert repair(meta, NOW_S)[1].problems == []
    fresh = Meta(tree.store, RUNTIME)
    fresh.sessions.open({"host": "test"})
    assert clones.abandoned(fresh) == [building._replace(owner=None)]
    clones.discard(fresh, building)
    assert check(tree.store).problems == []
    assert tree.store.read_rows([keys.CLONES]) == [{}]


def test_a_volume_in_use_is_not_repaired() -> None:
    tree = Tree()
    tree.put_attr(tree.f, nlink=5)
    with pytest.raises(ConfigError, match=r"used by 1 client\(s\), or"):
        repair(tree.meta, NOW_S)
    assert check(tree.store).problems


def test_a_client_that_joins_meanwhile_stops_it() -> None:
    """What was found may be so no more, also where that client has left again by the commit."""
    tree = Tree()
    tree.put_attr(tree.f, nlink=5)
    meta, late = ended(tree), Meta(tree.store, RUNTIME)
    before = tree.attr(tree.f)

    def join(text: str) -> None:
        if text.startswith("comparing"):
            late.sessions.open({"host": "test"})
            late.sessions.close()

    with pytest.raises(ConfigError, match="a client has mounted"):
        repair(meta, NOW_S, join)
    assert tree.attr(tree.f) == before

    joined = meta.transactor.view(repairs._joined)
    with Examination(tree.store) as found:
        found.run()
        late.sessions.open({"host": "test"})
        with pytest.raises(ConfigError, match="a client has mounted"):
            list(repairs._Pass(meta, found, NOW_S, joined).run())
    assert tree.attr(tree.f) == before

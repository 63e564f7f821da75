"""R1: `check` sees, and `repair` mends, what is wrong with quotas, ACLs, references, trash, clones,
locks and sessions; afterwards the volume is clean."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fsmeta.admin import quota_admin
from fsmeta.admin.quota_admin import QuotaLimits
from fsmeta.admin.snapshots import Taker
from fsmeta.admin.trash_expiry import hours
from fsmeta.check.check import Examination, check
from fsmeta.check.repair import repair
from fsmeta.check.spill_table import Groups, SpillTable
from fsmeta.meta.meta import Meta
from fsmeta.rules import quota
from fsmeta.schema import acl, inode, keys, locks
from fsmeta.schema.acl import ACCESS_XATTR, DEFAULT_XATTR, Acl, Named, pack_xattr
from fsmeta.schema.locks import LOCK_END, Kind, LockRecord, LockWait, Owner
from fsmeta.schema.trash import TRASH_INO
from fsmeta.store.contract import FENCE_FIELD
from fsmeta.store.writes import Delete, DeleteRow, Put, limit_field
from fsmeta.types import ROOT_CALLER, FileType, Ino
from tests.conftest import assert_clean
from tests.fsmeta.check.test_check import Tree
from tests.fsmeta.check.test_repair import NOW_S, ended
from tests.fsmeta.engines import RUNTIME, add

EIGHT = keys.pack_u64
LET_IN = Acl(7, 5, 7, 0, (Named(False, 1000, 7),))
ACCOUNTS, LIMITED, BACKGROUND = keys.ACCOUNTS, keys.LIMITED, keys.BACKGROUND


class Everything(Tree):
    """A tree with a quota, with ACLs, with something in the trash, and no client left."""

    def __init__(self, files: int = 0) -> None:
        super().__init__()
        self.node = quota.dir_node(self.d)
        quota_admin.set_quota(self.meta, self.node, QuotaLimits(1 << 30, 100_000))
        self.meta.setxattr(ROOT_CALLER, self.f, ACCESS_XATTR, pack_xattr(LET_IN))
        self.meta.setxattr(ROOT_CALLER, self.sub, DEFAULT_XATTR, pack_xattr(LET_IN))
        self.meta.format = self.meta.format._replace(trash_days=1)
        self.trashed_dir = self.create(self.d, b"old", 0o40755)
        self.meta.rmdir(ROOT_CALLER, self.d, b"old")
        (self.hour,) = hours(self.meta)
        for number in range(files):
            self.create(self.sub, b"%d-" % number + b"x" * 100)
        self.ended = ended(self)
        assert_clean(self.store)

    def change_field(self, row: bytes, field: bytes, value: bytes | None) -> None:
        self.plant(Delete(row, field) if value is None else Put(row, field, value))


def _space(uid: int) -> bytes:
    return quota.space_field(quota.user_node(uid))


def _acl(tree: Everything, ino: Ino) -> bytes:
    attr = tree.attr(ino)
    return keys.acl_row(attr.acl or attr.default_acl)


def _lock(tree: Everything, session: int) -> None:
    held = locks.pack_locks([LockRecord(Owner(session, 7), 1, True, 0, LOCK_END)])
    tree.plant(Put(*locks.held_key(tree.f, Kind.POSIX), held))


def _wait(tree: Everything) -> None:
    queue = locks.pack_waits([LockWait(LockRecord(Owner(3, 7), 1, True, 0, LOCK_END), 4)])
    tree.plant(Put(*locks.queue_key(tree.f, Kind.POSIX), queue))


def _fill_trashed_dir(tree: Everything) -> None:
    tree.put_name(tree.trashed_dir, b"x", tree.f)
    tree.plant(Delete(keys.dir_row(tree.d), b"f"))
    tree.put_attr(tree.f, parent=tree.trashed_dir)


Damage = Callable[[Everything], None]
DAMAGE: dict[str, tuple[str, Damage]] = {
    "counter of a directory": (
        "space of directory", lambda t: t.plant(add(ACCOUNTS, quota.space_field(t.node), 4096)),
    ),
    "counter that is gone": (
        "inodes of directory",
        lambda t: t.change_field(ACCOUNTS, quota.inodes_field(t.node), None),
    ),
    "counter of a user": ("space of user 0", lambda t: t.plant(add(ACCOUNTS, _space(0), -4096))),
    "counter of nobody": (
        "space of user 5 says 7", lambda t: t.plant(add(ACCOUNTS, _space(5), 7)),
    ),
    "counter that can't be read": (
        "counter b'many'", lambda t: t.change_field(ACCOUNTS, _space(0), b"many"),
    ),
    "limit not listed": (
        "is not listed as limited", lambda t: t.change_field(LIMITED, t.node, None)
    ),
    "listed without a limit": (
        "user 5 is listed", lambda t: t.change_field(LIMITED, quota.user_node(5), b"1")
    ),
    "limit that can't be read": (
        "counter b'x'",
        lambda t: t.change_field(ACCOUNTS, limit_field(quota.space_field(t.node)), b"x"),
    ),
    "limit of a file": (
        "has a limit and is no directory",
        lambda t: t.plant(
            Put(ACCOUNTS, limit_field(quota.space_field(quota.dir_node(t.f))), b"9"),
            Put(LIMITED, quota.dir_node(t.f), b"1"),
        ),
    ),
    "mark": ("has mark 9", lambda t: t.put_attr(t.s, mark=9)),
    "home elsewhere": (
        "counts in 1, where it has no name",
        lambda t: t.change_field(keys.inode_row(t.linked), keys.HOME_FIELD, EIGHT(1)),
    ),
    "no home": (
        "has several names and no home",
        lambda t: t.change_field(keys.inode_row(t.linked), keys.HOME_FIELD, None),
    ),
    "home that can't be read": (
        "has a home b'x'",
        lambda t: t.change_field(keys.inode_row(t.linked), keys.HOME_FIELD, b"x"),
    ),
    "ACL of a file gone": ("has access ACL", lambda t: t.plant(DeleteRow(_acl(t, t.f)))),
    "default ACL gone": ("has default ACL", lambda t: t.plant(DeleteRow(_acl(t, t.sub)))),
    "ACL that can't be read": (
        "no ACL", lambda t: t.change_field(_acl(t, t.f), b"e", b"\1\0\0\1\0\x77\0\0\0\1")
    ),
    "ACL with more": ("has fields", lambda t: t.change_field(_acl(t, t.f), b"more", b"x")),
    "ACLs nobody speaks of": (
        "F does not say so", lambda t: t.change_field(keys.FORMAT, keys.HAS_ACLS, None)
    ),
    "default ACL of a file": (
        "is no directory",
        lambda t: t.put_attr(t.linked, default_acl=t.attr(t.sub).default_acl),
    ),
    "ACL of a symlink": ("symlink with an ACL", lambda t: t.put_attr(t.s, acl=t.attr(t.f).acl)),
    "flags": ("has flags 0x8010", lambda t: t.put_attr(t.f, flags=0x8010)),
    "uses of a slice": ("counted", lambda t: t.change_field(b"R", EIGHT(1), b"3")),
    "uses that can't be read": ("shared slice", lambda t: t.change_field(b"R", b"odd", b"1")),
    "uses beyond belief": ("shared slice", lambda t: t.change_field(b"R", EIGHT(1), b"9" * 19)),
    "drops that can't be read": ("row b'X'", lambda t: t.change_field(b"X", EIGHT(99), b"short")),
    "an orphan that can't be read": (
        "orphan b'odd'", lambda t: t.change_field(keys.ORPHANS, b"odd", EIGHT(1))
    ),
    "hour that is none": (
        "is listed as an hour", lambda t: t.change_field(keys.TRASH, EIGHT(5), b"1")
    ),
    "hour that can't be read": (
        "is listed as an hour", lambda t: t.change_field(keys.TRASH, b"today", b"1")
    ),
    "hour not listed": (
        "in the trash and is not listed",
        lambda t: t.change_field(keys.TRASH, EIGHT(t.hour), None),
    ),
    "directory in the trash": ("in the trash and not empty", _fill_trashed_dir),
    "name in the trash of nothing": (
        "does not exist", lambda t: t.put_name(t.hour, b"1-4242-x", Ino(4242), FileType.DIR)
    ),
    "clone that is gone": (
        "clone that is being built and does not exist",
        lambda t: t.change_field(keys.CLONES, EIGHT(4242), EIGHT(1)),
    ),
    "clone that can't be read": (
        "is listed as a clone", lambda t: t.change_field(keys.CLONES, b"odd", EIGHT(1))
    ),
    "lock of a session that ended": ("which has ended", lambda t: _lock(t, 3)),
    "wait without need": ("with waiters that need not wait", _wait),
    "locks that can't be read": (
        "row b'l", lambda t: t.plant(Put(*locks.held_key(t.f, Kind.FLOCK), b"x"))
    ),
    "notes of locks": (
        "notes of locks",
        lambda t: t.change_field(locks.grant_row(3), locks.place_field(t.f, Kind.FLOCK), b"1"),
    ),
    "session that is not listed": (
        "not listed", lambda t: t.change_field(keys.session_row(99), FENCE_FIELD, b"1")
    ),
    "session that can't be read": (
        "row b'S'", lambda t: t.change_field(keys.SESSIONS, EIGHT(99), b"\x81")
    ),
    "session of no number": ("row b'S'", lambda t: t.change_field(keys.SESSIONS, b"x", b"\x80")),
    "leader": ("leads", lambda t: t.change_field(BACKGROUND, keys.LEADER, b"me")),
    "round": ("field b'round'", lambda t: t.change_field(BACKGROUND, keys.ROUND, b"one")),
    "void": ("field b'void'", lambda t: t.change_field(BACKGROUND, keys.VOID, b"none")),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_r1_each_damage_is_seen_and_mended(name: str) -> None:
    tree = Everything()
    text, damage = DAMAGE[name]
    damage(tree)
    found = tree.found()
    assert any(text in problem for problem in found), found
    done, checked = repair(tree.ended, NOW_S)
    assert done
    assert checked.problems == []
    assert_clean(tree.store)
    assert repair(tree.ended, NOW_S) == ([], checked)
    fresh = Meta(tree.store, RUNTIME)
    fresh.sessions.open({})
    assert fresh.getattr(ROOT_CALLER, tree.f).size == 5000
    assert fresh.getattr(ROOT_CALLER, tree.linked).nlink == 3


def test_r1_everything_at_once() -> None:
    tree = Everything()
    for name, (_, damage) in DAMAGE.items():
        if not name.startswith(("ACL", "default ACL", "directory in", "hour not", "flags")):
            damage(tree)
    done, checked = repair(tree.ended, NOW_S)
    assert len(done) > 20
    assert checked.problems == []


def test_r1_whom_a_lost_acl_let_in_nobody_knows_so_the_group_is_shut_out() -> None:
    """The mode's group bits are the ACL's mask: without the ACL they would be the group's."""
    tree = Everything()
    assert stat.S_IMODE(tree.attr(tree.f).mode) == 0o770
    tree.plant(DeleteRow(_acl(tree, tree.f)))
    done, _ = repair(tree.ended, NOW_S)
    assert any(f"inode {tree.f} had an ACL that is gone" in line for line in done)
    attr = Meta(tree.store, RUNTIME).getattr(ROOT_CALLER, tree.f)
    assert (stat.S_IMODE(attr.mode), attr.acl) == (0o700, 0)


def test_p2_acl_records_that_no_inode_has_are_removed() -> None:
    """They are no problem, and stay for ever but for this."""
    tree = Everything()
    meta = Meta(tree.store, RUNTIME)
    meta.sessions.open({})
    meta.setxattr(ROOT_CALLER, tree.f, ACCESS_XATTR, b"")
    for perm in range(4):
        other = LET_IN._replace(named=(Named(True, 7, perm),))
        meta.setxattr(ROOT_CALLER, tree.linked, ACCESS_XATTR, pack_xattr(other))
    found = check(tree.store)
    assert (found.problems, found.acls, found.acls_used) == ([], 6, 2)
    meta.sessions.close()
    done, checked = repair(Meta(tree.store, RUNTIME), NOW_S)
    assert len(done) == 4
    assert (checked.acls, checked.acls_used) == (2, 2)
    names = [acl.describe(acl.with_mode(acl.unpack_record(0, each[b"e"]), 0o770)) for each in
             tree.store.read_rows([_acl(tree, tree.linked)])]  # fmt: skip
    assert names == ["u::rwx,g::r-x,g:7:-wx,m::rwx,o::---"]


def test_r1_no_id_is_moved_by_an_hour_of_the_trash() -> None:
    """Regression: the hour's number, 2^61 and more, was taken for an inode's."""
    tree = Everything()
    before = tree.store.read([(keys.COUNTERS, keys.NEXT_INO)])
    assert keys.id_of(EIGHT(tree.hour)) > TRASH_INO
    tree.change_field(keys.TRASH, EIGHT(tree.hour), None)
    repair(tree.ended, NOW_S)
    assert tree.store.read([(keys.COUNTERS, keys.NEXT_INO)]) == before


# --- the tables that spill ------------------------------------------------------------------------


def test_r1_a_check_that_spills_finds_the_same() -> None:
    tree = Everything(files=2000)
    for each in (tree.d, tree.f, tree.linked):
        tree.put_attr(each, nlink=77)
    tree.put_name(tree.sub, b"dangling", Ino(4242))
    tree.plant(add(ACCOUNTS, _space(0), 4096))
    with Examination(tree.store, cache_bytes=16 << 10) as examination:
        spilled = examination.run()
    assert len(spilled.problems) >= 4
    assert spilled == check(tree.store)


def test_groups_hand_out_rows_by_key_and_tell_of_the_rest() -> None:
    strays: list[int] = []
    groups = Groups([(1,), (3, "a"), (3, "b"), (4,), (7,)], lambda row: strays.append(row[0]))
    assert (groups.of(2), groups.of(3), groups.of(6)) == ([], [(3, "a"), (3, "b")], [])
    groups.end()
    assert strays == [1, 4, 7]


def test_a_row_that_is_there_stays() -> None:
    spill = SpillTable("CREATE TABLE t(id INTEGER PRIMARY KEY, what)")
    spill.add("t", 5, "first")
    assert list(spill.rows("SELECT * FROM t")) == [(5, "first")]
    spill.add("t", 5, "second")
    spill.add("t", 4, None)
    assert list(spill.rows("SELECT * FROM t ORDER BY id")) == [(4, None), (5, "first")]
    spill.close()
    with pytest.raises(OSError, match="temporary tables") as caught:
        spill.run("DELETE FROM t")
    assert caught.value.errno == errno.EIO


FULL = """
from fsmeta.check.spill_table import SpillTable
spill = SpillTable("CREATE TABLE t(id INTEGER PRIMARY KEY, what)", 64 << 10)
try:
    for number in range(100_000):
        spill.add("t", number, b"x" * 100)
    spill.one("SELECT COUNT(*) FROM t")
except OSError as error:
    print(error.errno, error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to mount a tmpfs")
def test_r1_a_full_temporary_directory_is_named(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", tmp_path], check=True)
    try:
        done = subprocess.run(
            [sys.executable, "-c", FULL],
            env={**os.environ, "SQLITE_TMPDIR": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
        )
    finally:
        subprocess.run(["umount", tmp_path], check=True)
    assert done.stdout.startswith(f"{errno.ENOSPC} ")
    assert "let TMPDIR name another directory" in done.stdout


def test_t2_repairing_directories_leaves_snapshots_as_they_are() -> None:
    """Repairing a directory must not forget its snapshots, nor take what is in them out."""
    tree = Everything()
    meta = Meta(tree.store, RUNTIME)
    meta.sessions.open({})
    taker = Taker(meta, ROOT_CALLER, RUNTIME.now_ns, lambda: False)
    made = taker.take(tree.d, b"snap")
    meta.sessions.close()
    meta = tree.ended
    assert_clean(tree.store)
    copied = meta.lookup(ROOT_CALLER, made.root, b"sub").ino
    attr = meta.getattr(ROOT_CALLER, tree.d)
    wrong = inode.pack_attr(attr._replace(flags=attr.flags | 1 << 13))
    tree.change_field(keys.inode_row(tree.d), keys.ATTR_FIELD, wrong)
    volatile = inode.pack_volatile(meta.getattr(ROOT_CALLER, copied)._replace(nlink=9))
    tree.change_field(keys.inode_row(copied), keys.VOLATILE_FIELD, volatile)
    before = tree.store.read([(keys.COUNTERS, keys.NEXT_INO)])
    done, checked = repair(meta, NOW_S)
    assert checked.problems == []
    assert len(done) == 2, done
    assert meta.getattr(ROOT_CALLER, tree.d) == attr
    assert tree.store.read([(keys.COUNTERS, keys.NEXT_INO)]) == before
    assert_clean(tree.store)

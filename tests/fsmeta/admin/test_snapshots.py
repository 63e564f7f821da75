"""T2: snapshots on every engine: what they show, that nobody changes them, what is left of them."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from fsmeta.admin import clones, snapshots
from fsmeta.admin.quota_admin import QuotaLimits, set_quota
from fsmeta.admin.snapshots import Taker
from fsmeta.check.check import check
from fsmeta.meta.meta import Meta
from fsmeta.ops.data.ranges import Span
from fsmeta.ops.names.create import NewNode
from fsmeta.ops.names.rename import DentryLocation
from fsmeta.ops.trees import clone, snapshot
from fsmeta.rules import quota
from fsmeta.rules.access import READ, WRITE
from fsmeta.schema import keys
from fsmeta.schema.snapshot_inos import is_snapshot_ino, snapshot_dir_of
from fsmeta.schema.snapshots import Snapshot
from fsmeta.types import FLAGS, ROOT_CALLER, ROOT_INO, SNAPSHOTS_SHIFT, Caller, Ino, SetAttr, Slice
from tests.fsmeta.engines import RUNTIME, Engine
from tests.fsmeta.ops.trees.test_clone import plant, tree, write
from tests.support.outcome import errno_of

ROOT = ROOT_CALLER
USER = Caller(1000, 1000)
FEW = 40  # files: several commits to remove, and quick on TiKV


def _taker(meta: Meta, caller: Caller = ROOT) -> Taker:
    return Taker(meta, caller, RUNTIME.now_ns, lambda: False)


def take(meta: Meta, source: Ino, name: bytes = b"snap", caller: Caller = ROOT) -> Snapshot:
    return _taker(meta, caller).take(source, name)


def _leader_removes(meta: Meta) -> None:
    """What the leading client does about what has lost its name."""
    for each in clones.abandoned(meta):
        assert clones.discard(meta, each)
    assert clones.abandoned(meta) == []


def test_t2_a_snapshot_is_the_same_and_stays_so(engine: Engine) -> None:
    meta = engine.meta()
    top = plant(meta, FEW)
    before, shown = meta.statfs(), tree(meta, top)
    made = take(meta, top)
    assert made.changed == 0
    assert tree(meta, made.root) == shown
    assert made.inodes == len(shown) - 2  # one has three names
    used = meta.statfs()
    assert used.inodes_used == before.inodes_used + made.inodes
    assert used.space_used == 2 * before.space_used
    assert check(meta.store).problems == []
    file = meta.lookup(ROOT, top, b"same")
    copied = meta.lookup(ROOT, made.root, b"same")
    assert (copied.ctime_ns, copied.btime_ns) == (file.ctime_ns, file.btime_ns)
    write(meta, file.ino, range(5))
    meta.setattr(ROOT, file.ino, SetAttr(size=10))
    sub = meta.lookup(ROOT, top, b"sub").ino
    for name in (b"1", b"2", b"10"):
        meta.unlink(ROOT, sub, name)
    meta.rename(ROOT, DentryLocation(sub, b"3"), DentryLocation(ROOT_INO, b"3"))
    meta.create(ROOT, sub, b"new", 0o100644)
    assert tree(meta, made.root) == shown
    assert check(meta.store).problems == []


def test_t2_large_files_are_filled_in_steps(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clone, "_SLICES_INLINE", 2)
    monkeypatch.setattr(clone, "COMMIT_OPS_ENOUGH", 100)
    meta = engine.meta()
    top = plant(meta, FEW)
    made = take(meta, top)
    assert made.changed == 0
    assert tree(meta, made.root) == tree(meta, top)
    assert check(meta.store).problems == []


def test_t2_what_changes_while_it_is_taken_is_counted(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each way of changing something between copying and comparing is noticed."""
    meta = engine.meta()
    top = meta.create(ROOT, ROOT_INO, b"top", 0o40755).ino
    sub = meta.create(ROOT, top, b"sub", 0o40755).ino
    file = meta.create(ROOT, sub, b"file", 0o100644).ino
    meta.link(ROOT, file, ROOT_INO, b"elsewhere")
    write(meta, file)
    other = engine.meta()
    changes: dict[bytes, tuple[Callable[[], object], int]] = {
        b"nothing": (lambda: None, 0),
        b"chmod": (lambda: other.setattr(ROOT, file, SetAttr(mode=0o600)), 1),
        b"xattr": (lambda: other.setxattr(ROOT, file, b"user.a", b"1"), 1),
        b"write": (lambda: _overwrite(other, file), 1),
        b"create": (lambda: other.create(ROOT, sub, b"more", 0o100644), 1),
        b"unlink": (lambda: other.unlink(ROOT, sub, b"more"), 2),
        b"rename": (
            lambda: other.rename(ROOT, DentryLocation(top, b"sub"), DentryLocation(top, b"dir")),
            2,
        ),
        b"link": (lambda: other.link(ROOT, file, ROOT_INO, b"again"), 1),
    }
    copy = clones.CloneBuilder.copy
    for name, (change, count) in changes.items():

        def copy_then_change(
            self: clones.CloneBuilder,
            directories: Any,
            change: Callable[[], object] = change,
        ) -> None:
            copy(self, directories)
            change()

        monkeypatch.setattr(clones.CloneBuilder, "copy", copy_then_change)
        assert (name, take(meta, top, name).changed) == (name, count)
    assert check(meta.store).problems == []


def _overwrite(meta: Meta, ino: Ino) -> None:
    """Other bytes, with every time and the size as they were."""
    attr = meta.getattr(ROOT, ino)
    meta.write_slices(ino, [(0, Slice(0, meta.new_slice_id(), 100, 0, 100))], 100, attr.mtime_ns)
    assert meta.getattr(ROOT, ino) == attr


def test_t2_nobody_changes_a_snapshot(engine: Engine) -> None:
    """By whatever verb, root included; and nothing is linked or moved across its border."""
    meta = engine.meta()
    top = plant(meta, FEW)
    shown = tree(meta, top)
    root = take(meta, top).root
    sub = meta.lookup(ROOT, root, b"sub").ino
    file = meta.lookup(ROOT, root, b"same").ino
    snapshot_dir = snapshot_dir_of(top)
    outside = meta.create(ROOT, ROOT_INO, b"outside", 0o100644).ino
    node = NewNode(meta.new_ino(), 0o100600)
    piece = [(0, Slice(0, meta.new_slice_id(), 10, 0, 10))]
    old = meta.read_chunk(file, 0)
    calls: list[Callable[[], object]] = []
    for place in (root, sub, snapshot_dir):
        calls += [
            partial(meta.create, ROOT, place, b"new", 0o100644),
            partial(meta.create, ROOT, place, b"new", 0o40755),
            partial(meta.symlink, ROOT, place, b"new", b"target"),
            partial(meta.link, ROOT, outside, place, b"new"),
            partial(
                meta.rename,
                ROOT,
                DentryLocation(ROOT_INO, b"outside"),
                DentryLocation(place, b"new"),
            ),
            partial(meta.ranges.tmpfile, ROOT, place, node, True),
            partial(meta.setattr, ROOT, place, SetAttr(mode=0o777)),
            partial(meta.setxattr, ROOT, place, b"user.a", b"1"),
            partial(meta.setflags, ROOT, place, 0),
        ]
    calls += [
        lambda: meta.rename(ROOT, DentryLocation(sub, b"file"), DentryLocation(ROOT_INO, b"out")),
        lambda: meta.rename(ROOT, DentryLocation(sub, b"file"), DentryLocation(sub, b"other")),
        lambda: meta.rename(
            ROOT, DentryLocation(snapshot_dir, b"snap"), DentryLocation(snapshot_dir, b"other")
        ),
        lambda: meta.unlink(ROOT, sub, b"file"),
        lambda: meta.rmdir(ROOT, sub, b"empty"),
        lambda: meta.rmdir(ROOT, snapshot_dir, b"snap"),
        lambda: meta.setattr(ROOT, file, SetAttr(size=0)),
        lambda: meta.setattr(ROOT, file, SetAttr(uid=5)),
        lambda: meta.setattr(ROOT, file, SetAttr(atime_now=True)),
        lambda: meta.setxattr(ROOT, file, b"system.posix_acl_access", b"\2\0\0\0"),
        lambda: meta.removexattr(ROOT, file, b"user.a"),
        lambda: meta.write_slices(file, piece, 10, 1),
        lambda: meta.ranges.fallocate(file, 3, 0, 10),
        lambda: meta.access(ROOT, file, WRITE),
        lambda: meta.require(ROOT, meta.getattr(ROOT, file), WRITE),
        lambda: meta.ranges.copy_file_range(Span(outside, 0, 10), file, 0),
        lambda: take(meta, sub),
        lambda: clones.CloneBuilder(meta, ROOT, True, lambda: False).build(top, root, b"new"),
    ]
    assert [errno_of(call) for call in calls] == [errno.EROFS] * len(calls)
    assert errno_of(lambda: meta.link(ROOT, file, ROOT_INO, b"out")) == errno.EXDEV
    meta.access(ROOT, file, READ)
    meta.require(ROOT, meta.getattr(ROOT, file), READ)
    assert not meta.compact_chunk(file, 0, old, [piece[0][1]])
    assert tree(meta, root) == shown
    assert check(meta.store).problems == []
    meta.ranges.copy_file_range(Span(file, 0, 100), outside, 0)  # out of it all may be copied
    clones.CloneBuilder(meta, ROOT, True, lambda: False).build(root, ROOT_INO, b"restored")
    restored = meta.lookup(ROOT, ROOT_INO, b"restored").ino
    assert tree(meta, restored) == shown
    assert not is_snapshot_ino(restored)
    meta.create(ROOT, restored, b"new", 0o100644)
    assert check(meta.store).problems == []


def test_t2_deleting_frees_everything(engine: Engine) -> None:
    meta = engine.meta()
    top = plant(meta, FEW)
    before = meta.statfs()
    first, second = take(meta, top, b"first"), take(meta, top, b"second")
    assert [each.name for each in snapshots.listing(meta)] == [b"first", b"second"]
    assert snapshots.snapshot_of(meta, first.root) == first
    assert meta.getflags(ROOT, top) & ~FLAGS == 0
    snapshots.remove(meta, ROOT, snapshot_dir_of(top), b"first")
    assert errno_of(lambda: meta.lookup(ROOT, snapshot_dir_of(top), b"first")) == errno.ENOENT
    assert [each.name for each in snapshots.listing(meta)] == [b"second"]
    assert check(meta.store).problems == []
    _leader_removes(meta)
    snapshots.remove(meta, ROOT, snapshot_dir_of(top), b"second")
    _leader_removes(meta)
    assert meta.statfs() == before
    assert meta.getattr(ROOT, second.source).flags == 0
    assert check(meta.store).problems == []
    meta.deletion.purge(meta.deletion.orphans(10_000))
    assert check(meta.store).problems == []


def test_t2_deletion_goes_on_where_it_was_left(engine: Engine) -> None:
    """In bounded steps, and by whoever leads next."""
    one, two = engine.meta(), engine.meta()
    top = plant(one, FEW)
    before = one.statfs()
    take(one, top)
    snapshots.remove(one, ROOT, snapshot_dir_of(top), b"snap")
    for meta in (one, two, one, two):
        (left,) = clones.abandoned(meta)
        turns = iter(range(3))
        assert not clones.discard(meta, left, partial(_is_over, turns))
        assert check(meta.store).problems == []
    _leader_removes(two)
    assert two.statfs() == before
    assert check(two.store).problems == []


def _is_over(turns: Iterator[int]) -> bool:
    return next(turns, None) is None


@pytest.mark.parametrize("where", ["children", "link_child", "publish"])
def test_t2_what_a_dead_taker_left_is_removed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """It was never seen, and its directory can go as before."""
    one, two = engine.meta(), engine.meta()
    top = plant(one, FEW)
    before = one.statfs()

    class Killed(BaseException):
        pass

    def dies(*_args: object) -> object:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(snapshot if where == "publish" else clone, where, dies)
        with pytest.raises(Killed):
            take(one, top)
    assert one.session is not None
    assert two.names(snapshot_dir_of(top)) == ([], None)
    assert snapshots.listing(two) == []
    assert check(two.store).problems == []
    two.sessions.end(one.session.id)
    _leader_removes(two)
    assert two.statfs() == before
    assert check(two.store).problems == []


@contextmanager
def _unchanged(meta: Meta) -> Iterator[None]:
    before = meta.statfs()
    yield
    assert meta.statfs() == before
    assert meta.store.read_rows([keys.CLONES]) == [{}]
    assert check(meta.store).problems == []


def test_t2_bad_input(engine: Engine) -> None:
    meta = engine.meta()
    top = meta.create(ROOT, ROOT_INO, b"top", 0o40777).ino
    file = meta.create(ROOT, top, b"file", 0o100644).ino
    gone = meta.create(ROOT, ROOT_INO, b"gone", 0o40777).ino
    meta.rmdir(ROOT, ROOT_INO, b"gone")
    take(meta, top, b"taken")
    with _unchanged(meta):
        assert errno_of(lambda: take(meta, top, b"taken")) == errno.EEXIST
        assert errno_of(lambda: take(meta, top, b"other", USER)) == errno.EPERM
        assert errno_of(lambda: take(meta, file)) == errno.ENOTDIR
        assert errno_of(lambda: take(meta, gone)) in (errno.ENOENT, errno.ESTALE)
        for name in (b".", b"..", b"", b"a/b"):
            assert errno_of(partial(take, meta, top, name)) == errno.EINVAL
        assert errno_of(lambda: take(meta, top, b"n" * 256)) == errno.ENAMETOOLONG
        snapshot_dir = snapshot_dir_of(top)
        assert errno_of(lambda: snapshots.remove(meta, USER, snapshot_dir, b"taken")) == errno.EPERM
        assert (
            errno_of(lambda: snapshots.remove(meta, ROOT, snapshot_dir, b"other")) == errno.ENOENT
        )


def test_t2_a_directory_with_snapshots_stays(engine: Engine) -> None:
    """Until they are deleted; whoever knew it before there were any is told, too."""
    one, two = engine.meta(), engine.meta()
    top = one.create(ROOT, ROOT_INO, b"top", 0o40755).ino
    one.create(ROOT, top, b"file", 0o100644)
    empty = one.create(ROOT, ROOT_INO, b"empty", 0o40755).ino
    two.lookup(ROOT, ROOT_INO, b"top")
    take(one, top)
    one.unlink(ROOT, top, b"file")
    for meta in (one, two):
        assert errno_of(partial(meta.rmdir, ROOT, ROOT_INO, b"top")) == errno.ENOTEMPTY
        over = DentryLocation(ROOT_INO, b"empty"), DentryLocation(ROOT_INO, b"top")
        assert errno_of(partial(meta.rename, ROOT, *over)) == errno.ENOTEMPTY
    one.rename(ROOT, DentryLocation(ROOT_INO, b"top"), DentryLocation(empty, b"moved"))
    assert one.lookup(ROOT, snapshot_dir_of(top), b"snap").is_dir
    snapshots.remove(two, ROOT, snapshot_dir_of(top), b"snap")
    one.rmdir(ROOT, empty, b"moved")
    _leader_removes(one)
    assert check(one.store).problems == []


def test_t2_a_directory_that_goes_while_it_is_taken(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = engine.meta(), engine.meta()
    top = one.create(ROOT, ROOT_INO, b"top", 0o40755).ino
    publish = snapshot.publish
    removed: list[object] = []

    def first_removed(*args: Any) -> object:
        removed.append(removed or two.rmdir(ROOT, ROOT_INO, b"top"))
        return publish(*args)

    monkeypatch.setattr(snapshot, "publish", first_removed)
    with _unchanged(one):
        assert errno_of(lambda: take(one, top)) in (errno.ENOENT, errno.ESTALE)
        one.create(ROOT, ROOT_INO, b"as much", 0o40755)


def test_t2_flags_and_snapshots_don_t_meet(engine: Engine) -> None:
    meta = engine.meta()
    top = meta.create(ROOT, ROOT_INO, b"top", 0o40755).ino
    below = meta.create(ROOT, top, b"below", 0o40755).ino
    take(meta, below)
    meta.setflags(ROOT, below, FLAGS)
    assert meta.getflags(ROOT, below) == FLAGS
    copied = meta.lookup(ROOT, take(meta, top).root, b"below")
    assert copied.flags >> SNAPSHOTS_SHIFT == 0
    made = clones.CloneBuilder(meta, ROOT, True, lambda: False).build(below, ROOT_INO, b"copy")
    assert made.flags >> SNAPSHOTS_SHIFT == 0
    meta.setflags(ROOT, below, 0)
    snapshots.remove(meta, ROOT, snapshot_dir_of(below), b"snap")
    assert meta.getattr(ROOT, below).flags == 0
    _leader_removes(meta)
    assert check(meta.store).problems == []


def test_t2_snapshots_count_for_the_volume_alone(engine: Engine) -> None:
    """Whether quotas come before them or after, and whatever leaves the directory since."""
    meta = engine.meta()
    top = plant(meta, FEW)
    early = take(meta, top, b"early")
    accounts = [quota.dir_node(top), quota.user_node(0), quota.group_node(0)]
    for node in accounts:
        set_quota(meta, node, QuotaLimits(None, 10_000))

    def rooms() -> list[quota.Headroom]:
        return meta.transactor.view(lambda txn: quota.rooms(txn, accounts))

    charged = rooms()
    assert charged[0].used.inodes == early.inodes - 1  # a directory does not count in itself
    volume = meta.statfs()
    take(meta, top, b"late")
    assert rooms() == charged
    assert meta.statfs().inodes_used == volume.inodes_used + early.inodes
    assert check(meta.store).problems == []
    inside = meta.lookup(ROOT, early.root, b"sub").ino
    assert meta.statfs(inside) == meta.statfs()
    for name in (b"early", b"late"):
        snapshots.remove(meta, ROOT, snapshot_dir_of(top), name)
    _leader_removes(meta)
    assert rooms() == charged
    assert check(meta.store).problems == []

"""Q1, T1, T2, P4: random verbs with quotas, against a reference that counts all anew each time.

The reference is a tree of dicts, with what is in the trash and what snapshots have beside it. It
says beforehand which quota a verb would pass, and afterwards what each directory, user and group
takes up, and the volume.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Iterator

import pytest

from fsmeta.admin import clones, quota_admin, snapshots
from fsmeta.admin.quota_admin import QuotaLimits
from fsmeta.admin.trash_expiry import expire, hours
from fsmeta.meta.meta import Meta
from fsmeta.ops.data.ranges import ZERO_RANGE
from fsmeta.ops.names.rename import EXCHANGE, DentryLocation
from fsmeta.rules import quota
from fsmeta.rules.settings import VolumeFormat
from fsmeta.schema.snapshot_inos import snapshot_dir_of
from fsmeta.types import ROOT_CALLER, ROOT_INO, Caller, Ino, SetAttr, Slice
from tests.conftest import assert_clean
from tests.fsmeta.engines import RUNTIME, Engine

PAGE = 4096
STEPS = {"mem": 300, "sqlite": 150, "redis": 200, "cluster": 100, "tikv": 40}
NAMES = (b"a", b"b", b"c", b"d")
IDS = (0, 1000, 1001)
VERBS = (
    *("create", "create", "mkdir", "write", "write", "reserve", "truncate", "unlink", "rmdir"),
    *("rename", "rename", "rename", "exchange", "chown", "limit", "unlimit", "refill"),
)
KEEPING = (*VERBS, "trash", "restore", "restore", "empty", "clone", "clone", "snapshot", "forget")
CLONED_MAX = 12  # inodes: more would soon be all there is


class Node:
    """An inode of the reference; a directory has `names`."""

    def __init__(self, ino: Ino, parent: Node | None, uid: int, gid: int, is_dir: bool) -> None:
        self.ino = ino
        self.parent = parent
        self.uid, self.gid = uid, gid
        self.names: dict[bytes, Node] | None = {} if is_dir else None
        self.pages = 0
        self.written = 0  # of them; the others are reserved

    def below(self) -> Iterator[Node]:
        for child in (self.names or {}).values():
            yield child
            yield from child.below()

    def above(self) -> Iterator[Node]:
        node = self.parent
        while node is not None:
            yield node
            node = node.parent

    def copied(self, parent: Node, owner: tuple[int, int] | None) -> Node:
        """A clone of it that is to be in `parent`."""
        uid, gid = owner or (self.uid, self.gid)
        copy = Node(Ino(0), parent, uid, gid, self.names is not None)
        copy.pages = copy.written = self.written
        if self.names is not None:
            copy.names = {name: each.copied(copy, owner) for name, each in self.names.items()}
        return copy

    def learn(self, meta: Meta, ino: Ino) -> None:
        """The numbers of a tree that was made at once."""
        self.ino = ino
        if self.names is not None:
            shown, cursor = meta.names(ino)
            assert cursor is None
            assert sorted(each.name for each in shown) == sorted(self.names)
            for each in shown:
                self.names[each.name].learn(meta, each.ino)


class Machine:
    """A volume, the reference of it, and the limits."""

    def __init__(
        self, metas: list[Meta], dice: random.Random, verbs: tuple[str, ...] = VERBS
    ) -> None:
        self.metas = metas
        self.dice = dice
        self.verbs = verbs
        self.trashed: list[Node] | None = None  # None: there is no trash
        self.kept: dict[tuple[Node, bytes], tuple[int, int]] = {}  # snapshots: pages and inodes
        self._taken = 0
        self.root = Node(ROOT_INO, None, 0, 0, is_dir=True)
        self.limits: dict[bytes, tuple[int, int]] = {}
        self.refused = 0

    def nodes(self) -> dict[bytes, tuple[int, int]]:
        """What counts where: pages and inodes."""
        sums: dict[bytes, list[int]] = {}
        for node in (self.root, *self.root.below(), *(self.trashed or ())):
            where = [quota.user_node(node.uid), quota.group_node(node.gid)]
            where += [quota.dir_node(each.ino) for each in node.above() if each is not self.root]
            for each in where:
                sums.setdefault(each, [0, 0])
                sums[each][0] += node.pages
                sums[each][1] += 1
        return {node: (pages, inodes) for node, (pages, inodes) in sums.items()}

    def volume(self) -> tuple[int, int]:
        """Pages and inodes of all there is."""
        found = [(each.pages, 1) for each in (*self.root.below(), *(self.trashed or ()))]
        found += self.kept.values()
        return sum(pages for pages, _ in found), 1 + sum(inodes for _, inodes in found)

    def meta(self) -> Meta:
        return self.dice.choice(self.metas)

    def pick(self, is_dir: bool, root: bool = False) -> Node | None:
        found = [each for each in self.root.below() if (each.names is not None) is is_dir]
        return self.dice.choice(found + [self.root] * root) if found or root else None

    def step(self) -> None:
        verb = self.dice.choice(self.verbs)
        before = self.nodes()
        undo = getattr(self, verb)()
        if undo is None:
            return
        call, back = undo
        after = self.nodes()
        passed = [
            node
            for node, limit in self.limits.items()
            for at in (0, 1)
            if limit[at]
            and after.get(node, (0, 0))[at] > max(limit[at], before.get(node, (0, 0))[at])
        ]
        try:
            call()
            assert not passed, f"{verb} should have passed {passed}"
        except OSError as error:
            assert error.errno == errno.EDQUOT, (verb, error)
            back()
            self.refused += 1
            # what is above its limit already takes nothing in, even in exchange for more
            above = [n for n in self.limits if self._is_above(n, after)]
            assert passed or above, f"{verb} was refused; before {before}, after {after}"
            needed = after != before or verb not in ("write", "reserve")
            assert needed, f"{verb} was refused, and all that it covers is covered"

    def _is_above(self, node: bytes, usage: dict[bytes, tuple[int, int]]) -> bool:
        pairs = zip(usage.get(node, (0, 0)), self.limits[node], strict=True)
        return any(limit and used > limit for used, limit in pairs)

    # Each changes the reference and says how to do it for real, and how to take it back.

    def create(self, mode: int = 0o100666) -> object:
        parent = self.pick(True, root=True)
        assert parent is not None
        assert parent.names is not None
        name, uid = self.dice.choice(NAMES), self.dice.choice(IDS)
        if name in parent.names:
            return None
        node = Node(Ino(0), parent, uid, uid, mode & 0o40000 != 0)
        parent.names[name] = node
        names = parent.names

        def call() -> None:
            caller = Caller(uid, uid, checked=True)
            node.ino = self.meta().create(caller, parent.ino, name, mode).ino

        return call, lambda: names.pop(name)

    def mkdir(self) -> object:
        return self.create(0o40777)

    def write(self) -> object:
        node = self.pick(False)
        if node is None:
            return None
        old, new = (node.pages, node.written), self.dice.randrange(1, 9)
        node.pages, node.written = max(node.pages, new), max(node.written, new)
        meta = self.meta()
        piece = Slice(0, meta.new_slice_id(), new * PAGE, 0, new * PAGE)
        return (
            lambda: meta.write_slices(node.ino, [(0, piece)], new * PAGE, 1),
            lambda: self._set(node, *old),
        )

    def _set(self, node: Node, pages: int, written: int) -> None:
        node.pages, node.written = pages, written

    def reserve(self) -> object:
        """fallocate(2), which sets the size; or zeroes what is there, and makes it reserved."""
        node = self.pick(False)
        if node is None:
            return None
        old, new = (node.pages, node.written), self.dice.randrange(1, 9)
        zeroes = new >= node.written and self.dice.random() < 0.5
        node.pages, node.written = max(node.pages, new), 0 if zeroes else node.written
        mode, meta = ZERO_RANGE if zeroes else 0, self.meta()
        return (
            lambda: meta.ranges.fallocate(node.ino, mode, 0, new * PAGE),
            lambda: self._set(node, *old),
        )

    def truncate(self) -> object:
        node = self.pick(False)
        if node is None:
            return None
        old, new = node.pages, self.dice.randrange(9)
        self._set(node, min(old, new), min(node.written, new))
        want = SetAttr(size=new * PAGE)
        return lambda: self.meta().setattr(ROOT_CALLER, node.ino, want), _never

    def unlink(self) -> object:
        node = self.pick(False)
        if node is None:
            return None
        parent, name = self._drop(node)
        self._lose(node)
        return lambda: self.meta().unlink(ROOT_CALLER, parent.ino, name), _never

    def rmdir(self) -> object:
        node = self.pick(True)
        if node is None or node.names or self._has_snapshots(node):
            return None
        parent, name = self._drop(node)
        self._lose(node)
        self.limits.pop(quota.dir_node(node.ino), None)
        return lambda: self.meta().rmdir(ROOT_CALLER, parent.ino, name), _never

    def _drop(self, node: Node) -> tuple[Node, bytes]:
        parent = node.parent
        assert parent is not None
        assert parent.names is not None
        name = next(name for name, each in parent.names.items() if each is node)
        del parent.names[name]
        return parent, name

    def _lose(self, node: Node) -> None:
        """What has no name any more is in the trash, if there is one."""
        node.parent = None
        if self.trashed is not None:
            self.trashed.append(node)

    def _has_snapshots(self, node: Node) -> bool:
        return any(source is node for source, _ in self.kept)

    def rename(self) -> object:
        node = self.pick(self.dice.random() < 0.5)
        new = self.pick(True, root=True)
        if node is None or new is None or new is node or node in new.above():
            return None
        assert new.names is not None
        name = self.dice.choice(NAMES)
        target = new.names.get(name)
        if target is node or (target is not None and target in node.above()):
            return None
        if target is not None and ((target.names is None) != (node.names is None) or target.names):
            return None
        if target is not None and self._has_snapshots(target):
            return None
        old, old_name = self._drop(node)
        new.names[name] = node
        node.parent = new
        gone = None
        if target is not None:
            gone = self.limits.pop(quota.dir_node(target.ino), None)
            self._lose(target)

        def back() -> None:
            assert new.names is not None
            assert old.names is not None
            del new.names[name]
            if target is not None:
                new.names[name] = target
                target.parent = new
                if self.trashed is not None:
                    self.trashed.remove(target)
                if gone is not None:
                    self.limits[quota.dir_node(target.ino)] = gone
            old.names[old_name] = node
            node.parent = old

        places = DentryLocation(old.ino, old_name), DentryLocation(new.ino, name)
        return lambda: self.meta().rename(ROOT_CALLER, *places), back

    def exchange(self) -> object:
        one, two = (self.pick(self.dice.random() < 0.5) for _ in range(2))
        if one is None or two is None or one is two or one in two.above() or two in one.above():
            return None
        first, second = self._drop(one), self._drop(two)

        def put(left: Node, right: Node) -> None:
            for (parent, name), node in ((first, left), (second, right)):
                assert parent.names is not None
                parent.names[name] = node
                node.parent = parent

        put(two, one)
        places = DentryLocation(first[0].ino, first[1]), DentryLocation(second[0].ino, second[1])
        return lambda: self.meta().rename(ROOT_CALLER, *places, EXCHANGE), lambda: put(one, two)

    def chown(self) -> object:
        node = self.pick(self.dice.random() < 0.3)
        if node is None:
            return None
        old = node.uid, node.gid
        node.uid, node.gid = self.dice.choice(IDS), self.dice.choice(IDS)
        want = SetAttr(uid=node.uid, gid=node.gid)

        def back() -> None:
            node.uid, node.gid = old

        return lambda: self.meta().setattr(ROOT_CALLER, node.ino, want), back

    def limit(self) -> object:
        directory = self.pick(True)
        nodes = [quota.user_node(1000), quota.group_node(1001)]
        node = self.dice.choice(nodes + [quota.dir_node(directory.ino)] * 4 if directory else nodes)
        pages, inodes = self.dice.choice((0, 3, 9)), self.dice.choice((1, 3, 6))
        self.limits[node] = pages, inodes
        limits = QuotaLimits(pages * PAGE, inodes)
        return lambda: quota_admin.set_quota(self.meta(), node, limits), _never

    def unlimit(self) -> object:
        if not self.limits or self.dice.random() < 0.7:
            return None
        node = self.dice.choice(sorted(self.limits))
        del self.limits[node]
        return lambda: quota_admin.delete_quota(self.meta(), node), _never

    def refill(self) -> object:
        if not self.limits or self.dice.random() < 0.7:
            return None
        return lambda: quota_admin.recount(self.meta()), _never

    # Trash, clones and snapshots.

    def trash(self) -> object:
        """It is switched on, or off when nothing is in it."""
        if self.trashed:
            return None
        days = int(self.trashed is None)
        self.trashed = [] if days else None
        return lambda: self._keep_days(days), _never

    def _keep_days(self, days: int) -> None:
        quota_admin.change_settings(self.meta(), lambda now: now._replace(trash_days=days))
        for meta in self.metas:  # as a mount does with each heartbeat
            meta.refresh_settings()

    def restore(self) -> object:
        node = self.dice.choice(self.trashed) if self.trashed else None
        parent, name = self.pick(True, root=True), self.dice.choice(NAMES)
        if node is None or parent is None or parent.names is None or name in parent.names:
            return None
        assert self.trashed is not None
        trashed, names = self.trashed, parent.names
        trashed.remove(node)
        names[name], node.parent = node, parent

        def call() -> None:
            meta = self.meta()
            (old,) = [
                DentryLocation(hour, each.name)
                for hour in hours(meta)
                for each in meta.names(hour)[0]
                if each.ino == node.ino
            ]
            meta.rename(ROOT_CALLER, old, DentryLocation(parent.ino, name))

        def back() -> None:
            del names[name]
            node.parent = None
            trashed.append(node)

        return call, back

    def empty(self) -> object:
        if not self.trashed:
            return None
        self.trashed.clear()

        def call() -> None:
            meta = self.meta()
            for hour in hours(meta):
                while meta.names(hour)[0]:  # the hour itself is not over
                    expire(meta, hour)

        return call, _never

    def clone(self) -> object:
        source, parent = self.pick(True), self.pick(True, root=True)
        name, uid = self.dice.choice(NAMES), self.dice.choice(IDS)
        if source is None or parent is None or parent.names is None or name in parent.names:
            return None
        if len([*source.below()]) >= CLONED_MAX:
            return None
        preserve = self.dice.random() < 0.5
        copy = source.copied(parent, None if preserve else (uid, uid))
        names = parent.names
        names[name] = copy

        def call() -> None:
            meta, caller = self.meta(), Caller(uid, uid, checked=True)
            builder = clones.CloneBuilder(meta, caller, preserve, lambda: False)
            copy.learn(meta, builder.build(source.ino, parent.ino, name).ino)

        return call, lambda: names.pop(name)

    def snapshot(self) -> object:
        """Whatever it holds, no quota is in its way."""
        source = self.pick(True, root=True)
        if source is None:
            return None
        self._taken += 1
        name = b"s%d" % self._taken
        parts = (source, *source.below())
        self.kept[source, name] = sum(each.written for each in parts), len(parts)

        def call() -> None:
            taker = snapshots.Taker(self.meta(), ROOT_CALLER, RUNTIME.now_ns, lambda: False)
            assert taker.take(source.ino, name).changed == 0

        return call, _never

    def forget(self) -> object:
        """A snapshot is deleted, and what it held."""
        if not self.kept:
            return None
        source, name = self.dice.choice(list(self.kept))
        del self.kept[source, name]

        def call() -> None:
            meta = self.meta()
            snapshots.remove(meta, ROOT_CALLER, snapshot_dir_of(source.ino), name)
            for each in clones.abandoned(meta):
                assert clones.discard(meta, each)

        return call, _never

    def compare(self) -> None:
        """Every counter, and every limit."""
        meta = self.meta()
        listed = {each.node: each for each in quota_admin.list_quotas(meta)}
        shown = {n: (q.limit.space // PAGE, q.limit.inodes) for n, q in listed.items()}
        assert shown == self.limits
        volume = meta.statfs()
        assert (volume.space_used // PAGE, volume.inodes_used) == self.volume()
        if self.limits:
            for node, (pages, inodes) in self.nodes().items():
                found = quota_admin.get_quota(meta, node).used
                assert (found.space // PAGE, found.inodes) == (pages, inodes), node


def _never() -> None:
    raise AssertionError("it can't be refused")


def _live(machine: Machine, engine: Engine) -> None:
    quota_admin.change_settings(machine.meta(), VolumeFormat.with_reserved)
    for meta in machine.metas:
        meta.refresh_settings()
    for step in range(STEPS[engine.name]):
        machine.step()
        if step % 10 == 0:
            machine.compare()
    machine.compare()
    assert_clean(engine.first)


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 6, 7])  # those that meet a limit in 100 steps
def test_random_verbs(engine: Engine, seed: int) -> None:
    machine = Machine([engine.meta(), engine.meta()], random.Random(seed))
    _live(machine, engine)
    assert machine.refused or engine.name == "tikv"


@pytest.mark.parametrize("seed", range(100, 106))
def test_t1_t2_random_verbs_with_what_is_kept(engine: Engine, seed: int) -> None:
    """With a trash, clones and snapshots, and quotas set before, after and in between."""
    machine = Machine([engine.meta(), engine.meta()], random.Random(seed), KEEPING)
    _live(machine, engine)

"""M6, issue 3: several clients make and remove names in one directory, each change in one request.

Each client does what a kernel does before a change: it asks for the directory, whose mode it judges
by, and looks the names up. With the change itself that is two requests a name, however many clients
there are, and no conflict.
"""

from __future__ import annotations

import itertools
import stat
from collections.abc import Callable

import pytest

from fsmeta.meta.meta import Meta
from fsmeta.ops.names.rename import DentryLocation
from fsmeta.schema import keys
from fsmeta.txn import contended_dirs
from fsmeta.types import ROOT_INO, Attr, Caller, Ino, SetAttr
from tests.fsmeta.engines import Engine
from tests.support.waiting import wait_until

KERNEL = Caller(1000, 1000, checked=True)
ROOT = Caller(0, 0, checked=True)
CLIENTS = 4
WARM, WARM_MAX = 3, 100  # rounds until news of Redis have made the directory busy


class Crowd:
    """Clients in one directory, and a clock for what of it is believed."""

    def __init__(self, engine: Engine) -> None:
        self.now = 1000.0
        self.metas = [engine.meta() for _ in range(CLIENTS)]
        self.dir = self.metas[0].create(ROOT, ROOT_INO, b"d", stat.S_IFDIR | 0o777).ino
        for meta in self.metas:
            meta.cache.busy.now = lambda: self.now
        row = keys.dir_row(self.dir)
        for number in itertools.count():  # until everybody has heard of the others twice
            if number > WARM and all(meta.cache.busy.has(row) for meta in self.metas):
                break
            assert number < WARM_MAX
            self.each(lambda meta, name: self.create(meta, b"warm" + name), number)
        self.each(lambda meta, name: self.create(meta, b"warm" + name), number)

    def each(self, change: Callable[[Meta, bytes], object], number: int = 0) -> None:
        """Every client's `change`, by turns, with a name of its own."""
        for who, meta in enumerate(self.metas):
            change(meta, b"%d-%d" % (who, number))

    def costs(self, change: Callable[[Meta, bytes], object]) -> tuple[int, int]:
        """Requests and conflicts of a round."""
        requests = sum(meta.store.round_trips for meta in self.metas)
        conflicts = sum(meta.transactor.counters.conflicts for meta in self.metas)
        self.each(change)
        return (
            sum(meta.store.round_trips for meta in self.metas) - requests,
            sum(meta.transactor.counters.conflicts for meta in self.metas) - conflicts,
        )

    def look(self, meta: Meta, name: bytes) -> Attr | None:
        """As the kernel before a change."""
        meta.getattr(KERNEL, self.dir)
        try:
            return meta.lookup(KERNEL, self.dir, name)
        except FileNotFoundError:
            return None

    def create(self, meta: Meta, name: bytes, mode: int = stat.S_IFREG | 0o644) -> Attr:
        assert self.look(meta, name) is None
        return meta.create(KERNEL, self.dir, name, mode)

    def mkdir(self, meta: Meta, name: bytes) -> Ino:
        return self.create(meta, b"d" + name, stat.S_IFDIR | 0o755).ino

    def rename(self, meta: Meta, name: bytes) -> None:
        assert self.look(meta, name)
        assert self.look(meta, b"to" + name) is None
        meta.rename(KERNEL, DentryLocation(self.dir, name), DentryLocation(self.dir, b"to" + name))

    def unlink(self, meta: Meta, name: bytes) -> None:
        assert self.look(meta, b"to" + name)
        meta.unlink(KERNEL, self.dir, b"to" + name)

    def rmdir(self, meta: Meta, name: bytes) -> None:
        assert self.look(meta, b"d" + name)
        meta.rmdir(KERNEL, self.dir, b"d" + name)


@pytest.fixture
def crowd(engine: Engine) -> Crowd:
    return Crowd(engine)


redis_only = pytest.mark.parametrize("engine", ["redis"], indirect=True)
watched = pytest.mark.parametrize("engine", ["mem", "redis"], indirect=True)


@redis_only
def test_m6_changes_in_a_crowd_are_one_request(crowd: Crowd) -> None:
    one_look_up = 2 * CLIENTS, 0
    assert crowd.costs(crowd.create) == one_look_up
    assert crowd.costs(crowd.mkdir) == one_look_up
    assert crowd.costs(crowd.rename) == (3 * CLIENTS, 0)  # two names are looked up
    assert crowd.costs(crowd.unlink) == one_look_up
    assert crowd.costs(crowd.rmdir) == one_look_up


@watched
def test_m6_the_directory_s_attributes_are_shown_for_a_moment(crowd: Crowd) -> None:
    """What a change of one's own has left is shown; what others do later is, BELIEVED_S later."""
    one, other = crowd.metas[:2]
    before = one.getattr(KERNEL, crowd.dir)
    crowd.mkdir(one, b"1")
    mine = one.getattr(KERNEL, crowd.dir)
    assert mine.nlink == before.nlink + 1
    assert mine.mtime_ns > before.mtime_ns
    crowd.mkdir(other, b"2")
    assert one.getattr(KERNEL, crowd.dir) == mine
    assert other.getattr(KERNEL, crowd.dir).nlink == before.nlink + 2
    crowd.now += contended_dirs.BELIEVED_S + 0.001
    assert one.getattr(KERNEL, crowd.dir) == other.getattr(KERNEL, crowd.dir)


@watched
def test_m6_one_s_own_changes_show_at_once(crowd: Crowd) -> None:
    one = crowd.metas[0]
    crowd.mkdir(one, b"1")
    one.setattr(ROOT, crowd.dir, SetAttr(mode=0o700))
    assert one.getattr(KERNEL, crowd.dir).mode & 0o777 == 0o700
    one.setattr(ROOT, crowd.dir, SetAttr(mtime_ns=5))
    assert one.getattr(KERNEL, crowd.dir).mtime_ns == 5
    made = crowd.mkdir(one, b"sub")
    one.setattr(ROOT, made, SetAttr(mode=0o555))
    assert one.getattr(KERNEL, made).mode & 0o777 == 0o555


@watched
def test_m6_a_directory_that_is_left_alone_is_watched_again(crowd: Crowd) -> None:
    one, other = crowd.metas[:2]
    assert not one.are_names_leased(crowd.dir)
    crowd.now += contended_dirs.BUSY_S + contended_dirs.GAP_S + 0.001
    one.getattr(KERNEL, crowd.dir)
    crowd.look(one, b"new")
    assert one.are_names_leased(crowd.dir)
    assert one.is_inode_leased(crowd.dir)
    crowd.create(other, b"new")

    def is_told() -> bool:
        one.store.poll_invalidations()
        return not one.are_names_leased(crowd.dir)

    wait_until(is_told)
    assert crowd.look(one, b"new")


@watched
def test_m6_who_vouches_while_a_commit_is_not_watched_is_told(crowd: Crowd) -> None:
    """The commit began when the directory was busy, and ends the watch of those who come after."""
    one = crowd.metas[0]
    told: list[bytes] = []
    one.on_change(lambda rows: told.extend(rows or ()))
    send = one.store.commit

    def meanwhile(commit: object) -> object:
        crowd.now += 2 * contended_dirs.BUSY_S
        crowd.look(one, b"other")
        assert one.are_names_leased(crowd.dir)
        assert one.is_inode_leased(crowd.dir)
        return send(commit)  # type: ignore[arg-type]

    one.store.commit = meanwhile  # type: ignore[method-assign, assignment]
    one.create(KERNEL, crowd.dir, b"name", stat.S_IFREG | 0o644)
    one.store.commit = send  # type: ignore[method-assign]
    assert not one.are_names_leased(crowd.dir)
    assert not one.is_inode_leased(crowd.dir)
    assert {keys.dir_row(crowd.dir), keys.inode_row(crowd.dir)} <= set(told)


@watched
def test_m6_a_name_that_others_have_made_is_not_made_twice(crowd: Crowd) -> None:
    """What the kernel has been told is free need not be any more."""
    one, other = crowd.metas[:2]
    for name in (b"x", b"y"):
        assert crowd.look(one, name) is None
        crowd.create(other, name)
        if name == b"y":
            one.cache.drop([keys.dir_row(crowd.dir)])
        with pytest.raises(FileExistsError):
            one.create(KERNEL, crowd.dir, name, stat.S_IFREG | 0o644)


@watched
def test_m6_who_may_not_write_any_more_is_refused(crowd: Crowd) -> None:
    """A mode that others have changed is noticed by the commit, however busy the directory is."""
    one, other = crowd.metas[:2]
    user = KERNEL._replace(checked=False)
    one.create(user, crowd.dir, b"before", stat.S_IFREG | 0o644)
    other.setattr(ROOT, crowd.dir, SetAttr(mode=0o755))
    with pytest.raises(PermissionError):
        one.create(user, crowd.dir, b"after", stat.S_IFREG | 0o644)
    with pytest.raises(PermissionError):
        one.unlink(user, crowd.dir, b"before")

"""Q1: quotas of directories, users and groups, on every engine; each test ends with `check`."""

from __future__ import annotations

import errno
import itertools
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from fsmeta.admin import quota_admin
from fsmeta.admin.quota_admin import Quota, QuotaLimits
from fsmeta.errors import ConfigError
from fsmeta.meta.meta import Meta
from fsmeta.ops.names.rename import EXCHANGE, DentryLocation
from fsmeta.rules import quota
from fsmeta.rules.settings import load_format
from fsmeta.schema import keys
from fsmeta.txn.txn import Txn
from fsmeta.types import ROOT_CALLER, ROOT_INO, Caller, Ino, SetAttr, Slice, SpaceUsage
from tests.conftest import assert_clean
from tests.fsmeta.engines import Engine

ROOT = ROOT_CALLER
ALICE, BOB = Caller(1000, 100), Caller(1001, 101)
PAGE = 4096


def mkdir(meta: Meta, parent: Ino, name: bytes, caller: Caller = ROOT) -> Ino:
    return meta.create(caller, parent, name, 0o40777).ino


def mkfile(meta: Meta, parent: Ino, name: bytes, pages: int = 0, caller: Caller = ROOT) -> Ino:
    ino = meta.create(caller, parent, name, 0o100666).ino
    if pages:
        write(meta, ino, pages)
    return ino


def write(meta: Meta, ino: Ino, pages: int) -> None:
    """Overwrite the file's first pages."""
    size = pages * PAGE
    piece = Slice(0, meta.new_slice_id(), size, 0, size)
    meta.write_slices(ino, [(0, piece)], size, 1)


def limit_dir(meta: Meta, ino: Ino, pages: int | None = None, inodes: int | None = None) -> Quota:
    space = None if pages is None else pages * PAGE
    return quota_admin.set_quota(meta, quota.dir_node(ino), QuotaLimits(space, inodes))


def used(meta: Meta, node: bytes) -> tuple[int, int]:
    """Pages and inodes."""
    space, inodes = quota_admin.get_quota(meta, node).used
    return space // PAGE, inodes


def used_dir(meta: Meta, ino: Ino) -> tuple[int, int]:
    return used(meta, quota.dir_node(ino))


def edquot(act: Callable[[], object]) -> None:
    """`act` passes a quota."""
    with pytest.raises(OSError, match="full") as caught:
        act()
    assert caught.value.errno == errno.EDQUOT


def test_a_populated_directory_is_counted(engine: Engine) -> None:
    meta = engine.meta()
    d = mkdir(meta, ROOT_INO, b"d")
    inner = mkdir(meta, d, b"inner", ALICE)
    mkfile(meta, inner, b"f", 3, ALICE)
    mkfile(meta, d, b"g", 2)
    mkfile(meta, ROOT_INO, b"outside", 50)
    counted: list[int] = []
    found = quota_admin.set_quota(
        meta, quota.dir_node(d), QuotaLimits(10 * PAGE, None), progress=counted.append
    )
    assert found == Quota(quota.dir_node(d), SpaceUsage(5 * PAGE, 3), SpaceUsage(10 * PAGE, 0))
    assert counted[-1] >= 6
    assert used_dir(meta, inner) == (3, 1)  # each directory is known from now on
    assert used(meta, quota.user_node(1000)) == (3, 2)
    assert used(meta, quota.group_node(100)) == (3, 2)
    assert list(quota_admin.list_quotas(meta)) == [found]
    write(meta, mkfile(meta, inner, b"h"), 5)
    edquot(lambda: mkfile(meta, d, b"i", 1))
    assert used_dir(meta, d) == (10, 5)


def test_everything_that_grows_is_refused(engine: Engine) -> None:
    meta = engine.meta()
    d, other = mkdir(meta, ROOT_INO, b"d"), mkdir(meta, ROOT_INO, b"other")
    f = mkfile(meta, d, b"f", 4)
    g = mkfile(meta, other, b"g", 1)
    tree = mkdir(meta, other, b"tree")
    limit_dir(meta, d, pages=4, inodes=1)
    before = used_dir(meta, d)
    for act in (
        lambda: mkfile(meta, d, b"x"),
        lambda: mkdir(meta, d, b"x"),
        lambda: meta.symlink(ROOT, d, b"x", b"to"),
        lambda: meta.create(ROOT, d, b"x", 0o010644),
        lambda: write(meta, f, 5),
        lambda: meta.rename(ROOT, DentryLocation(other, b"g"), DentryLocation(d, b"x")),
        lambda: meta.rename(ROOT, DentryLocation(other, b"tree"), DentryLocation(d, b"x")),
    ):
        edquot(act)
        assert used_dir(meta, d) == before == (4, 1)
    write(meta, f, 4)  # over what is there
    meta.setattr(ROOT, f, SetAttr(size=10**9))  # a hole
    meta.link(ROOT, g, d, b"link")  # it counts where it was
    meta.rename(ROOT, DentryLocation(d, b"f"), DentryLocation(d, b"f2"))
    meta.setattr(ROOT, f, SetAttr(size=PAGE))
    assert used_dir(meta, d) == (1, 1)
    meta.rename(ROOT, DentryLocation(d, b"f2"), DentryLocation(other, b"f2"))
    meta.rename(ROOT, DentryLocation(other, b"tree"), DentryLocation(d, b"tree"))
    assert used_dir(meta, d) == (0, 1)
    edquot(lambda: mkfile(meta, tree, b"x"))


def test_nested_ten_deep(engine: Engine) -> None:
    """The tightest refuses, and each counts all below it."""
    meta = engine.meta()
    dirs = [ROOT_INO]
    for _ in range(10):
        dirs.append(mkdir(meta, dirs[-1], b"d"))
    for depth, ino in enumerate(dirs[1:], 1):
        limit_dir(meta, ino, pages=100 - depth, inodes=100)
    limit_dir(meta, dirs[5], pages=3)
    mkfile(meta, dirs[10], b"f", 3)
    edquot(lambda: mkfile(meta, dirs[10], b"g", 1))
    edquot(lambda: mkfile(meta, dirs[5], b"g", 1))
    mkfile(meta, dirs[4], b"g", 1)
    assert used_dir(meta, dirs[10]) == (3, 2)
    assert used_dir(meta, dirs[5]) == (3, 5 + 3)
    assert used_dir(meta, dirs[4]) == (4, 6 + 4)
    assert used_dir(meta, dirs[1]) == (4, 9 + 4)


def test_statfs_of_what_has_been_removed(engine: Engine) -> None:
    """As df(1) asks in a directory that is gone: no limit but the volume's holds there."""
    meta = engine.meta()
    outer = mkdir(meta, ROOT_INO, b"outer")
    limit_dir(meta, outer, pages=10)
    inner, file = mkdir(meta, outer, b"inner"), mkfile(meta, outer, b"file")
    for ino in (inner, file):
        assert meta.statfs(ino).space_limit == 10 * PAGE
    meta.rmdir(ROOT, outer, b"inner")
    meta.unlink(ROOT, outer, b"file")
    for ino in (inner, file):
        assert meta.statfs(ino) == meta.statfs()


def test_users_and_groups(engine: Engine) -> None:
    meta = engine.meta()
    d = mkdir(meta, ROOT_INO, b"d")
    mkfile(meta, d, b"a", 2, ALICE)
    quota_admin.set_quota(meta, quota.user_node(1000), QuotaLimits(3 * PAGE, 2))
    quota_admin.set_quota(meta, quota.group_node(101), QuotaLimits(4 * PAGE, 2))
    edquot(lambda: mkfile(meta, d, b"b", 2, ALICE))
    edquot(lambda: mkfile(meta, d, b"c", 0, ALICE))
    bobs = mkfile(meta, d, b"bobs", 2, BOB)
    edquot(lambda: meta.setattr(ROOT, bobs, SetAttr(uid=1000)))  # chown
    roots = mkfile(meta, d, b"roots", 3)
    edquot(lambda: meta.setattr(ROOT, roots, SetAttr(gid=101)))  # chgrp
    edquot(lambda: meta.setattr(ROOT, roots, SetAttr(uid=1000, gid=101)))
    meta.unlink(ROOT, d, b"b")
    meta.setattr(ROOT, roots, SetAttr(size=PAGE))
    meta.setattr(ROOT, roots, SetAttr(uid=1000, gid=101))
    assert used(meta, quota.user_node(1000)) == (3, 2)
    assert used(meta, quota.group_node(101)) == (3, 2)
    assert used(meta, quota.user_node(0)) == (0, 2)  # the root directory and d
    meta.setattr(ROOT, roots, SetAttr(uid=1000, gid=101))  # no change
    meta.setattr(ROOT, roots, SetAttr(uid=0))
    assert used(meta, quota.user_node(1000)) == (2, 1)


def test_a_quota_below_usage(engine: Engine) -> None:
    """Nothing grows; shrinking, deleting and moving within work, and then there is room again."""
    meta = engine.meta()
    d = mkdir(meta, ROOT_INO, b"d")
    a, b = mkdir(meta, d, b"a"), mkdir(meta, d, b"b")
    f = mkfile(meta, a, b"f", 8)
    limit_dir(meta, d, pages=4, inodes=2)
    edquot(lambda: write(meta, f, 9))
    edquot(lambda: mkfile(meta, b, b"g"))
    meta.rename(ROOT, DentryLocation(a, b"f"), DentryLocation(b, b"f"))
    meta.rename(ROOT, DentryLocation(d, b"a"), DentryLocation(b, b"a"))
    write(meta, f, 8)
    meta.setattr(ROOT, f, SetAttr(size=2 * PAGE))
    meta.rmdir(ROOT, b, b"a")
    edquot(lambda: mkfile(meta, b, b"g"))
    meta.rename(ROOT, DentryLocation(b, b"f"), DentryLocation(ROOT_INO, b"f"))
    mkfile(meta, b, b"g", 4)
    assert used_dir(meta, d) == (4, 2)


def test_a_moved_directory_takes_its_usage_along(engine: Engine) -> None:
    meta, other = engine.meta(), engine.meta()
    a, b = mkdir(meta, ROOT_INO, b"a"), mkdir(meta, ROOT_INO, b"b")
    tree = mkdir(meta, a, b"tree")
    below = mkdir(meta, tree, b"below")
    for n in range(5):
        mkfile(meta, below, b"%d" % n, 2)
    limit_dir(meta, a, pages=100)
    limit_dir(meta, b, pages=10, inodes=7)
    assert (used_dir(meta, a), used_dir(meta, b)) == ((10, 7), (0, 0))
    write(other, other.lookup(ROOT, below, b"0").ino, 3)
    edquot(lambda: meta.rename(ROOT, DentryLocation(a, b"tree"), DentryLocation(b, b"tree")))
    assert (used_dir(meta, a), used_dir(meta, b)) == ((11, 7), (0, 0))
    other.unlink(ROOT, below, b"0")
    other.rename(ROOT, DentryLocation(a, b"tree"), DentryLocation(b, b"tree"))
    assert (used_dir(meta, a), used_dir(meta, b)) == ((0, 0), (8, 6))
    mkfile(meta, below, b"0", 2)
    edquot(lambda: mkfile(meta, below, b"more"))
    meta.rename(ROOT, DentryLocation(tree, b"below"), DentryLocation(a, b"below"))
    assert (used_dir(meta, a), used_dir(meta, b)) == ((10, 6), (0, 1))
    c = mkdir(meta, ROOT_INO, b"c")
    meta.rename(ROOT, DentryLocation(a, b"below"), DentryLocation(c, b"below"), 0)
    assert used_dir(meta, c) == (10, 6)
    meta.rename(ROOT, DentryLocation(b, b"tree"), DentryLocation(c, b"below"), EXCHANGE)
    assert (used_dir(meta, b), used_dir(meta, c)) == ((10, 6), (0, 1))
    assert used_dir(meta, below) == (10, 5)


def test_replacing_makes_room_first(engine: Engine) -> None:
    meta = engine.meta()
    d, other = mkdir(meta, ROOT_INO, b"d"), mkdir(meta, ROOT_INO, b"other")
    mkfile(meta, d, b"f", 3)
    mkfile(meta, other, b"g", 3)
    mkdir(meta, other, b"e")
    mkfile(meta, mkdir(meta, other, b"full"), b"f", 1)
    limit_dir(meta, d, pages=3, inodes=1)
    meta.rename(ROOT, DentryLocation(other, b"g"), DentryLocation(d, b"f"))
    assert (used_dir(meta, d), used_dir(meta, other)) == ((3, 1), (1, 3))
    meta.rename(ROOT, DentryLocation(d, b"f"), DentryLocation(other, b"e"), EXCHANGE)
    assert (used_dir(meta, d), used_dir(meta, other)) == ((0, 1), (4, 3))
    edquot(lambda: meta.rename(ROOT, DentryLocation(other, b"full"), DentryLocation(d, b"f")))
    limit_dir(meta, d, inodes=2)
    meta.rename(
        ROOT, DentryLocation(other, b"full"), DentryLocation(d, b"f")
    )  # over an empty directory
    assert (used_dir(meta, d), used_dir(meta, other)) == ((1, 2), (3, 1))


def test_hard_links_count_at_home(engine: Engine) -> None:
    meta = engine.meta()
    a, b, c = (mkdir(meta, ROOT_INO, name) for name in (b"a", b"b", b"c"))
    old = mkfile(meta, b, b"old", 1)  # linked before anybody counts
    meta.link(ROOT, old, a, b"old")
    limit_dir(meta, a, pages=5)
    assert (used_dir(meta, a), used_dir(meta, b)) == ((1, 1), (0, 0))  # the oldest that names it
    f = mkfile(meta, a, b"f", 2)
    meta.link(ROOT, f, a, b"f2")
    meta.link(ROOT, f, b, b"f")
    limit_dir(meta, b, pages=1)
    assert (used_dir(meta, a), used_dir(meta, b)) == ((3, 2), (0, 0))
    edquot(lambda: write(meta, f, 5))
    write(meta, f, 4)
    meta.rename(
        ROOT, DentryLocation(a, b"f"), DentryLocation(c, b"f")
    )  # its home has another name yet
    assert (used_dir(meta, a), used_dir(meta, c)) == ((5, 2), (0, 0))
    edquot(lambda: meta.rename(ROOT, DentryLocation(a, b"f2"), DentryLocation(b, b"f2")))
    meta.rename(ROOT, DentryLocation(a, b"f2"), DentryLocation(c, b"f2"))
    assert (used_dir(meta, a), used_dir(meta, c)) == ((1, 1), (4, 1))
    meta.unlink(ROOT, c, b"f")
    meta.unlink(ROOT, c, b"f2")  # now it is in b alone, which may not refuse
    assert (used_dir(meta, b), used_dir(meta, c)) == ((4, 1), (0, 0))
    edquot(lambda: write(meta, f, 5))
    meta.unlink(ROOT, b, b"f")
    meta.unlink(ROOT, a, b"old")
    assert (used_dir(meta, a), used_dir(meta, b)) == ((0, 0), (1, 1))
    write(meta, f, 9)  # it has no name


def test_a_removed_directory_takes_its_quota_along(engine: Engine) -> None:
    meta = engine.meta()
    d, e = mkdir(meta, ROOT_INO, b"d"), mkdir(meta, ROOT_INO, b"e")
    limit_dir(meta, d, pages=1)
    limit_dir(meta, e, pages=1)
    meta.rmdir(ROOT, ROOT_INO, b"d")
    assert [each.node for each in quota_admin.list_quotas(meta)] == [quota.dir_node(e)]
    with pytest.raises(ConfigError, match="removed"):
        limit_dir(meta, d, pages=2)
    mkdir(meta, ROOT_INO, b"f")
    meta.rename(ROOT, DentryLocation(ROOT_INO, b"f"), DentryLocation(ROOT_INO, b"e"))
    assert not list(quota_admin.list_quotas(meta))


def test_without_quotas_nothing_is_charged(engine: Engine) -> None:
    """When the last limit goes accounting ends; it begins anew with the next one."""
    meta, idle = engine.meta(), engine.meta()
    d = mkdir(meta, ROOT_INO, b"d")
    mkfile(meta, d, b"f", 2)
    for epoch in range(1, 18):  # marks are used again in the end
        limit_dir(meta, d, pages=5, inodes=7)
        assert meta.transactor.view(_settings)[1] == (epoch - 1) % 15 + 1
        assert used_dir(meta, d) == (2, 1)
        mkfile(idle, d, b"g", 1)
        assert used_dir(meta, d) == (3, 2)
        assert quota_admin.delete_quota(meta, quota.dir_node(d))
        assert not quota_admin.delete_quota(meta, quota.dir_node(d))
        assert meta.transactor.view(_settings)[0] == ""
        assert not meta.store.scan(keys.ACCOUNTS).items
        idle.unlink(ROOT, d, b"g")
        assert not meta.store.scan(keys.ACCOUNTS).items


def _settings(txn: Txn) -> tuple[str, int]:
    settings = load_format(txn)
    return settings.accounting, settings.epoch


def test_one_limit_at_a_time(engine: Engine) -> None:
    meta = engine.meta()
    d = mkdir(meta, ROOT_INO, b"d")
    assert limit_dir(meta, d, pages=5).limit == (5 * PAGE, 0)
    assert limit_dir(meta, d, inodes=7).limit == (5 * PAGE, 7)
    assert limit_dir(meta, d, pages=0).limit == (0, 7)
    limit_dir(meta, mkdir(meta, ROOT_INO, b"e"), pages=1)
    assert limit_dir(meta, d, inodes=0).limit == (0, 0)
    assert len(list(quota_admin.list_quotas(meta))) == 1


def test_recount_mends(engine: Engine) -> None:
    meta, other = engine.meta(), engine.meta()
    d = mkdir(meta, ROOT_INO, b"d")
    mkfile(meta, d, b"f", 2)
    limit_dir(meta, d, pages=5, inodes=7)
    field = quota.space_field(quota.dir_node(d))
    meta.transactor.run(lambda txn: txn.put(keys.ACCOUNTS, field, b"1234"))
    other.link(ROOT, mkfile(other, d, b"g", 1), ROOT_INO, b"g")
    quota_admin.recount(meta)
    assert quota_admin.get_quota(meta, quota.dir_node(d)).limit == (5 * PAGE, 7)
    assert used_dir(meta, d) == (3, 2)
    edquot(lambda: mkfile(other, d, b"h", 3))


def test_clients_at_once_get_exactly_what_there_is(engine: Engine) -> None:
    pages, inodes = 40, 12
    metas = [engine.meta() for _ in range(2)]
    d = mkdir(metas[0], ROOT_INO, b"d")
    subdirs = [mkdir(metas[0], d, b"%d" % n) for n in range(2)]
    limit_dir(metas[0], d, pages=pages, inodes=inodes)
    errors: list[int | None] = []
    made: list[tuple[Ino, bytes]] = []

    def work(meta: Meta, number: int) -> None:
        for n in range(inodes):
            parent, name = subdirs[n % 2], b"%d.%d" % (number, n)
            try:
                ino = mkfile(meta, parent, name)
                made.append((parent, name))
                for page in range(8):
                    write(meta, ino, page + 1)
            except OSError as error:
                errors.append(error.errno)

    threads = [threading.Thread(target=work, args=(metas[n % 2], n)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert used_dir(metas[0], d) == (pages, inodes)
    assert len(made) == inodes - 2
    assert set(errors) == {errno.EDQUOT}
    for parent, name in made:
        metas[1].unlink(ROOT, parent, name)
    assert used_dir(metas[0], d) == (0, 2)


@pytest.mark.parametrize("seed", range(3))
def test_directories_move_while_others_create_below_them(engine: Engine, seed: int) -> None:
    """`check` compares with a recount at the end."""
    metas = [engine.meta() for _ in range(3)]
    a, b = (mkdir(metas[0], ROOT_INO, name) for name in (b"a", b"b"))
    tree = mkdir(metas[0], a, b"tree")
    below = mkdir(metas[0], tree, b"below")
    for place in (a, b):
        limit_dir(metas[0], place, pages=1_000_000)  # more than the quickest machine fills

    def create(meta: Meta, number: int) -> None:
        dice = random.Random(seed * 10 + number)
        for n in itertools.count():
            if n > 25 and moves > 10:
                break
            parent = dice.choice((below, tree))
            ino = mkfile(meta, parent, b"%d.%d" % (number, n), dice.randrange(3))
            if dice.random() < 0.3:
                meta.unlink(ROOT, parent, b"%d.%d" % (number, n))
            elif dice.random() < 0.3:
                meta.setattr(ROOT, ino, SetAttr(size=0))

    moves = 0
    old, new = DentryLocation(a, b"tree"), DentryLocation(b, b"tree")
    with ThreadPoolExecutor(2) as pool:
        work = [pool.submit(create, metas[n], n) for n in (1, 2)]
        while not all(each.done() for each in work):
            metas[0].rename(ROOT, old, new)
            old, new = new, old
            moves += 1
            if not engine.tells:
                time.sleep(0.1)  # who is not told tries in vain first, and is not to starve
    for each in work:
        each.result()
    assert moves > 3
    space, inodes = used_dir(metas[0], tree)
    at, away = (a, b) if old.parent == a else (b, a)
    assert used_dir(metas[0], at) == (space, inodes + 1)
    assert used_dir(metas[0], away) == (0, 0)


def test_counting_while_others_write(engine: Engine) -> None:
    """Every kind of change meets the count; `check` compares with a recount at the end."""
    admin, *metas = [engine.meta() for _ in range(3)]
    top = mkdir(admin, ROOT_INO, b"top")
    dirs = [mkdir(admin, top, b"d%d" % n) for n in range(4)]
    for n in range(60):
        mkfile(admin, dirs[n % 4], b"old%d" % n, n % 3)
    stop = threading.Event()
    done = [0, 0]

    def churn(meta: Meta, number: int) -> None:
        dice = random.Random(number)
        while not stop.is_set():
            try:
                _one_change(meta, dice, dirs, b"%d.%d" % (number, done[number]))
            except (FileNotFoundError, FileExistsError):
                pass
            done[number] += 1

    with ThreadPoolExecutor(2) as pool:
        work = [pool.submit(churn, meta, n) for n, meta in enumerate(metas)]
        try:
            counts = 0
            while counts < 2 or min(done) < 20:
                for each in work:
                    if each.done():
                        each.result()  # says why it has ended
                limit_dir(admin, top, pages=10**6)
                quota_admin.recount(admin)
                quota_admin.delete_quota(admin, quota.dir_node(top))
                counts += 1
            limit_dir(admin, top, pages=10**6)
        finally:
            stop.set()
    for each in work:
        each.result()
    assert_clean(engine.first)


def _one_change(meta: Meta, dice: random.Random, dirs: list[Ino], name: bytes) -> None:
    parent, other = dice.choice(dirs), dice.choice(dirs)
    old = b"old%d" % dice.randrange(60)
    match dice.randrange(7):
        case 0:
            mkfile(meta, parent, name, dice.randrange(3), ALICE)
        case 1:
            meta.unlink(ROOT, parent, old)
        case 2:
            meta.rename(ROOT, DentryLocation(parent, old), DentryLocation(other, old))
        case 3:
            ino = meta.lookup(ROOT, parent, old).ino
            meta.setattr(ROOT, ino, SetAttr(uid=dice.randrange(3), gid=dice.randrange(3)))
        case 4:
            meta.link(ROOT, meta.lookup(ROOT, parent, old).ino, other, name)
        case 5:
            write(meta, meta.lookup(ROOT, parent, old).ino, dice.randrange(1, 5))
        case 6:
            inner = mkdir(meta, parent, name)
            mkfile(meta, inner, b"f", 1)
            meta.rename(ROOT, DentryLocation(parent, name), DentryLocation(other, name + b"moved"))

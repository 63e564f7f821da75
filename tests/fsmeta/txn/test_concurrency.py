"""M6: several clients at once: no needless conflicts, no loops, and caches that stay true."""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Callable
from functools import partial
from itertools import count

import pytest

from fsmeta.meta.meta import Meta
from fsmeta.ops.names.rename import EXCHANGE, DentryLocation
from fsmeta.schema import inode, keys
from fsmeta.schema.acl import DEFAULT_XATTR, Acl, Named, pack_xattr
from fsmeta.store.contract import Applied, Commit
from fsmeta.store.mem import MemBackend, MemStore
from fsmeta.txn.cached_fields import Missing
from fsmeta.types import FLAG_NODUMP, ROOT_CALLER, ROOT_INO, FileType, Ino, SetAttr
from tests.conftest import assert_clean
from tests.fsmeta.engines import Engine, make_volume
from tests.fsmeta.work import random_work
from tests.sim.world.faults import CALM, Faults, FaultStore
from tests.sim.world.harness import simulate
from tests.sim.world.scheduler import SimRuntime

ROOT = ROOT_CALLER
FAST = CALM._replace(latency_s=0.00002)
ROUGH = FAST._replace(refused=0.03, reply_lost=0.05, request_lost=0.03, late=0.03, late_s=0.001)
SETTLED_S = 100.0


def _together(*bodies: Callable[[], object]) -> None:
    """Run each in a thread; raise what the first one raised."""
    failures: list[BaseException] = []

    def guarded(body: Callable[[], object]) -> None:
        try:
            body()
        except BaseException as error:  # noqa: BLE001 (raised again below)
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def _works(call: Callable[..., object], *args: object, allowed: set[int]) -> bool:
    """Whether a call works; it may only fail with one of the errnos `allowed`."""
    try:
        call(*args)
    except OSError as error:
        if error.errno not in allowed:
            raise
        return False
    return True


# --- a thousand creates in one directory ---------------------------------------------------------

CREATES = 1000  # of each client; with the first one, less than a batch of ids


def _create_many(meta: Meta, directory: Ino, prefix: bytes, count: int) -> None:
    for n in range(count):
        meta.create(ROOT, directory, prefix + b"%d" % n, 0o100644)


@pytest.mark.parametrize("engine", ["mem", "redis"], indirect=True)
def test_creates_in_a_shared_directory_never_conflict(engine: Engine) -> None:
    """Two clients of two threads each: only who wants the same name may conflict."""
    metas = engine.meta(), engine.meta()
    directory = metas[0].create(ROOT, ROOT_INO, b"shared", 0o40777).ino
    for meta in metas:
        meta.create(ROOT, directory, b"first%d" % id(meta), 0o100644)  # takes its ids
        meta.transactor.counters.conflicts = 0
    bodies = [
        partial(_create_many, meta, directory, b"%d.%d." % (client, thread), CREATES // 2)
        for client, meta in enumerate(metas)
        for thread in range(2)
    ]
    _together(*bodies)
    assert [meta.transactor.counters.conflicts for meta in metas] == [0, 0]
    names: set[bytes] = set()
    cursor: bytes | None = b""
    while cursor is not None:
        page, cursor = metas[0].names(directory, cursor)
        names.update(dentry.name for dentry in page)
    assert len(names) == 2 * CREATES + 2


def test_only_one_gets_a_name(engine: Engine) -> None:
    metas = [engine.meta() for _ in range(2)]
    won: list[bytes] = []

    def work(meta: Meta) -> None:
        for n in range(50):
            try:
                meta.create(ROOT, ROOT_INO, b"n%d" % n, 0o100644)
            except FileExistsError:
                continue
            won.append(b"n%d" % n)

    _together(*(partial(work, meta) for meta in metas for _ in range(2)))
    assert sorted(won) == sorted(b"n%d" % n for n in range(50))
    assert metas[0].getattr(ROOT, ROOT_INO).nlink == 2


def test_directories_made_at_once_are_all_counted(engine: Engine) -> None:
    metas = [engine.meta() for _ in range(2)]

    def work(meta: Meta, name: bytes) -> None:
        for n in range(50):
            meta.create(ROOT, ROOT_INO, b"%s%d" % (name, n), 0o40755)
            if n % 2:
                meta.rmdir(ROOT, ROOT_INO, b"%s%d" % (name, n))

    _together(*(partial(work, meta, b"%d." % n) for n, meta in enumerate(metas * 2)))
    for meta in metas:
        meta.cache.forget()
        assert meta.getattr(ROOT, ROOT_INO).nlink == 2 + 100


def test_a_directory_is_not_removed_while_names_are_made_in_it(engine: Engine) -> None:
    """Either rmdir finds it empty and the create finds it gone, or the other way round."""
    maker, remover = engine.meta(), engine.meta()

    def make(directory: Ino, won: list[str]) -> None:
        if _works(maker.create, ROOT, directory, b"x", 0o100644, allowed={errno.ENOENT}):
            won.append("made")

    def remove(name: bytes, won: list[str]) -> None:
        if _works(remover.rmdir, ROOT, ROOT_INO, name, allowed={errno.ENOTEMPTY}):
            won.append("removed")

    for n in range(60):
        name = b"d%d" % n
        directory = maker.create(ROOT, ROOT_INO, name, 0o40755).ino
        remover.lookup(ROOT, ROOT_INO, name)
        won: list[str] = []
        _together(partial(make, directory, won), partial(remove, name, won))
        assert len(won) == 1, won


# --- directories on the move ---------------------------------------------------------------------


def _tree(meta: Meta, *names: bytes) -> Ino:
    """Directories one under the other; the last one."""
    ino = ROOT_INO
    for name in names:
        ino = meta.create(ROOT, ino, name, 0o40755).ino
    return ino


def _move(
    meta: Meta, old: DentryLocation, new: DentryLocation, moved: list[bytes], flags: int = 0
) -> None:
    allowed = {errno.EINVAL, errno.ENOENT, errno.ENOTEMPTY}
    if _works(meta.rename, ROOT, old, new, flags, allowed=allowed):
        moved.append(old.name)


def _opposite_renames(sim: SimRuntime, seed: int, faults: Faults) -> None:
    """p moves under q while q moves under p: exactly one of them may."""
    backend = MemBackend(sim)
    make_volume(MemStore(backend), sim)
    stores = [FaultStore(MemStore(backend), sim, seed + n, faults) for n in range(2)]
    metas = [Meta(store, sim) for store in stores]
    for meta in metas:
        meta.sessions.open({})
    p, q = _tree(metas[0], b"p", b"1", b"2"), _tree(metas[1], b"q", b"3")
    moved: list[bytes] = []
    threads = [
        sim.spawn(
            "pq",
            lambda: _move(metas[0], DentryLocation(ROOT_INO, b"p"), DentryLocation(q, b"p"), moved),
        ),
        sim.spawn(
            "qp",
            lambda: _move(metas[1], DentryLocation(ROOT_INO, b"q"), DentryLocation(p, b"q"), moved),
        ),
    ]
    for thread in threads:
        thread.join()
    assert len(moved) == 1, moved
    assert_clean(MemStore(backend))


@pytest.mark.parametrize("seed", range(100))
def test_opposite_renames_make_no_loop(seed: int) -> None:
    faults = ROUGH if seed % 4 == 3 else FAST
    simulate(seed, lambda sim: _opposite_renames(sim, seed, faults))


def test_names_made_in_a_directory_do_not_stop_who_moves_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time that it is about to be moved, somebody makes a directory in it."""
    mover, maker = engine.meta(), engine.meta()
    moving, target = _tree(mover, b"moving"), _tree(mover, b"target")
    commit, made = mover.store.commit, count()

    def interfere(wanted: Commit) -> Applied | None:
        if wanted.writes:
            maker.create(ROOT, moving, b"%d" % next(made), 0o40755)
        return commit(wanted)

    monkeypatch.setattr(mover.store, "commit", interfere)
    places = (
        DentryLocation(ROOT_INO, b"moving"),
        DentryLocation(ROOT_INO, b"renamed"),
        DentryLocation(target, b"moved"),
    )
    also = DentryLocation(ROOT_INO, b"target")
    for old, new, flags in (
        (places[0], places[1], 0),
        (places[1], places[2], 0),
        (places[2], places[0], 0),
        (places[0], also, EXCHANGE),
    ):
        mover.rename(ROOT, old, new, flags)
    assert mover.transactor.counters.conflicts == 0
    assert next(made) == 4
    for meta in (mover, maker):
        meta.transactor.drop(None)
        assert meta.getattr(ROOT, moving).nlink == 2 + 4
        assert meta.lookup(ROOT, ROOT_INO, b"target").ino == moving


def test_names_made_in_a_directory_do_not_stop_who_changes_its_attributes(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """chmod(2), chown(2), utimensat(2), setfacl(1), chattr(1): one conflict, and no second."""
    changer, maker = engine.meta(), engine.meta()
    ino = changer.create(ROOT, ROOT_INO, b"busy", 0o40755).ino
    commit, made = changer.store.commit, count()

    def interfere(wanted: Commit) -> Applied | None:
        if wanted.writes:
            maker.create(ROOT, ino, b"%d" % next(made), 0o40755)
        return commit(wanted)

    monkeypatch.setattr(changer.store, "commit", interfere)
    acl = pack_xattr(Acl(7, 5, 7, 0, (Named(False, 5, 7),)))
    changes: list[Callable[[], object]] = [
        partial(changer.setattr, ROOT, ino, SetAttr(mode=0o700)),
        partial(changer.setattr, ROOT, ino, SetAttr(uid=3, gid=4)),
        partial(changer.setxattr, ROOT, ino, DEFAULT_XATTR, acl),
        partial(changer.setflags, ROOT, ino, FLAG_NODUMP),
        partial(changer.setattr, ROOT, ino, SetAttr(atime_ns=5, mtime_ns=6)),
    ]
    for change in changes:
        before = changer.transactor.counters.conflicts
        change()
        assert changer.transactor.counters.conflicts - before <= 1
    monkeypatch.undo()
    names = next(made)
    for meta in (changer, maker):
        meta.transactor.drop(None)
        attr = meta.getattr(ROOT, ino)
        assert (attr.mode & 0o7777, attr.uid, attr.gid, attr.flags) == (0o700, 3, 4, FLAG_NODUMP)
        assert (attr.atime_ns, attr.mtime_ns) == (5, 6)
        assert attr.nlink == 2 + names
        assert meta.getxattr(ROOT, ino, DEFAULT_XATTR) == acl


def test_directories_moved_by_many_make_no_loop(engine: Engine) -> None:
    """Real threads shuffle eight directories into one another; `check` looks for rings."""
    metas = [engine.meta() for _ in range(2)]
    dirs = [_tree(metas[0], b"%d" % n) for n in range(8)]
    moved: list[bytes] = []

    def where(meta: Meta, name: bytes, ino: Ino) -> DentryLocation:
        """The name of a directory that may be moving."""
        a = meta.store.read([(keys.inode_row(ino), keys.ATTR_FIELD)])[0]
        assert a is not None
        return DentryLocation(inode.unpack_stable(ino, a).parent, name)

    def work(meta: Meta, seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(60):
            one, two = chance.sample(range(len(dirs)), 2)
            old, target = (
                where(meta, b"%d" % one, dirs[one]),
                DentryLocation(dirs[two], b"%d" % one),
            )
            if chance.random() < 0.2:
                target = where(meta, b"%d" % two, dirs[two])
                _move(meta, old, target, [], EXCHANGE)
                continue
            _move(meta, old, target, moved)

    _together(*(partial(work, meta, seed) for seed, meta in enumerate(metas * 2)))
    assert moved


# --- everything at once --------------------------------------------------------------------------


def _cached(meta: Meta, backend: MemBackend) -> int:
    """How many vouched values this client remembers; each must be the store's."""
    known = 0
    last_ino = keys.unpack_count(b"C", b"ino", backend.rows[b"C"][b"ino"])
    names = {field for row, fields in backend.rows.items() if row[:1] == b"d" for field in fields}
    fields = {b"a", b"v", b"l", keys.chunk_field(0), *(b"n%d" % n for n in range(12)), *names}
    for ino in range(1, last_ino):
        for row in (keys.inode_row(ino), keys.dir_row(ino)):
            stored = backend.rows.get(row, {})
            for field in fields | stored.keys():
                value = meta.cache.get(row, field, need_vouched=True)
                if not isinstance(value, Missing):
                    known += 1
                    assert value == stored.get(field), f"{row!r} {field!r} is remembered wrongly"
    return known


def _everything(sim: SimRuntime, seed: int, faults: Faults) -> int:
    backend = MemBackend(sim)
    make_volume(MemStore(backend), sim)
    stores = [FaultStore(MemStore(backend), sim, seed + n, faults) for n in range(2)]
    metas = [Meta(store, sim) for store in stores]
    for meta in metas:
        meta.sessions.open({})
        # few ids: what is looked at below is every inode there ever was
        meta._inos._batch = 20
    threads = [
        sim.spawn(f"t{n}", partial(random_work, metas[n % 2], random.Random(seed + n), 12))
        for n in range(4)
    ]
    for thread in threads:
        thread.join()
    sim.sleep(SETTLED_S)
    assert_clean(MemStore(backend))
    return sum(_cached(meta, backend) for meta in metas)


@pytest.mark.parametrize("seed", range(40))
def test_clients_at_once_leave_volume_and_caches_true(seed: int) -> None:
    faults = ROUGH if seed % 2 else FAST
    known = simulate(seed, lambda sim: _everything(sim, seed, faults))
    assert known or faults is ROUGH  # a connection lost at the end leaves nothing


def test_real_threads_at_once_leave_it_clean(engine: Engine) -> None:
    metas = [engine.meta() for _ in range(2)]
    works = [
        partial(random_work, meta, random.Random(seed), 100) for seed, meta in enumerate(metas * 2)
    ]
    _together(*works)
    assert {FileType.of_mode(meta.getattr(ROOT, ROOT_INO).mode) for meta in metas} == {FileType.DIR}


def test_a_worker_that_another_thread_takes_meanwhile_is_no_error(engine: Engine) -> None:
    """Between the question whether one is idle and its being taken: the verb failed."""

    class Raced(list[bytes]):
        def __len__(self) -> int:
            return 1  # as it was a moment ago

    meta = engine.meta()
    meta.transactor._idle = Raced()
    attr = meta.create(ROOT, ROOT_INO, b"f", 0o100644)
    assert meta.getattr(ROOT, attr.ino).nlink == 1

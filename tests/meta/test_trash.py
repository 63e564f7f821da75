"""T1: what is deleted goes to the trash, comes back and expires, on every engine."""

from __future__ import annotations

import errno
from collections.abc import Callable
from functools import partial

import pytest

from fsclient.restore import Outcome, Restorer, Trashed
from fsclient.trash_keeper import LOOK_EVERY_S, TrashKeeper
from fsmeta import accounting
from fsmeta.check import check
from fsmeta.engine import Meta
from fsmeta.ops.rename import EXCHANGE, NOREPLACE, Place
from fsmeta.runtime import SystemRuntime
from fsmeta.trash import (
    HOUR_NS,
    TRASH_INO,
    Origin,
    entry_name,
    hour_at,
    hour_name,
    hour_of_name,
    is_cut,
    origin_of,
)
from fsmeta.trash_hours import FORGET_S, expire, hours
from fsmeta.types import NO_PARENT, ROOT_CALLER, ROOT_INO, Caller, FileType, Ino, Slice
from tests.meta.engines import RUNTIME, Engine
from tests.outcome import errno_of

ROOT = ROOT_CALLER
USER = Caller(1000, 1000)


def _client(engine: Engine) -> Meta:
    """One that keeps what is deleted for a day."""
    meta = engine.meta()
    meta.format = meta.format._replace(trash_days=1)
    return meta


def _file(meta: Meta, name: bytes, parent: Ino = ROOT_INO, caller: Caller = ROOT) -> Ino:
    """A file of 5000 bytes."""
    ino = meta.create(caller, parent, name, 0o100644).ino
    piece = Slice(0, meta.new_slice_id(), 5000, 0, 5000)
    meta.write_slices(ino, [(0, piece)], 5000, 1)
    return ino


def _here(meta: Meta) -> list[tuple[Ino, bytes]]:
    """Everything in the trash."""
    return [(hour, name) for hour in hours(meta) for name, _, _ in sorted(meta.names(hour)[0])]


def test_names_of_hours() -> None:
    assert hour_name(hour_at(0)) == b"1970-01-01-00"
    hour = hour_at(1_795_289_143 * 10**9)
    assert hour_name(hour) == b"2026-11-21-19"
    assert hour_of_name(b"2026-11-21-19") == hour
    for wrong in (b"2026-11-21", b"2026-11-21-25", b"2026-1-1-1", b"", b"\xff", b"1960-01-01-00"):
        assert hour_of_name(wrong) is None


def test_names_in_the_trash() -> None:
    for name in (b"a", b"a-b", b"-", b"n" * 240):
        assert origin_of(entry_name(Origin(Ino(1), Ino(22), name))) == (1, 22, name)
    long = Origin(Ino(1), Ino(22), b"n" * 255)
    assert is_cut(long)
    assert len(entry_name(long)) == 255
    for wrong in (b"x", b"1-x-y", b"1-2", b"1-2-", b"--a"):
        assert origin_of(wrong) is None


def test_what_is_deleted_goes_to_the_trash(engine: Engine) -> None:
    """Files and directories unlinked, and what a rename replaces; usage stays."""
    meta = _client(engine)
    one, two, over = _file(meta, b"one"), _file(meta, b"two"), _file(meta, b"over")
    folder = meta.create(ROOT, ROOT_INO, b"dir", 0o40755).ino
    link = meta.symlink(ROOT, ROOT_INO, b"link", b"to").ino
    before = meta.statfs()
    assert meta.unlink(ROOT, ROOT_INO, b"one").nlink == 1
    meta.rmdir(ROOT, ROOT_INO, b"dir")
    meta.unlink(ROOT, ROOT_INO, b"link")
    meta.rename(ROOT, Place(ROOT_INO, b"two"), Place(ROOT_INO, b"over"))
    assert meta.statfs() == before
    hour = hour_at(RUNTIME.now_ns())
    wanted = [(one, b"one"), (over, b"over"), (folder, b"dir"), (link, b"link")]
    found = _here(meta)
    assert {name for _, name in found} == {b"1-%d-%b" % pair for pair in wanted}
    assert hour - 1 <= found[0][0] <= hour
    assert meta.lookup(ROOT, ROOT_INO, b"over").ino == two
    assert meta.deletion.orphans(10) == []
    assert meta.lookup(ROOT, hour, b"1-%d-one" % one).size == 5000
    assert (
        errno_of(partial(meta.create, ROOT, folder, b"in a removed one", 0o100644)) == errno.ENOENT
    )
    assert check(meta.store).problems == []


def test_only_the_last_name_counts(engine: Engine) -> None:
    meta = _client(engine)
    ino = _file(meta, b"one")
    folder = meta.create(ROOT, ROOT_INO, b"dir", 0o40755).ino
    meta.link(ROOT, ino, folder, b"two")
    meta.unlink(ROOT, ROOT_INO, b"one")
    assert _here(meta) == []
    meta.unlink(ROOT, folder, b"two")
    assert [name for _, name in _here(meta)] == [b"%d-%d-two" % (folder, ino)]
    assert meta.getattr(ROOT, ino).nlink == 1
    assert check(meta.store).problems == []


def test_deleting_in_the_trash_really_deletes(engine: Engine) -> None:
    meta = _client(engine)
    before = meta.statfs()
    _file(meta, b"one")
    meta.create(ROOT, ROOT_INO, b"dir", 0o40755)
    meta.unlink(ROOT, ROOT_INO, b"one")
    meta.rmdir(ROOT, ROOT_INO, b"dir")
    for hour, name in _here(meta):
        verb = meta.rmdir if name.endswith(b"dir") else meta.unlink
        assert errno_of(partial(verb, USER, hour, name)) == errno.EACCES
        verb(ROOT, hour, name)
    assert _here(meta) == []
    assert meta.statfs() == before
    assert len(meta.deletion.orphans(10)) == 2


def test_the_trash_is_no_place_to_put_things(engine: Engine) -> None:
    meta = _client(engine)
    ino = _file(meta, b"one")
    _file(meta, b"two")
    meta.unlink(ROOT, ROOT_INO, b"one")
    hour, name = _here(meta)[0]
    there, here = Place(hour, name), Place(ROOT_INO, b"two")
    assert errno_of(partial(meta.rename, ROOT, here, Place(hour, b"x"))) == errno.EPERM
    assert errno_of(partial(meta.rename, ROOT, there, here, EXCHANGE)) == errno.EPERM
    assert errno_of(partial(meta.rename, ROOT, there, here, NOREPLACE)) == errno.EEXIST
    assert errno_of(partial(meta.link, ROOT, ino, ROOT_INO, b"three")) == errno.EPERM
    meta.rename(ROOT, there, Place(ROOT_INO, b"back"))
    assert meta.getattr(ROOT, ino).parent == ROOT_INO


def test_it_expires_and_its_space_comes_back(engine: Engine) -> None:
    meta = _client(engine)
    before = meta.statfs()
    for number in range(250):
        meta.create(ROOT, ROOT_INO, b"%d" % number, 0o100644)
        meta.unlink(ROOT, ROOT_INO, b"%d" % number)
    for hour in hours(meta):
        while expire(meta, hour):
            pass
    assert _here(meta) == []
    assert meta.statfs() == before
    assert len(meta.deletion.orphans(1000)) == 250
    meta.create(ROOT, ROOT_INO, b"next", 0o100644)


def test_clients_that_meet_in_a_fresh_hour_do_not_conflict(engine: Engine) -> None:
    """Each lists it the first time."""
    one, two = _client(engine), _client(engine)
    for meta in (one, two):
        for number in range(3):
            name = b"%d-%d" % (id(meta), number)
            meta.create(ROOT, ROOT_INO, name, 0o100644)
            meta.unlink(ROOT, ROOT_INO, name)
    assert len(_here(one)) == 6
    assert one.transactor.counters.conflicts == two.transactor.counters.conflicts == 0


class Clocks(SystemRuntime):
    """A host whose clocks are where the test wants them."""

    def __init__(self, behind_ns: int = 0) -> None:
        super().__init__()
        self.passed_s = 0.0
        self.now_ns = lambda: RUNTIME.now_ns() - behind_ns
        self.monotonic = lambda: RUNTIME.monotonic() + self.passed_s


def test_a_clock_that_is_behind_loses_nothing_in_the_trash(engine: Engine) -> None:
    """What its client deletes goes where others have emptied the trash long ago, and expires."""
    clocks, late = Clocks(), Clocks(behind_ns=48 * HOUR_NS)
    accounting.change_settings(engine.meta(), lambda now: now._replace(trash_days=1))
    store = engine.open()
    leader, client = Meta(store, clocks), Meta(engine.open(), late)
    keeper = TrashKeeper(leader, clocks, lambda: False)

    def delete(name: bytes) -> None:
        client.create(ROOT, ROOT_INO, name, 0o100644)
        client.unlink(ROOT, ROOT_INO, name)
        assert len(_here(leader)) == 1

    def later(seconds: float) -> None:
        clocks.passed_s += seconds
        late.passed_s += seconds
        keeper.turn()
        assert check(store).problems == []

    delete(b"noted")
    later(LOOK_EVERY_S)
    assert _here(leader) == []
    assert len(hours(leader)) == 1
    delete(b"right after it, so it is not noted")
    later(FORGET_S)
    assert _here(leader) == []
    delete(b"noted again")
    later(LOOK_EVERY_S)
    assert _here(leader) == []
    later(FORGET_S)
    assert hours(leader) == {}
    delete(b"noted, for it is long ago")
    later(LOOK_EVERY_S)
    assert keeper.expired == 4


@pytest.mark.parametrize("engine", ["redis"], indirect=True)
def test_deleting_stays_one_round_trip(engine: Engine) -> None:
    meta = _client(engine)
    for number in range(3):
        _file(meta, b"f%d" % number)
        meta.create(ROOT, ROOT_INO, b"d%d" % number, 0o40755)

    def cost(verb: Callable[..., object], *args: object) -> int:
        before = meta.store.round_trips
        verb(ROOT, *args)
        return meta.store.round_trips - before

    assert [cost(meta.unlink, ROOT_INO, b"f0"), cost(meta.rmdir, ROOT_INO, b"d0")] == [1, 1]
    assert cost(meta.rename, Place(ROOT_INO, b"f1"), Place(ROOT_INO, b"f2")) == 1
    assert cost(meta.rename, Place(ROOT_INO, b"d1"), Place(ROOT_INO, b"d2")) == 1


# --- restoring -----------------------------------------------------------------------------------


def _restore(meta: Meta, caller: Caller = ROOT) -> dict[bytes, str]:
    """Put everything back; what was said of each name."""
    restorer = Restorer(meta, RUNTIME, caller)
    said: list[Outcome] = []
    things = [each for hour, _ in restorer.hours() for each in restorer.of_hour(hour)]
    restorer.put_back(things, said.append)
    return {each.thing.origin.name: each.error for each in said}


def test_a_tree_comes_back_whole(engine: Engine) -> None:
    """Removed from its leaves up, as rm(1) does; long names and hard links, too."""
    meta = _client(engine)
    top = meta.create(ROOT, ROOT_INO, b"top", 0o40755).ino
    sub = meta.create(ROOT, top, b"sub", 0o40755).ino
    files = {_file(meta, name, sub): name for name in (b"a", b"b-c", b"n" * 255)}
    for name in files.values():
        meta.unlink(ROOT, sub, name)
    meta.rmdir(ROOT, top, b"sub")
    meta.rmdir(ROOT, ROOT_INO, b"top")
    assert set(_restore(meta).values()) == {""}
    assert meta.lookup(ROOT, ROOT_INO, b"top").nlink == 3
    assert {dentry.ino: dentry.name for dentry in meta.names(sub)[0]} == files
    assert _here(meta) == []


def test_restoring_replaces_nothing(engine: Engine) -> None:
    meta = _client(engine)
    _file(meta, b"one")
    meta.unlink(ROOT, ROOT_INO, b"one")
    kept = _file(meta, b"one")
    assert _restore(meta) == {b"one": "the name exists: it stays in the trash"}
    assert meta.lookup(ROOT, ROOT_INO, b"one").ino == kept
    assert len(_here(meta)) == 1


def test_who_is_not_root_restores_his_own(engine: Engine) -> None:
    meta = _client(engine)
    open_to_all = meta.create(ROOT, ROOT_INO, b"open", 0o40777).ino
    for name, caller in ((b"mine", USER), (b"theirs", ROOT)):
        _file(meta, name, open_to_all, caller)
        meta.unlink(ROOT, open_to_all, name)
    _file(meta, b"closed")  # root's directory, root's file
    meta.unlink(ROOT, ROOT_INO, b"closed")
    denied = "not yours, or you may not write to its directory"
    assert _restore(meta, USER) == {b"mine": "", b"theirs": denied, b"closed": denied}


def test_one_path_and_the_latest_of_it(engine: Engine) -> None:
    meta = _client(engine)
    folder = meta.create(ROOT, ROOT_INO, b"dir", 0o40755).ino
    inos = []
    for _ in range(2):
        inos.append(_file(meta, b"f", folder))
        meta.unlink(ROOT, folder, b"f")
    restorer = Restorer(meta, RUNTIME, ROOT)
    assert restorer.of_path("/dir/f").attr.ino == inos[1]
    assert restorer.put_back([restorer.of_path("dir/f")], lambda _: None) == 0
    assert meta.lookup(ROOT, folder, b"f").ino == inos[1]


def test_t1_a_path_brings_its_tree(engine: Engine) -> None:
    """Over several hours, and of two things with one name the last; nothing of other trees."""
    meta = _client(engine)
    kept = meta.create(ROOT, ROOT_INO, b"kept", 0o40755).ino
    other = _file(meta, b"other", kept)
    meta.unlink(ROOT, kept, b"other")
    top = meta.create(ROOT, kept, b"top", 0o40755).ino
    for number in range(2):  # the first `sub` is not the one that comes back
        sub = meta.create(ROOT, top, b"sub", 0o40755).ino
        deep = meta.create(ROOT, sub, b"deep", 0o40755).ino
        last = _file(meta, b"n%d" % number, deep)
        meta.unlink(ROOT, deep, b"n%d" % number)
        meta.rmdir(ROOT, sub, b"deep")
        meta.rmdir(ROOT, top, b"sub")
    early = _file(meta, b"b", top)
    meta.unlink(ROOT, top, b"b")
    meta.rmdir(ROOT, kept, b"top")
    restorer = Restorer(meta, RUNTIME, ROOT)
    things = restorer.tree("/kept/top")
    assert [(each.path, each.attr.ino) for each in things] == [
        ("/kept/top", top),
        ("/kept/top/b", early),
        ("/kept/top/sub", sub),
        ("/kept/top/sub/deep", deep),
        ("/kept/top/sub/deep/n1", last),
    ]
    assert restorer.put_back(things, lambda _: None) == 0
    assert meta.lookup(ROOT, deep, b"n1").ino == last
    assert [each.name for each in meta.names(top)[0]] == [b"b", b"sub"]
    ((hour, _),) = restorer.hours()
    left = [each.path for each in restorer.of_hour(hour)]
    assert len(left) == 4
    assert left[0] == "/kept/other"
    assert restorer.tree("/kept/other")[0].attr.ino == other


def test_a_directory_that_is_gone_for_good(engine: Engine) -> None:
    meta = _client(engine)
    folder = meta.create(ROOT, ROOT_INO, b"dir", 0o40755).ino
    _file(meta, b"f", folder)
    meta.unlink(ROOT, folder, b"f")
    meta.rmdir(ROOT, ROOT_INO, b"dir")
    hour = next(hour for hour, name in _here(meta) if name.endswith(b"dir"))
    meta.rmdir(ROOT, hour, b"1-%d-dir" % folder)
    assert _restore(meta) == {b"f": f"its directory, inode {folder}, is gone"}


def _fell(meta: Meta, depth: int, files: int) -> dict[bytes, Ino]:
    """A chain of directories with files in each, all of it deleted; what was where."""
    chain, found = [ROOT_INO], {}
    for level in range(depth):
        name = b"dir%d" % level
        chain.append(meta.create(ROOT, chain[-1], name, 0o40755).ino)
        found[name] = chain[-1]
        for number in range(files):
            name = b"%d-%d" % (level, number)
            found[name] = _file(meta, name, chain[-1])
    for level in reversed(range(depth)):
        for number in range(files):
            meta.unlink(ROOT, chain[level + 1], b"%d-%d" % (level, number))
        meta.rmdir(ROOT, chain[level], b"dir%d" % level)
    return found


def _standing(meta: Meta, ino: Ino = ROOT_INO) -> dict[bytes, Ino]:
    found = {}
    for name, child, kind in meta.names(ino)[0]:
        found[name] = child
        if kind is FileType.DIR:
            found.update(_standing(meta, child))
    return found


def _trashed(restorer: Restorer) -> list[Trashed]:
    return [each for hour, _ in restorer.hours() for each in restorer.of_hour(hour)]


def test_t1_many_threads_restore_a_tree(engine: Engine) -> None:
    """Directories before what was in them, whatever is under way at once."""
    meta = _client(engine)
    before = _fell(meta, depth=4, files=8)
    restorer = Restorer(meta, RUNTIME, ROOT)
    said: list[Outcome] = []
    assert restorer.put_back(_trashed(restorer), said.append, threads=8) == 0
    assert len(said) == len(before)
    assert _standing(meta) == before
    assert _here(meta) == []


def test_t1_two_restore_at_once(engine: Engine) -> None:
    """Both say that all is back, and nothing is twice."""
    metas = [_client(engine), _client(engine)]
    before = _fell(metas[0], depth=4, files=8)
    failed: list[int] = []
    said: list[Outcome] = []
    listed = [(r, _trashed(r)) for r in (Restorer(meta, RUNTIME, ROOT) for meta in metas)]

    def restore(restorer: Restorer, things: list[Trashed]) -> None:
        failed.append(restorer.put_back(things, said.append, threads=3))

    threads = [RUNTIME.spawn("restorer", partial(restore, *each)) for each in listed]
    for thread in threads:
        thread.join()
    assert failed == [0, 0], [each.error for each in said if each.error]
    assert len(said) == 2 * len(before)
    assert _standing(engine.meta()) == before


def test_t1_what_others_took_out_of_the_trash_is_said(engine: Engine) -> None:
    """It is not called back, nor is its directory called gone."""
    meta = _client(engine)
    folder = meta.create(ROOT, ROOT_INO, b"dir", 0o40755).ino
    for name in (b"moved", b"gone", b"kept"):
        _file(meta, name, folder)
        meta.unlink(ROOT, folder, name)
    restorer = Restorer(meta, RUNTIME, ROOT)
    said: list[Outcome] = []
    things = {each.origin.name: each for each in _trashed(restorer)}
    other = engine.meta()
    moved, gone = things[b"moved"], things[b"gone"]
    other.rename(ROOT, Place(moved.hour, moved.entry), Place(ROOT_INO, b"elsewhere"))
    other.unlink(ROOT, gone.hour, gone.entry)
    assert restorer.put_back(things.values(), said.append, threads=4) == 2
    errors = {each.thing.origin.name: each.error for each in said}
    no_more = "it is in the trash no more"
    assert errors == {b"moved": no_more, b"gone": no_more, b"kept": ""}


def test_hours_are_numbers(engine: Engine) -> None:
    """The directories of the trash have no rows, and look like directories of root's."""
    meta = _client(engine)
    attr = meta.getattr(ROOT, TRASH_INO)
    assert (attr.mode, attr.uid, attr.parent) == (0o40700, 0, ROOT_INO)
    hour = hour_at(5 * HOUR_NS)
    assert meta.getattr(ROOT, hour).parent == TRASH_INO
    assert meta.getattr(ROOT, hour).mtime_ns == 5 * HOUR_NS
    assert NO_PARENT < ROOT_INO < TRASH_INO < hour

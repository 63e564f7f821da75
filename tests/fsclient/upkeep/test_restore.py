"""T1: what lies in the trash comes back: names, trees, by many threads, for whom it belongs to."""

from __future__ import annotations

from functools import partial

import pytest

from fsclient.upkeep.restore import BEAT_S, NotInTrash, RestoreOutcome, Restorer, Trashed
from fsmeta.meta.meta import Meta
from fsmeta.ops.names.rename import DentryLocation
from fsmeta.types import ROOT_INO, Caller, FileType, Ino
from tests.fsmeta.engines import RUNTIME, Engine
from tests.fsmeta.trash_world import ROOT, USER, Clocks, all_in_trash, small_file, trashing_client


def _restore(meta: Meta, caller: Caller = ROOT) -> dict[bytes, str]:
    """Put everything back; what was said of each name."""
    restorer = Restorer(meta, RUNTIME, caller)
    said: list[RestoreOutcome] = []
    things = [each for hour, _ in restorer.hours() for each in restorer.of_hour(hour)]
    restorer.put_back(things, said.append)
    return {each.thing.origin.name: each.error for each in said}


def test_a_tree_comes_back_whole(engine: Engine) -> None:
    """Removed from its leaves up, as rm(1) does; long names and hard links, too."""
    meta = trashing_client(engine)
    top = meta.create(ROOT, ROOT_INO, b"top", 0o40755).ino
    sub = meta.create(ROOT, top, b"sub", 0o40755).ino
    files = {small_file(meta, name, sub): name for name in (b"a", b"b-c", b"n" * 255)}
    for name in files.values():
        meta.unlink(ROOT, sub, name)
    meta.rmdir(ROOT, top, b"sub")
    meta.rmdir(ROOT, ROOT_INO, b"top")
    assert set(_restore(meta).values()) == {""}
    assert meta.lookup(ROOT, ROOT_INO, b"top").nlink == 3
    assert {dentry.ino: dentry.name for dentry in meta.names(sub)[0]} == files
    assert all_in_trash(meta) == []


def test_restoring_replaces_nothing(engine: Engine) -> None:
    meta = trashing_client(engine)
    small_file(meta, b"one")
    meta.unlink(ROOT, ROOT_INO, b"one")
    kept = small_file(meta, b"one")
    assert _restore(meta) == {b"one": "the name exists: it stays in the trash"}
    assert meta.lookup(ROOT, ROOT_INO, b"one").ino == kept
    assert len(all_in_trash(meta)) == 1


def test_who_is_not_root_restores_his_own(engine: Engine) -> None:
    meta = trashing_client(engine)
    open_to_all = meta.create(ROOT, ROOT_INO, b"open", 0o40777).ino
    for name, caller in ((b"mine", USER), (b"theirs", ROOT)):
        small_file(meta, name, open_to_all, caller)
        meta.unlink(ROOT, open_to_all, name)
    small_file(meta, b"closed")  # root's directory, root's file
    meta.unlink(ROOT, ROOT_INO, b"closed")
    denied = "not yours, or you may not write to its directory"
    assert _restore(meta, USER) == {b"mine": "", b"theirs": denied, b"closed": denied}


def test_one_path_and_the_latest_of_it(engine: Engine) -> None:
    meta = trashing_client(engine)
    folder = meta.create(ROOT, ROOT_INO, b"dir", 0o40755).ino
    inos = []
    for _ in range(2):
        inos.append(small_file(meta, b"f", folder))
        meta.unlink(ROOT, folder, b"f")
    restorer = Restorer(meta, RUNTIME, ROOT)
    assert restorer.of_path("/dir/f").attr.ino == inos[1]
    assert restorer.put_back([restorer.of_path("dir/f")], lambda _: None) == 0
    assert meta.lookup(ROOT, folder, b"f").ino == inos[1]


def test_t1_a_path_brings_its_tree(engine: Engine) -> None:
    """Over several hours, and of two things with one name the last; nothing of other trees."""
    meta = trashing_client(engine)
    kept = meta.create(ROOT, ROOT_INO, b"kept", 0o40755).ino
    other = small_file(meta, b"other", kept)
    meta.unlink(ROOT, kept, b"other")
    top = meta.create(ROOT, kept, b"top", 0o40755).ino
    for number in range(2):  # the first `sub` is not the one that comes back
        sub = meta.create(ROOT, top, b"sub", 0o40755).ino
        deep = meta.create(ROOT, sub, b"deep", 0o40755).ino
        last = small_file(meta, b"n%d" % number, deep)
        meta.unlink(ROOT, deep, b"n%d" % number)
        meta.rmdir(ROOT, sub, b"deep")
        meta.rmdir(ROOT, top, b"sub")
    early = small_file(meta, b"b", top)
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
    meta = trashing_client(engine)
    folder = meta.create(ROOT, ROOT_INO, b"dir", 0o40755).ino
    small_file(meta, b"f", folder)
    meta.unlink(ROOT, folder, b"f")
    meta.rmdir(ROOT, ROOT_INO, b"dir")
    hour = next(hour for hour, name in all_in_trash(meta) if name.endswith(b"dir"))
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
            found[name] = small_file(meta, name, chain[-1])
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
    meta = trashing_client(engine)
    before = _fell(meta, depth=4, files=8)
    restorer = Restorer(meta, RUNTIME, ROOT)
    said: list[RestoreOutcome] = []
    assert restorer.put_back(_trashed(restorer), said.append, threads=8) == 0
    assert len(said) == len(before)
    assert _standing(meta) == before
    assert all_in_trash(meta) == []


def test_t1_two_restore_at_once(engine: Engine) -> None:
    """Both say that all is back, and nothing is twice."""
    metas = [trashing_client(engine), trashing_client(engine)]
    before = _fell(metas[0], depth=4, files=8)
    failed: list[int] = []
    said: list[RestoreOutcome] = []
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
    meta = trashing_client(engine)
    folder = meta.create(ROOT, ROOT_INO, b"dir", 0o40755).ino
    for name in (b"moved", b"gone", b"kept"):
        small_file(meta, name, folder)
        meta.unlink(ROOT, folder, name)
    restorer = Restorer(meta, RUNTIME, ROOT)
    said: list[RestoreOutcome] = []
    things = {each.origin.name: each for each in _trashed(restorer)}
    other = engine.meta()
    moved, gone = things[b"moved"], things[b"gone"]
    other.rename(
        ROOT, DentryLocation(moved.hour, moved.entry), DentryLocation(ROOT_INO, b"elsewhere")
    )
    other.unlink(ROOT, gone.hour, gone.entry)
    assert restorer.put_back(things.values(), said.append, threads=4) == 2
    errors = {each.thing.origin.name: each.error for each in said}
    no_more = "it is in the trash no more"
    assert errors == {b"moved": no_more, b"gone": no_more, b"kept": ""}


def test_t1_a_directory_that_is_there_gets_back_what_was_in_it(engine: Engine) -> None:
    """As after a restore that was interrupted: its directories are back, and not all files."""
    meta = trashing_client(engine)
    top = meta.create(ROOT, ROOT_INO, b"top", 0o40755).ino
    sub = meta.create(ROOT, top, b"sub", 0o40755).ino
    other = meta.create(ROOT, ROOT_INO, b"topmost", 0o40755).ino
    inside = {small_file(meta, b"a", top), small_file(meta, b"b", sub)}
    small_file(meta, b"c", other)
    for parent, name in ((top, b"a"), (sub, b"b"), (other, b"c")):
        meta.unlink(ROOT, parent, name)
    restorer = Restorer(meta, RUNTIME, ROOT)
    assert {each.attr.ino for each in restorer.tree("/top")} == inside
    assert restorer.put_back(restorer.tree("/top"), lambda _: None) == 0
    with pytest.raises(NotInTrash, match="/top: nothing of that name is in the trash"):
        restorer.tree("/top")
    with pytest.raises(NotInTrash):
        restorer.tree("/nowhere")
    assert [each.path for each in restorer.tree("/")] == ["/topmost/c"]


def test_listing_the_trash_is_no_sign_of_death(engine: Engine) -> None:
    """With each page the session beats, if it is time: an hour may take longer than a lease."""
    meta, clocks = trashing_client(engine), Clocks()
    small_file(meta, b"f")
    meta.unlink(ROOT, ROOT_INO, b"f")
    restorer = Restorer(meta, clocks, ROOT)
    assert meta.session is not None
    before = meta.session.beat
    clocks.passed_s += BEAT_S + 1
    restorer.hours()
    assert meta.session.beat == before + 1
    clocks.passed_s += BEAT_S + 1
    restorer.of_path("/f")
    assert meta.session.beat == before + 2

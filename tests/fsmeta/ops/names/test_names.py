"""P1, R1: what can be no name is refused wherever names come in, found by fsck and mended."""

from __future__ import annotations

import errno
import io
from collections.abc import Callable
from functools import partial

import pytest

from fsmeta.admin import dump
from fsmeta.admin.clones import CloneBuilder
from fsmeta.check.check import check
from fsmeta.check.repair import repair
from fsmeta.meta.meta import Meta
from fsmeta.ops.names.rename import DentryLocation
from fsmeta.schema import keys
from fsmeta.store.mem import MemBackend, MemStore
from fsmeta.store.writes import Delete, Put
from fsmeta.types import ROOT_CALLER, ROOT_INO, FileType, Ino
from tests.conftest import LogWatch
from tests.fsmeta.engines import RUNTIME, Engine, change

ROOT = ROOT_CALLER
NO_NAMES = (b".", b"..", b"a/b", b"a\0b", b"", b"n" * 256)


def _errno_of(call: Callable[[], object]) -> int | None:
    try:
        call()
    except OSError as error:
        return error.errno
    return None


@pytest.mark.parametrize("name", NO_NAMES)
def test_no_verb_takes_it(engine: Engine, name: bytes) -> None:
    meta = engine.meta()
    top = meta.create(ROOT, ROOT_INO, b"top", 0o40755).ino
    file = meta.create(ROOT, top, b"f", 0o100644).ino
    doors: list[Callable[[], object]] = [
        lambda: meta.create(ROOT, top, name, 0o100644),
        lambda: meta.create(ROOT, top, name, 0o40755),
        lambda: meta.symlink(ROOT, top, name, b"to"),
        lambda: meta.link(ROOT, file, top, name),
        lambda: meta.rename(ROOT, DentryLocation(top, b"f"), DentryLocation(top, name)),
        lambda: CloneBuilder(meta, ROOT, True, lambda: False).build(top, ROOT_INO, name),
    ]
    code = errno.ENAMETOOLONG if len(name) > 255 else errno.EINVAL
    assert [_errno_of(door) for door in doors] == [code] * len(doors)
    assert [each.name for each in meta.names(top)[0]] == [b"f"]


def _plant(engine: Engine) -> tuple[Ino, list[Ino]]:
    """A directory with all of NO_NAMES, and what each leads to, as a bug may have left them."""
    meta = engine.meta()
    top = meta.create(ROOT, ROOT_INO, b"top", 0o40755).ino
    inos: list[Ino] = []
    for number, name in enumerate(NO_NAMES):
        kind = FileType.REG if number % 2 else FileType.DIR
        mode = 0o100644 if number % 2 else 0o40755
        inos.append(meta.create(ROOT, top, b"%d" % number, mode).ino)
        row, value = keys.dir_row(top), keys.pack_dentry(kind, inos[-1])
        engine.first.commit(change(Put(row, name, value), Delete(row, b"%d" % number)))
    meta.sessions.close()
    return top, inos


def test_fsck_finds_and_renames_it(engine: Engine) -> None:
    top, inos = _plant(engine)
    found = sorted(str(each) for each in check(engine.first).problems)
    assert found == sorted(
        f"inode {ino}: is named {name!r} in {top}, which can't be a name"
        for ino, name in zip(inos, NO_NAMES, strict=True)
    )
    meta = Meta(engine.first, RUNTIME)
    done, checked = repair(meta, 1_700_000_000)
    assert len(done) == len(NO_NAMES)
    assert not checked.problems
    names = {each.name: each.ino for each in meta.names(top, b"")[0]}
    assert names == {b"#%d" % ino: ino for ino in inos}


def test_several_names_of_one_file(engine: Engine) -> None:
    meta = engine.meta()
    ino = meta.create(ROOT, ROOT_INO, b"f", 0o100644).ino
    for name in (b"g", b"#%d" % ino):
        meta.link(ROOT, ino, ROOT_INO, name)
    row, value = keys.dir_row(ROOT_INO), keys.pack_dentry(FileType.REG, ino)
    for old, name in ((b"f", b"."), (b"g", b"..")):
        engine.first.commit(change(Put(row, name, value), Delete(row, old)))
    meta.sessions.close()
    repair(Meta(engine.first, RUNTIME), 1_700_000_000)
    left = {each.name for each in meta.names(ROOT_INO, b"")[0]}
    assert left == {b"#%d" % ino, b"#%d.1" % ino, b"#%d.2" % ino}


def test_a_clone_takes_none_along(engine: Engine) -> None:
    top, _ = _plant(engine)
    meta = engine.meta()
    build = partial(CloneBuilder(meta, ROOT, True, lambda: False).build, top, ROOT_INO, b"copy")
    assert _errno_of(build) in (errno.EINVAL, errno.ENAMETOOLONG)
    assert [each.name for each in meta.names(ROOT_INO)[0]] == [b"top"]
    assert not [each for each in check(engine.first).problems if "can't be a name" not in str(each)]
    meta.sessions.close()
    repair(Meta(engine.first, RUNTIME), 1_700_000_000)


def test_a_dump_that_has_some_is_loaded_and_says_so(engine: Engine, log_watch: LogWatch) -> None:
    """A backup is better than none: what it takes to use it is said."""
    _plant(engine)
    packed = io.BytesIO()
    dump.dump(engine.first, packed)
    store = MemStore(MemBackend(RUNTIME))
    log_watch.expect("the dump has 6 names that nothing can have: `slicefs fsck --repair` gives")
    packed.seek(0)
    dump.load(store, packed)
    repair(Meta(store, RUNTIME), 1_700_000_000)
    assert not check(store).problems
    repair(Meta(engine.first, RUNTIME), 1_700_000_000)

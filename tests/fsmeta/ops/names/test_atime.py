"""P1: what reading leaves behind, as the verb decides it; on every engine, ending with `check`."""

from __future__ import annotations

import pytest

from fsmeta.meta.meta import Meta
from fsmeta.ops.names.atime import DAY_NS, Use, is_due, touch_atime
from fsmeta.types import FLAG_NOATIME, ROOT_INO, Attr, Ino, SetAttr
from tests.fsmeta.engines import RUNTIME, Engine
from tests.fsmeta.rules.test_quota import ROOT, mkdir, mkfile


def _attr(meta: Meta, ino: Ino) -> Attr:
    return meta.getattr(ROOT, ino)


def _use(*inos: Ino) -> list[Use]:
    now_ns = RUNTIME.now_ns()
    return [Use(ino, now_ns, now_ns) for ino in inos]


def test_p1_atime_moves_alone(engine: Engine) -> None:
    """Of files, directories and symlinks at once; mtime, ctime and all else stay."""
    meta = engine.meta()
    file, directory = mkfile(meta, ROOT_INO, b"file", 2), mkdir(meta, ROOT_INO, b"dir")
    link = meta.symlink(ROOT, ROOT_INO, b"link", b"file").ino
    inos = [file, directory, link]
    before = {ino: _attr(meta, ino) for ino in inos}
    uses = _use(*inos)
    assert meta.run(touch_atime, ROOT, uses, False) == inos
    for use in uses:
        assert _attr(engine.meta(), use.ino) == before[use.ino]._replace(atime_ns=use.at_ns)
    assert meta.run(touch_atime, ROOT, _use(*inos), False) == [], "relatime: once is enough"
    assert meta.run(touch_atime, ROOT, uses, True) == [], "never back, and not for nothing"
    assert meta.run(touch_atime, ROOT, _use(*inos), True) == inos


def test_p1_who_sets_a_time_has_the_last_word(engine: Engine) -> None:
    meta, other = engine.meta(), engine.meta()
    file = mkfile(meta, ROOT_INO, b"file", 2)
    use = _use(file)
    assert _attr(meta, file).atime_ns < use[0].at_ns
    other.setattr(ROOT, file, SetAttr(atime_ns=10**18, mtime_ns=5))
    assert meta.run(touch_atime, ROOT, use, True) == []
    assert _attr(engine.meta(), file).atime_ns == 10**18


def test_p1_what_is_gone_or_wants_no_atime_is_left_out(engine: Engine) -> None:
    meta, other = engine.meta(), engine.meta()
    inos = [mkfile(meta, ROOT_INO, b"file%d" % number, 1) for number in range(4)]
    meta.setflags(ROOT, inos[1], FLAG_NOATIME)
    uses = _use(*inos)
    other.unlink(ROOT, ROOT_INO, b"file2")
    assert meta.run(touch_atime, ROOT, uses, True) == [inos[0], inos[3]]


@pytest.mark.parametrize("engine", ["redis"], indirect=True)
def test_p1_many_files_are_one_request(engine: Engine) -> None:
    meta = engine.meta()
    inos = [mkfile(meta, ROOT_INO, b"file%d" % number, 1) for number in range(60)]
    meta.attrs(inos)
    before = meta.store.round_trips
    assert meta.run(touch_atime, ROOT, _use(*inos), False) == inos
    assert meta.store.round_trips - before == 1


@pytest.mark.parametrize("engine", ["redis"], indirect=True)
def test_p1_a_directory_in_which_others_make_names_is_no_conflict(engine: Engine) -> None:
    meta, other = engine.meta(), engine.meta()
    directory = mkdir(meta, ROOT_INO, b"dir")
    meta.attrs([directory])
    use = _use(directory)
    ahead = [Use(directory, each.since_ns + 10**9, each.at_ns + 10**9) for each in use]
    mkfile(other, directory, b"theirs", 1)
    assert meta.run(touch_atime, ROOT, ahead, False) == [directory]
    assert meta.transactor.counters.conflicts == 0
    attr = _attr(engine.meta(), directory)
    assert attr.mtime_ns == _attr(other, directory).mtime_ns, "what they did stays"


@pytest.mark.parametrize(
    ("atime", "mtime", "ctime", "strict", "due"),
    [
        (10, 10, 10, False, True),
        (10, 5, 9, False, False),
        (10, 11, 9, False, True),
        (10, 5, 11, False, True),
        (10, 5, 9, True, True),
        (30, 5, 9, True, False),  # the clock of who read before is ahead
        (10, 5, 21, True, False),  # changed while it was open
        (20 - DAY_NS, 20 - 2 * DAY_NS, 20 - 2 * DAY_NS, False, True),
        (21 - DAY_NS, 20 - 2 * DAY_NS, 20 - 2 * DAY_NS, False, False),
    ],
)
def test_p1_relatime_as_the_kernel_has_it(
    atime: int, mtime: int, ctime: int, strict: bool, due: bool
) -> None:
    """relatime_need_update() of the kernel's fs/inode.c."""
    attr = Attr(Ino(5), 0o100644, 0, 0, 0, 0, ROOT_INO, 0, 0, 1, 0, atime, mtime, ctime)
    assert is_due(attr, Use(Ino(5), 20, 20), strict) == due

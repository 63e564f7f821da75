"""P4: RENAME_WHITEOUT: the old name leads to a device 0/0, in the same commit."""

from __future__ import annotations

import errno
import stat

import pytest

from fsmeta.meta.meta import Meta
from fsmeta.ops.names.rename import EXCHANGE, NOREPLACE, WHITEOUT, DentryLocation
from fsmeta.types import ROOT_CALLER, ROOT_INO, Caller, Ino, SetAttr
from tests.fsmeta.engines import Engine

ROOT = ROOT_CALLER
USER = Caller(1000, 1000)


def _make(meta: Meta, parent: Ino, name: bytes, mode: int = 0o100644) -> Ino:
    return meta.create(ROOT, parent, name, mode).ino


def _is_whiteout(meta: Meta, parent: Ino, name: bytes) -> bool:
    attr = meta.lookup(ROOT, parent, name)
    return stat.S_ISCHR(attr.mode) and attr.rdev == 0 and attr.mode & 0o7777 == 0


@pytest.mark.parametrize("mode", [0o100644, 0o40755])
def test_p4_within_and_across_directories(engine: Engine, mode: int) -> None:
    meta, other = engine.meta(), engine.meta()
    first, second = (_make(meta, ROOT_INO, name, 0o40755) for name in (b"first", b"second"))
    ino = _make(meta, first, b"a", mode)
    before = meta.statfs().inodes_used
    meta.rename(ROOT, DentryLocation(first, b"a"), DentryLocation(first, b"b"), WHITEOUT)
    meta.rename(
        ROOT, DentryLocation(first, b"b"), DentryLocation(second, b"c"), WHITEOUT | NOREPLACE
    )
    for each in (meta, other):
        assert _is_whiteout(each, first, b"a")
        assert _is_whiteout(each, first, b"b")
        assert each.lookup(ROOT, second, b"c").ino == ino
        assert each.lookup(ROOT, ROOT_INO, b"first").nlink == 2
    assert meta.statfs().inodes_used == before + 2
    assert meta.lookup(ROOT, ROOT_INO, b"second").nlink == 2 + (mode == 0o40755)


def test_p4_over_what_is_there(engine: Engine) -> None:
    """As overlayfs does it: over the whiteout of an earlier rename, too."""
    meta = engine.meta()
    ino = _make(meta, ROOT_INO, b"a")
    meta.rename(ROOT, DentryLocation(ROOT_INO, b"a"), DentryLocation(ROOT_INO, b"b"), WHITEOUT)
    meta.rename(ROOT, DentryLocation(ROOT_INO, b"b"), DentryLocation(ROOT_INO, b"a"), WHITEOUT)
    assert meta.lookup(ROOT, ROOT_INO, b"a").ino == ino
    assert _is_whiteout(meta, ROOT_INO, b"b")
    assert meta.statfs().inodes_used == 3


def test_p4_an_ordinary_user_may(engine: Engine) -> None:
    meta = engine.meta()
    meta.setattr(ROOT, ROOT_INO, SetAttr(mode=0o777))
    meta.create(USER, ROOT_INO, b"a", 0o100644)
    meta.rename(USER, DentryLocation(ROOT_INO, b"a"), DentryLocation(ROOT_INO, b"b"), WHITEOUT)
    assert _is_whiteout(meta, ROOT_INO, b"a")
    assert meta.lookup(ROOT, ROOT_INO, b"a").uid == USER.uid


def test_p4_what_is_refused_leaves_nothing(engine: Engine) -> None:
    meta = engine.meta()
    for name in (b"a", b"b"):
        _make(meta, ROOT_INO, name)
    places = DentryLocation(ROOT_INO, b"a"), DentryLocation(ROOT_INO, b"b")
    for flags, code in ((WHITEOUT | EXCHANGE, errno.EINVAL), (WHITEOUT | NOREPLACE, errno.EEXIST)):
        with pytest.raises(OSError, match=r"rename|exists") as caught:
            meta.rename(ROOT, *places, flags)
        assert caught.value.errno == code
    assert meta.statfs().inodes_used == 3
    assert stat.S_ISREG(meta.lookup(ROOT, *places[0]).mode)

"""P2, Q1: what one inode's extended attributes may hold and cost, and rows that hold far more."""

from __future__ import annotations

import errno
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from fsmeta.admin.clones import CloneBuilder
from fsmeta.check.check import check
from fsmeta.check.repair import repair
from fsmeta.meta.meta import Meta
from fsmeta.schema import keys
from fsmeta.schema.scan import of_rows
from fsmeta.schema.xattrs import XATTR_COST, XATTRS_COUNT_MAX, XATTRS_FIELD, XATTRS_FREE, XATTRS_MAX
from fsmeta.store.contract import SHORT_ROW_FIELDS, SHORT_ROWS_BYTES, Store
from fsmeta.store.writes import Put
from fsmeta.types import ROOT_CALLER, ROOT_INO, XATTR_SIZE_MAX, Ino, SpaceUsage
from tests.fsmeta.engines import ENGINES, RUNTIME, Engine, change, open_engine

ROOT = ROOT_CALLER
FULL = b"v" * XATTR_SIZE_MAX
OLD_COUNT = 1100  # attributes of an inode that an earlier version has filled
OLD_SIZES = [XATTR_SIZE_MAX] * 20 + [100] * (OLD_COUNT - 20)


def _errno_of(call: Callable[[], object]) -> int | None:
    try:
        call()
    except OSError as error:
        return error.errno
    return None


def _create(meta: Meta, name: bytes, mode: int = 0o100644) -> Ino:
    return meta.create(ROOT, ROOT_INO, name, mode).ino


def _old_name(number: int) -> bytes:
    return b"user.old%04d" % number


def _plant_old(store: Store, ino: Ino) -> None:
    """Attributes as a version stored them that neither counted nor bounded them."""
    row = keys.inode_row(ino)
    for begin in range(0, OLD_COUNT, 100):
        store.commit(
            change(
                *(
                    Put(row, keys.xattr_field(_old_name(n)), b"\1" + b"v" * OLD_SIZES[n])
                    for n in range(begin, min(begin + 100, OLD_COUNT))
                )
            )
        )


class OnePiece:
    """Any read of a whole row, or of too many of its fields at once, fails."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self._read_rows, self._scan = store.read_rows, store.scan
        monkeypatch.setattr(store, "read_rows", self.read_rows)
        monkeypatch.setattr(store, "scan", self.scan)

    def read_rows(self, rows: list[bytes]) -> object:
        assert not any(row[:1] == keys.INODE_PREFIX for row in rows), "a row of any length"
        return self._read_rows(rows)

    def scan(self, row: bytes, cursor: bytes = b"", limit: int = 1000) -> object:
        assert row[:1] != keys.INODE_PREFIX or limit <= 100
        return self._scan(row, cursor, limit)


def test_short_rows(engine: Engine) -> None:
    """Rows that are too long, and those behind enough bytes, are left to `scan`."""
    store = engine.open()
    rows = [b"tA", b"tB", b"tC", b"tD"]
    big = b"v" * (SHORT_ROWS_BYTES // 64)
    for row, count, value in (
        (rows[0], SHORT_ROW_FIELDS, b"1"),
        (rows[1], SHORT_ROW_FIELDS + 1, b"1"),
        (rows[2], 64, big),
        (rows[3], 1, b"1"),
    ):
        store.commit(change(*(Put(row, b"%04d" % n, value) for n in range(count))))
    first, second, third, fourth = store.read_short_rows(rows)
    assert first == {b"%04d" % n: b"1" for n in range(SHORT_ROW_FIELDS)}
    assert second is None
    assert third == {b"%04d" % n: big for n in range(64)}
    assert fourth is None
    assert store.read_short_rows([rows[3], rows[1], b"tnone"]) == [{b"0000": b"1"}, None, {}]
    assert store.read_short_rows([]) == []


def test_an_inode_holds_so_much_and_no_more(engine: Engine) -> None:
    meta = engine.meta()
    ino = _create(meta, b"f")
    count = 0
    while _errno_of(partial(meta.setxattr, ROOT, ino, b"user.%d" % count, FULL)) is None:
        count += 1
    assert count == XATTRS_MAX // XATTR_SIZE_MAX - 1
    small = 0
    while (code := _errno_of(partial(meta.setxattr, ROOT, ino, b"user.s%d" % small, b""))) is None:
        small += 1
    assert code == errno.ENOSPC
    assert count + small < XATTRS_COUNT_MAX
    assert len(meta.listxattr(ROOT, ino)) == count + small
    meta.setxattr(ROOT, ino, b"user.0", b"short")  # what takes less is never refused
    meta.setxattr(ROOT, ino, b"user.s%d" % small, b"fits now")
    for name in meta.listxattr(ROOT, ino):
        meta.removexattr(ROOT, ino, name)
    assert engine.first.read([(keys.inode_row(ino), XATTRS_FIELD)]) == [None]


def test_golden_bytes_of_the_sum(engine: Engine) -> None:
    meta = engine.meta()
    ino = _create(meta, b"f")
    meta.setxattr(ROOT, ino, b"user.a", b"12")
    meta.setxattr(ROOT, ino, b"security.capability", b"1" * 20)  # is not counted
    assert engine.first.read_rows([keys.inode_row(ino)])[0].keys() - {b"a", b"v"} == {
        b"y", b"xuser.a", b"xsecurity.capability"
    }  # fmt: skip
    assert engine.first.read([(keys.inode_row(ino), b"y")]) == [b"136"]


def test_two_mounts_count_together(engine: Engine) -> None:
    """One that has not heard of the other's attribute finds out in its commit."""
    one, other = engine.meta(), engine.meta()
    ino = _create(one, b"f")
    other.getattr(ROOT, ino)
    for number in range(4):
        for meta in (one, other):
            meta.setxattr(ROOT, ino, b"user.%d" % number, b"v" * 10 * (1 + (meta is one)))
    total = 4 * (XATTR_COST + len(b"user.0") + 10)
    assert engine.first.read([(keys.inode_row(ino), XATTRS_FIELD)]) == [b"%d" % total]


@pytest.mark.parametrize("name", ENGINES)
def test_beyond_a_page_they_count_as_space(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A volume of 1 MiB takes 1 MiB of attributes, whatever has them, and gets it back."""
    engine = open_engine(name, tmp_path, request.getfixturevalue)
    try:
        engine.format(SpaceUsage(1 << 20, 0))
        meta = engine.meta()
        kinds = (0o100644, 0o40755)
        inos = [_create(meta, b"%d" % number, kinds[number % 2]) for number in range(32)]
        for ino in inos:
            meta.setxattr(ROOT, ino, b"user.small", b"v" * (XATTRS_FREE - XATTR_COST - 10))
        assert meta.statfs().space_used == 0
        codes = [_errno_of(partial(meta.setxattr, ROOT, ino, b"user.x", FULL)) for ino in inos]
        assert codes == [None] * 15 + [errno.ENOSPC] * 17  # each takes 64 KiB and a page
        assert meta.getattr(ROOT, inos[0]).space == meta.statfs().space_used // 15
        assert not check(engine.first).problems
        meta.removexattr(ROOT, inos[0], b"user.x")
        meta.rmdir(ROOT, ROOT_INO, b"1")
        meta.setxattr(ROOT, inos[20], b"user.x", FULL)
        meta.setxattr(ROOT, inos[21], b"user.x", FULL)
        for number in (0, *range(2, 32)):
            (meta.rmdir if number % 2 else meta.unlink)(ROOT, ROOT_INO, b"%d" % number)
        assert meta.statfs().space_used == 0
        assert not check(engine.first).problems
    finally:
        engine.close()


def test_clones_count_what_they_have(engine: Engine) -> None:
    meta = engine.meta()
    top = _create(meta, b"top", 0o40755)
    file = meta.create(ROOT, top, b"f", 0o100644).ino
    for ino in (top, file):
        meta.setxattr(ROOT, ino, b"user.x", FULL)
        meta.setxattr(ROOT, ino, b"trusted.y", FULL)
    used = meta.statfs().space_used
    CloneBuilder(meta, ROOT, True, lambda: False).build(top, ROOT_INO, b"copy")
    assert meta.statfs().space_used == 2 * used
    assert not check(engine.first).problems


def test_a_row_of_an_earlier_version(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is listed, changed, checked, walked and purged, and never read in one piece."""
    meta = engine.meta()
    ino = _create(meta, b"f")
    _plant_old(engine.first, ino)
    for store in (meta.store, engine.first):
        OnePiece(store, monkeypatch)
    names = [_old_name(number) for number in range(OLD_COUNT)]
    assert meta.listxattr(ROOT, ino) == names
    assert not check(engine.first).problems
    assert [each.ino for each in of_rows(engine.first, [keys.inode_row(ino)])] == [ino]
    meta.setxattr(ROOT, ino, b"user.new", b"1")
    meta.setxattr(ROOT, ino, names[0], b"shorter")
    meta.removexattr(ROOT, ino, names[1])
    assert not check(engine.first).problems
    builder = CloneBuilder(meta, ROOT, True, lambda: False)
    top = _create(meta, b"top", 0o40755)
    meta.link(ROOT, ino, top, b"l")
    assert _errno_of(partial(builder.build, top, ROOT_INO, b"copy")) == errno.ENOSPC
    meta.unlink(ROOT, top, b"l")
    meta.unlink(ROOT, ROOT_INO, b"f")
    meta.deletion.purge(meta.deletion.orphans(10))
    assert not meta.deletion.orphans(10)
    assert not engine.first.scan(keys.inode_row(ino), limit=1).items


def test_a_sum_above_what_there_is_is_mended(engine: Engine) -> None:
    meta = engine.meta()
    ino = _create(meta, b"f")
    meta.setxattr(ROOT, ino, b"user.x", b"1")
    engine.first.commit(change(Put(keys.inode_row(ino), XATTRS_FIELD, b"99999")))
    meta.sessions.close()
    found = [str(each) for each in check(engine.first).problems]
    assert f"inode {ino}: counts 99999 bytes of extended attributes, it has 135" in found
    repair(Meta(engine.first, RUNTIME), 1_700_000_000)
    assert engine.first.read([(keys.inode_row(ino), XATTRS_FIELD)]) == [b"135"]

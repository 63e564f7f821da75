"""Q1 with T1, T2, P4: what the trash, clones, copies and files without names count, and where.

On every engine; each test ends with `check`, which adds all of it up anew.
"""

from __future__ import annotations

import errno

import pytest

from fsmeta.admin import quota_admin
from fsmeta.admin.clones import CloneBuilder
from fsmeta.admin.trash_expiry import expire, hours
from fsmeta.meta.meta import Meta
from fsmeta.ops.data.ranges import KEEP_SIZE, PUNCH_HOLE, Span
from fsmeta.ops.names.create import NewNode
from fsmeta.ops.names.rename import DentryLocation
from fsmeta.rules import quota
from fsmeta.schema import keys
from fsmeta.types import ROOT_INO, Ino, Slice
from tests.fsmeta.engines import Engine
from tests.fsmeta.rules.test_quota import (
    ALICE,
    PAGE,
    ROOT,
    edquot,
    limit_dir,
    mkdir,
    mkfile,
    used,
    used_dir,
    write,
)

ALICES = quota.user_node(1000)


def _keeps_trash(meta: Meta) -> None:
    meta.format = meta.format._replace(trash_days=1)


def _in_trash(meta: Meta) -> list[DentryLocation]:
    return [
        DentryLocation(hour, name)
        for hour in hours(meta)
        for name, _, _ in sorted(meta.names(hour)[0])
    ]


def test_what_is_in_the_trash_has_left_its_directories(engine: Engine) -> None:
    """T1: it counts at its owner and for the volume until it expires."""
    meta = engine.meta()
    d = mkdir(meta, ROOT_INO, b"d")
    inner = mkdir(meta, d, b"inner")
    limit_dir(meta, d, pages=4, inodes=4)
    limit_dir(meta, inner, pages=4, inodes=2)
    mkfile(meta, inner, b"f", 3, ALICE)
    twice = mkfile(meta, inner, b"g", 1, ALICE)
    meta.link(ROOT, twice, ROOT_INO, b"g too")
    _keeps_trash(meta)
    volume = meta.statfs()
    meta.unlink(ROOT, inner, b"f")
    assert (used_dir(meta, d), used_dir(meta, inner)) == ((1, 2), (1, 1))
    meta.unlink(ROOT, ROOT_INO, b"g too")
    meta.unlink(ROOT, inner, b"g")
    meta.rmdir(ROOT, d, b"inner")
    assert used_dir(meta, d) == (0, 0)
    assert used(meta, ALICES) == (4, 2)
    assert meta.statfs()[:1] == volume[:1]
    write(meta, mkfile(meta, d, b"new"), 4)  # there is room again
    write(meta, twice, 2)  # one has it open still
    assert (used_dir(meta, d), used(meta, ALICES)) == ((4, 1), (5, 2))
    (hour,) = hours(meta)
    while expire(meta, hour):
        pass
    assert used(meta, ALICES) == (0, 0)
    assert meta.statfs().inodes_used == 3  # the root, d and new


def test_restoring_is_limited_as_making(engine: Engine) -> None:
    meta = engine.meta()
    d = mkdir(meta, ROOT_INO, b"d")
    limit_dir(meta, d, pages=4)
    mkfile(meta, d, b"f", 3, ALICE)
    mkdir(meta, d, b"sub")
    _keeps_trash(meta)
    meta.unlink(ROOT, d, b"f")
    meta.rmdir(ROOT, d, b"sub")
    mkfile(meta, d, b"new", 2)
    file, sub = sorted(_in_trash(meta), key=lambda place: place.name.endswith(b"sub"))
    edquot(lambda: meta.rename(ROOT, file, DentryLocation(d, b"f")))
    meta.rename(ROOT, sub, DentryLocation(d, b"sub"))
    assert used_dir(meta, d) == (2, 2)
    meta.unlink(ROOT, d, b"new")
    meta.rename(ROOT, file, DentryLocation(d, b"f"))
    assert (used_dir(meta, d), used(meta, ALICES)) == ((3, 2), (3, 1))
    mkfile(meta, Ino(meta.lookup(ROOT, d, b"sub").ino), b"below", 1)
    assert used_dir(meta, d) == (4, 3)


def test_counting_begins_with_things_in_the_trash(engine: Engine) -> None:
    meta = engine.meta()
    d = mkdir(meta, ROOT_INO, b"d")
    _keeps_trash(meta)
    mkfile(meta, d, b"f", 3, ALICE)
    meta.unlink(ROOT, d, b"f")
    limit_dir(meta, d, pages=4)
    assert (used_dir(meta, d), used(meta, ALICES)) == ((0, 0), (3, 1))
    quota_admin.recount(meta)
    (place,) = _in_trash(meta)
    meta.rename(ROOT, place, DentryLocation(d, b"f"))
    assert (used_dir(meta, d), used(meta, ALICES)) == ((3, 1), (3, 1))


def test_a_file_counts_from_its_first_name_on(engine: Engine) -> None:
    """P4: O_TMPFILE."""
    meta = engine.meta()
    d = mkdir(meta, ROOT_INO, b"d")
    limit_dir(meta, d, pages=4)
    files = [meta.new_ino() for _ in range(2)]
    for ino in files:
        meta.ranges.tmpfile(ALICE, d, NewNode(ino, 0o100644), True)
        write(meta, ino, 3)
    assert (used_dir(meta, d), used(meta, ALICES)) == ((0, 0), (0, 0))
    meta.link(ROOT, files[0], d, b"f")
    assert (used_dir(meta, d), used(meta, ALICES)) == ((3, 1), (3, 1))
    edquot(lambda: meta.link(ROOT, files[1], d, b"g"))
    meta.link(ROOT, files[1], ROOT_INO, b"g")
    assert (used_dir(meta, d), used(meta, ALICES)) == ((3, 1), (6, 2))


def test_copies_count_as_writes_do(engine: Engine) -> None:
    """P4: copy_file_range and fallocate; and gc hears of what is shared."""
    meta = engine.meta()
    d = mkdir(meta, ROOT_INO, b"d")
    limit_dir(meta, d, pages=5)
    source = mkfile(meta, ROOT_INO, b"source", 4)
    (sid,) = {piece.id for piece in meta.read_chunk(source, 0)}
    one, two = mkfile(meta, d, b"one"), mkfile(meta, d, b"two")
    span = Span(source, 0, 4 * PAGE)
    meta.ranges.copy_file_range(span, one, 0)
    assert used_dir(meta, d) == (4, 2)
    assert meta.store.read_rows([keys.SHARED]) == [{}]
    edquot(lambda: meta.ranges.copy_file_range(span, two, 0))
    meta.ranges.fallocate(one, PUNCH_HOLE | KEEP_SIZE, 0, 3 * PAGE)
    assert used_dir(meta, d) == (1, 2)
    meta.transactor.run(lambda txn: txn.put(keys.BACKGROUND, keys.COLLECTING, b"1"))
    meta.cache.drop([keys.BACKGROUND])
    meta.ranges.copy_file_range(span, two, 0)
    assert used_dir(meta, d) == (5, 2)
    assert [*meta.store.read_rows([keys.SHARED])[0]] == [keys.pack_u64(sid)]


@pytest.mark.parametrize(
    "room", ["enough", "too little space", "too few inodes", "alice has little"]
)
def test_a_clone_counts_where_it_is_published(engine: Engine, room: str) -> None:
    """T2: all of it in one commit, or none; what fails is uncounted."""
    meta = engine.meta()
    top, place = mkdir(meta, ROOT_INO, b"top"), mkdir(meta, ROOT_INO, b"place")
    sub = mkdir(meta, top, b"sub")
    file = mkfile(meta, sub, b"f", 3)
    meta.link(ROOT, file, top, b"again")
    mkfile(meta, top, b"g", 1)
    big = mkfile(meta, sub, b"big")  # filled by copies
    pieces = [(0, Slice(n * 64, meta.new_slice_id(), 64, 0, 64)) for n in range(600)]
    meta.write_slices(big, pieces, 600 * 64, 1)
    pages = 4 + 10
    limit_dir(meta, top)
    limit_dir(
        meta, place,
        pages - 1 if room == "too little space" else pages,
        4 if room == "too few inodes" else 5,
    )  # fmt: skip
    if room == "alice has little":
        quota_admin.set_quota(meta, ALICES, quota_admin.QuotaLimits(3 * PAGE, None))
    before = (used_dir(meta, place), used(meta, ALICES), meta.statfs())
    builder = CloneBuilder(meta, ALICE, False, lambda: False)
    if room == "enough":
        builder.build(top, place, b"copy")
        assert (used_dir(meta, place), used(meta, ALICES)) == ((pages, 5), (pages, 5))
        copy = meta.lookup(ROOT, place, b"copy").ino
        assert used_dir(meta, copy) == used_dir(meta, top) == (pages, 4)
        meta.rename(ROOT, DentryLocation(place, b"copy"), DentryLocation(ROOT_INO, b"moved"))
        assert used_dir(meta, place) == (0, 0)
        return
    with pytest.raises(OSError, match="full") as caught:
        builder.build(top, place, b"copy")
    assert caught.value.errno == errno.EDQUOT
    assert (used_dir(meta, place), used(meta, ALICES), meta.statfs()) == before


def test_counting_while_a_clone_is_built(engine: Engine) -> None:
    """T2: what is out of sight is counted as what is seen."""
    meta = engine.meta()
    top, place = mkdir(meta, ROOT_INO, b"top"), mkdir(meta, ROOT_INO, b"place")
    sub = mkdir(meta, top, b"sub")
    file = mkfile(meta, sub, b"f", 3)
    meta.link(ROOT, file, top, b"again")
    turns = iter(range(100))

    def counts() -> bool:
        if next(turns) == 1:
            limit_dir(meta, place, pages=100)
        return False

    CloneBuilder(meta, ALICE, False, counts).build(top, place, b"copy")
    assert used_dir(meta, place) == (3, 3)
    assert used(meta, ALICES) == (3, 3)

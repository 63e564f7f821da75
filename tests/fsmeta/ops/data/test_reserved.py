"""P4, Q1: space that fallocate(2) reserves: what it counts, and that no limit refuses its use.

On every engine; each test ends with `check`, which adds all of it up anew.
"""

from __future__ import annotations

import errno
import io
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from fsdata.files.compact import rewrite
from fsmeta.admin import clones, dump, quota_admin
from fsmeta.admin.clones import CloneBuilder
from fsmeta.admin.quota_admin import QuotaLimits, change_settings
from fsmeta.admin.snapshots import Taker
from fsmeta.errors import ConfigError
from fsmeta.meta import sessions
from fsmeta.meta.meta import Meta
from fsmeta.ops.data import ranges
from fsmeta.ops.data.ranges import KEEP_SIZE as KEEP, PUNCH_HOLE, RESERVED_MAX, ZERO_RANGE, Span
from fsmeta.rules import quota
from fsmeta.rules.settings import RESERVED_VERSION, VolumeFormat, pack_format, unpack_format
from fsmeta.schema import keys, slices
from fsmeta.slices import resolve
from fsmeta.types import (
    AT_END,
    CHUNK_BYTES,
    FLAG_BEYOND,
    ROOT_INO,
    Attr,
    Ino,
    SetAttr,
    Slice,
    SliceId,
    SliceKind,
)
from tests.fsdata.world import World
from tests.fsmeta.engines import RUNTIME, Engine, open_engine
from tests.fsmeta.rules.test_quota import (
    PAGE,
    ROOT,
    edquot,
    limit_dir,
    mkdir,
    mkfile,
    used_dir,
)

PUNCH = PUNCH_HOLE | KEEP


def _reserving(engine: Engine) -> Meta:
    """A client of a volume that has had a reservation."""
    meta = engine.meta()
    change_settings(meta, VolumeFormat.with_reserved)
    meta.refresh_settings()
    return meta


def _reserve(meta: Meta, ino: Ino, first: int, last: int, mode: int = 0) -> Attr:
    """Pages `first..last` of a file."""
    return meta.ranges.fallocate(ino, mode, first * PAGE, last * PAGE).after


def _put(meta: Meta, ino: Ino, first: int, last: int, at: int | None = None) -> Attr:
    """Write pages; `at` AT_END appends as many."""
    index, pos = divmod(first * PAGE, CHUNK_BYTES)
    length = (last - first) * PAGE
    piece = Slice(0 if at == AT_END else pos, meta.new_slice_id(), length, 0, length)
    batch = [(index if at is None else at, piece)]
    return meta.write_slices(ino, batch, 0 if at == AT_END else last * PAGE, 1).after


def _pages(attr: Attr) -> tuple[int, int]:
    """Size and space."""
    return attr.size // PAGE, attr.space // PAGE


def _chunks(meta: Meta, ino: Ino) -> list[int]:
    return meta.ranges.chunks(ino)


def _refused(code: int, act: Callable[[], object]) -> None:
    with pytest.raises(OSError, match=r".") as caught:
        act()
    assert caught.value.errno == code


def test_golden_bytes(engine: Engine) -> None:
    record = slices.pack_slices([slices.reserved(5, 0x01020304)])
    assert record == bytes.fromhex("13 00000005 0000000000000000 01020304 00000000 01020304")
    assert slices.unpack_slices(Ino(7), 0, record) == [
        Slice(5, SliceId(0), 0x01020304, 0, 0x01020304, SliceKind.RESERVED)
    ]
    meta = _reserving(engine)
    file = mkfile(meta, ROOT_INO, b"f")
    meta.ranges.fallocate(file, KEEP, 0, 0x100)
    fields = meta.store.read_rows([keys.inode_row(file)])[0]
    assert (
        fields[keys.chunk_field(0)].hex() == "13" + "00" * 12 + "00000100" + "00000000" + "00000100"
    )
    assert fields[keys.ATTR_FIELD][-16:].hex() == "00000000" + "00002000" + "00" * 8


@pytest.mark.parametrize("mode", [0, KEEP, ZERO_RANGE, ZERO_RANGE | KEEP])
def test_what_is_reserved_counts_and_no_quota_refuses_it_later(engine: Engine, mode: int) -> None:
    """On the mount that has reserved it, and on another one."""
    meta, other = _reserving(engine), engine.meta()
    d = mkdir(meta, ROOT_INO, b"d")
    limit_dir(meta, d, pages=10)
    file, rest = mkfile(meta, d, b"f"), mkfile(meta, d, b"rest")
    assert _pages(_reserve(meta, file, 0, 6, mode)) == (0 if mode & KEEP else 6, 6)
    assert used_dir(meta, d) == (6, 2)
    edquot(lambda: _reserve(meta, rest, 0, 5, mode))
    assert _pages(meta.getattr(ROOT, rest)) == (0, 0)
    _put(other, rest, 0, 4)
    edquot(lambda: _put(other, rest, 4, 5))
    assert _pages(_put(meta, file, 0, 2)) == (2 if mode & KEEP else 6, 6)
    assert _pages(_put(other, file, 4, 6)) == (6, 6)
    assert _pages(_put(meta, file, 2, 4)) == (6, 6)
    edquot(lambda: _put(other, file, 4, 7))
    assert used_dir(meta, d) == (10, 2)
    assert [part.slice is None for part in resolve(other.read_chunk(file, 0))] == [False] * 3


@pytest.mark.parametrize("mode", [0, KEEP])
def test_the_volume_is_full_for_those_who_have_reserved_nothing(engine: Engine, mode: int) -> None:
    meta = _reserving(engine)
    space = meta.statfs().space_used
    change_settings(meta, lambda before: before._replace(capacity=space + 8 * PAGE))
    meta.refresh_settings()
    file, rest = mkfile(meta, ROOT_INO, b"f"), mkfile(meta, ROOT_INO, b"rest")
    _reserve(meta, file, 0, 8, mode)
    _refused(errno.ENOSPC, lambda: _put(meta, rest, 0, 1))
    _refused(errno.ENOSPC, lambda: _reserve(meta, rest, 0, 1, mode))
    assert meta.fitting(rest, [(0, Slice(0, meta.new_slice_id(), PAGE, 0, PAGE))]) == 0
    assert meta.fitting(file, [(0, Slice(0, meta.new_slice_id(), 9 * PAGE, 0, 9 * PAGE))]) == (
        8 * PAGE
    )
    assert _pages(_put(meta, file, 0, 8)) == (8, 8)
    _refused(errno.ENOSPC, lambda: _put(meta, file, 8, 9))


def test_only_what_nothing_covers_is_reserved(engine: Engine) -> None:
    meta = _reserving(engine)
    file = mkfile(meta, ROOT_INO, b"f")
    _put(meta, file, 2, 3)
    _put(meta, file, 5, 6)
    assert _pages(_reserve(meta, file, 0, 8)) == (8, 8)
    before = meta.read_chunk(file, 0)
    assert _pages(_reserve(meta, file, 1, 7)) == (8, 8)
    assert meta.read_chunk(file, 0) == before, "there is nothing to be added"
    shown = [(part.pos // PAGE, part.slice is None) for part in resolve(before)]
    assert shown == [(0, True), (2, False), (3, True), (5, False), (6, True)]


def test_a_range_is_zeroed_and_stays_covered(engine: Engine) -> None:
    """FALLOC_FL_ZERO_RANGE: the data go, at once where a chunk has no others."""
    meta = _reserving(engine)
    file = mkfile(meta, ROOT_INO, b"f")
    _put(meta, file, 0, 4)
    assert _pages(_reserve(meta, file, 1, 2, ZERO_RANGE)) == (4, 4)
    assert [part.slice is None for part in resolve(meta.read_chunk(file, 0))] == [
        False, True, False,
    ]  # fmt: skip
    assert meta.deletion.dead_slices(10) == {}
    assert _pages(_reserve(meta, file, 0, 4, ZERO_RANGE)) == (4, 4)
    assert meta.read_chunk(file, 0) == [slices.reserved(0, 4 * PAGE)]
    assert len(meta.deletion.dead_slices(10)) == 1


@pytest.mark.parametrize("known", [True, False])
def test_beyond_the_end(engine: Engine, known: bool) -> None:
    """KEEP_SIZE: what lies there is found by writes, appends, punches and truncations."""
    meta = _reserving(engine)
    file = mkfile(meta, ROOT_INO, b"f")

    def attr() -> tuple[int, int]:
        if not known:
            meta.cache.forget()
        return _pages(meta.getattr(ROOT, file))

    _put(meta, file, 0, 1)
    chunk = CHUNK_BYTES // PAGE
    _reserve(meta, file, 4, 8, KEEP)
    _reserve(meta, file, 3 * chunk, 3 * chunk + 5, KEEP)
    assert attr() == (1, 10)
    assert _chunks(meta, file) == [0, 3]
    _reserve(meta, file, 6, 7, PUNCH)
    _reserve(meta, file, 3 * chunk + 4, 4 * chunk, PUNCH)
    assert attr() == (1, 8)
    _put(meta, file, 1, 4, AT_END)
    assert attr() == (4, 11)
    _put(meta, file, 4, 8, AT_END)
    assert attr() == (8, 12), "three pages of it were reserved"
    meta.setattr(ROOT, file, SetAttr(size=20 * PAGE))
    assert attr() == (20, 12), "what is reserved stays where a file grows"
    meta.setattr(ROOT, file, SetAttr(size=(3 * chunk + 2) * PAGE))
    assert attr() == (3 * chunk + 2, 12)
    meta.setattr(ROOT, file, SetAttr(size=(3 * chunk + 2) * PAGE))
    assert attr() == (3 * chunk + 2, 10), "a truncation to the same size ends it there"
    assert not meta.getattr(ROOT, file).flags & FLAG_BEYOND
    _reserve(meta, file, 3 * chunk + 2, 3 * chunk + 3, KEEP)
    meta.setattr(ROOT, file, SetAttr(size=0))
    assert attr() == (0, 0)
    assert _chunks(meta, file) == []


def test_very_many_chunks_beyond_the_end_go_in_steps(engine: Engine) -> None:
    """No commit is longer than a store takes, and the size is never more than it was."""
    meta = _reserving(engine)
    file = mkfile(meta, ROOT_INO, b"f")
    before = meta.transactor.counters.commits
    attr = meta.ranges.fallocate(file, KEEP, 100, 2500 * CHUNK_BYTES).after
    assert meta.transactor.counters.commits - before == 3
    assert (attr.size, attr.used) == (0, 2500 * CHUNK_BYTES - 100)
    before = meta.transactor.counters.commits
    changed = meta.setattr(ROOT, file, SetAttr(size=0))
    assert meta.transactor.counters.commits - before > 2
    assert (changed.after.size, changed.after.used, changed.after.flags) == (0, 0, 0)
    assert _chunks(meta, file) == []
    assert meta.statfs().space_used == 0


def test_a_chunk_of_very_many_holes_is_one_step(engine: Engine) -> None:
    meta = _reserving(engine)
    file = mkfile(meta, ROOT_INO, b"f")
    for index in range(3):
        size = 4 * PAGE * 2000
        sid = meta.new_slice_id()
        batch = [(index, Slice(4 * PAGE * n, sid, size, 0, PAGE)) for n in range(2000)]
        meta.write_slices(file, batch, index * CHUNK_BYTES + size, 1)
    before = meta.transactor.counters.commits
    attr = meta.ranges.fallocate(file, 0, 0, 3 * CHUNK_BYTES).after
    assert meta.transactor.counters.commits - before == 1
    assert attr.used == attr.size == 3 * CHUNK_BYTES


def test_more_than_ext4_could_is_refused_at_once(engine: Engine) -> None:
    meta = _reserving(engine)
    file = mkfile(meta, ROOT_INO, b"f")
    for mode in (0, KEEP, ZERO_RANGE):
        _refused(errno.ENOSPC, partial(meta.ranges.fallocate, file, mode, 5, 6 + RESERVED_MAX))
    meta.ranges.fallocate(file, PUNCH, 5, 6 + RESERVED_MAX)
    assert _pages(meta.getattr(ROOT, file)) == (0, 0)


def test_deleting_frees_it(engine: Engine) -> None:
    """With the name, since space without a name does not count; and nothing is left of it."""
    meta = _reserving(engine)
    assert meta.deletion.take_lead()
    file = mkfile(meta, ROOT_INO, b"f")
    _reserve(meta, file, 0, 10, KEEP)
    _put(meta, file, 2, 3)
    assert meta.statfs().space_used == 10 * PAGE
    meta.unlink(ROOT, ROOT_INO, b"f")
    assert meta.statfs().space_used == 0
    meta.deletion.purge(meta.deletion.orphans(10))
    assert meta.store.read_rows([keys.inode_row(file)]) == [{}]
    assert sum(map(len, meta.deletion.dead_slices(10).values())) == 1


def test_clones_snapshots_and_copies_leave_it_out(engine: Engine) -> None:
    """T2: as reflinks do on XFS. What a zeroed range hides does not come back."""
    meta = _reserving(engine)
    d = mkdir(meta, ROOT_INO, b"d")
    file, empty = mkfile(meta, d, b"f"), mkfile(meta, d, b"empty")
    _put(meta, file, 0, 4)
    _reserve(meta, file, 1, 2, ZERO_RANGE)
    _reserve(meta, file, 8, 20, KEEP)
    _reserve(meta, empty, 0, 7)
    assert (_pages(meta.getattr(ROOT, file)), _pages(meta.getattr(ROOT, empty))) == (
        (4, 16),
        (7, 7),
    )
    builder = CloneBuilder(meta, ROOT, True, lambda: False)
    clone = builder.build(d, ROOT_INO, b"clone")
    taken = Taker(meta, ROOT, RUNTIME.now_ns, lambda: False).take(d, b"snap")
    assert taken.changed == 0
    for copy in (clone.ino, taken.root):
        found = {name: ino for name, ino, _ in meta.names(copy)[0]}
        assert _pages(meta.getattr(ROOT, found[b"f"])) == (4, 3)
        assert _pages(meta.getattr(ROOT, found[b"empty"])) == (7, 0)
        assert _chunks(meta, found[b"empty"]) == []
        shown = resolve(meta.read_chunk(found[b"f"], 0))
        assert [(part.pos // PAGE, part.slice is None) for part in shown[:3]] == [
            (0, False), (1, True), (2, False),
        ]  # fmt: skip
    target = mkfile(meta, ROOT_INO, b"target")
    _reserve(meta, target, 0, 4)
    after = meta.ranges.copy_file_range(Span(file, 0, 4 * PAGE), target, 0).changed.after
    assert _pages(after) == (4, 3), "a hole takes the place of what was reserved"
    assert list(clones.abandoned(meta)) == []


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def test_compaction_keeps_it(engine: Engine, world: World) -> None:
    meta = _reserving(engine)
    d = mkdir(meta, ROOT_INO, b"d")
    file = mkfile(meta, d, b"f")
    _reserve(meta, file, 0, 300)
    for page in (10, 11, 200):
        sid = meta.new_slice_id()
        world.blocks.put_block(sid, 0, bytearray(b"x" * PAGE))
        meta.write_slices(file, [(0, Slice(page * PAGE, sid, PAGE, 0, PAGE))], 0, 1)
    limit_dir(meta, d, pages=300)
    old = meta.read_chunk(file, 0)
    new = rewrite(world.blocks, old, meta.new_slice_id())
    assert len(new) == 3
    assert meta.compact_chunk(file, 0, old, new)
    assert _pages(meta.getattr(ROOT, file)) == (300, 300)
    _put(meta, file, 0, 300)
    edquot(lambda: _put(meta, file, 300, 301))


def test_a_chunk_that_is_full_keeps_no_reservation(world: World) -> None:
    old = [slices.reserved(0, 4 * PAGE)]
    for number in range(4):
        sid = SliceId(number + 1)
        world.blocks.put_block(sid, 0, bytearray(b"x" * PAGE))
        old.append(Slice(number * PAGE, sid, PAGE, 0, PAGE))
    (only,) = rewrite(world.blocks, old, SliceId(9))
    assert (only.pos, only.length, only.stored) == (0, 4 * PAGE, True)


def test_what_earlier_clients_left_in_a_journal_reserves_nothing(engine: Engine) -> None:
    """Their entries have two arguments, and so does a volume of an earlier version."""
    meta = engine.meta()
    assert meta.format.version < RESERVED_VERSION
    file = mkfile(meta, ROOT_INO, b"f", 2)
    assert _pages(_reserve(meta, file, 0, 8)) == (8, 2)
    assert _pages(_reserve(meta, file, 0, 1, ZERO_RANGE)) == (8, 1)
    assert _pages(_reserve(meta, file, 8, 9, KEEP)) == (8, 1)
    change_settings(meta, VolumeFormat.with_reserved)
    meta.refresh_settings()
    meta.run(ranges.fallocate, ROOT, 0, Span(file, 0, 12 * PAGE))
    assert _pages(meta.getattr(ROOT, file)) == (12, 1)


def test_a_mount_follows_the_new_version(engine: Engine) -> None:
    """Its own commits do: no client can commit as if nothing was reserved."""
    meta, other = engine.meta(), engine.meta()
    file = mkfile(other, ROOT_INO, b"f")
    change_settings(meta, VolumeFormat.with_reserved)
    mkfile(other, ROOT_INO, b"g")
    assert other.format.version == RESERVED_VERSION
    assert _pages(_reserve(other, file, 0, 3)) == (3, 3)


def test_a_session_says_what_its_client_knows(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of earlier clients do not, so that they are not locked out."""
    meta = engine.meta()
    assert meta.sessions.all_know(RESERVED_VERSION)
    assert not meta.sessions.all_know(keys.METADATA_VERSION + 1)
    with monkeypatch.context() as earlier:
        earlier.setattr(sessions, "_KNOWS", "of no client")
        older = engine.meta()
    assert not meta.sessions.all_know(RESERVED_VERSION)
    older.sessions.close()
    assert meta.sessions.all_know(RESERVED_VERSION)


def test_an_older_client_refuses_the_volume(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it is the same volume until the first reservation, to the byte."""
    meta = _reserving(engine)
    packed = pack_format(meta.format)
    with monkeypatch.context() as older:
        older.setattr(keys, "METADATA_VERSION", RESERVED_VERSION - 1)
        with pytest.raises(ConfigError, match="upgrade slicefs"):
            unpack_format(packed)


def test_dumps_have_it(engine: Engine) -> None:
    """M4: loaded into another volume, all of it is reserved there."""
    meta = _reserving(engine)
    file = mkfile(meta, ROOT_INO, b"f")
    _reserve(meta, file, 1, 5, KEEP)
    out = io.BytesIO()
    dump.dump(meta.store, out)
    loaded = open_engine("mem", Path(), str)
    out.seek(0)
    dump.load(loaded.first, out)
    copy = loaded.meta()
    quota_admin.set_quota(copy, quota.user_node(0), QuotaLimits(4 * PAGE, None))
    assert _pages(copy.getattr(ROOT, file)) == (0, 4)
    assert _pages(_put(copy, file, 1, 5)) == (5, 4)
    edquot(lambda: _put(copy, file, 5, 6))
    loaded.close()
    assert meta.statfs().space_used == 4 * PAGE

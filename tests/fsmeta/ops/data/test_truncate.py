"""truncate(2) of files with few, many and very many chunks, and of what others change meanwhile."""

from __future__ import annotations

import errno

import pytest

from fsmeta.meta.meta import Meta
from fsmeta.ops.data import ranges
from fsmeta.schema import keys
from fsmeta.store.contract import COMMIT_OPS_ENOUGH
from fsmeta.types import CHUNK_BYTES, FILE_SIZE_MAX, ROOT_CALLER, ROOT_INO, Ino, SetAttr, Slice
from tests.fsmeta.engines import Engine

ROOT = ROOT_CALLER


def _create(meta: Meta) -> Ino:
    return meta.create(ROOT, ROOT_INO, b"f", 0o100644).ino


def _write(meta: Meta, ino: Ino, indexes: range, pos: int = 0) -> None:
    """100 bytes at `pos` in each of these chunks."""
    batch = [(index, Slice(pos, meta.new_slice_id(), 100, 0, 100)) for index in indexes]
    meta.write_slices(ino, batch, indexes[-1] * CHUNK_BYTES + pos + 100, 1)


def _chunks(meta: Meta, ino: Ino) -> list[int]:
    fields = meta.store.read_rows([keys.inode_row(ino)])[0]
    return sorted(keys.id_of(field) for field in fields if field[:1] == b"c")


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("size", [0, 50, CHUNK_BYTES, CHUNK_BYTES + 50, 2 * CHUNK_BYTES + 100])
def test_what_lies_beyond_goes(engine: Engine, size: int, known: bool) -> None:
    meta = engine.meta()
    ino = _create(meta)
    _write(meta, ino, range(3))
    if not known:
        meta.cache.forget()
    attr = meta.setattr(ROOT, ino, SetAttr(size=size)).after
    last, pos = divmod(size, CHUNK_BYTES)
    assert (attr.size, attr.used) == (size, 100 * last + min(pos, 100))
    assert _chunks(meta, ino) == list(range(last + (pos > 0)))
    grown = meta.setattr(ROOT, ino, SetAttr(size=3 * CHUNK_BYTES)).after
    assert grown.used == attr.used
    assert meta.getattr(ROOT, ino) == grown


@pytest.mark.parametrize("length", [100, 200])
def test_p4_a_hole_that_is_copied_over_all_data_leaves_nothing(engine: Engine, length: int) -> None:
    """Truncation of a file that uses nothing looks for nothing, so slices stayed beyond its end."""
    meta = engine.meta()
    ino, source = _create(meta), meta.create(ROOT, ROOT_INO, b"hole", 0o100644).ino
    _write(meta, ino, range(2))
    meta.setattr(ROOT, source, SetAttr(size=CHUNK_BYTES + length))
    span = ranges.Span(source, 0, CHUNK_BYTES + length)
    after = meta.ranges.copy_file_range(span, ino, 0).changed.after
    assert (after.size, after.used) == (CHUNK_BYTES + length, 0)
    assert _chunks(meta, ino) == []
    assert len(meta.deletion.dead_slices(10)) == 2
    meta.setattr(ROOT, ino, SetAttr(size=0))


def test_very_many_chunks_go_in_steps(engine: Engine) -> None:
    """No commit is longer than a store takes; the last says what was asked for."""
    meta = engine.meta()
    ino = _create(meta)
    many = COMMIT_OPS_ENOUGH
    for begin in range(0, many, 500):
        _write(meta, ino, range(begin, min(begin + 500, many)))
    before = meta.transactor.counters.commits
    attr = meta.setattr(ROOT, ino, SetAttr(size=50)).after
    assert (attr.size, attr.used) == (50, 50)
    assert meta.transactor.counters.commits - before == 3
    assert _chunks(meta, ino) == [0]
    assert meta.statfs().space_used == attr.space


def test_a_far_end_takes_one_step(engine: Engine) -> None:
    """What counts is how many chunks hold something, not how far apart they are."""
    meta = engine.meta()
    ino = _create(meta)
    far = FILE_SIZE_MAX // CHUNK_BYTES
    _write(meta, ino, range(2))
    _write(meta, ino, range(far - 1, far), pos=CHUNK_BYTES - 100)
    assert meta.getattr(ROOT, ino).size == FILE_SIZE_MAX
    before = meta.store.round_trips
    assert meta.setattr(ROOT, ino, SetAttr(size=50)).after.used == 50
    # a read and a commit, which on TiKV are two and five
    assert meta.store.round_trips - before <= (7 if engine.name == "tikv" else 4)
    assert _chunks(meta, ino) == [0]
    assert meta.setattr(ROOT, ino, SetAttr(size=FILE_SIZE_MAX)).after.size == FILE_SIZE_MAX
    with pytest.raises(OSError, match="size") as caught:
        meta.setattr(ROOT, ino, SetAttr(size=FILE_SIZE_MAX + 1))
    assert caught.value.errno == errno.EFBIG


def test_who_was_let_in_ends_what_he_began(engine: Engine) -> None:
    """The first step takes the right to write away; the others go on."""
    meta = engine.meta()
    ino = _create(meta)
    user = ROOT._replace(uid=1000, gid=1000)
    meta.setattr(ROOT, ino, SetAttr(uid=1000, gid=1000))
    for begin in range(0, 1500, 500):
        _write(meta, ino, range(begin, begin + 500))
    attr = meta.setattr(user, ino, SetAttr(size=0, mode=0o400)).after
    assert (attr.size, attr.used, attr.mode & 0o777) == (0, 0, 0o400)


@pytest.mark.parametrize("index", [0, 1, 3])
def test_what_others_have_written_goes_too(engine: Engine, index: int) -> None:
    """Into a chunk known here, into one known to be a hole, behind the end."""
    meta, other = engine.meta(), engine.meta()
    ino = _create(meta)
    _write(meta, ino, range(1))
    meta.setattr(ROOT, ino, SetAttr(size=2 * CHUNK_BYTES))
    _write(other, ino, range(index, index + 1), pos=500)
    assert meta.setattr(ROOT, ino, SetAttr(size=0)).after.used == 0
    assert _chunks(meta, ino) == []

"""P4: appends find their place in the commit; what has several users is counted."""

from __future__ import annotations

import errno

import pytest

from fsmeta.meta.meta import Meta
from fsmeta.schema import keys
from fsmeta.types import (
    AT_END,
    CHUNK_BYTES,
    FILE_SIZE_MAX,
    ROOT_CALLER,
    ROOT_INO,
    Ino,
    SetAttr,
    Slice,
)
from tests.fsmeta.engines import Engine

ROOT = ROOT_CALLER


def _create(meta: Meta) -> Ino:
    return meta.create(ROOT, ROOT_INO, b"f", 0o100644).ino


def _piece(meta: Meta, length: int, pos: int = 0) -> Slice:
    return Slice(pos, meta.new_slice_id(), length, 0, length)


def test_an_append_goes_where_the_file_ends(engine: Engine) -> None:
    """Two clients, neither of which knows of the other's; and one that knows a longer file."""
    one, two = engine.meta(), engine.meta()
    ino = _create(one)
    for number, meta in enumerate((one, two, two, one)):
        after = meta.write_slices(ino, [(AT_END, _piece(meta, 10, 777))], 5, 1).after
        assert (after.size, after.used) == (10 + 10 * number,) * 2
    one.getattr(ROOT, ino)
    two.setattr(ROOT, ino, SetAttr(size=3))
    one.write_slices(ino, [(AT_END, _piece(one, 10))], 1000, 1)
    assert one.getattr(ROOT, ino).size == 13
    assert [(each.pos, each.length) for each in one.read_chunk(ino, 0)][-1] == (3, 10)


def test_an_append_across_the_end_of_a_chunk(engine: Engine) -> None:
    """Its slice has two users, and goes with the second."""
    meta = engine.meta()
    ino = _create(meta)
    meta.setattr(ROOT, ino, SetAttr(size=CHUNK_BYTES - 4))
    piece = _piece(meta, 10)
    assert meta.write_slices(ino, [(AT_END, piece)], 1, 1).after.size == CHUNK_BYTES + 6
    assert meta.read_chunk(ino, 0) == [piece._replace(pos=CHUNK_BYTES - 4, length=4)]
    assert meta.read_chunk(ino, 1) == [piece._replace(pos=0, off=4, length=6)]
    key = (keys.SHARED_SLICES, keys.pack_u64(piece.id))
    assert meta.store.read([key]) == [b"1"]
    assert meta.deletion.take_lead()
    for size, gone in ((CHUNK_BYTES, []), (0, [(piece.id, 10)])):
        meta.setattr(ROOT, ino, SetAttr(size=size))
        number = meta.deletion.next_round()
        assert number is not None
        noted = meta.deletion.dead_slices(10)
        uses = meta.deletion.last_uses(number, noted)
        assert uses is not None
        assert uses.gone == gone
        meta.deletion.forget_dead(noted, uses.shared)
    assert meta.store.read([key]) == [None]


def test_appends_and_other_writes_in_order(engine: Engine) -> None:
    meta = engine.meta()
    ino = _create(meta)
    batch = [
        (AT_END, _piece(meta, 10)),
        (0, _piece(meta, 5, pos=100)),
        (AT_END, _piece(meta, 10)),
        (0, _piece(meta, 5, pos=3)),
    ]
    assert meta.write_slices(ino, batch, 1, 1).after.size == 115
    assert [each.pos for each in meta.read_chunk(ino, 0)] == [0, 100, 105, 3]


def test_an_append_beyond_the_longest_file(engine: Engine) -> None:
    meta = engine.meta()
    ino = _create(meta)
    meta.setattr(ROOT, ino, SetAttr(size=FILE_SIZE_MAX - 5))
    with pytest.raises(OSError, match="append at") as caught:
        meta.write_slices(ino, [(AT_END, _piece(meta, 10))], 1, 1)
    assert caught.value.errno == errno.EFBIG


def test_who_leads_no_longer_deletes_nothing(engine: Engine) -> None:
    """The next leader may have dealt with the drops, and others dropped the same slice since."""
    one, two = engine.meta(), engine.meta()
    ino = _create(one)
    one.write_slices(ino, [(0, _piece(one, 10))], 10, 1)
    one.setattr(ROOT, ino, SetAttr(size=0))
    assert one.deletion.take_lead()
    number = one.deletion.next_round()
    assert number is not None
    noted = one.deletion.dead_slices(10)
    assert one.session is not None
    assert two.deletion.take_lead(believed_dead=one.session.id) is True
    assert one.deletion.last_uses(number, noted) is None
    later = two.deletion.next_round()
    assert later is not None
    assert two.deletion.last_uses(number, noted) is None
    assert two.deletion.last_uses(later, noted) is not None

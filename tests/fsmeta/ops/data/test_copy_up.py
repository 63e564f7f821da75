"""X2: an attached file gets its own slices in one commit, once, and only from its own object."""

from __future__ import annotations

import errno

import pytest

from fsmeta.admin.quota_admin import change_settings
from fsmeta.errors import ShowsObject
from fsmeta.meta.meta import Meta
from fsmeta.ops.data.copy_up import CopiedObject, copy_up
from fsmeta.ops.data.ranges import Span
from fsmeta.ops.names.attach import NewAttached, attach, attached_object
from fsmeta.rules.context import Changed
from fsmeta.rules.settings import VolumeFormat
from fsmeta.schema.xattrs import XATTRS_FREE
from fsmeta.types import (
    CHUNK_BYTES,
    FLAG_APPEND,
    FLAG_ATTACHED,
    FLAG_IMMUTABLE,
    ROOT_CALLER,
    ROOT_INO,
    AttachedObject,
    Ino,
    SetAttr,
    Slice,
)
from tests.fsmeta.engines import Engine
from tests.support.outcome import errno_of

ROOT = ROOT_CALLER
SHOWN = AttachedObject("", "", "bucket", "key", "etag")
SIZE = 2 * CHUNK_BYTES + 5


def _attached(meta: Meta) -> Ino:
    change_settings(meta, VolumeFormat.with_attached)
    ino = meta.new_ino()
    meta.run(attach, ROOT, ROOT_INO, 0o644, [NewAttached(b"f", ino, SHOWN, SIZE, 7)])
    return ino


def _copied(meta: Meta, size: int = SIZE, found: AttachedObject = SHOWN) -> CopiedObject:
    lengths = [min(CHUNK_BYTES, size - at) for at in range(0, size, CHUNK_BYTES)]
    slices = [Slice(0, meta.new_slice_id(), length, 0, length) for length in lengths]
    return CopiedObject(found, slices, size, lambda: None)


def _copy_up(meta: Meta, ino: Ino, copied: CopiedObject) -> Changed | None:
    ids = [piece.id for piece in copied.slices]
    with meta.slices.committing(ids):
        return meta.run(copy_up, ROOT, ino, copied)


def test_one_commit_of_the_first_client(engine: Engine) -> None:
    one, two = engine.meta(), engine.meta()
    ino = _attached(one)
    before = two.getattr(ROOT, ino)
    assert (before.used, before.flags & FLAG_ATTACHED) == (0, FLAG_ATTACHED)
    changed = _copy_up(one, ino, _copied(one))
    assert changed is not None
    assert changed.before == before
    after = changed.after
    assert (after.size, after.used, after.mtime_ns, after.flags) == (SIZE, SIZE, 7, 0)
    assert _copy_up(two, ino, _copied(two)) is None
    two.cache.forget()
    assert two.getattr(ROOT, ino) == after
    assert [len(two.read_chunk(ino, index)) for index in range(4)] == [1, 1, 1, 0]
    assert errno_of(lambda: two.run(attached_object, ROOT, ino)) == errno.ENODATA


def test_another_object_is_stale(engine: Engine) -> None:
    meta = engine.meta()
    ino = _attached(meta)
    other = _copied(meta, found=SHOWN._replace(etag="other"))
    assert errno_of(lambda: _copy_up(meta, ino, other)) == errno.ESTALE
    assert meta.run(attached_object, ROOT, ino) == SHOWN
    assert meta.getattr(ROOT, ino).flags & FLAG_ATTACHED


def test_no_verb_changes_the_bytes_of_an_object(engine: Engine) -> None:
    meta = engine.meta()
    ino = _attached(meta)
    piece = Slice(0, meta.new_slice_id(), 100, 0, 100)
    source = meta.create(ROOT, ROOT_INO, b"g", 0o100644).ino
    meta.write_slices(source, [(0, piece)], 100, 1)
    changes = (
        lambda: meta.write_slices(ino, [(0, piece)], 100, 1),
        lambda: meta.setattr(ROOT, ino, SetAttr(size=0)),
        lambda: meta.setattr(ROOT, ino, SetAttr(size=2 * SIZE)),
        lambda: meta.ranges.fallocate(ino, 0, 0, 10),
        lambda: meta.ranges.copy_file_range(Span(source, 0, 100), ino, 0),
    )
    for change in changes:
        with pytest.raises(ShowsObject):
            change()
    assert meta.read_chunk(ino, 0) == []
    assert _copy_up(meta, ino, _copied(meta, 0)) is not None
    assert meta.setattr(ROOT, ino, SetAttr(size=9)).after.used == 0


def test_what_its_attributes_cost_stays_counted(engine: Engine) -> None:
    """Extended attributes beyond XATTRS_FREE are space; `check` of the engine adds it up anew."""
    meta = engine.meta()
    ino = _attached(meta)
    meta.setxattr(ROOT, ino, b"user.long", bytes(4 * XATTRS_FREE), 0)
    beside = meta.getattr(ROOT, ino).used
    assert beside > 0
    changed = _copy_up(meta, ino, _copied(meta))
    assert changed is not None
    assert changed.after.used == SIZE + beside
    meta.removexattr(ROOT, ino, b"user.long")
    assert meta.getattr(ROOT, ino).used == SIZE


def test_flags_that_came_meanwhile_refuse_it(engine: Engine) -> None:
    """truncate(2) is two commits, and chattr(1) may come between them."""
    meta = engine.meta()
    ino = _attached(meta)
    meta.setflags(ROOT, ino, FLAG_IMMUTABLE)
    assert errno_of(lambda: _copy_up(meta, ino, _copied(meta, 10))) == errno.EPERM
    assert errno_of(lambda: _copy_up(meta, ino, _copied(meta))) == errno.EPERM
    meta.setflags(ROOT, ino, FLAG_APPEND)
    assert errno_of(lambda: _copy_up(meta, ino, _copied(meta, 10))) == errno.EPERM
    assert meta.run(attached_object, ROOT, ino) == SHOWN
    assert meta.getattr(ROOT, ino).size == SIZE
    assert _copy_up(meta, ino, _copied(meta)) is not None, "to append takes all of it"
    meta.setflags(ROOT, ino, 0)

"""The records of slices: what a chunk lists, oldest first, and what it has dropped.

`docs/FORMAT.md` is this page in prose.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final

from fsmeta.errors import Corrupt
from fsmeta.schema.keys import DEAD_SLICES, chunk_field, inode_row
from fsmeta.types import CHUNK_BYTES, Ino, Slice, SliceId, SliceKind

_KINDS: Final = {int(kind): kind for kind in SliceKind}
_SLICE: Final = struct.Struct(">BIQIII")  # version and kind, pos, id, size, off, length
assert _SLICE.size == 25
SLICE_BYTES: Final = _SLICE.size
_SLICE_V1: Final = 0x10  # the upper half of the first byte is the version, the lower the kind
_RESERVED: Final = _SLICE_V1 | SliceKind.RESERVED


def pack_slices(slices: Iterable[Slice]) -> bytes:
    """Records of one chunk, ready to append to its field."""
    return b"".join(
        _SLICE.pack(_SLICE_V1 | s.kind, s.pos, s.id, s.size, s.off, s.length) for s in slices
    )


def unpack_slices(ino: Ino, index: int, value: bytes | None) -> list[Slice]:
    """The slices of one chunk, oldest first.

    Raises: Corrupt.
    """
    if not value:
        return []
    if len(value) % SLICE_BYTES:
        raise Corrupt(inode_row(ino), chunk_field(index), f"length {len(value)}")
    slices = []
    for head, pos, sid, size, off, length in _SLICE.iter_unpack(value):
        kind = head ^ _SLICE_V1
        if kind not in _KINDS or pos + length > CHUNK_BYTES or off + length > size:
            raise Corrupt(inode_row(ino), chunk_field(index), f"slice {sid} at {pos}")
        slices.append(Slice(pos, sid, size, off, length, _KINDS[kind]))
    return slices


_DEAD: Final = struct.Struct(">QI")  # id, size
assert _DEAD.size == 12


def pack_dead(slices: Iterable[tuple[int, int]]) -> bytes:
    """Ids and sizes of slices that wait for deletion."""
    return b"".join(_DEAD.pack(sid, size) for sid, size in slices)


def unpack_dead(field: bytes, value: bytes) -> list[tuple[SliceId, int]]:
    """Raises: Corrupt."""
    if len(value) % _DEAD.size:
        raise Corrupt(DEAD_SLICES, field, f"length {len(value)}")
    return [(SliceId(sid), size) for sid, size in _DEAD.iter_unpack(value)]


def hole(pos: int, length: int) -> Slice:
    """A record that makes a range of a chunk read as zeros."""
    return Slice(pos, SliceId(0), length, 0, length, SliceKind.HOLE)


def reserved(pos: int, length: int) -> Slice:
    """A record that makes a range of a chunk read as zeros, and counts as covered."""
    return Slice(pos, SliceId(0), length, 0, length, SliceKind.RESERVED)


def has_reserved(value: bytes) -> bool:
    """Whether one of these records is of what is reserved, visible or not."""
    return _RESERVED in value[::SLICE_BYTES]

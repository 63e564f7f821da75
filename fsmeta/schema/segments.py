"""The table of segments: slices in which small files of many inodes lie, one behind the other.

    row          field        value
    P            <slice8>     the inodes that were packed into it, 8 bytes each, in order
    K            s<slice8>    8 bytes: the session that gives it to one file after the other;
                              4 bytes: its size

A field of P is there as long as R counts uses of the slice beyond the first. It lists the inodes
that may have to be packed anew when most of the others are gone; it does not say that they still
use the slice. A segment that is listed in K is *open*: further files will list it, and that promise
counts as one use, so it is not deleted when files that listed it are gone meanwhile.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final, NamedTuple

from fsmeta.errors import Corrupt
from fsmeta.schema.keys import CLONES, id_of, pack_u64
from fsmeta.types import Ino, SessionId, SliceId

PACKED: Final = b"P"
_OPEN: Final = struct.Struct(">QI")  # session, size
_OPEN_FIELD_BYTES: Final = 9


class OpenSegment(NamedTuple):
    """A segment that is given to one file after the other, and the session that does so."""

    id: SliceId
    size: int
    session: SessionId

    @property
    def field(self) -> bytes:
        """Where it is listed in K."""
        return b"s" + pack_u64(self.id)

    def pack(self) -> bytes:
        """The value there."""
        return _OPEN.pack(self.session, self.size)


def is_open_segment(field: bytes) -> bool:
    """Whether a field of K is a segment's, and no clone's."""
    return len(field) == _OPEN_FIELD_BYTES and field[:1] == b"s"


def unpack_open(field: bytes, value: bytes) -> OpenSegment:
    """Raises: Corrupt."""
    if len(value) != _OPEN.size:
        raise Corrupt(CLONES, field, f"length {len(value)}")
    session, size = _OPEN.unpack(value)
    return OpenSegment(SliceId(id_of(field)), size, SessionId(session))


def pack_members(inos: Iterable[Ino]) -> bytes:
    """The value of a segment's field."""
    return b"".join(map(pack_u64, inos))


def unpack_members(field: bytes, value: bytes) -> list[Ino]:
    """Raises: Corrupt."""
    if not value or len(value) % 8:
        raise Corrupt(PACKED, field, f"length {len(value)}")
    words = range(0, len(value), 8)
    return [Ino(int.from_bytes(value[at : at + 8], "big")) for at in words]

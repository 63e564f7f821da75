"""The format of one object: a head with checksums, then the payload.

This is version 1, which new blocks have that are stored as they are; `units` has version 2, for
blocks that are compressed or encrypted. All integers are little-endian.

    offset  size  field
    0       4     magic "SFSB"
    4       1     version, 1
    5       1     codec of the payload: 0 none, 1 lz4 block, 2 zstd frame
    6       1     flags, 0
    7       1     log2 of the CRC frame, 16
    8       4     raw bytes: the length of the block
    12      4     stored bytes: the length of the payload as stored
    16      4     CRC-32C of bytes 0..16 and of the table
    20      4·n   table: CRC-32C of each 64 KiB frame of the stored payload; n = ⌈stored / 64 KiB⌉
    20+4·n  …     payload, to the end of the object

The checksums are of the stored bytes, so a copy is verified without decompressing it, and a range
of an uncompressed object is verified with its head alone. Anything off is `ObjectDamaged`.
Pure functions: any thread may call them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from struct import Struct
from typing import NamedTuple

import lz4.block
import zstandard
from crc32c import crc32c

from fsdata.units import (
    FIXED,
    MAGIC,
    PAYLOAD_BYTES_MAX,
    UNIT_BYTES,
    UNITS_VERSION,
    Buffer,
    Cipher,
    Codec,
    Opener,
    UnitHead,
    check_units,
    encode_units,
    open_units,
    parse_units_head,
    units_head_need,
)
from fsmeta.errors import ObjectDamaged

__all__ = ["Buffer", "Cipher", "Codec", "Opener", "UnitHead"]

VERSION = 1
FRAME_LOG2 = 16
FRAME_BYTES = 1 << FRAME_LOG2  # 3 µs of CRC: fine enough for small ranges, 0.006 % of overhead

_CRC = Struct("<I")
_FIXED_BYTES = FIXED.size + _CRC.size
assert _FIXED_BYTES == 20, "the format says 20"
assert FRAME_BYTES == UNIT_BYTES, "so ranges of both versions are the same"


class Head(NamedTuple):
    """A verified head. `crcs` is the table as it stands in the object."""

    codec: Codec
    raw_bytes: int
    stored_bytes: int
    crcs: bytes

    @property
    def size(self) -> int:
        """Bytes before the payload."""
        return _FIXED_BYTES + len(self.crcs)

    def span(self, begin: int, end: int) -> tuple[int, int, int]:
        """For bytes `begin..end` of the block: the first byte and the range of the payload."""
        if self.codec is not Codec.NONE:
            return 0, 0, self.stored_bytes
        first, last = frame_range(begin, end, self.stored_bytes)
        return first, first, last


def head_bytes(stored_bytes: int) -> int:
    """Bytes before a payload of `stored_bytes`."""
    return _FIXED_BYTES + _CRC.size * -(-stored_bytes >> FRAME_LOG2)


def encode(
    pieces: Sequence[Buffer],
    codec: Codec = Codec.NONE,
    lock: tuple[bytes, Cipher] | None = None,
) -> list[Buffer]:
    """The object that holds `pieces`, as buffers; a payload stored as it is is not copied.

    `lock`: salt and cipher of a block that is to be encrypted.
    """
    raw = sum(map(len, pieces))
    assert 0 < raw <= PAYLOAD_BYTES_MAX, raw
    if codec is not Codec.NONE or lock is not None:
        units = encode_units(pieces, codec, lock)
        if units is not None:
            return units
    table = _table(pieces)
    fixed = FIXED.pack(MAGIC, VERSION, Codec.NONE, 0, FRAME_LOG2, raw, raw)
    return [fixed + _CRC.pack(crc32c(table, crc32c(fixed))) + table, *pieces]


def head_need(front: Buffer) -> int:
    """Bytes of the head that `front` begins, as far as that can be told."""
    if len(front) < _FIXED_BYTES or front[4] != UNITS_VERSION:
        return 0
    return units_head_need(front)


def parse_head(data: Buffer) -> Head | UnitHead:
    """The head at the start of `data`; `data` may go on after it.

    Raises: ObjectDamaged.
    """
    if len(data) < _FIXED_BYTES:
        raise ObjectDamaged(f"object of {len(data)} bytes is shorter than its head")
    magic, version, codec, flags, log2, raw, stored = FIXED.unpack_from(data)
    if magic == MAGIC and version == UNITS_VERSION:
        return parse_units_head(data)
    if magic != MAGIC or version != VERSION:
        raise ObjectDamaged(f"magic {magic!r} version {version} is not a SliceFS object")
    if flags != 0 or log2 != FRAME_LOG2 or codec > Codec.ZSTD:
        raise ObjectDamaged(f"unknown codec {codec}, flags {flags} or frame 2^{log2}")
    if not 0 < stored <= raw <= PAYLOAD_BYTES_MAX or (codec == Codec.NONE and stored != raw):
        raise ObjectDamaged(f"lengths raw {raw} stored {stored} can't be")
    size = head_bytes(stored)
    if len(data) < size:
        raise ObjectDamaged(f"object of {len(data)} bytes ends within its head of {size}")
    (crc,) = _CRC.unpack_from(data, FIXED.size)
    view = memoryview(data)
    table = bytes(view[_FIXED_BYTES:size])
    if crc32c(table, crc32c(view[: FIXED.size])) != crc:
        raise ObjectDamaged("the head's CRC is wrong")
    return Head(Codec(codec), raw, stored, table)


def decode(data: Buffer, opener: Opener | None = None) -> memoryview:
    """The block that the whole object `data` holds; a view of `data` where it is stored as it is.

    Raises: ObjectDamaged.
    """
    head = parse_head(data)
    return decode_payload(head, memoryview(data)[head.size :], opener)


def check_object(data: Buffer) -> int:
    """Whether `data` is what was stored, which needs no key; the length of the block.

    Raises: ObjectDamaged.
    """
    head = parse_head(data)
    payload = memoryview(data)[head.size :]
    if isinstance(head, Head):
        decode_payload(head, payload)
    else:
        check_units(head, payload)
    return head.raw_bytes


def decode_payload(
    head: Head | UnitHead,
    payload: memoryview,
    opener: Opener | None = None,
    into: memoryview | None = None,
) -> memoryview:
    """The block of which `payload` is the stored form; what is made of it is put `into` a buffer.

    Raises: ObjectDamaged.
    """
    if len(payload) != head.stored_bytes:
        raise ObjectDamaged(f"payload of {len(payload)} bytes instead of {head.stored_bytes}")
    if isinstance(head, UnitHead) or opener is not None:
        return open_units(_sealed(head, opener), 0, payload, opener, into)
    if _table((payload,)) != head.crcs:
        raise ObjectDamaged("a frame's CRC is wrong")
    return payload if head.codec is Codec.NONE else memoryview(_decompress(head, payload))


def frame_range(begin: int, end: int, stored_bytes: int) -> tuple[int, int]:
    """`begin..end` widened to whole frames."""
    return begin & -FRAME_BYTES, min(stored_bytes, -(-end // FRAME_BYTES) * FRAME_BYTES)


def decode_range(
    head: Head | UnitHead, begin: int, payload: Buffer, opener: Opener | None = None
) -> memoryview:
    """`payload`, verified, as the bytes of the block from `begin` on.

    `begin` and what is in `payload` come from the head's `span`. Raises: ObjectDamaged.
    """
    assert begin % FRAME_BYTES == 0, begin
    view = memoryview(payload)
    if isinstance(head, UnitHead) or opener is not None:
        return open_units(_sealed(head, opener), begin, view, opener)
    assert head.codec is Codec.NONE, "ranges of payloads compressed as one can't be read"
    table = _table((view,))
    at = (begin >> FRAME_LOG2) * _CRC.size
    if table != head.crcs[at : at + len(table)]:
        raise ObjectDamaged(f"a frame's CRC is wrong in the range from {begin}")
    return view


def _sealed(head: Head | UnitHead, opener: Opener | None) -> UnitHead:
    """`head`, in a volume whose key `opener` has, if any: there nothing else is believed.

    Raises: ObjectDamaged.
    """
    if isinstance(head, UnitHead) and (opener is None or head.salt):
        return head
    raise ObjectDamaged("it is not encrypted, and the volume is")


def _table(pieces: Sequence[Buffer]) -> bytes:
    """One CRC a frame of the concatenated pieces."""
    if len(pieces) == 1:
        view = memoryview(pieces[0])
        # Holding the GIL for 3 µs costs less than handing it over twice for every frame.
        crcs = [
            crc32c(view[at : at + FRAME_BYTES], 0, gil_release_mode=0)
            for at in range(0, len(view), FRAME_BYTES)
        ]
        return _words(len(crcs)).pack(*crcs)
    return _table_of_many(pieces)


def _table_of_many(pieces: Sequence[Buffer]) -> bytes:
    """`_table` where frames may span pieces."""
    crcs: list[int] = []
    crc, room = 0, FRAME_BYTES
    for piece in pieces:
        view = memoryview(piece)
        while len(view):
            part = view[:room]
            crc = crc32c(part, crc, gil_release_mode=0)
            room -= len(part)
            view = view[len(part) :]
            if room == 0:
                crcs.append(crc)
                crc, room = 0, FRAME_BYTES
    if room < FRAME_BYTES:
        crcs.append(crc)
    return _words(len(crcs)).pack(*crcs)


@cache
def _words(count: int) -> Struct:
    return Struct(f"<{count}I")


def _decompress(head: Head, payload: memoryview) -> bytes:
    """The block behind a verified payload. Raises: ObjectDamaged."""
    try:
        if head.codec is Codec.LZ4:
            raw: bytes = lz4.block.decompress(payload, uncompressed_size=head.raw_bytes)
        else:
            raw = zstandard.ZstdDecompressor().decompress(payload, head.raw_bytes)
    except (lz4.block.LZ4BlockError, zstandard.ZstdError) as error:
        raise ObjectDamaged(f"the payload does not decompress: {error}") from error
    if len(raw) != head.raw_bytes:
        raise ObjectDamaged(f"the payload holds {len(raw)} bytes instead of {head.raw_bytes}")
    return raw

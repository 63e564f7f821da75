"""The format of one object: a head with checksums, then the payload.

Every object in the store has this form whatever the codec; all integers are little-endian.

    offset  size  field
    0       4     magic "SFSB"
    4       1     version, 1
    5       1     codec of the payload: 0 none, 1 lz4 block, 2 zstd frame
    6       1     flags, 0; reserved for encryption
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
from enum import IntEnum
from functools import cache
from struct import Struct
from typing import NamedTuple, TypeAlias

import lz4.block
import zstandard
from crc32c import crc32c

from fsmeta.errors import ObjectDamaged

Buffer: TypeAlias = bytes | bytearray | memoryview

MAGIC = b"SFSB"
VERSION = 1
FRAME_LOG2 = 16
FRAME_BYTES = 1 << FRAME_LOG2  # 3 µs of CRC: fine enough for small ranges, 0.006 % of overhead
PAYLOAD_BYTES_MAX = (
    64 << 20
)  # no object is larger than a chunk; bounds what a head makes us allocate
ZSTD_LEVEL = 1  # training data is read more often than written, and level 1 keeps up with the disks
WORTH_SAVING = 16  # compression must save 1/16th, or reads pay CPU for nothing

_FIXED = Struct("<4sBBBBII")
_CRC = Struct("<I")
_FIXED_BYTES = _FIXED.size + _CRC.size
assert _FIXED.size == 16, "the format says 16"
assert _FIXED_BYTES == 20, "the format says 20"


class Codec(IntEnum):
    """How the payload is stored."""

    NONE = 0
    LZ4 = 1
    ZSTD = 2


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


def head_bytes(stored_bytes: int) -> int:
    """Bytes before a payload of `stored_bytes`."""
    return _FIXED_BYTES + _CRC.size * -(-stored_bytes >> FRAME_LOG2)


def encode(pieces: Sequence[Buffer], codec: Codec = Codec.NONE) -> list[Buffer]:
    """The object that holds `pieces`, as buffers; an uncompressed payload is not copied."""
    raw = sum(map(len, pieces))
    assert 0 < raw <= PAYLOAD_BYTES_MAX, raw
    stored = pieces
    if codec is not Codec.NONE:
        packed = _compress(pieces, codec)
        if len(packed) + raw // WORTH_SAVING < raw:
            stored = (packed,)
        else:
            codec = Codec.NONE
    size = sum(map(len, stored))
    table = _table(stored)
    fixed = _FIXED.pack(MAGIC, VERSION, codec, 0, FRAME_LOG2, raw, size)
    return [fixed + _CRC.pack(crc32c(table, crc32c(fixed))) + table, *stored]


def parse_head(data: Buffer) -> Head:
    """The head at the start of `data`; `data` may go on after it.

    Raises: ObjectDamaged.
    """
    if len(data) < _FIXED_BYTES:
        raise ObjectDamaged(f"object of {len(data)} bytes is shorter than its head")
    magic, version, codec, flags, log2, raw, stored = _FIXED.unpack_from(data)
    if magic != MAGIC or version != VERSION:
        raise ObjectDamaged(f"magic {magic!r} version {version} is not a SliceFS object")
    if flags != 0 or log2 != FRAME_LOG2 or codec > Codec.ZSTD:
        raise ObjectDamaged(f"unknown codec {codec}, flags {flags} or frame 2^{log2}")
    if not 0 < stored <= raw <= PAYLOAD_BYTES_MAX or (codec == Codec.NONE and stored != raw):
        raise ObjectDamaged(f"lengths raw {raw} stored {stored} can't be")
    size = head_bytes(stored)
    if len(data) < size:
        raise ObjectDamaged(f"object of {len(data)} bytes ends within its head of {size}")
    (crc,) = _CRC.unpack_from(data, _FIXED.size)
    view = memoryview(data)
    table = bytes(view[_FIXED_BYTES:size])
    if crc32c(table, crc32c(view[: _FIXED.size])) != crc:
        raise ObjectDamaged("the head's CRC is wrong")
    return Head(Codec(codec), raw, stored, table)


def decode(data: Buffer) -> memoryview:
    """The block that the whole object `data` holds; a view of `data` where it is uncompressed.

    Raises: ObjectDamaged.
    """
    head = parse_head(data)
    return decode_payload(head, memoryview(data)[head.size :])


def decode_payload(head: Head, payload: memoryview) -> memoryview:
    """The block of which `payload` is the stored form.

    Raises: ObjectDamaged.
    """
    if len(payload) != head.stored_bytes:
        raise ObjectDamaged(f"payload of {len(payload)} bytes instead of {head.stored_bytes}")
    if _table((payload,)) != head.crcs:
        raise ObjectDamaged("a frame's CRC is wrong")
    return payload if head.codec is Codec.NONE else memoryview(_decompress(head, payload))


def frame_range(begin: int, end: int, stored_bytes: int) -> tuple[int, int]:
    """`begin..end` widened to whole frames."""
    return begin & -FRAME_BYTES, min(stored_bytes, -(-end // FRAME_BYTES) * FRAME_BYTES)


def decode_range(head: Head, begin: int, payload: Buffer) -> memoryview:
    """`payload`, verified as the bytes of an uncompressed block from `begin` on.

    `begin` and the length come from `frame_range`. Raises: ObjectDamaged.
    """
    assert head.codec is Codec.NONE, "ranges of compressed payloads can't be read"
    assert begin % FRAME_BYTES == 0, begin
    view = memoryview(payload)
    table = _table((view,))
    at = (begin >> FRAME_LOG2) * _CRC.size
    if table != head.crcs[at : at + len(table)]:
        raise ObjectDamaged(f"a frame's CRC is wrong in the range from {begin}")
    return view


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


def _compress(pieces: Sequence[Buffer], codec: Codec) -> bytes:
    """The pieces as one compressed payload."""
    whole = pieces[0] if len(pieces) == 1 else b"".join(pieces)
    if codec is Codec.LZ4:
        packed: bytes = lz4.block.compress(whole, store_size=False)
        return packed
    return zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(whole)


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

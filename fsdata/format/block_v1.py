"""The format of one object: a head with checksums, then the payload.

These are versions 1 and 3, of blocks that are stored as they are; `format/block_v2` has version 2,
for blocks that are compressed or encrypted. All integers are little-endian.

    offset  size  field
    0       4     magic "SFSB"
    4       1     version, 1 or 3
    5       1     codec of the payload: 0 none, 1 lz4 block, 2 zstd frame; version 3: 0
    6       1     flags, 0
    7       1     log2 of the frame: 16; version 3: 12 to 15
    8       4     raw bytes: the length of the block
    12      4     stored bytes: the length of the payload as stored
    16      4     CRC-32C of bytes 0..16 and of the table
    20      4·n   table: a CRC-32C for each frame of the stored payload; n = ⌈stored / frame⌉
    20+4·n  …     payload, to the end of the object

In version 1 a CRC is of its frame, in version 3 of all up to the frame's end: `format/checksums`
says why. The checksums are of the stored bytes, so a copy is verified without decompressing it, and
a range of an uncompressed object is verified with its head alone. Anything off is `ObjectDamaged`.
Pure functions: any thread may call them.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Final, NamedTuple

import lz4.block
import zstandard

from fsdata.format.block_v2 import (
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
from fsdata.format.checksums import (
    is_right_running,
    is_right_single,
    running_table,
    single_table,
    table_bytes,
)
from fsdata.resources.crc import crc32c
from fsmeta.errors import ObjectDamaged
from fsmeta.types import FRAME_BYTES_MAX, FRAME_BYTES_MIN

__all__ = ["Buffer", "Cipher", "Codec", "Opener", "UnitHead"]

SINGLE_VERSION: Final = 1
RUNNING_VERSION: Final = 3
SINGLE_LOG2: Final = 16  # of the frames of version 1
_LOG2_MIN: Final = FRAME_BYTES_MIN.bit_length() - 1

_CRC = Struct("<I")
_FIXED_BYTES = FIXED.size + _CRC.size
assert _FIXED_BYTES == 20, "the format says 20"
assert FRAME_BYTES_MAX == 1 << SINGLE_LOG2, "frames of that size are version 1"
assert UNIT_BYTES % FRAME_BYTES_MAX == 0, "so a range of units is one of frames"


class Head(NamedTuple):
    """A verified head. `crcs` is the table as it is in the object."""

    codec: Codec
    raw_bytes: int
    stored_bytes: int
    crcs: bytes
    version: int
    log2: int

    @property
    def size(self) -> int:
        """Bytes before the payload."""
        return _FIXED_BYTES + len(self.crcs)

    def span(self, begin: int, end: int) -> tuple[int, int, int]:
        """For bytes `begin..end` of the block: the first byte and the range of the payload."""
        if self.codec is not Codec.NONE:
            return 0, 0, self.stored_bytes
        first, last = frame_range(begin, end, self.stored_bytes, 1 << self.log2)
        return first, first, last


def head_bytes(stored_bytes: int, frame_bytes: int = FRAME_BYTES_MAX) -> int:
    """Bytes before a payload of `stored_bytes` in frames of `frame_bytes`."""
    return _FIXED_BYTES + table_bytes(stored_bytes, frame_bytes.bit_length() - 1)


def encode(
    pieces: Sequence[Buffer],
    codec: Codec = Codec.NONE,
    lock: tuple[bytes, Cipher] | None = None,
    frame_bytes: int = FRAME_BYTES_MAX,
) -> list[Buffer]:
    """The object that holds `pieces`, as buffers; a payload stored as it is is not copied.

    `lock`: salt and cipher of a block that is to be encrypted; `frame_bytes`: of one that is
    stored as it is.
    """
    raw = sum(map(len, pieces))
    assert 0 < raw <= PAYLOAD_BYTES_MAX, raw
    if codec is not Codec.NONE or lock is not None:
        units = encode_units(pieces, codec, lock)
        if units is not None:
            return units
    log2 = frame_bytes.bit_length() - 1
    version, make_table = RUNNING_VERSION, running_table
    if log2 == SINGLE_LOG2:
        version, make_table = SINGLE_VERSION, single_table
    table = make_table(pieces, log2)
    fixed = FIXED.pack(MAGIC, version, Codec.NONE, 0, log2, raw, raw)
    return [fixed + _CRC.pack(crc32c(table, crc32c(fixed))) + table, *pieces]


def head_need(front: Buffer) -> int:
    """Bytes of the head that `front` begins; 0 where that is not known."""
    if len(front) < _FIXED_BYTES:
        return 0
    if front[4] == UNITS_VERSION:
        return units_head_need(front)
    stored = int(FIXED.unpack_from(front)[6])
    return _FIXED_BYTES + table_bytes(min(stored, PAYLOAD_BYTES_MAX), max(_LOG2_MIN, front[7]))


def parse_head(data: Buffer) -> Head | UnitHead:
    """The head at the start of `data`; `data` may go on after it.

    Raises: ObjectDamaged.
    """
    if len(data) < _FIXED_BYTES:
        raise ObjectDamaged(f"object of {len(data)} bytes is shorter than its head")
    magic, version, codec, flags, log2, raw, stored = FIXED.unpack_from(data)
    if magic == MAGIC and version == UNITS_VERSION:
        return parse_units_head(data)
    if magic != MAGIC or version not in (SINGLE_VERSION, RUNNING_VERSION):
        raise ObjectDamaged(f"magic {magic!r} version {version} is not a SliceFS object")
    if flags != 0 or not _may_be(version, codec, log2):
        raise ObjectDamaged(f"unknown codec {codec}, flags {flags} or frame 2^{log2}")
    if not 0 < stored <= raw <= PAYLOAD_BYTES_MAX or (codec == Codec.NONE and stored != raw):
        raise ObjectDamaged(f"lengths raw {raw} stored {stored} can't be right")
    size = head_need(data)
    if len(data) < size:
        raise ObjectDamaged(f"object of {len(data)} bytes ends within its head of {size}")
    (crc,) = _CRC.unpack_from(data, FIXED.size)
    view = memoryview(data)
    table = bytes(view[_FIXED_BYTES:size])
    if crc32c(table, crc32c(view[: FIXED.size])) != crc:
        raise ObjectDamaged("the head's CRC is wrong")
    return Head(Codec(codec), raw, stored, table, version, log2)


def _may_be(version: int, codec: int, log2: int) -> bool:
    """Whether objects of that version have that codec and such frames."""
    if version == SINGLE_VERSION:
        return codec <= Codec.ZSTD and log2 == SINGLE_LOG2
    return codec == Codec.NONE and _LOG2_MIN <= log2 < SINGLE_LOG2


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
    if not _is_right(head, 0, payload):
        raise ObjectDamaged("a frame's CRC is wrong")
    return payload if head.codec is Codec.NONE else memoryview(_decompress(head, payload))


def _is_right(head: Head, begin: int, view: memoryview) -> bool:
    """Whether `view`, of whole frames, is the payload from `begin` on."""
    judge = is_right_single if head.version == SINGLE_VERSION else is_right_running
    return judge(head.crcs, head.log2, begin, view)


def frame_range(begin: int, end: int, stored_bytes: int, frame_bytes: int) -> tuple[int, int]:
    """`begin..end` widened to whole frames."""
    return begin & -frame_bytes, min(stored_bytes, -(-end // frame_bytes) * frame_bytes)


def decode_range(
    head: Head | UnitHead, begin: int, payload: Buffer, opener: Opener | None = None
) -> memoryview:
    """`payload`, verified, as the bytes of the block from `begin` on.

    `begin` and what is in `payload` come from the head's `span`. Raises: ObjectDamaged.
    """
    view = memoryview(payload)
    if isinstance(head, UnitHead) or opener is not None:
        return open_units(_sealed(head, opener), begin, view, opener)
    assert begin % (1 << head.log2) == 0, begin
    assert head.codec is Codec.NONE, "ranges of payloads compressed as one can't be read"
    if not _is_right(head, begin, view):
        raise ObjectDamaged(f"a frame's CRC is wrong in the range from {begin}")
    return view


def _sealed(head: Head | UnitHead, opener: Opener | None) -> UnitHead:
    """`head`, in a volume whose key `opener` has, if any: there no other head is accepted.

    Raises: ObjectDamaged.
    """
    if isinstance(head, UnitHead) and (opener is None or head.salt):
        return head
    raise ObjectDamaged("it is not encrypted, and the volume is")


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

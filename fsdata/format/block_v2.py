"""Version 2 of the object format: a block in units of 64 KiB, compressed, encrypted, or both.

`format/block_v1` calls it for blocks that are not stored as they are. A range of the block needs
the head and the units it touches, whatever was done to them; all integers are little-endian.

    offset  size  field
    0       4     magic "SFSB"
    4       1     version, 2
    5       1     codec of the packed units: 0 none, 1 lz4 block, 2 zstd frame
    6       1     flags: 1 sealed with AES-256-GCM
    7       1     log2 of the unit, 16
    8       4     raw bytes: the length of the block
    12      4     stored bytes: the length of the payload
    16      4     CRC-32C of bytes 0..16 and of what follows up to the payload
    20      16    salt; only where sealed
    …       8·n   a unit each: its stored length, bit 31 set where it is packed, and its CRC-32C;
                  n = ⌈raw / 64 KiB⌉
    …       …     payload: the stored units one after another, to the end of the object

A unit is packed first and sealed then, which adds a tag of 16 bytes. The checksums are of stored
bytes: damage is found without the key. Anything off is `ObjectDamaged`.
Pure functions: any thread may call them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import cache
from struct import Struct
from typing import Final, NamedTuple, Protocol, TypeAlias

import lz4.block
import zstandard

from fsdata.resources.crc import crc32c
from fsmeta.errors import ObjectDamaged

Buffer: TypeAlias = bytes | bytearray | memoryview

MAGIC: Final = b"SFSB"
UNITS_VERSION: Final = 2
UNIT_LOG2: Final = 16  # what one checksum of version 1 guards: small ranges cost the same in both
UNIT_BYTES: Final = 1 << UNIT_LOG2
PAYLOAD_BYTES_MAX: Final = 64 << 20  # no object is larger than a chunk; bounds what a head costs
ZSTD_LEVEL: Final = 1  # training data is read more often than written; level 1 keeps up with disks
WORTH_SAVING: Final = 16  # packing must save 1/16th, or reads pay CPU for nothing
SEALED: Final = 1
SALT_BYTES: Final = 16
TAG_BYTES: Final = 16

FIXED: Final = Struct("<4sBBBBII")
_CRC: Final = Struct("<I")
_FIXED_BYTES: Final = FIXED.size + _CRC.size
_ENTRY_BYTES: Final = 8
_WORD: Final = Struct("<I")
_PACKED: Final = 1 << 31
assert FIXED.size == 16, "the format says 16"


class Codec(IntEnum):
    """How data is compressed."""

    NONE = 0
    LZ4 = 1
    ZSTD = 2


class Cipher(Protocol):
    """Seals and opens the units of one object."""

    def seal(self, unit: int, data: Buffer, about: bytes) -> bytes:
        """`data` encrypted, with its tag, which authenticates `about`, too."""

    def open(self, unit: int, data: Buffer, about: bytes) -> bytes:
        """What was sealed. Raises: ObjectDamaged."""


Opener: TypeAlias = Callable[[bytes], Cipher]
"""The cipher of an object, by the salt in its head."""


class UnitHead(NamedTuple):
    """A verified head."""

    codec: Codec
    raw_bytes: int
    stored_bytes: int
    fixed: bytes  # the first 16 bytes, which the tags authenticate
    salt: bytes  # empty where it is not sealed
    table: bytes

    @property
    def size(self) -> int:
        """Bytes before the payload."""
        return _FIXED_BYTES + len(self.salt) + len(self.table)

    def span(self, begin: int, end: int) -> tuple[int, int, int]:
        """For bytes `begin..end` of the block: the first byte and the range of the payload."""
        words = _entries(len(self.table) // _ENTRY_BYTES).unpack(self.table)[::2]
        first, last = begin >> UNIT_LOG2, -(-end >> UNIT_LOG2)
        skip = sum([word & ~_PACKED for word in words[:first]])
        length = sum([word & ~_PACKED for word in words[first:last]])
        return first << UNIT_LOG2, skip, skip + length


def units_front_bytes(raw_bytes: int, end: int) -> int:
    """How much of an object has its head and the first `end` bytes of the block, at most."""
    head = _FIXED_BYTES + SALT_BYTES + _ENTRY_BYTES * -(-raw_bytes >> UNIT_LOG2)
    return head + end + TAG_BYTES * -(-end >> UNIT_LOG2)


def encode_units(
    pieces: Sequence[Buffer], codec: Codec, lock: tuple[bytes, Cipher] | None
) -> list[Buffer] | None:
    """The object that holds `pieces`; None where that saves nothing and nothing is to be sealed.

    `lock`: salt and cipher.
    """
    whole = memoryview(pieces[0] if len(pieces) == 1 else b"".join(pieces))
    pack = _packer(codec)
    stored: list[Buffer] = []
    words: list[int] = []
    for at in range(0, len(whole), UNIT_BYTES):
        unit: Buffer = whole[at : at + UNIT_BYTES]
        packed = None if pack is None else pack(unit)
        if packed is not None and len(packed) + len(unit) // WORTH_SAVING < len(unit):
            stored.append(packed)
            words.append(len(packed) | _PACKED)
        else:
            stored.append(unit)
            words.append(len(unit))
    size = sum(map(len, stored))
    if lock is None and size + len(whole) // WORTH_SAVING >= len(whole):
        return None
    salt, flags = b"", 0
    if lock is not None:
        salt, flags = lock[0], SEALED
        words = [word + TAG_BYTES for word in words]
        size += TAG_BYTES * len(words)
    fixed = FIXED.pack(MAGIC, UNITS_VERSION, codec, flags, UNIT_LOG2, len(whole), size)
    if lock is not None:
        cipher = lock[1]
        stored = [
            cipher.seal(index, unit, fixed + _WORD.pack(word))
            for index, (unit, word) in enumerate(zip(stored, words, strict=True))
        ]
    table = _table(words, stored)
    head_crc = crc32c(salt + table, crc32c(fixed))
    return [fixed + _CRC.pack(head_crc) + salt + table, *stored]


def _table(words: Sequence[int], stored: Sequence[Buffer]) -> bytes:
    crcs = [crc32c(unit, 0, gil_release_mode=0) for unit in stored]
    pairs = [each for pair in zip(words, crcs, strict=True) for each in pair]
    return _entries(len(words)).pack(*pairs)


def units_head_need(front: Buffer) -> int:
    """How long the head is that `front`, at least 20 bytes of a version 2 object, begins."""
    flags, raw = front[6], int(FIXED.unpack_from(front)[5])
    salt = SALT_BYTES if flags & SEALED else 0
    return _FIXED_BYTES + salt + _ENTRY_BYTES * -(-min(raw, PAYLOAD_BYTES_MAX) >> UNIT_LOG2)


def parse_units_head(data: Buffer) -> UnitHead:
    """The head at the start of `data`, whose first 20 bytes are there; `data` may go on after it.

    Raises: ObjectDamaged.
    """
    _, _, codec, flags, log2, raw, stored = FIXED.unpack_from(data)
    if flags & ~SEALED or log2 != UNIT_LOG2 or codec > Codec.ZSTD:
        raise ObjectDamaged(f"unknown codec {codec}, flags {flags} or unit 2^{log2}")
    if not 0 < raw <= PAYLOAD_BYTES_MAX:
        raise ObjectDamaged(f"a block can't have {raw} bytes")
    size = units_head_need(data)
    if len(data) < size:
        raise ObjectDamaged(f"object of {len(data)} bytes ends within its head of {size}")
    view = memoryview(data)
    fixed, rest = bytes(view[: FIXED.size]), bytes(view[_FIXED_BYTES:size])
    (crc,) = _CRC.unpack_from(data, FIXED.size)
    if crc32c(rest, crc32c(fixed)) != crc:
        raise ObjectDamaged("the head's CRC is wrong")
    salt_bytes = SALT_BYTES if flags & SEALED else 0
    head = UnitHead(Codec(codec), raw, stored, fixed, rest[:salt_bytes], rest[salt_bytes:])
    if head.span(0, raw)[2] != stored:
        raise ObjectDamaged(f"its units do not add up to {stored} bytes")
    return head


def check_units(head: UnitHead, payload: memoryview) -> None:
    """Whether the whole payload is what was stored; needs no key. Raises: ObjectDamaged."""
    for _ in _units(head, 0, payload):
        pass


def open_units(
    head: UnitHead,
    begin: int,
    payload: memoryview,
    opener: Opener | None,
    into: memoryview | None = None,
) -> memoryview:
    """The bytes of the block from `begin` on, which a unit begins with, verified.

    `payload` is of whole units, as `span` has them. The bytes are put `into` a buffer if there is
    one. Raises: ObjectDamaged.
    """
    if head.salt and opener is None:
        raise ObjectDamaged("it is encrypted, and the volume is not")
    cipher = opener(head.salt) if head.salt and opener is not None else None
    unpack = _unpacker(head.codec)
    out: list[Buffer] = []
    at = 0
    for index, word, unit in _units(head, begin >> UNIT_LOG2, payload):
        size = min(UNIT_BYTES, head.raw_bytes - index * UNIT_BYTES)
        plain: Buffer = unit
        if cipher is not None:
            plain = cipher.open(index, unit, head.fixed + _WORD.pack(word))
        if word & _PACKED:
            plain = unpack(plain, size)
        if len(plain) != size:
            raise ObjectDamaged(f"unit {index} holds {len(plain)} bytes instead of {size}")
        if into is None:
            out.append(plain)
        else:
            into[at : at + size] = plain
            at += size
    if into is not None:
        return into[:at]
    return memoryview(out[0] if len(out) == 1 else b"".join(out))


def _units(head: UnitHead, first: int, payload: memoryview) -> list[tuple[int, int, memoryview]]:
    """The stored units in `payload`, from number `first` on, verified: number, word, bytes."""
    table = _entries(len(head.table) // _ENTRY_BYTES).unpack(head.table)
    found: list[tuple[int, int, memoryview]] = []
    at, index = 0, first
    while at < len(payload) and 2 * index < len(table):
        word, crc = table[2 * index : 2 * index + 2]
        unit = payload[at : at + (word & ~_PACKED)]
        if len(unit) != word & ~_PACKED or crc32c(unit, 0, gil_release_mode=0) != crc:
            raise ObjectDamaged(f"the CRC of unit {index} is wrong")
        found.append((index, word, unit))
        at, index = at + len(unit), index + 1
    if at != len(payload) or not found:
        raise ObjectDamaged(f"{len(payload)} bytes are not the units from {first} on")
    return found


@cache
def _entries(count: int) -> Struct:
    return Struct(f"<{2 * count}I")


def _packer(codec: Codec) -> Callable[[Buffer], bytes] | None:
    """How units are packed, one after another."""
    if codec is Codec.LZ4:
        return _lz4
    return zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress if codec is Codec.ZSTD else None


def _lz4(unit: Buffer) -> bytes:
    packed: bytes = lz4.block.compress(unit, store_size=False)
    return packed


def _unpacker(codec: Codec) -> Callable[[Buffer, int], bytes]:
    """How packed units are unpacked: bytes, and the size that comes out."""
    zstd = zstandard.ZstdDecompressor() if codec is Codec.ZSTD else None

    def unpack(unit: Buffer, size: int) -> bytes:
        try:
            if zstd is not None:
                return zstd.decompress(unit, size)
            if codec is Codec.LZ4:
                raw: bytes = lz4.block.decompress(unit, uncompressed_size=size)
                return raw
        except (lz4.block.LZ4BlockError, zstandard.ZstdError) as error:
            raise ObjectDamaged(f"a unit does not decompress: {error}") from error
        raise ObjectDamaged("a unit is compressed, but the object names no compression")

    return unpack

"""A file of the disk cache: a head that names the object, then bytes of this object.

All integers are little-endian.

    offset  size  field
    0       4     magic "SFSC"
    4       1     version, 1
    5       1     kind: 0 a whole object, 1 ranges of one
    6       2     bytes of the key
    8       4     base: where in the file the object's first byte is or would be
    12      4     bytes of the object; 0 for ranges
    16      4     number of extents; 0 for a whole object
    20      4     CRC-32C of all of the head but these four bytes
    24      …     the object's key
            8·n   extents: begin and end in the object, in order, apart from each other
    base    …     the object's bytes; between extents a hole

The object's own checksums (`fsdata/format/block_v1`) verify its bytes; this head, its name.
Pure functions: any thread may call them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from struct import Struct
from typing import NamedTuple, TypeAlias

from fsdata.resources.crc import crc32c

Extents: TypeAlias = tuple[tuple[int, int], ...]

MAGIC = b"SFSC"
VERSION = 1
KIND_WHOLE, KIND_RANGES = 0, 1
ALIGN = 64  # whole objects begin at a multiple: copies are quicker
RANGES_BASE = 4096  # room for the list of extents, and a page
KEY_BYTES_MAX = 255  # a key is a file's name

_FIXED = Struct("<4sBBHIII")
_CRC = Struct("<I")
_EXTENT = Struct("<II")
_FIXED_BYTES = _FIXED.size + _CRC.size
assert _FIXED_BYTES == 24, "the format says 24"

HEAD_BYTES = _FIXED_BYTES + KEY_BYTES_MAX  # read first: enough for the head of any whole object
EXTENTS_MAX = (RANGES_BASE - HEAD_BYTES) // _EXTENT.size
assert EXTENTS_MAX >= 128 + 1, "every second frame of 16 KiB of a block, and the head"


class BadFile(Exception):
    """A cache file is not what its name says."""


class FileHead(NamedTuple):
    """What a file holds. `extents` is None for a whole object."""

    base: int
    size: int
    extents: Extents | None


def whole_base(key: bytes) -> int:
    """Where a whole object begins in its file."""
    return -(-(_FIXED_BYTES + len(key)) // ALIGN) * ALIGN


def pack_whole(key: bytes, size: int) -> bytes:
    """The head of the file of a whole object, up to its first byte."""
    base = whole_base(key)
    return _pack(KIND_WHOLE, key, base, size, ()).ljust(base, b"\0")


def pack_ranges(key: bytes, extents: Extents) -> bytes:
    """The head of a file of ranges."""
    return _pack(KIND_RANGES, key, RANGES_BASE, 0, extents).ljust(RANGES_BASE, b"\0")


def _pack(kind: int, key: bytes, base: int, size: int, extents: Extents) -> bytes:
    assert 0 < len(key) <= KEY_BYTES_MAX, key
    assert len(extents) <= EXTENTS_MAX, len(extents)
    fixed = _FIXED.pack(MAGIC, VERSION, kind, len(key), base, size, len(extents))
    rest = key + b"".join(_EXTENT.pack(*extent) for extent in extents)
    return fixed + _CRC.pack(crc32c(rest, crc32c(fixed))) + rest


def is_ranges(data: bytes) -> bool:
    """Whether the head that begins with `data` needs RANGES_BASE bytes to be parsed."""
    return len(data) > 5 and data[5] == KIND_RANGES


def parse(data: bytes, key: bytes) -> FileHead:
    """The head at the start of `data`, which must be that of `key`. Raises: BadFile."""
    if len(data) < _FIXED_BYTES:
        raise BadFile(f"{len(data)} bytes are no head")
    magic, version, kind, key_bytes, base, size, count = _FIXED.unpack_from(data)
    if magic != MAGIC or version != VERSION or kind > KIND_RANGES:
        raise BadFile(f"magic {magic!r} version {version} kind {kind}")
    end = _FIXED_BYTES + key_bytes + count * _EXTENT.size
    if end > min(len(data), base) or base > RANGES_BASE:
        raise BadFile(f"a head of {end} bytes before {base}")
    rest = data[_FIXED_BYTES:end]
    if crc32c(rest, crc32c(data[: _FIXED.size])) != _CRC.unpack_from(data, _FIXED.size)[0]:
        raise BadFile("the head's CRC is wrong")
    if rest[:key_bytes] != key:
        raise BadFile(f"the bytes of {rest[:key_bytes]!r}")
    if kind == KIND_WHOLE:
        return FileHead(base, size, None)
    return FileHead(base, 0, tuple(_EXTENT.iter_unpack(rest[key_bytes:])))


def read_head(read: Callable[[int, int], bytes], key: bytes) -> tuple[FileHead, bytes]:
    """The head of a file, and its bytes; `read(size, at)`. Raises: BadFile, OSError."""
    data = read(HEAD_BYTES, 0)
    if is_ranges(data):
        data = read(RANGES_BASE, 0)
    return parse(data, key), data


def covers(extents: Extents, begin: int, end: int) -> bool:
    """Whether one extent has all of `begin..end`."""
    at = bisect_right(extents, (begin, 1 << 62)) - 1
    return at >= 0 and end <= extents[at][1]


def add_extent(extents: Extents, begin: int, end: int) -> Extents:
    """`extents` and `begin..end`; those that touch become one."""
    before = [each for each in extents if each[1] < begin]
    after = [each for each in extents if each[0] > end]
    inside = extents[len(before) : len(extents) - len(after)]
    if inside:
        begin, end = min(begin, inside[0][0]), max(end, inside[-1][1])
    return (*before, (begin, end), *after)

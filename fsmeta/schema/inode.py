"""The records of an inode's attributes: `a`, which changes seldom, and `v`, which changes often.

Verbs check the first and merge into the second; the parts of such a MERGE are made here, too, since
they contain the position of a number in the record. `docs/FORMAT.md` is this page in prose.

Listings pass on thousands of both, one behind the other, without parsing each. For most inodes the
two have JOINED_BYTES together, and are *plain*; the others (a device, flags, an ACL; corrupt ones)
are passed on apart.
"""

from __future__ import annotations

import stat
import struct
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, cast

from fsmeta.errors import Corrupt
from fsmeta.schema.keys import (
    ATTR_FIELD,
    OBJECT_FIELD,
    VOLATILE_FIELD,
    inode_row,
    pack_map,
    pack_u64,
    unpack_map,
)
from fsmeta.store.contract import Key
from fsmeta.store.writes import Parts
from fsmeta.types import FILE_TYPES, AttachedObject, Attr, Ino

_new: Final = tuple.__new__  # makes a NamedTuple in half the time of its constructor
DIR_SIZE: Final = 4096  # what stat(2) shows as the size of any directory

# version, mode with type, uid, gid, parent, birth time; 27 bytes, which keeps the hash of a small
# file within the allocator's 128-byte class on Redis
_ATTR: Final = struct.Struct(">BHIIQQ")
# the tail: rdev, chattr flags, access ACL id, default ACL id; only written when one is not zero
_ATTR_TAIL: Final = struct.Struct(">IIII")
_VOLATILE: Final = struct.Struct(">BQIQQQQ")  # version, size, nlink, used, atime, mtime, ctime
assert _ATTR.size == 27
ATTR_PARENT_AT: Final = 11  # offset of the parent in an `a` record
assert _ATTR_TAIL.size == 16
assert _VOLATILE.size == 45

_ATTR_V1: Final = 1
_MARK: Final = 4  # bits by which the mark is shifted: it is the upper half of the version's byte
MARKS: Final = 16
_VOLATILE_V1: Final = 1
_NLINK_AT: Final = 9
_ATIME_AT: Final = 21
_MTIME_AT: Final = 29
_CTIME_AT: Final = 37
EPOCH_NS: Final = 1 << 63  # times are stored unsigned with this bias, so years before 1970 sort too


# both records in a row: mode uid gid, size nlink used atime mtime ctime
_SHOWN: Final = struct.Struct(">xHII8x8xxQIQQQQ")
_FRESHNESS: Final = struct.Struct(">B27xQ4x8x8xQ8x")  # head, size, mtime
JOINED_BYTES: Final = _SHOWN.size
assert JOINED_BYTES == _FRESHNESS.size == _ATTR.size + _VOLATILE.size
NO_RECORD: Final = bytes(JOINED_BYTES)  # where a name needs none
_PLAIN_LENGTH: Final = {JOINED_BYTES}
# What the bytes are that all is told by which `_are_plain` looks at; all of NO_RECORD are 0.
_HEADS: Final = {0, *(_ATTR_V1 | mark << _MARK for mark in range(MARKS))}
_KINDS: Final = {0, *(kind << 4 | low for kind in FILE_TYPES for low in range(16))}
_VERSIONS: Final = {0, _VOLATILE_V1}


def pack_attr(attr: Attr) -> bytes:
    """The `a` record of `attr`."""
    _, mode, uid, gid, rdev, flags, parent, btime, _, _, _, _, _, _, acl, default_acl, mark = attr
    base = _ATTR.pack(_ATTR_V1 | mark << _MARK, mode, uid, gid, parent, btime + EPOCH_NS)
    if rdev or flags or acl or default_acl:
        return base + _ATTR_TAIL.pack(rdev, flags, acl, default_acl)
    return base


def pack_volatile(attr: Attr) -> bytes:
    """The `v` record of `attr`."""
    _, _, _, _, _, _, _, _, size, nlink, used, atime, mtime, ctime, _, _, _ = attr
    times = atime + EPOCH_NS, mtime + EPOCH_NS, ctime + EPOCH_NS
    return _VOLATILE.pack(_VOLATILE_V1, size, nlink, used, *times)


class Stable(NamedTuple):
    """What the `a` record holds: all that permission checks and most parents need."""

    mode: int
    uid: int
    gid: int
    rdev: int
    flags: int
    parent: Ino
    btime_ns: int
    acl: int
    default_acl: int
    mark: int


def unpack_stable(ino: int, a: bytes) -> Stable:
    """Raises: Corrupt."""
    return _new(Stable, _stable_values(ino, a))


def _stable_values(ino: int, a: bytes) -> tuple[int, int, int, int, int, Ino, int, int, int, int]:
    """The values of `Stable`."""
    try:
        head, mode, uid, gid, parent, btime = _ATTR.unpack_from(a)
        rdev = flags = acl = default_acl = 0
        if len(a) != 27:
            rdev, flags, acl, default_acl = _ATTR_TAIL.unpack(a[27:])
    except struct.error as error:
        raise Corrupt(inode_row(ino), ATTR_FIELD, f"length {len(a)}") from error
    if head & 0xF != _ATTR_V1:
        raise Corrupt(inode_row(ino), ATTR_FIELD, f"version {head & 0xF}")
    if mode >> 12 not in FILE_TYPES:
        raise Corrupt(inode_row(ino), ATTR_FIELD, f"mode {mode:o}")
    btime_ns = btime - EPOCH_NS
    return mode, uid, gid, rdev, flags, parent, btime_ns, acl, default_acl, head >> _MARK


def unpack_inode(ino: Ino, a: bytes, v: bytes) -> Attr:
    """The attributes that the two records of an inode hold.

    Raises: Corrupt.
    """
    try:
        version, size, nlink, used, atime, mtime, ctime = _VOLATILE.unpack(v)
    except struct.error as error:
        raise Corrupt(inode_row(ino), VOLATILE_FIELD, f"length {len(v)}") from error
    if version != _VOLATILE_V1:
        raise Corrupt(inode_row(ino), VOLATILE_FIELD, f"version {version}")
    mode, uid, gid, rdev, flags, parent, btime_ns, acl, default_acl, mark = _stable_values(ino, a)
    return _new(
        Attr,
        (
            ino,
            mode,
            uid,
            gid,
            rdev,
            flags,
            parent,
            btime_ns,
            size,
            nlink,
            used,
            atime - EPOCH_NS,
            mtime - EPOCH_NS,
            ctime - EPOCH_NS,
            acl,
            default_acl,
            mark,
        ),
    )


def touch_parts(now_ns: int, nlink_delta: int = 0) -> Parts:
    """A MERGE into `v` that sets mtime and ctime and moves the link count.

    The last commit wins, even with an earlier clock: programs that compare times would miss a
    change that left mtime as it was.
    """
    stamp = pack_u64(now_ns + EPOCH_NS)
    times = (_MTIME_AT, stamp + stamp)
    return (*times, _NLINK_AT, nlink_delta) if nlink_delta else times


def nlink_parts(delta: int) -> Parts:
    """A MERGE into `v` that only moves the link count."""
    return _NLINK_AT, delta


def ctime_parts(now_ns: int) -> Parts:
    """A MERGE into `v` that sets only ctime."""
    return _CTIME_AT, pack_u64(now_ns + EPOCH_NS)


def times_parts(before: Attr, after: Attr) -> Parts:
    """A MERGE into `v` that sets ctime, and of the other times those that differ."""
    parts: Parts = ()
    if before.atime_ns != after.atime_ns:
        parts += (_ATIME_AT, pack_u64(after.atime_ns + EPOCH_NS))
    if before.mtime_ns != after.mtime_ns:
        parts += (_MTIME_AT, pack_u64(after.mtime_ns + EPOCH_NS))
    return (*parts, *ctime_parts(after.ctime_ns))


def attr_keys(ino: int) -> tuple[Key, Key]:
    """Where the two records of an inode's attributes are."""
    row = inode_row(ino)
    return (row, ATTR_FIELD), (row, VOLATILE_FIELD)


def new_attr(
    ino: Ino,
    mode: int,
    owner: tuple[int, int],
    parent: Ino,
    now_ns: int,
    rdev: int = 0,
    mark: int = 0,
) -> Attr:
    """Attributes of an inode that is born now; `owner` is its uid and gid."""
    uid, gid = owner
    size, nlink = (DIR_SIZE, 2) if stat.S_ISDIR(mode) else (0, 1)
    now = now_ns
    return _new(
        Attr, (ino, mode, uid, gid, rdev, 0, parent, now, size, nlink, 0, now, now, now, 0, 0, mark)
    )


class JoinedRecords(NamedTuple):
    """Both records of many inodes in a row."""

    records: bytes
    odd: Sequence[int]  # positions of those that are not plain; `records` has NO_RECORD there


def join(records: Sequence[bytes]) -> JoinedRecords:
    """Plain records as one value; the others by their positions."""
    whole = b"".join(records)
    if _are_plain(records, whole):
        return JoinedRecords(whole, ())
    odd = [at for at, record in enumerate(records) if not _are_plain([record], record)]
    plain = list(records)
    for at in odd:
        plain[at] = NO_RECORD
    return JoinedRecords(b"".join(plain), odd)


def _are_plain(records: Sequence[bytes], whole: bytes) -> bool:
    """Whether each is of the one version that there is, without a tail; or NO_RECORD."""
    if {*map(len, records)} != _PLAIN_LENGTH:
        return False
    heads, versions = whole[::JOINED_BYTES], whole[_ATTR.size :: JOINED_BYTES]
    kinds = whole[1::JOINED_BYTES]  # of `mode` the upper byte
    blank = heads.count(0)
    if not blank == versions.count(0) == kinds.count(0):
        return False
    if blank and records.count(NO_RECORD) != blank:
        return False
    return _HEADS.issuperset(heads) and _VERSIONS.issuperset(versions) and _KINDS.issuperset(kinds)


def unpack_plain(records: bytes) -> Iterator[tuple[int, ...]]:
    """Mode, uid, gid, size, nlink, used, atime, mtime and ctime of each; the times are above
    EPOCH_NS. NO_RECORD has mode 0."""
    return _SHOWN.iter_unpack(records)


def versions(records: bytes) -> Iterator[tuple[int, int] | None]:
    """Mtime and size of each; None for NO_RECORD."""
    for head, size, mtime in _FRESHNESS.iter_unpack(records):
        yield (mtime - EPOCH_NS, size) if head else None


def split(record: bytes) -> dict[bytes, bytes | None]:
    """The two records that lie one behind the other, by their fields."""
    return {ATTR_FIELD: record[: -_VOLATILE.size], VOLATILE_FIELD: record[-_VOLATILE.size :]}


def join_each(records: Sequence[Sequence[bytes | None]]) -> list[bytes] | None:
    """The two records of each inode one behind the other, to be `split` again; None where an inode
    is gone or has one of another length."""
    if {len(v) if v else 0 for _, v in records} != {_VOLATILE.size}:
        return None
    try:
        return [a + v for a, v in cast("Sequence[Sequence[bytes]]", records)]
    except TypeError:
        return None


def unpack_record(ino: Ino, record: bytes) -> Attr:
    """The attributes in a record of any length. Raises: Corrupt."""
    return unpack_inode(ino, record[: -_VOLATILE.size], record[-_VOLATILE.size :])


def pack_object(found: AttachedObject) -> bytes:
    """The record `u` of a file that shows an object."""
    return pack_map(found._asdict())


def unpack_object(ino: Ino, value: bytes) -> AttachedObject:
    """Raises: Corrupt."""
    record = unpack_map(inode_row(ino), OBJECT_FIELD, value)
    words = [record.get(name) for name in AttachedObject._fields]
    texts = [word for word in words if isinstance(word, str)]
    if len(texts) != len(words) or not all(texts[2:]):
        raise Corrupt(inode_row(ino), OBJECT_FIELD, "names no object")
    return AttachedObject(*texts)

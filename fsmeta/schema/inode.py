"""The records of an inode's attributes: `a`, which changes seldom, and `v`, which changes often.

Verbs check the first and merge into the second; the parts of such a MERGE are made here, too, since
they say where in the record a number stands. `docs/FORMAT.md` is this page in prose.
"""

from __future__ import annotations

import stat
import struct
from typing import Final, NamedTuple

from fsmeta.errors import Corrupt
from fsmeta.schema.keys import ATTR_FIELD, VOLATILE_FIELD, inode_row, pack_u64
from fsmeta.store.contract import Key, Parts
from fsmeta.types import FILE_TYPES, Attr, Ino

_new: Final = tuple.__new__  # makes a NamedTuple in half the time of its constructor
DIR_SIZE: Final = 4096  # what stat(2) shows as the size of any directory

# version, mode with type, uid, gid, parent, birth time; 27 bytes, which keeps the hash of a small
# file within the allocator's 128-byte class on Redis
_ATTR: Final = struct.Struct(">BHIIQQ")
# the tail: rdev, chattr flags, access ACL id, default ACL id; only written when one is not zero
_ATTR_TAIL: Final = struct.Struct(">IIII")
_VOLATILE: Final = struct.Struct(">BQIQQQQ")  # version, size, nlink, used, atime, mtime, ctime
assert _ATTR.size == 27
ATTR_PARENT_AT: Final = 11  # where the parent stands in an `a` record
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
_EPOCH: Final = 1 << 63  # times are stored unsigned with this bias, so years before 1970 sort too


def pack_attr(attr: Attr) -> bytes:
    """The `a` record of `attr`."""
    head = _ATTR_V1 | attr.mark << _MARK
    base = _ATTR.pack(head, attr.mode, attr.uid, attr.gid, attr.parent, attr.btime_ns + _EPOCH)
    if attr.rdev or attr.flags or attr.acl or attr.default_acl:
        return base + _ATTR_TAIL.pack(attr.rdev, attr.flags, attr.acl, attr.default_acl)
    return base


def pack_volatile(attr: Attr) -> bytes:
    """The `v` record of `attr`."""
    return _VOLATILE.pack(
        _VOLATILE_V1,
        attr.size,
        attr.nlink,
        attr.used,
        attr.atime_ns + _EPOCH,
        attr.mtime_ns + _EPOCH,
        attr.ctime_ns + _EPOCH,
    )


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
    btime_ns = btime - _EPOCH
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
            atime - _EPOCH,
            mtime - _EPOCH,
            ctime - _EPOCH,
            acl,
            default_acl,
            mark,
        ),
    )


def touch_parts(now_ns: int, nlink_delta: int = 0) -> Parts:
    """A MERGE into `v` that sets mtime and ctime and moves the link count.

    The last commit wins, even with an earlier clock: a change that left mtime as it was would be
    missed by whoever compares times.
    """
    stamp = pack_u64(now_ns + _EPOCH)
    times = (_MTIME_AT, stamp + stamp)
    return (*times, _NLINK_AT, nlink_delta) if nlink_delta else times


def nlink_parts(delta: int) -> Parts:
    """A MERGE into `v` that only moves the link count."""
    return _NLINK_AT, delta


def ctime_parts(now_ns: int) -> Parts:
    """A MERGE into `v` that sets only ctime."""
    return _CTIME_AT, pack_u64(now_ns + _EPOCH)


def times_parts(before: Attr, after: Attr) -> Parts:
    """A MERGE into `v` that sets ctime, and of the other times those that differ."""
    parts: Parts = ()
    if before.atime_ns != after.atime_ns:
        parts += (_ATIME_AT, pack_u64(after.atime_ns + _EPOCH))
    if before.mtime_ns != after.mtime_ns:
        parts += (_MTIME_AT, pack_u64(after.mtime_ns + _EPOCH))
    return (*parts, *ctime_parts(after.ctime_ns))


def attr_keys(ino: int) -> tuple[Key, Key]:
    """Where the two records of an inode's attributes are."""
    row = inode_row(ino)
    return (row, ATTR_FIELD), (row, VOLATILE_FIELD)


def new_attr(
    ino: Ino, mode: int, uid: int, gid: int, parent: Ino, now_ns: int, rdev: int = 0, mark: int = 0
) -> Attr:
    """Attributes of an inode that is born now."""
    size, nlink = (DIR_SIZE, 2) if stat.S_ISDIR(mode) else (0, 1)
    now = now_ns
    return Attr(
        ino, mode, uid, gid, rdev, 0, parent, now, size, nlink, 0, now, now, now, 0, 0, mark
    )

"""POSIX ACLs: the rules of acl(5), the kernel's format in xattrs, and ours in records.

Called by the verbs and by `access`; pure functions. Of an access ACL the entries for owner, mask
and others *are* the mode bits of the inode: its record has zeros there, so that chmod(2) changes no
record and files of different modes share one. Of a default ACL everything is in the record.
"""

from __future__ import annotations

import errno
import struct
import zlib
from collections.abc import Iterator
from typing import Final, NamedTuple

from fsmeta.errors import Corrupt
from fsmeta.schema import keys
from fsmeta.types import Caller

ACCESS_XATTR: Final = b"system.posix_acl_access"
DEFAULT_XATTR: Final = b"system.posix_acl_default"
XATTRS: Final = (ACCESS_XATTR, DEFAULT_XATTR)
ENTRIES_MAX: Final = 511  # what fits in the 4 KiB that FUSE passes between the kernel and us
TRIES_MAX: Final = 64  # ids looked at for a free one; four billion are there
SPARE_TRIES_MAX: Final = 16  # of others, where all those are taken: unpredictable ones
MADE_MAX: Final = 16_384  # records that a user other than root makes: 42 MB where each is longest

# posix_acl_xattr.h: a version, then entries in this order
_HEADER: Final = struct.Struct("<I")
_ENTRY: Final = struct.Struct("<HHI")  # tag, perm, id
_VERSION: Final = 2
_USER_OBJ: Final = 0x01
_USER: Final = 0x02
_GROUP_OBJ: Final = 0x04
_GROUP: Final = 0x08
_MASK: Final = 0x10
_OTHER: Final = 0x20
_TAGS: Final = (_USER_OBJ, _USER, _GROUP_OBJ, _GROUP, _MASK, _OTHER)
_NO_ID: Final = 0xFFFFFFFF

_RECORD: Final = struct.Struct(">BBBBB")  # version, owner, group, mask or NO_MASK, others
_NAMED: Final = struct.Struct(">BI")  # perm, 8 more for a group; id
_RECORD_V1: Final = 1
_SPARE: Final = struct.Struct(">QB")  # the time, and which try it is
_U64_MAX: Final = (1 << 64) - 1
_NO_MASK: Final = 8
_OF_GROUP: Final = 8
assert _RECORD.size == 5
assert _NAMED.size == 5


class AclEntry(NamedTuple):
    """One entry as the kernel has it."""

    tag: int
    perm: int
    id: int


class Named(NamedTuple):
    """What one user or group may."""

    is_group: bool
    id: int
    perm: int


class Acl(NamedTuple):
    """An ACL; without a mask it says no more than a mode does."""

    owner: int
    group: int
    mask: int | None
    other: int
    named: tuple[Named, ...] = ()  # users, then groups

    @property
    def bits(self) -> int:
        """The mode bits that it implies: those of the group are the mask's."""
        middle = self.group if self.mask is None else self.mask
        return self.owner << 6 | middle << 3 | self.other


# --- the kernel's format -------------------------------------------------------------------------


def parse_entries(value: bytes) -> list[AclEntry]:
    """What an xattr's value holds, in whatever order; none: the ACL is to go.

    Raises: EINVAL, EOPNOTSUPP for another version.
    """
    if not value:
        return []
    if len(value) < _HEADER.size:
        raise OSError(errno.EINVAL, "the ACL has no header")
    if _HEADER.unpack_from(value)[0] != _VERSION:
        raise OSError(errno.EOPNOTSUPP, "the ACL has another version")
    if (len(value) - _HEADER.size) % _ENTRY.size:
        raise OSError(errno.EINVAL, "the ACL is cut short")
    entries = [AclEntry(*each) for each in _ENTRY.iter_unpack(value[_HEADER.size :])]
    if any(entry.tag not in _TAGS for entry in entries):
        raise OSError(errno.EINVAL, "the ACL has an entry of no known kind")
    return entries


def build(entries: list[AclEntry]) -> Acl:
    """The ACL of entries in their order: posix_acl_valid() in the kernel.

    Raises: EINVAL, E2BIG.
    """
    if len(entries) > ENTRIES_MAX:
        raise OSError(errno.E2BIG, f"an ACL has at most {ENTRIES_MAX} entries")
    order = [_TAGS.index(entry.tag) for entry in entries]
    single = {entry.tag: entry.perm for entry in entries if entry.tag not in (_USER, _GROUP)}
    named = tuple(
        Named(entry.tag == _GROUP, entry.id, entry.perm)
        for entry in entries
        if entry.tag in (_USER, _GROUP)
    )
    if (
        order != sorted(order)
        or len(single) + len(named) != len(entries)
        or not {_USER_OBJ, _GROUP_OBJ, _OTHER} <= single.keys()
        or (named and _MASK not in single)
        or any(entry.perm > 7 for entry in entries)
        or any(each.id == _NO_ID for each in named)
    ):
        raise OSError(errno.EINVAL, "the ACL is not valid")
    return Acl(single[_USER_OBJ], single[_GROUP_OBJ], single.get(_MASK), single[_OTHER], named)


def pack_xattr(acl: Acl) -> bytes:
    """`acl` as the kernel has it."""
    entries = [(_USER_OBJ, acl.owner, _NO_ID)]
    entries += [(_USER, each.perm, each.id) for each in acl.named if not each.is_group]
    entries.append((_GROUP_OBJ, acl.group, _NO_ID))
    entries += [(_GROUP, each.perm, each.id) for each in acl.named if each.is_group]
    if acl.mask is not None:
        entries.append((_MASK, acl.mask, _NO_ID))
    entries.append((_OTHER, acl.other, _NO_ID))
    return _HEADER.pack(_VERSION) + b"".join(_ENTRY.pack(*each) for each in entries)


# --- records -------------------------------------------------------------------------------------


def without_mode(acl: Acl) -> Acl:
    """What of an access ACL is not in the mode: what its record holds."""
    assert acl.mask is not None, "a mode says all of it"
    return acl._replace(owner=0, mask=0, other=0)


def with_mode(stored: Acl, mode: int) -> Acl:
    """The access ACL of an inode with `mode`."""
    return stored._replace(owner=mode >> 6 & 7, mask=mode >> 3 & 7, other=mode & 7)


def pack_record(acl: Acl) -> bytes:
    """The value of an ACL's row."""
    mask = _NO_MASK if acl.mask is None else acl.mask
    head = _RECORD.pack(_RECORD_V1, acl.owner, acl.group, mask, acl.other)
    return head + b"".join(
        _NAMED.pack(each.perm | (_OF_GROUP if each.is_group else 0), each.id) for each in acl.named
    )


def unpack_record(number: int, value: bytes | None) -> Acl:
    """The ACL in row `number`. Raises: Corrupt."""
    row = keys.acl_row(number)
    if value is None:
        raise Corrupt(row, keys.ACL_FIELD, "an inode has this ACL, and it does not exist")
    try:
        version, owner, group, mask, other = _RECORD.unpack_from(value)
        rest = _NAMED.iter_unpack(value[_RECORD.size :])
        named = tuple(Named(bool(perm & _OF_GROUP), who, perm & 7) for perm, who in rest)
    except struct.error as error:
        raise Corrupt(row, keys.ACL_FIELD, f"length {len(value)}") from error
    if version != _RECORD_V1:
        raise Corrupt(row, keys.ACL_FIELD, f"version {version}")
    acl = Acl(owner, group, None if mask == _NO_MASK else mask, other, named)
    unmasked = named and acl.mask is None
    if unmasked or max(owner, group, other) > 7 or mask > _NO_MASK or pack_record(acl) != value:
        raise Corrupt(row, keys.ACL_FIELD, f"no ACL: {value!r}")
    return acl


def numbers(record: bytes, now_ns: int = 0) -> Iterator[int]:
    """The ids that a record may have, in the order in which they are tried; never 0.

    Any user can make records that take all ids behind a checksum. The last few depend on the time
    as well, so such records can't keep an ACL from being set; it is stored once more each time.
    """
    first = zlib.crc32(record)
    for step in range(TRIES_MAX):
        yield (first + step) % _NO_ID + 1
    for step in range(SPARE_TRIES_MAX):
        yield zlib.crc32(_SPARE.pack(now_ns & _U64_MAX, step), first) % _NO_ID + 1


# --- the rules -----------------------------------------------------------------------------------


def inherit(default: Acl, mode: int) -> tuple[int, Acl | None]:
    """Mode of what is made in a directory with the ACL `default`, and its access ACL's record.

    `mode` is what the maker asked for; its umask does not count.
    """
    mode &= default.bits | ~0o777
    return mode, None if default.mask is None else without_mode(default)


def grants(stored: Acl, mode: int, gid: int, caller: Caller, mask: int) -> bool:
    """posix_acl_permission() in the kernel, for a caller that does not own the inode."""
    for each in stored.named:
        if not each.is_group and each.id == caller.uid:
            return each.perm & mode >> 3 & mask == mask
    groups = [stored.group] if caller.in_group(gid) else []
    groups += [each.perm for each in stored.named if each.is_group and caller.in_group(each.id)]
    if not groups:
        return mode & mask == mask
    return any(perm & mode >> 3 & mask == mask for perm in groups)


def describe(acl: Acl) -> str:
    """As `getfacl -cn` has it, on one line: `u::rwx,u:1000:r--,g::r-x,m::r-x,o::---`."""

    def line(kind: str, who: int | str, perm: int) -> str:
        return f"{kind}:{who}:" + "".join(
            letter if perm & bit else "-" for letter, bit in (("r", 4), ("w", 2), ("x", 1))
        )

    parts = [line("u", "", acl.owner)]
    parts += [line("u", each.id, each.perm) for each in acl.named if not each.is_group]
    parts.append(line("g", "", acl.group))
    parts += [line("g", each.id, each.perm) for each in acl.named if each.is_group]
    if acl.mask is not None:
        parts.append(line("m", "", acl.mask))
    return ",".join([*parts, line("o", "", acl.other)])

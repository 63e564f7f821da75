"""The model's POSIX ACLs: fs/posix_acl.c, on whole lists of entries as the kernel has them.

On purpose not how `fsmeta/schema/acl` does it: there the mode is not in the ACL at all.
"""

from __future__ import annotations

import errno
import stat
import struct

from tests.model.inodes import (
    APPEND,
    DEFAULT_ACL,
    FIXED,
    FLAGS,
    GROUP,
    GROUP_OBJ,
    IMMUTABLE,
    MASK,
    OTHER,
    SGID,
    USER,
    USER_OBJ,
    Entries,
    Inode,
    fail,
    keeps_sgid,
    owns,
)
from tests.model.ops import User
from tests.model.tree import Tree

_ORDER = (USER_OBJ, USER, GROUP_OBJ, GROUP, MASK, OTHER)
NO_ID = 0xFFFFFFFF


def pack(entries: Entries) -> bytes:
    """posix_acl_to_xattr()."""
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *each) for each in entries)


def _parse(value: bytes) -> Entries:
    """posix_acl_from_xattr(); none: the ACL goes."""
    if not value:
        return []
    if len(value) < 4:
        fail(errno.EINVAL)
    if struct.unpack_from("<I", value)[0] != 2:
        fail(errno.EOPNOTSUPP)
    if len(value) % 8 != 4:
        fail(errno.EINVAL)
    entries = [(tag, perm, who) for tag, perm, who in struct.iter_unpack("<HHI", value[4:])]
    if any(tag not in _ORDER for tag, _, _ in entries):
        fail(errno.EINVAL)
    return entries


def _require_valid(entries: Entries) -> None:
    """posix_acl_valid()."""
    tags = [tag for tag, _, _ in entries]
    once = all(tags.count(tag) == 1 for tag in (USER_OBJ, GROUP_OBJ, OTHER))
    named = USER in tags or GROUP in tags
    sorted_ = [_ORDER.index(tag) for tag in tags] == sorted(_ORDER.index(tag) for tag in tags)
    masks = tags.count(MASK)
    ids = all(who != NO_ID for tag, _, who in entries if tag in (USER, GROUP))
    perms = all(perm <= 7 for _, perm, _ in entries)
    if not (once and sorted_ and ids and perms and masks <= 1 and (masks or not named)):
        fail(errno.EINVAL)


def _perm(entries: Entries, tag: int) -> int | None:
    return next((perm for each, perm, _ in entries if each == tag), None)


def _bits(entries: Entries) -> int:
    """posix_acl_equiv_mode()."""
    group = _perm(entries, MASK)
    group = _perm(entries, GROUP_OBJ) if group is None else group
    return (_perm(entries, USER_OBJ) or 0) << 6 | (group or 0) << 3 | (_perm(entries, OTHER) or 0)


def _with_bits(entries: Entries, mode: int) -> Entries:
    """The same ACL where owner, group class and others may what `mode` says."""
    middle = GROUP_OBJ if _perm(entries, MASK) is None else MASK
    bits = {USER_OBJ: mode >> 6 & 7, middle: mode >> 3 & 7, OTHER: mode & 7}
    return [(tag, bits.get(tag, perm), who) for tag, perm, who in entries]


def chmod(inode: Inode) -> None:
    """posix_acl_chmod(), after the mode has changed."""
    if inode.acl:
        inode.acl = _with_bits(inode.acl, inode.mode)


def born(parent: Inode, inode: Inode, umask: int) -> None:
    """posix_acl_create(): mode and ACLs of what was made in `parent`."""
    if inode.is_link:
        return
    if not parent.default:
        inode.mode &= ~umask
        return
    inode.mode &= ~0o777 | _bits(parent.default)
    if _perm(parent.default, MASK) is not None:
        inode.acl = _with_bits(parent.default, inode.mode)
    if inode.is_dir:
        inode.default = list(parent.default)


def get(inode: Inode, name: bytes) -> bytes:
    """getxattr(2): anyone may know."""
    if inode.is_link:
        fail(errno.EOPNOTSUPP)
    entries = inode.default if name == DEFAULT_ACL else inode.acl
    return pack(entries) if entries else fail(errno.ENODATA)


def put(tree: Tree, user: User, inode: Inode, name: bytes, value: bytes) -> None:
    """setxattr(2), and removexattr(2) with no value: vfs_set_acl()."""
    entries = _parse(value)
    require_mutable(inode)
    if inode.is_link:
        fail(errno.EOPNOTSUPP)
    if name == DEFAULT_ACL and not inode.is_dir:
        if entries:
            fail(errno.EACCES)
        return
    if not owns(user, inode):
        fail(errno.EPERM)
    if entries:
        _require_valid(entries)
    if name == DEFAULT_ACL:
        inode.default = entries
    else:
        if entries:
            mode = inode.mode & ~0o777 | _bits(entries)
            inode.mode = mode if keeps_sgid(user, inode.gid) else mode & ~SGID
        inode.acl = entries if _perm(entries, MASK) is not None else []
    tree.touch_ctime(inode)


# --- flags of chattr(1) --------------------------------------------------------------------------


def require_mutable(inode: Inode) -> None:
    if inode.flags & FIXED:
        fail(errno.EPERM)


def may_setattr(inode: Inode, touch: bool) -> None:
    """may_setattr(): `touch` is utimensat of both times to now."""
    if inode.flags & (IMMUTABLE if touch else FIXED):
        fail(errno.EPERM)


def may_open(inode: Inode, writes: bool, appends: bool, truncates: bool) -> None:
    """The last lines of may_open()."""
    if inode.flags & APPEND and ((writes and not appends) or truncates):
        fail(errno.EPERM)


def get_flags(inode: Inode) -> int:
    """FS_IOC_GETFLAGS of what has been opened."""
    if not stat.S_ISREG(inode.mode) and not inode.is_dir:
        fail(errno.ENOTTY)
    return inode.flags


def set_flags(tree: Tree, user: User, inode: Inode, flags: int) -> None:
    """FS_IOC_SETFLAGS: vfs_fileattr_set(), shmem_fileattr_set()."""
    before = get_flags(inode)
    if not owns(user, inode) or ((flags ^ before) & FIXED and user.uid != 0):
        fail(errno.EPERM)
    if flags & ~FLAGS:
        fail(errno.EOPNOTSUPP)
    inode.flags = flags
    tree.touch_ctime(inode)

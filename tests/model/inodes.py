"""Inodes of the model and the rules of who may do what to them; pure functions.

The rules are those of fs/namei.c and fs/attr.c of Linux 6.18, where user 0 has every
capability and nobody else has any.
"""

from __future__ import annotations

import errno
import stat
from dataclasses import dataclass, field
from typing import NoReturn, TypeAlias

from tests.model.ops import User

R, W, X = 4, 2, 1  # MAY_READ, MAY_WRITE, MAY_EXEC

ACCESS_ACL, DEFAULT_ACL = b"system.posix_acl_access", b"system.posix_acl_default"
USER_OBJ, USER, GROUP_OBJ, GROUP, MASK, OTHER = 1, 2, 4, 8, 16, 32  # tags of ACL entries
Entries: TypeAlias = list[tuple[int, int, int]]  # tag, permissions, id

IMMUTABLE, APPEND = 0x10, 0x20  # FS_*_FL
FIXED = IMMUTABLE | APPEND
INHERITED = 0xC0  # nodump, noatime
FLAGS = FIXED | INHERITED  # SHMEM_FL_USER_MODIFIABLE

SUID, SGID, STICKY = stat.S_ISUID, stat.S_ISGID, stat.S_ISVTX


def fail(code: int) -> NoReturn:
    raise OSError(code, errno.errorcode[code])


@dataclass(slots=True, eq=False)
class Inode:
    """One inode; which of the last fields are used depends on the type in `mode`."""

    number: int
    mode: int
    uid: int
    gid: int
    nlink: int
    rdev: int = 0
    mtime: int = 0
    ctime: int = 0
    xattrs: dict[bytes, bytes] = field(default_factory=dict)
    data: bytearray = field(default_factory=bytearray)
    target: bytes = b""
    entries: dict[bytes, Inode] = field(default_factory=dict)
    parent: Inode | None = None  # of a directory; the root's is None
    acl: Entries = field(default_factory=list)  # none where the mode says it all
    default: Entries = field(default_factory=list)
    flags: int = 0

    @property
    def kind(self) -> int:
        return stat.S_IFMT(self.mode)

    @property
    def is_dir(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def is_link(self) -> bool:
        return stat.S_ISLNK(self.mode)

    @property
    def is_reg(self) -> bool:
        return stat.S_ISREG(self.mode)

    @property
    def size(self) -> int:
        return len(self.target) if self.is_link else len(self.data)

    def contains(self, other: Inode | None) -> bool:
        """Whether `other` is this directory or below it."""
        while other is not None:
            if other is self:
                return True
            other = other.parent
        return False


def allowed(user: User, inode: Inode, mask: int) -> bool:
    """generic_permission()."""
    if user.uid == 0:
        return not (mask & X) or inode.is_dir or bool(inode.mode & 0o111)
    if user.uid == inode.uid:
        bits = inode.mode >> 6
    elif inode.acl and inode.mode & 0o070:
        return _acl_allows(user, inode, mask)
    elif user.in_group(inode.gid):
        bits = inode.mode >> 3
    else:
        bits = inode.mode
    return mask & ~bits & 7 == 0


def _acl_allows(user: User, inode: Inode, mask: int) -> bool:
    """posix_acl_permission() for who is not the owner."""
    limit = next(perm for tag, perm, _ in inode.acl if tag == MASK)
    found = False
    for tag, perm, who in inode.acl:
        granted = mask & ~(perm & limit) == 0
        if tag == USER and who == user.uid:
            return granted
        if tag in (GROUP_OBJ, GROUP) and user.in_group(inode.gid if tag == GROUP_OBJ else who):
            found = True
            if granted:
                return True
        if tag == OTHER:
            return not found and mask & ~perm == 0
    raise AssertionError("an ACL without others")


def require(user: User, inode: Inode, mask: int) -> None:
    """inode_permission()."""
    if mask & W and inode.flags & IMMUTABLE:
        fail(errno.EPERM)
    if not allowed(user, inode, mask):
        fail(errno.EACCES)


def owns(user: User, inode: Inode) -> bool:
    """inode_owner_or_capable()."""
    return user.uid in (0, inode.uid)


def may_delete(user: User, parent: Inode, victim: Inode, as_dir: bool) -> None:
    """may_delete(): first the directory, then stickiness, then the type."""
    require(user, parent, W | X)
    if parent.flags & APPEND or victim.flags & FIXED:
        fail(errno.EPERM)
    if parent.mode & STICKY and user.uid not in (0, victim.uid, parent.uid):
        fail(errno.EPERM)
    if as_dir and not victim.is_dir:
        fail(errno.ENOTDIR)
    if as_dir and victim.parent is None:
        fail(errno.EBUSY)
    if not as_dir and victim.is_dir:
        fail(errno.EISDIR)


def keeps_sgid(user: User, gid: int) -> bool:
    """in_group_or_capable()."""
    return user.uid == 0 or user.in_group(gid)


def born_mode(user: User, parent: Inode, mode: int) -> int:
    """The mode of a new non-directory: S_ISGID is not given to strangers' groups."""
    if not stat.S_ISDIR(mode) and parent.mode & SGID and mode & (SGID | 0o010) == SGID | 0o010:
        return mode if keeps_sgid(user, parent.gid) else mode & ~SGID
    return mode


def without_privileges(user: User, inode: Inode) -> int:
    """setattr_should_drop_suidgid(): the mode after a change of content or owner."""
    mode = inode.mode & ~SUID
    if mode & 0o010 or not keeps_sgid(user, inode.gid):
        mode &= ~SGID
    return mode


def linkable(user: User, inode: Inode) -> bool:
    """may_linkat() with fs.protected_hardlinks set."""
    special = not inode.is_reg or inode.mode & SUID
    runs_as_group = inode.mode & (SGID | 0o010) == SGID | 0o010
    return owns(user, inode) or not (special or runs_as_group or not allowed(user, inode, R | W))

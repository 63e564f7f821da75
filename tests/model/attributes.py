"""The model's verbs on attributes: fs/attr.c, fs/utimes.c, fs/open.c and fs/xattr.c."""

from __future__ import annotations

import errno
import os
import stat

from fsmeta.types import XATTR_NAME_MAX, XATTR_SIZE_MAX
from tests.model import acls
from tests.model.files import reach
from tests.model.inodes import (
    ACCESS_ACL,
    DEFAULT_ACL,
    SGID,
    STICKY,
    Inode,
    R,
    W,
    allowed,
    fail,
    keeps_sgid,
    owns,
    require,
    without_privileges,
)
from tests.model.ops import (
    NOW,
    OMIT,
    GetXattr,
    Op,
    RemoveXattr,
    SetXattr,
    StatValue,
    Target,
    TimesValue,
    User,
    explicit,
)
from tests.model.tree import Tree, Walk

USER_PREFIX = b"user."
ACLS = (ACCESS_ACL, DEFAULT_ACL)


def stat_of(inode: Inode) -> StatValue:
    """stat(2)."""
    return StatValue(
        type=inode.kind,
        perm=stat.S_IMODE(inode.mode),
        nlink=inode.nlink,
        uid=inode.uid,
        gid=inode.gid,
        size=inode.size,
        rdev=inode.rdev,
        mtime=explicit(inode.mtime),
    )


def chmod(tree: Tree, user: User, file: Target, mode: int) -> None:
    """chmod(2); S_ISGID silently goes where the group is not the caller's."""
    inode = reach(tree, user, file)
    acls.may_setattr(inode, touch=False)
    if not owns(user, inode):
        fail(errno.EPERM)
    if not keeps_sgid(user, inode.gid):
        mode &= ~SGID
    inode.mode = inode.kind | stat.S_IMODE(mode)
    acls.chmod(inode)
    tree.touch_ctime(inode)


def chown(tree: Tree, user: User, inode: Inode, uid: int, gid: int) -> None:
    """chown(2) and lchown(2). Even root's chown, even one that changes nothing, drops S_ISUID."""
    acls.may_setattr(inode, touch=False)
    mode = inode.mode if inode.is_dir else without_privileges(user, inode)
    if user.uid != 0:
        if uid != -1 and (user.uid != inode.uid or uid != inode.uid):
            fail(errno.EPERM)
        joins = gid == inode.gid or user.in_group(gid)
        if gid != -1 and (user.uid != inode.uid or not joins):
            fail(errno.EPERM)
        if mode != inode.mode and not owns(user, inode):
            fail(errno.EPERM)
    inode.mode = mode
    inode.uid = inode.uid if uid == -1 else uid
    inode.gid = inode.gid if gid == -1 else gid
    tree.touch_ctime(inode)


def utimens(
    tree: Tree, user: User, path: bytes, atime: int, mtime: int, follow: bool
) -> TimesValue:
    """utimensat(2). Both NOW: write permission suffices; both OMIT: not even the path counts."""
    if atime == mtime == OMIT:
        return TimesValue(None, None)
    inode = Walk(tree, user).end(path, follow)
    acls.may_setattr(inode, touch=atime == mtime == NOW)
    if not owns(user, inode):
        if atime != NOW or mtime != NOW:
            fail(errno.EPERM)
        if not allowed(user, inode, W):
            fail(errno.EACCES)
    if mtime != OMIT:
        inode.mtime = tree.clock if mtime == NOW else mtime
    tree.touch_ctime(inode)
    return TimesValue(atime if atime >= 0 else None, explicit(inode.mtime))


def check_xattr(op: SetXattr | GetXattr | RemoveXattr) -> None:
    """What the system call says before it looks at the path."""
    if isinstance(op, SetXattr) and op.flags & ~(os.XATTR_CREATE | os.XATTR_REPLACE):
        fail(errno.EINVAL)
    if not op.name or len(op.name) > XATTR_NAME_MAX:
        fail(errno.ERANGE)
    if isinstance(op, SetXattr) and len(op.value) > XATTR_SIZE_MAX:
        fail(errno.E2BIG)


def _may_xattr(user: User, inode: Inode, name: bytes, mask: int) -> None:
    """xattr_permission() and xattr_resolve_name()."""
    if mask & W:
        acls.require_mutable(inode)
    if name.startswith(USER_PREFIX):
        if not inode.is_reg and not inode.is_dir:
            fail(errno.EPERM if mask & W else errno.ENODATA)
        if inode.is_dir and inode.mode & STICKY and mask & W and not owns(user, inode):
            fail(errno.EPERM)
    require(user, inode, mask)
    if not name.startswith(USER_PREFIX):
        fail(errno.EOPNOTSUPP)
    if name == USER_PREFIX:
        fail(errno.EINVAL)


def setxattr(tree: Tree, user: User, inode: Inode, name: bytes, value: bytes, flags: int) -> None:
    """setxattr(2) of user.* and of ACLs."""
    if name in ACLS:
        acls.put(tree, user, inode, name, value)
        return
    _may_xattr(user, inode, name, W)
    if flags & os.XATTR_CREATE and name in inode.xattrs:
        fail(errno.EEXIST)
    if flags & os.XATTR_REPLACE and name not in inode.xattrs:
        fail(errno.ENODATA)
    inode.xattrs[name] = value
    tree.touch_ctime(inode)


def leaves_times_open(tree: Tree, user: User, op: Op) -> bool:
    """Whether `op` sets an xattr to what it is, where file systems differ in touching ctime.

    So they do of any ACL that is set or removed.
    """
    if not isinstance(op, SetXattr | RemoveXattr):
        return False
    if op.name in ACLS:
        return True
    if isinstance(op, RemoveXattr):
        return False
    try:
        return Walk(tree, user).end(op.path, op.follow).xattrs.get(op.name) == op.value
    except OSError:
        return False


def list_xattrs(inode: Inode) -> tuple[bytes, ...]:
    """listxattr(2) of what can be set here."""
    found = [name for name, acl in zip(ACLS, (inode.acl, inode.default), strict=True) if acl]
    return tuple(sorted([*found, *inode.xattrs]))


def getxattr(user: User, inode: Inode, name: bytes) -> bytes:
    """getxattr(2) of user.* and of ACLs."""
    if name in ACLS:
        return acls.get(inode, name)
    _may_xattr(user, inode, name, R)
    value = inode.xattrs.get(name)
    return fail(errno.ENODATA) if value is None else value


def removexattr(tree: Tree, user: User, inode: Inode, name: bytes) -> None:
    """removexattr(2) of user.* and of ACLs."""
    if name in ACLS:
        acls.put(tree, user, inode, name, b"")
        return
    _may_xattr(user, inode, name, W)
    if inode.xattrs.pop(name, None) is None:
        fail(errno.ENODATA)
    tree.touch_ctime(inode)

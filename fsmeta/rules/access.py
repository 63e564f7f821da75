"""Access rules: path_resolution(7), chmod(2), chown(2), acl(5), chattr(1), the sticky bit.

A `Caller` that is `checked` came through the kernel with `default_permissions`: the kernel has
checked it with groups and capabilities that the client can't see, so nothing here contradicts it.
The kernel does not know the flags of chattr(1): those hold for every caller, root included.
"""

from __future__ import annotations

import errno
import stat
from typing import Final, Protocol

from fsmeta.schema.acl import Acl, grants
from fsmeta.types import FLAG_APPEND, FLAG_IMMUTABLE, FLAGS_FIXED, Caller

READ: Final = 4
WRITE: Final = 2
EXECUTE: Final = 1


class Owned(Protocol):
    """Anything with an owner and a mode: `Attr` and `Stable`."""

    @property
    def mode(self) -> int: ...
    @property
    def uid(self) -> int: ...
    @property
    def gid(self) -> int: ...
    @property
    def flags(self) -> int: ...
    @property
    def acl(self) -> int: ...


def require(caller: Caller, inode: Owned, mask: int, acl: Acl | None = None) -> None:
    """Raises: EACCES unless `caller` may READ, WRITE or EXECUTE (search) as `mask` says.

    `acl` is the record of the inode's access ACL where there is one and the caller is not `checked`
    (`ops.inode.require` brings it). EPERM where the inode is immutable.
    """
    if mask & WRITE and inode.flags & FLAG_IMMUTABLE:
        raise OSError(errno.EPERM, "is immutable")
    if caller.checked or allows(caller, inode, mask, acl):
        return
    raise OSError(errno.EACCES, "permission denied")


def require_mutable(inode: Owned) -> None:
    """Raises: EPERM where chattr(1) forbids what is neither writing nor appending."""
    if inode.flags & FLAGS_FIXED:
        raise OSError(errno.EPERM, "is immutable or append-only")


def require_making(caller: Caller, mode: int, rdev: int) -> None:
    """Raises: EPERM where another than root makes a device that is no whiteout (mknod(2))."""
    if caller.checked or caller.uid == 0:
        return
    if stat.S_ISBLK(mode) or (stat.S_ISCHR(mode) and rdev):
        raise OSError(errno.EPERM, "only root makes devices")


def require_opening(inode: Owned, writes: bool, appends: bool, truncates: bool) -> None:
    """Raises: EPERM where an append-only file is to be opened for anything but appending."""
    if inode.flags & FLAG_APPEND and ((writes and not appends) or truncates):
        raise OSError(errno.EPERM, "is append-only")


def needs_acl(caller: Caller, inode: Owned) -> bool:
    """Whether an inode's ACL has a say: not for owner and root, nor where the group has no bits."""
    if not inode.acl or caller.checked:
        return False
    return bool(inode.mode & 0o070) and caller.uid not in (0, inode.uid)


def allows(caller: Caller, inode: Owned, mask: int, acl: Acl | None = None) -> bool:
    """access(2) by mode bits and ACL; root may do all but execute a file without any x bit."""
    if caller.uid == 0:
        if mask & EXECUTE and not stat.S_ISDIR(inode.mode):
            return bool(inode.mode & 0o111)
        return True
    if caller.uid == inode.uid:
        granted = inode.mode >> 6
    elif acl is not None:
        return grants(acl, inode.mode, inode.gid, caller, mask)
    elif caller.in_group(inode.gid):
        granted = inode.mode >> 3
    else:
        granted = inode.mode
    return granted & mask == mask


def require_owner(caller: Caller, inode: Owned) -> None:
    """Raises: EPERM unless `caller` owns the inode or is root."""
    if caller.checked or caller.uid in (0, inode.uid):
        return
    raise OSError(errno.EPERM, "not the owner")


def require_unsticky(caller: Caller, parent: Owned, inode: Owned) -> None:
    """Raises: EPERM where the sticky bit of `parent`, or a flag, keeps `inode` from being removed.

    From an append-only directory nothing is removed. A kernel that has judged already did so by
    attributes that may be old; where those of now forbid it, it is to look again.

    Raises: ESTALE for a `checked` caller, unless it is a flag.
    """
    if parent.flags & FLAG_APPEND or inode.flags & FLAGS_FIXED:
        raise OSError(errno.EPERM, "is immutable or append-only")
    if not parent.mode & stat.S_ISVTX or caller.uid in (0, inode.uid, parent.uid):
        return
    raise OSError(errno.ESTALE if caller.checked else errno.EPERM, "the directory is sticky")


def inherit(caller: Caller, parent: Owned, mode: int) -> tuple[int, int]:
    """Mode and gid of an inode made in `parent`: a setgid directory passes on its group.

    A new directory inherits the bit itself; a file that would be setgid for a group its maker is
    not in loses the bit (mode_strip_sgid in the kernel since 6.0). Requests that create name the
    supplementary group that counts here, so a `checked` caller is checked, too.
    """
    if not parent.mode & stat.S_ISGID:
        return mode, caller.gid
    if stat.S_ISDIR(mode):
        return mode | stat.S_ISGID, parent.gid
    wants = mode & (stat.S_ISGID | stat.S_IXGRP) == stat.S_ISGID | stat.S_IXGRP
    if wants and caller.uid != 0 and not caller.in_group(parent.gid):
        mode &= ~stat.S_ISGID
    return mode, parent.gid


def drop_suid(caller: Caller, inode: Owned) -> int:
    """The mode after a write or chown by `caller`: no setuid, no setgid if the group may execute.

    Without group execute, setgid goes if the caller is not in the group; of a `checked` one that is
    not known, and it stays: FUSE_HANDLE_KILLPRIV_V2 in linux/fuse.h has it so.
    """
    mode = inode.mode & ~stat.S_ISUID
    drops = mode & stat.S_IXGRP or caller.is_stranger(inode.gid)
    return mode & ~stat.S_ISGID if drops else mode

"""Who may do what: the rules of path_resolution(7), chmod(2), chown(2) and the sticky bit.

A `Caller` that is `checked` came through the kernel with `default_permissions`: the kernel has
judged it with groups and capabilities that we can't see, so nothing here contradicts it.
"""

from __future__ import annotations

import errno
import stat
from typing import Final, Protocol

from fsmeta.types import Caller

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


def require(caller: Caller, inode: Owned, mask: int) -> None:
    """Raises: EACCES unless `caller` may READ, WRITE or EXECUTE (search) as `mask` says."""
    if caller.checked or allows(caller, inode, mask):
        return
    raise OSError(errno.EACCES, "permission denied")


def allows(caller: Caller, inode: Owned, mask: int) -> bool:
    """access(2) by mode bits; root may all but execute a file nobody may execute."""
    if caller.uid == 0:
        if mask & EXECUTE and not stat.S_ISDIR(inode.mode):
            return bool(inode.mode & 0o111)
        return True
    if caller.uid == inode.uid:
        granted = inode.mode >> 6
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
    """Raises: EPERM where the sticky bit of `parent` keeps `caller` from removing `inode`."""
    if not parent.mode & stat.S_ISVTX or caller.checked:
        return
    if caller.uid not in (0, inode.uid, parent.uid):
        raise OSError(errno.EPERM, "the directory is sticky")


def inherit(caller: Caller, parent: Owned, mode: int) -> tuple[int, int]:
    """Mode and gid of an inode made in `parent`: a setgid directory passes on its group.

    A new directory inherits the bit itself; a file that would be setgid for a group its maker is
    not in loses the bit (mode_strip_sgid in the kernel since 6.0). Requests that create name the
    supplementary group that counts here, so a `checked` caller is judged, too.
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
    stranger = not caller.checked and caller.uid != 0 and not caller.in_group(inode.gid)
    return mode & ~stat.S_ISGID if mode & stat.S_IXGRP or stranger else mode

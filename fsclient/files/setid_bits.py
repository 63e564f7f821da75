"""What a caller may by its groups and capabilities: FUSE does not say, /proc does.

Called by `FileIO` when a request may drop S_ISUID or S_ISGID, which is seldom asked for: the kernel
sends it before a write only if there are bits to be dropped. By `VFS` where the sticky bit forbids
what the kernel has allowed. `Cloner` asks for groups, too. Any thread.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import Final

from fsclient.files.handles.open_files import OpenFiles
from fsmeta.types import Attr, Caller, SetAttr
from fsmeta.user_namespace import gid_outward

JUST_DROP: Final = SetAttr(kill_suid=True)
DROP_SETGID: Final = JUST_DROP._replace(kill_sgid=True)
_CAP_FOWNER: Final = 1 << 3  # linux/capability.h


def leaves_setgid(caller: Caller, before: Attr, mode: int) -> bool:
    """Whether `mode` still has S_ISGID without group execute, for a stranger to the file's group.

    Linux drops it then; verbs that don't know a caller's groups leave it.
    """
    if mode & (stat.S_ISGID | stat.S_IXGRP) != stat.S_ISGID or stat.S_ISDIR(mode):
        return False
    return caller.checked and _is_stranger(caller, before.gid)


def require_drop(caller: Caller, attr: Attr, files: OpenFiles) -> None:
    """A request that only drops the bits: is it chown(-1, -1) by a caller that may not?

    What the kernel sends before a write looks the same, so no caller is refused while the file is
    open for writing here. Raises: EPERM.
    """
    if not caller.checked or caller.uid in (0, attr.uid) or stat.S_ISDIR(attr.mode):
        return
    drops = attr.mode & stat.S_ISUID or (
        attr.mode & stat.S_ISGID and (attr.mode & stat.S_IXGRP or _is_stranger(caller, attr.gid))
    )
    if drops and not files.is_written(attr.ino):
        raise OSError(errno.EPERM, "not the owner")


def _is_stranger(caller: Caller, gid: int) -> bool:
    if caller.uid == 0 or gid == caller.gid:
        return False
    groups = groups_of(caller.pid)
    return groups is not None and gid not in groups


def groups_of(pid: int) -> frozenset[int] | None:
    """The supplementary groups of a thread; None where the system does not tell.

    It waits for our answer, so it is there, unless it runs where we don't see its number (0).
    """
    words = _status(pid, b"Groups:")
    return None if words is None else frozenset(gid_outward(int(word)) for word in words)


def overruling(caller: Caller, error: OSError) -> Caller:
    """The caller to use in place of `caller` where the sticky bit forbids what its kernel allowed.

    Raises: `error` where it was for another reason, and for a caller without CAP_FOWNER. One that
    a process has in a user namespace of its own is none: any user can make such a namespace.
    """
    if error.errno != errno.ESTALE or not caller.checked or caller.uid == 0:
        raise error
    words = _status(caller.pid, b"CapEff:")
    if words is None or not int(words[0], 16) & _CAP_FOWNER or not _is_in_our_users(caller.pid):
        raise error
    return caller._replace(uid=0)


def _is_in_our_users(pid: int) -> bool:
    """Whether a thread is in the user namespace of this process, which is that of the mount."""
    try:
        return os.readlink(f"/proc/{pid}/ns/user") == os.readlink("/proc/self/ns/user")
    except OSError:  # it is another user's: this process is not root, and can't tell
        return False


def _status(pid: int, name: bytes) -> list[bytes] | None:
    """A field of /proc/PID/status."""
    try:
        with open(f"/proc/{pid}/status", "rb") as status:
            for line in status:
                if line.startswith(name):
                    return line.split()[1:]
    except OSError:
        pass
    return None

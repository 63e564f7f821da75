"""setattr: chmod(2), chown(2), utimensat(2); truncate(2) is in `extent`."""

from __future__ import annotations

import errno
import stat
from typing import Final

from fsmeta import access
from fsmeta.ops.extent import change_size
from fsmeta.ops.inode import Changed, Env, get_attr, put_attr
from fsmeta.transact import Txn
from fsmeta.types import Attr, Ino, SetAttr

# What 64 bits of nanoseconds can say: 1677-09-21 to 2262-04-11. Times beyond become the nearest of
# these, as timestamp_truncate() in the kernel does for file systems with limits.
_TIME_MIN_NS: Final = -(1 << 63)
_TIME_MAX_NS: Final = (1 << 63) - 1


def setattr_(txn: Txn, env: Env, ino: Ino, want: SetAttr) -> Changed:
    """Change what `want` names, all at once.

    A size alone is truncate(2), which leaves the times of a file that has it already; ftruncate(2)
    and O_TRUNC say `mtime_now` with it. A file of very many chunks gets shorter, but not all at
    once: the size returned says how far it came.
    Raises: EPERM, EACCES, EINVAL, EISDIR, EFBIG, ENOSPC, ESTALE.
    """
    attr = get_attr(txn, ino)
    new = _chown(env, attr, want)
    new = _chmod(env, attr, new, want)
    new = _utimens(env, attr, new, want)
    if want.kill_suid and want.mode is None:
        new = new._replace(mode=access.drop_suid(env.caller, new))
    if want.size is not None:
        if not want.opened:
            access.require(env.caller, attr, access.WRITE)
        new = change_size(txn, env, new, want.size)
        if new == attr and not want.mtime_now:
            return Changed(attr, attr)
        if new.size != attr.size and want.mtime_ns is None:
            new = new._replace(mtime_ns=env.now_ns)
    new = new._replace(ctime_ns=env.now_ns)
    put_attr(txn, new)
    return Changed(attr, new)


def _chown(env: Env, attr: Attr, want: SetAttr) -> Attr:
    if want.uid is None and want.gid is None:
        return attr
    uid = attr.uid if want.uid is None else want.uid
    gid = attr.gid if want.gid is None else want.gid
    caller = env.caller
    if not caller.checked and caller.uid != 0:
        if caller.uid != attr.uid or uid != attr.uid:
            raise OSError(errno.EPERM, "only root may give files away")
        if gid != attr.gid and not caller.in_group(gid):
            raise OSError(errno.EPERM, "not in that group")
    mode = attr.mode if stat.S_ISDIR(attr.mode) else access.drop_suid(caller, attr)
    return attr._replace(uid=uid, gid=gid, mode=mode)


def _chmod(env: Env, attr: Attr, new: Attr, want: SetAttr) -> Attr:
    if want.mode is None:
        return new
    access.require_owner(env.caller, attr)
    mode = want.mode & 0o7777
    caller = env.caller
    if not caller.checked and caller.uid != 0 and not caller.in_group(new.gid):
        mode &= ~stat.S_ISGID
    return new._replace(mode=stat.S_IFMT(attr.mode) | mode)


def _utimens(env: Env, attr: Attr, new: Attr, want: SetAttr) -> Attr:
    """Both times to now takes write permission, anything else an owner."""
    atime, mtime = want.atime_ns, want.mtime_ns
    if atime is None and mtime is None:
        if not want.atime_now and not want.mtime_now:
            return new
        if want.size is None:
            _require_touch(env, attr, want)
    else:
        access.require_owner(env.caller, attr)
    atime = env.now_ns if want.atime_now else atime
    mtime = env.now_ns if want.mtime_now else mtime
    return new._replace(
        atime_ns=attr.atime_ns if atime is None else _representable(atime),
        mtime_ns=attr.mtime_ns if mtime is None else _representable(mtime),
    )


def _require_touch(env: Env, attr: Attr, want: SetAttr) -> None:
    """Raises: EPERM, or EACCES where write permission would do."""
    if not (want.atime_now and want.mtime_now):
        access.require_owner(env.caller, attr)
    elif env.caller.uid != attr.uid:
        access.require(env.caller, attr, access.WRITE)


def _representable(time_ns: int) -> int:
    return max(_TIME_MIN_NS, min(time_ns, _TIME_MAX_NS))

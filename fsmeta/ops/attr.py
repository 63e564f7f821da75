"""setattr: chmod(2), chown(2), utimensat(2); truncate(2) is in `extent`."""

from __future__ import annotations

import errno
import stat

from fsmeta import access
from fsmeta.ops.extent import change_size
from fsmeta.ops.inode import Env, get_attr, put_attr
from fsmeta.transact import Txn
from fsmeta.types import Attr, Ino, SetAttr


def setattr_(txn: Txn, env: Env, ino: Ino, want: SetAttr) -> Attr:
    """Change what `want` names, all at once; returns the new attributes.

    Raises: EPERM, EACCES, EINVAL, EISDIR, EFBIG, ENOSPC, ESTALE.
    """
    attr = get_attr(txn, ino)
    new = _chown(env, attr, want)
    new = _chmod(env, attr, new, want)
    new = _utimens(env, attr, new, want)
    if want.size is not None:
        access.require(env.caller, attr, access.WRITE)
        new = change_size(txn, env, new, want.size)
        if want.mtime_ns is None:
            new = new._replace(mtime_ns=env.now_ns)
    if want.kill_suid and want.mode is None:
        new = new._replace(mode=access.drop_suid(new.mode))
    new = new._replace(ctime_ns=env.now_ns)
    put_attr(txn, new)
    return new


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
    mode = attr.mode if stat.S_ISDIR(attr.mode) else access.drop_suid(attr.mode)
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
    if want.atime_ns is not None or want.mtime_ns is not None:
        access.require_owner(env.caller, attr)
    elif want.atime_now or want.mtime_now:
        if env.caller.uid != attr.uid:
            access.require(env.caller, attr, access.WRITE)
    else:
        return new
    atime = env.now_ns if want.atime_now else want.atime_ns
    mtime = env.now_ns if want.mtime_now else want.mtime_ns
    return new._replace(
        atime_ns=attr.atime_ns if atime is None else atime,
        mtime_ns=attr.mtime_ns if mtime is None else mtime,
    )

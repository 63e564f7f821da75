"""setattr: chmod(2), chown(2), utimensat(2); truncate(2) is in `extent`."""

from __future__ import annotations

import errno
import stat
from typing import Final

from fsmeta.ops.data.extent import change_size
from fsmeta.rules import access, quota
from fsmeta.rules.context import Changed, Env, change_attr, get_attr, require, require_unsealed
from fsmeta.txn.txn import Txn
from fsmeta.types import FLAG_APPEND, FLAG_IMMUTABLE, FLAGS_FIXED, Attr, Ino, SetAttr

# What 64 bits of nanoseconds can say: 1677-09-21 to 2262-04-11. Times beyond become the nearest of
# these, as timestamp_truncate() in the kernel does for file systems with limits.
_TIME_MIN_NS: Final = -(1 << 63)
_TIME_MAX_NS: Final = (1 << 63) - 1


def setattr_(txn: Txn, env: Env, ino: Ino, want: SetAttr) -> Changed:
    """Change what `want` names, all at once.

    A size alone is truncate(2), which sets the times even of a file that has it already, as does
    one with `mtime_now`, ftruncate(2) or O_TRUNC. A file of very many chunks gets shorter, but not
    all at once: the size returned says how far it came.
    Raises: EPERM, EACCES, EINVAL, EISDIR, EFBIG, ENOSPC, EDQUOT, EROFS, ESTALE.
    """
    require_unsealed(ino)
    attr = get_attr(txn, ino)
    if attr.flags & FLAGS_FIXED:
        _require_mutable(attr, want)
    new = _chown(env, attr, want)
    if new.uid != attr.uid or new.gid != attr.gid:
        quota.hand_over(txn, env, attr, new.uid, new.gid)
    new = _chmod(env, attr, new, want)
    new = _utimens(txn, env, attr, new, want)
    if want.kill_suid and want.mode is None and not stat.S_ISDIR(attr.mode):
        mode = access.drop_suid(env.caller, new)
        new = new._replace(mode=mode & ~stat.S_ISGID if want.kill_sgid else mode)
    if want.size is not None:
        if not want.opened:
            require(txn, env, attr, access.WRITE)
        new = change_size(txn, env, new, want.size)
        if want.mtime_ns is None:
            new = new._replace(mtime_ns=env.now_ns)
    new = new._replace(ctime_ns=env.now_ns)
    change_attr(txn, attr, new)
    return Changed(attr, new)


def _require_mutable(attr: Attr, want: SetAttr) -> None:
    """What may_setattr() in the kernel, and truncate(2), say of flags. Raises: EPERM.

    `utimensat` with one time of now, and one left alone, names a time; with both it is touch(1).
    """
    owner = want.mode is not None or want.uid is not None or want.gid is not None
    named = want.atime_ns is not None or want.mtime_ns is not None
    shrinks = want.size is not None and stat.S_ISREG(attr.mode)
    if want.size is None:
        named |= want.atime_now != want.mtime_now
        if want.mtime_now and attr.flags & FLAG_IMMUTABLE:
            raise OSError(errno.EPERM, "is immutable")
    if owner or named or (shrinks and (attr.flags & FLAG_APPEND or not want.opened)):
        access.require_mutable(attr)


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
    if env.caller.is_stranger(new.gid):
        mode &= ~stat.S_ISGID
    return new._replace(mode=stat.S_IFMT(attr.mode) | mode)


def _utimens(txn: Txn, env: Env, attr: Attr, new: Attr, want: SetAttr) -> Attr:
    """Both times to now takes write permission, anything else an owner."""
    atime, mtime = want.atime_ns, want.mtime_ns
    if atime is None and mtime is None:
        if not want.atime_now and not want.mtime_now:
            return new
        if want.size is None:
            _require_touch(txn, env, attr, want)
    else:
        access.require_owner(env.caller, attr)
    atime = env.now_ns if want.atime_now else atime
    mtime = env.now_ns if want.mtime_now else mtime
    return new._replace(
        atime_ns=attr.atime_ns if atime is None else _representable(atime),
        mtime_ns=attr.mtime_ns if mtime is None else _representable(mtime),
    )


def _require_touch(txn: Txn, env: Env, attr: Attr, want: SetAttr) -> None:
    """Raises: EPERM, or EACCES where write permission would do."""
    if not (want.atime_now and want.mtime_now):
        access.require_owner(env.caller, attr)
    elif env.caller.uid != attr.uid:
        require(txn, env, attr, access.WRITE)


def _representable(time_ns: int) -> int:
    return max(_TIME_MIN_NS, min(time_ns, _TIME_MAX_NS))

"""The flags of chattr(1). What they forbid is in `access` and in the verbs."""

from __future__ import annotations

import errno

from fsmeta.rules import access
from fsmeta.rules.context import Env, change_attr, get_attr, require_unsealed
from fsmeta.txn.txn import Txn
from fsmeta.types import FLAGS, FLAGS_FIXED, Attr, FileType, Ino


def getflags(txn: Txn, env: Env, ino: Ino) -> int:
    """FS_IOC_GETFLAGS. Raises: ENOTTY for what is neither file nor directory, ESTALE."""
    del env
    return _get(txn, ino).flags & FLAGS


def setflags(txn: Txn, env: Env, ino: Ino, flags: int) -> None:
    """FS_IOC_SETFLAGS. Raises: EPERM, EOPNOTSUPP for flags that we would not honour, ENOTTY."""
    require_unsealed(ino)
    attr = _get(txn, ino)
    access.require_owner(env.caller, attr)
    if (flags ^ attr.flags) & FLAGS_FIXED and env.caller.uid != 0:
        raise OSError(errno.EPERM, "only root makes files immutable or append-only")
    if flags & ~FLAGS:
        raise OSError(errno.EOPNOTSUPP, f"flags {flags & ~FLAGS:#x}")
    kept = attr.flags & ~FLAGS
    change_attr(txn, attr, attr._replace(flags=flags | kept, ctime_ns=env.now_ns))


def _get(txn: Txn, ino: Ino) -> Attr:
    attr = get_attr(txn, ino)
    if not attr.is_dir and attr.type is not FileType.REG:
        raise OSError(errno.ENOTTY, "only files and directories have flags")
    return attr

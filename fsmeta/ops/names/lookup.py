"""lookup, getattr, readlink, access: verbs that only read.

The kernel asks most of these again and again, and most answers are known: `known_attr` and
`known_name` answer from leased rows, a transaction does the rest.
"""

from __future__ import annotations

import errno
import stat
from collections.abc import Mapping
from typing import Final

from fsmeta.errors import Conflict
from fsmeta.rules import access as rules
from fsmeta.rules.context import (
    Env,
    check_name,
    find,
    get_attr,
    get_parent,
    require,
    require_unsealed,
)
from fsmeta.schema import inode, keys
from fsmeta.txn.row_cache import RowCache
from fsmeta.txn.txn import Txn
from fsmeta.types import NAME_MAX, ROOT_INO, Attr, Ino

_DOTS: Final = (b".", b"..")


def known_attr(cache: RowCache, ino: Ino) -> Attr | None:
    """`getattr_` without asking the store; None where it has to be asked."""
    row = keys.inode_row(ino)
    fields = cache.leased(row) or cache.busy.recent(row)
    return None if fields is None else _attr_in(ino, fields)


def leased_attr(cache: RowCache, ino: Ino) -> Attr | None:
    """`known_attr` without what is shown of contended directories."""
    fields = cache.leased(keys.inode_row(ino))
    return None if fields is None else _attr_in(ino, fields)


def _attr_in(ino: Ino, fields: Mapping[bytes, bytes | None]) -> Attr | None:
    a, v = fields.get(keys.ATTR_FIELD), fields.get(keys.VOLATILE_FIELD)
    return inode.unpack_inode(ino, a, v) if a and v else None


def known_name(cache: RowCache, parent: Ino, name: bytes) -> Attr | None:
    """`lookup` for a caller that may search, without a request; None where one is needed, and for
    `.` and `..`, which are in no row. Raises: ENOENT.
    """
    if name in _DOTS:
        return None
    row = keys.dir_row(parent)
    value = cache.get(row, name, need_vouched=True)
    if value is None and 0 < len(name) <= NAME_MAX:
        raise OSError(errno.ENOENT, "no such name")
    if not isinstance(value, bytes):
        return None
    attr = known_attr(cache, keys.unpack_dentry(row, name, value)[1])
    return attr if attr is not None and attr.nlink else None


def known_child(cache: RowCache, parent: Ino, name: bytes) -> Ino | None:
    """The inode that `name` in `parent` leads to, without asking the store; None where that is not
    known, or there is none."""
    row = keys.dir_row(parent)
    value = cache.get(row, name, need_vouched=True)
    return keys.unpack_dentry(row, name, value)[1] if isinstance(value, bytes) else None


def lookup(txn: Txn, env: Env, parent: Ino, name: bytes) -> Attr:
    """What `name` in `parent` leads to; `.` and `..` too.

    Raises: ENOENT, ENOTDIR, EACCES, ENAMETOOLONG.
    """
    if name in _DOTS:
        return _lookup_dots(txn, env, parent, name)
    if not env.caller.checked:
        get_parent(txn, env, parent, rules.EXECUTE)
    check_name(name)
    found = find(txn, parent, name)
    if found is None:
        raise OSError(errno.ENOENT, "no such name")
    if found.attr.nlink == 0 and txn.cached:  # the invalidation of one is here, of the other not
        raise Conflict("a name that is remembered leads to an inode without a name")
    return found.attr


def _lookup_dots(txn: Txn, env: Env, parent: Ino, name: bytes) -> Attr:
    here = get_parent(txn, env, parent, rules.EXECUTE)
    if name == b"." or parent == ROOT_INO:
        return get_attr(txn, parent)
    return get_attr(txn, here.parent)


def getattr_(txn: Txn, env: Env, ino: Ino) -> Attr:
    """stat(2) of an inode. Raises: ESTALE."""
    del env
    return get_attr(txn, ino)


def open_(txn: Txn, env: Env, ino: Ino) -> Attr:
    """As `getattr_`, with the first chunk, which is likely to be read next. Raises: ESTALE."""
    del env
    txn.get_many(inode.attr_keys(ino), along=((keys.inode_row(ino), keys.chunk_field(0)),))
    return get_attr(txn, ino)


def access(txn: Txn, env: Env, ino: Ino, mask: int) -> None:
    """access(2). Raises: EACCES, EPERM, EROFS, ESTALE."""
    require_known(txn, env, get_attr(txn, ino), mask)


def require_known(txn: Txn, env: Env, attr: Attr, mask: int) -> None:
    """`access` by attributes that have just been read. Raises: EACCES, EPERM, EROFS."""
    if mask & rules.WRITE:
        require_unsealed(attr.ino)
    require(txn, env, attr, mask)


def readlink(txn: Txn, env: Env, ino: Ino) -> bytes:
    """The target of a symlink. Raises: EINVAL, ESTALE."""
    del env
    target = txn.get(keys.inode_row(ino), keys.LINK_FIELD)
    if target is None:
        attr = get_attr(txn, ino)
        if not stat.S_ISLNK(attr.mode):
            raise OSError(errno.EINVAL, f"inode {ino} is not a symlink")
        raise keys.corrupt(ino, keys.LINK_FIELD, "a symlink without a target")
    return target

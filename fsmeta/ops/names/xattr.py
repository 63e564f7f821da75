"""setxattr, getxattr, listxattr, removexattr: fields of the inode's row."""

from __future__ import annotations

import errno
import stat
from typing import Final

from fsmeta.ops.names import acl as acls
from fsmeta.ops.names.lookup import known_attr
from fsmeta.rules import access, quota
from fsmeta.rules.context import Env, get_attr, require, require_unsealed
from fsmeta.schema import inode, keys
from fsmeta.schema.acl import XATTRS as ACLS
from fsmeta.schema.xattrs import XATTRS_FIELD, XATTRS_MAX, charged, cost, is_xattr
from fsmeta.store.contract import Key
from fsmeta.txn.row_cache import RowCache
from fsmeta.txn.txn import Txn
from fsmeta.types import XATTR_NAME_MAX, XATTR_SIZE_MAX, Attr, FileType, Ino

CREATE: Final = 1  # xattr.h
REPLACE: Final = 2
_MARK: Final = b"\1"  # before each value, so that an empty one can be stored
_USER: Final = b"user."
_SECURITY: Final = b"security."
_NAMESPACES: Final = (_USER, b"trusted.", _SECURITY)


def require_not_known_absent(cache: RowCache, ino: Ino, name: bytes) -> None:
    """Answer without asking the store where it is known that `name` has no value.

    For `security.*` and ACLs only, which any caller may read: the kernel asks for
    `security.capability` when it first writes to a file, and for the ACL when a caller that does
    not own the file comes. Raises: ENODATA.
    """
    if name in ACLS:
        attr = known_attr(cache, ino)
        if attr is not None and name not in acls.listed(attr) and attr.type is not FileType.LNK:
            raise _no_such()
        return
    if not name.startswith(_SECURITY):
        return
    if cache.get(keys.inode_row(ino), keys.xattr_field(name), need_vouched=True) is None:
        raise _no_such()


def _no_such() -> OSError:
    return OSError(errno.ENODATA, "no such attribute")


def setxattr(
    txn: Txn, env: Env, ino: Ino, name: bytes, value: bytes, flags: int, kill_sgid: bool
) -> None:
    """Set an attribute; CREATE wants it new, REPLACE wants it there, which ACLs don't look at.

    Raises: EEXIST, ENODATA, ERANGE, E2BIG, EINVAL, ENOTSUP, EPERM, EACCES, ESTALE.
    """
    require_unsealed(ino)
    if flags & ~(CREATE | REPLACE):
        raise OSError(errno.EINVAL, f"setxattr flags {flags:#x}")
    if len(value) > XATTR_SIZE_MAX:
        raise OSError(errno.E2BIG, "attribute value is larger than 64 KiB")
    if name in ACLS:
        acls.setxattr(txn, env, ino, name, value, kill_sgid)
        return
    key = (keys.inode_row(ino), keys.xattr_field(name))
    if flags:
        _require_presence(_find(txn, env, ino, name, access.WRITE), flags)
    elif txn.first and all(txn.is_cached(*each) for each in inode.attr_keys(ino)):
        _require_allowed(txn, env, ino, name, access.WRITE)
        txn.assume(*key, None)  # most have none: then nothing has to be asked for
        txn.assume(key[0], XATTRS_FIELD, None)
    else:
        _find(txn, env, ino, name, access.WRITE)
    _change(txn, env, ino, key[1], _MARK + value)


def _require_presence(old: bytes | None, flags: int) -> None:
    """Raises: EEXIST, ENODATA where `old` is not what CREATE or REPLACE wants."""
    if flags & CREATE and old is not None:
        raise OSError(errno.EEXIST, "the attribute exists")
    if flags & REPLACE and old is None:
        raise _no_such()


def getxattr(txn: Txn, env: Env, ino: Ino, name: bytes) -> bytes:
    """The value of an attribute. Raises: ENODATA, ENOTSUP, EACCES, ESTALE."""
    if name in ACLS:
        return acls.getxattr(txn, ino, name)
    value = _find(txn, env, ino, name, access.READ)
    if value is None:
        raise _no_such()
    return value[len(_MARK) :]


def removexattr(txn: Txn, env: Env, ino: Ino, name: bytes) -> None:
    """Raises: ENODATA, ENOTSUP, EPERM, EACCES, EROFS, ESTALE."""
    require_unsealed(ino)
    if name in ACLS:
        acls.setxattr(txn, env, ino, name, b"", False)
        return
    if _find(txn, env, ino, name, access.WRITE) is None:
        raise _no_such()
    _change(txn, env, ino, keys.xattr_field(name), None)


def _change(txn: Txn, env: Env, ino: Ino, field: bytes, value: bytes | None) -> None:
    """Put an attribute in place of what the verb has found, and charge for it.

    Raises: ENOSPC where the inode would have more than XATTRS_MAX; ENOSPC, EDQUOT of limits.
    """
    row = keys.inode_row(ino)
    old, count = txn.get_many(((row, field), (row, XATTRS_FIELD)))
    before = keys.unpack_count(row, XATTRS_FIELD, count)
    # one that was set by an earlier version may not be in the sum
    after = max(0, before + cost(field, value) - cost(field, old))
    if after > XATTRS_MAX and after > before:
        raise OSError(errno.ENOSPC, f"inode {ino} has {XATTRS_MAX} bytes of extended attributes")
    if value is None:
        txn.delete(row, field)
    else:
        txn.put(row, field, value)
    if after != before:
        _put_sum(txn, row, after)
    moved = charged(after) - charged(before)
    if not moved:
        txn.merge(row, keys.VOLATILE_FIELD, inode.ctime_parts(env.now_ns))
        return
    attr = get_attr(txn, ino)
    new = attr._replace(used=attr.used + moved, ctime_ns=max(attr.ctime_ns, env.now_ns))
    if attr.nlink:
        quota.charge(txn, env, attr, space=new.space - attr.space, inodes=0)
    txn.put(row, keys.VOLATILE_FIELD, inode.pack_volatile(new))


def _put_sum(txn: Txn, row: bytes, total: int) -> None:
    if total:
        txn.put(row, XATTRS_FIELD, b"%d" % total)
    else:
        txn.delete(row, XATTRS_FIELD)


def listxattr(txn: Txn, env: Env, ino: Ino) -> list[bytes]:
    """The names the caller may know of: `trusted.*` is root's. Raises: ESTALE."""
    row = keys.inode_row(ino)
    (found,) = txn.get_short_rows([row])
    fields: dict[bytes, bytes] = {}
    shown: set[bytes] = set()
    for field, value in txn.fields_of(row) if found is None else found.items():
        if is_xattr(field):
            shown.add(field[1:])
        elif field in keys.ATTR_FIELDS:
            fields[field] = value
    if not {*keys.ATTR_FIELDS} <= fields.keys():
        raise OSError(errno.ESTALE, f"inode {ino} is gone")
    attr = inode.unpack_inode(ino, *(fields[field] for field in keys.ATTR_FIELDS))
    names = [*acls.listed(attr), *shown]
    if env.caller.uid != 0:
        names = [name for name in names if not name.startswith(b"trusted.")]
    return sorted(names)


def _find(txn: Txn, env: Env, ino: Ino, name: bytes, mask: int) -> bytes | None:
    """The stored value; what else is needed for it comes in the same request."""
    row = keys.inode_row(ino)
    key = (row, keys.xattr_field(name))
    also = (key, (row, XATTRS_FIELD)) if mask == access.WRITE else (key,)
    _require_allowed(txn, env, ino, name, mask, also)
    return txn.get(*key)


def _require_allowed(
    txn: Txn, env: Env, ino: Ino, name: bytes, mask: int, also: tuple[Key, ...] = ()
) -> None:
    """The checks every verb here makes; `also` is read with what they need."""
    if len(name) > XATTR_NAME_MAX:
        raise OSError(errno.ERANGE, "attribute name is longer than 255 bytes")
    if env.caller.checked and mask == access.READ:
        _require_namespace(name)  # no request is needed
    txn.get_many((*inode.attr_keys(ino), *also))
    attr = get_attr(txn, ino)
    if mask == access.WRITE:
        access.require_mutable(attr)
    if not env.caller.checked:
        _require(txn, env, attr, name, mask)
    _require_namespace(name)


def _require_namespace(name: bytes) -> None:
    """Raises: ENOTSUP for what no handler of ours takes; EINVAL for `user.` alone, and the like."""
    if not name.startswith(_NAMESPACES):
        raise OSError(errno.ENOTSUP, f"attribute namespace of {name!r}")
    if name in _NAMESPACES:
        raise OSError(errno.EINVAL, "the attribute has no name")


def _require(txn: Txn, env: Env, attr: Attr, name: bytes, mask: int) -> None:
    """xattr_permission() in the kernel: `trusted.*` and changes of `security.*` are root's."""
    caller = env.caller
    if name.startswith(_USER):
        if not attr.is_dir and attr.type is not FileType.REG:
            missing = errno.ENODATA if mask == access.READ else errno.EPERM
            raise OSError(missing, "only files and directories have user attributes")
        if attr.is_dir and attr.mode & stat.S_ISVTX and mask == access.WRITE:
            access.require_owner(caller, attr)
    if caller.uid == 0:
        return
    if not name.startswith((b"trusted.", b"security.")):
        require(txn, env, attr, mask)
    elif name.startswith(b"trusted."):
        missing = errno.ENODATA if mask == access.READ else errno.EPERM
        raise OSError(missing, "trusted attributes are root's")
    elif mask == access.WRITE:
        raise OSError(errno.EPERM, "security attributes are root's")

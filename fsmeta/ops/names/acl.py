"""POSIX ACLs: the xattrs that show them, and what is inherited; rules: `fsmeta/schema/acl`."""

from __future__ import annotations

import errno
import stat

from fsmeta.rules import access
from fsmeta.rules.context import Env, change_attr, get_acl, get_attr
from fsmeta.schema import keys
from fsmeta.schema.acl import (
    ACCESS_XATTR,
    DEFAULT_XATTR,
    MADE_MAX,
    XATTRS,
    Acl,
    build,
    inherit as inherited,
    numbers,
    pack_record,
    pack_xattr,
    parse_entries,
    with_mode,
    without_mode,
)
from fsmeta.schema.inode import Stable
from fsmeta.txn.txn import Txn
from fsmeta.types import Attr, Ino


def find(txn: Txn, attr: Attr, name: bytes) -> Acl | None:
    """The ACL of an inode that the xattr `name` shows; None where it has none. Raises: Corrupt."""
    if name == DEFAULT_XATTR:
        return get_acl(txn, attr.default_acl) if attr.default_acl else None
    return with_mode(get_acl(txn, attr.acl), attr.mode) if attr.acl else None


def both(txn: Txn, attr: Attr) -> tuple[Acl | None, Acl | None]:
    """The access ACL and the default ACL of an inode. Raises: Corrupt."""
    return find(txn, attr, ACCESS_XATTR), find(txn, attr, DEFAULT_XATTR)


def listed(attr: Attr) -> list[bytes]:
    """The names under which listxattr(2) shows the ACLs of an inode."""
    return [
        name for name, number in zip(XATTRS, (attr.acl, attr.default_acl), strict=True) if number
    ]


def getxattr(txn: Txn, ino: Ino, name: bytes) -> bytes:
    """An ACL as the kernel has it; anyone may know. Raises: ENODATA, ENOTSUP, ESTALE."""
    attr = get_attr(txn, ino)
    _require_kind(attr)
    acl = find(txn, attr, name)
    if acl is None:
        raise OSError(errno.ENODATA, "no such ACL")
    return pack_xattr(acl)


def setxattr(txn: Txn, env: Env, ino: Ino, name: bytes, value: bytes, kill_sgid: bool) -> None:
    """Set an ACL, or remove it where `value` has no entries.

    An access ACL sets the mode, and is kept only where it says more. `kill_sgid`: a `checked`
    caller is not in the group, so S_ISGID goes.
    Raises: EINVAL, EOPNOTSUPP, E2BIG, EDQUOT, EPERM, ESTALE; EACCES for a default ACL on a file.
    """
    entries = parse_entries(value)
    attr = get_attr(txn, ino)
    access.require_mutable(attr)
    _require_kind(attr)
    if name == DEFAULT_XATTR and not attr.is_dir:
        if entries:
            raise OSError(errno.EACCES, "only directories have a default ACL")
        return
    access.require_owner(env.caller, attr)
    acl = build(entries) if entries else None
    if name == ACCESS_XATTR:
        new = _set_access(txn, env, attr, acl, kill_sgid)
    else:
        new = attr._replace(default_acl=_number(txn, env, acl) if acl else 0)
    change_attr(txn, attr, new._replace(ctime_ns=env.now_ns))


def _set_access(txn: Txn, env: Env, attr: Attr, acl: Acl | None, kill_sgid: bool) -> Attr:
    if acl is None:
        return attr._replace(acl=0)
    mode = attr.mode & ~0o777 | acl.bits
    if kill_sgid or env.caller.is_stranger(attr.gid):
        mode &= ~stat.S_ISGID
    more = acl.mask is not None
    return attr._replace(mode=mode, acl=_number(txn, env, without_mode(acl)) if more else 0)


def inherit(txn: Txn, env: Env, attr: Attr, directory: Stable) -> Attr:
    """A new inode with the mode and the ACLs that its directory wants. Raises: EDQUOT."""
    if not directory.default_acl or stat.S_ISLNK(attr.mode):
        return attr
    default = get_acl(txn, directory.default_acl)
    mode, stored = inherited(default, attr.mode)
    return attr._replace(
        mode=mode,
        acl=_number(txn, env, stored) if stored else 0,
        default_acl=directory.default_acl if attr.is_dir else 0,
    )


def _number(txn: Txn, env: Env, acl: Acl) -> int:
    """The id of an ACL's record, which is made where there is none.

    The commit checks that what was read here is so still: no two clients give one id away.
    Records go with `fsck --repair` only, so a user may make MADE_MAX of them: EDQUOT beyond.
    """
    record = pack_record(acl)
    for number in numbers(record, env.now_ns):
        row = keys.acl_row(number)
        found = txn.get(row, keys.ACL_FIELD)
        if found is None:
            txn.put(row, keys.ACL_FIELD, record)
            txn.put(keys.FORMAT, keys.HAS_ACLS, b"1")
            if env.caller.uid:
                maker = keys.pack_u32(env.caller.uid)
                txn.add(keys.ACL_MAKERS, maker, 1, MADE_MAX, "EDQUOT")
        if found in (None, record):
            return number
    raise OSError(errno.ENOSPC, "no id is free for this ACL")


def has_acls(txn: Txn) -> bool:
    """Whether an inode of the volume has, or has had, an ACL."""
    return txn.get(keys.FORMAT, keys.HAS_ACLS) is not None


def _require_kind(attr: Attr) -> None:
    if stat.S_ISLNK(attr.mode):
        raise OSError(errno.ENOTSUP, "symlinks have no ACL")

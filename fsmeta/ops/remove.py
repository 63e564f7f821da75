"""unlink and rmdir, and how an inode loses a name.

An inode that loses its last name becomes an orphan: it keeps its row with `nlink` 0 and is listed
in O until the background worker has heard from every session that nobody holds it open.
"""

from __future__ import annotations

import errno

from fsmeta import access, quota, schema
from fsmeta.ops.inode import Env, Found, find, get_place, put_attr, touch_dir
from fsmeta.schema import Stable
from fsmeta.transact import Txn
from fsmeta.types import NO_PARENT, Attr, FileType, Ino


def unlink(txn: Txn, env: Env, parent: Ino, name: bytes) -> Attr:
    """Remove the name of anything but a directory; returns what is left of the inode.

    Raises: ENOENT, EISDIR, EACCES, EPERM, ENOTDIR.
    """
    victim = _find_victim(txn, env, parent, name)
    if victim.type is FileType.DIR:
        raise OSError(errno.EISDIR, "is a directory")
    txn.delete(schema.dir_row(parent), name)
    touch_dir(txn, parent, env.now_ns)
    return drop_name(txn, env, victim.attr, parent)


def rmdir(txn: Txn, env: Env, parent: Ino, name: bytes) -> Attr:
    """Remove an empty directory; returns what is left of it.

    Raises: ENOENT, ENOTDIR, ENOTEMPTY, EACCES, EPERM, EINVAL for `.`.
    """
    if name == b".":
        raise OSError(errno.EINVAL, "can't remove `.`")
    if name == b"..":
        raise OSError(errno.ENOTEMPTY, "`..` is not empty")
    victim = _find_victim(txn, env, parent, name)
    if victim.type is not FileType.DIR:
        raise OSError(errno.ENOTDIR, "not a directory")
    txn.delete(schema.dir_row(parent), name)
    touch_dir(txn, parent, env.now_ns, nlink_delta=-1)
    return drop_dir(txn, env, victim.attr)


def _find_victim(txn: Txn, env: Env, parent: Ino, name: bytes) -> Found:
    # first what is less often known: one request brings a name and its inode
    victim = find(txn, parent, name)
    directory, _ = get_place(txn, env, parent, name)
    if victim is None:
        raise OSError(errno.ENOENT, "no such name")
    require_removable(env, directory, victim.attr)
    return victim


def require_removable(env: Env, directory: Stable, attr: Attr) -> None:
    """Raises: EACCES, EPERM unless the caller may take a name of `attr` out of `directory`."""
    access.require(env.caller, directory, access.WRITE | access.EXECUTE)
    access.require_unsticky(env.caller, directory, attr)


def drop_name(txn: Txn, env: Env, attr: Attr, parent: Ino) -> Attr:
    """A file loses one name in `parent`; returns its new attributes."""
    left = attr._replace(nlink=attr.nlink - 1, ctime_ns=env.now_ns)
    if left.nlink == 0:
        return _orphan(txn, env, left)
    if attr.parent == NO_PARENT:
        move_parent_count(txn, attr.ino, parent, -1)
    row = schema.inode_row(attr.ino)
    txn.put(row, schema.VOLATILE_FIELD, schema.pack_volatile(left))
    return left


def drop_dir(txn: Txn, env: Env, attr: Attr) -> Attr:
    """An empty directory loses its name. The commit is ENOTEMPTY if it is not empty."""
    txn.require_empty(schema.dir_row(attr.ino))
    return _orphan(txn, env, attr._replace(nlink=0, ctime_ns=env.now_ns))


def _orphan(txn: Txn, env: Env, attr: Attr) -> Attr:
    # with a new `a` record, whoever still believes in this directory can't create in it
    orphan = attr._replace(parent=NO_PARENT)
    put_attr(txn, orphan)
    txn.put(schema.ORPHANS, schema.pack_u64(attr.ino), schema.pack_u64(env.now_ns // 10**9))
    quota.charge(txn, env.limits, space=-attr.space, inodes=-1)
    return orphan


def move_parent_count(txn: Txn, ino: Ino, parent: Ino, delta: int) -> None:
    """A hard-linked file has `delta` more names in `parent`."""
    row, field = schema.inode_row(ino), schema.parent_field(parent)
    count = schema.unpack_count(row, field, txn.get(row, field)) + delta
    if count < 0:
        raise schema.corrupt(ino, field, "fewer names than links")
    if count:
        txn.put(row, field, b"%d" % count)
    else:
        txn.delete(row, field)

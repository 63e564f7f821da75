"""link(2): one more name for a file."""

from __future__ import annotations

import errno

from fsmeta.ops.names.remove import move_parent_count
from fsmeta.ops.names.tmpfile import first_name
from fsmeta.rules import access, quota
from fsmeta.rules.context import Env, get_attr, get_place, put_attr, put_dentry, require, touch_dir
from fsmeta.schema import inode, keys
from fsmeta.schema.snapshot_inos import is_snapshot_ino
from fsmeta.schema.trash import TRASH_INO
from fsmeta.txn.txn import Txn
from fsmeta.types import LINK_MAX, NO_PARENT, Attr, Ino


def link(txn: Txn, env: Env, ino: Ino, parent: Ino, name: bytes) -> Attr:
    """Give `ino` the name `name` in `parent`; returns its new attributes.

    Raises: EPERM for a directory, EEXIST, EMLINK, ENOENT where the file has lost its last name,
    EXDEV out of a snapshot.
    """
    if is_snapshot_ino(ino):
        raise OSError(errno.EXDEV, "is in a snapshot")
    here = (keys.inode_row(parent), keys.ATTR_FIELD), (keys.dir_row(parent), name)
    txn.get_many((*inode.attr_keys(ino), *here))
    attr = get_attr(txn, ino)
    directory, dentry = get_place(txn, env, parent, name)
    if dentry is not None:
        raise OSError(errno.EEXIST, "the name exists")
    require(txn, env, directory, access.WRITE)
    access.require_mutable(attr)
    if attr.is_dir:
        raise OSError(errno.EPERM, "is a directory")
    if attr.parent > TRASH_INO:
        raise OSError(errno.EPERM, "the file is in the trash: move it out of there")
    if attr.nlink == 0:
        linked = first_name(txn, env, attr, parent)
    else:
        linked = add_name(txn, env, attr, parent)._replace(ctime_ns=env.now_ns)
    put_attr(txn, linked)
    put_dentry(txn, parent, name, attr.type, ino)
    touch_dir(txn, parent, env.now_ns)
    return linked


def add_name(txn: Txn, env: Env, attr: Attr, parent: Ino) -> Attr:
    """A file that has names has one more, in `parent`; the caller writes its records.

    Raises: EMLINK.
    """
    if attr.nlink >= LINK_MAX:
        raise OSError(errno.EMLINK, "too many links")
    if attr.parent != NO_PARENT:
        _leave_single_parent(txn, attr, parent)
        quota.settle(txn, env, attr.ino, attr.parent)
    else:
        move_parent_count(txn, attr.ino, parent, +1)
    return attr._replace(nlink=attr.nlink + 1, parent=NO_PARENT)


def _leave_single_parent(txn: Txn, attr: Attr, parent: Ino) -> None:
    """From one parent in the `a` record to counts of names by parent."""
    row = keys.inode_row(attr.ino)
    if attr.parent == parent:
        txn.put(row, keys.parent_field(parent), b"2")
    else:
        txn.put(row, keys.parent_field(attr.parent), b"1")
        txn.put(row, keys.parent_field(parent), b"1")

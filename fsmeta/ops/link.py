"""link(2): one more name for a file."""

from __future__ import annotations

import errno

from fsmeta import access, schema
from fsmeta.ops.inode import Env, get_attr, get_place, put_attr, put_dentry, touch_dir
from fsmeta.ops.remove import move_parent_count
from fsmeta.transact import Txn
from fsmeta.types import LINK_MAX, NO_PARENT, Attr, Ino


def link(txn: Txn, env: Env, ino: Ino, parent: Ino, name: bytes) -> Attr:
    """Give `ino` the name `name` in `parent`; returns its new attributes.

    Raises: EPERM for a directory, EEXIST, EMLINK, ENOENT where the file has lost its last name.
    """
    here = (schema.inode_row(parent), schema.ATTR_FIELD), (schema.dir_row(parent), name)
    txn.get_many((*schema.attr_keys(ino), *here))
    attr = get_attr(txn, ino)
    directory, dentry = get_place(txn, env, parent, name)
    if dentry is not None:
        raise OSError(errno.EEXIST, "the name exists")
    access.require(env.caller, directory, access.WRITE)
    if attr.is_dir:
        raise OSError(errno.EPERM, "is a directory")
    if attr.nlink == 0:
        raise OSError(errno.ENOENT, "the file has no name left")
    if attr.nlink >= LINK_MAX:
        raise OSError(errno.EMLINK, "too many links")
    if attr.parent != NO_PARENT:
        _leave_single_parent(txn, attr, parent)
    else:
        move_parent_count(txn, ino, parent, +1)
    linked = attr._replace(nlink=attr.nlink + 1, ctime_ns=env.now_ns, parent=NO_PARENT)
    put_attr(txn, linked)
    put_dentry(txn, parent, name, attr.type, ino)
    touch_dir(txn, parent, env.now_ns)
    return linked


def _leave_single_parent(txn: Txn, attr: Attr, parent: Ino) -> None:
    """From one parent in the `a` record to counts of names by parent."""
    row = schema.inode_row(attr.ino)
    if attr.parent == parent:
        txn.put(row, schema.parent_field(parent), b"2")
    else:
        txn.put(row, schema.parent_field(attr.parent), b"1")
        txn.put(row, schema.parent_field(parent), b"1")

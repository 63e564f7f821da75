"""O_TMPFILE: a file that begins as an orphan, and link(2) that may give it its first name."""

from __future__ import annotations

import errno

from fsmeta.ops.names.create import NewNode, born
from fsmeta.rules import access, quota
from fsmeta.rules.context import Env, get_parent, put_attr, require_unsealed
from fsmeta.schema import keys
from fsmeta.txn.txn import Txn
from fsmeta.types import NO_PARENT, Attr, Ino


def tmpfile(txn: Txn, env: Env, parent: Ino, node: NewNode, linkable: bool) -> Attr:
    """Make the file `node` for `parent`, without a name: it goes unless a client holds it open.

    As all that has no name it costs nothing. Raises: ENOENT, ENOTDIR, EACCES.
    """
    require_unsealed(parent)
    directory = get_parent(txn, env, parent, access.WRITE | access.EXECUTE)
    attr = born(txn, env, directory, NO_PARENT, node)._replace(nlink=0)
    row = keys.inode_row(node.ino)
    txn.require_empty(row)
    put_attr(txn, attr)
    if linkable:
        txn.put(row, keys.NAMELESS_FIELD, b"1")
    txn.put(keys.ORPHANS, keys.pack_u64(node.ino), keys.pack_u64(env.now_ns // 10**9))
    return attr


def first_name(txn: Txn, env: Env, attr: Attr, parent: Ino) -> Attr:
    """An orphan as it is with its first name, which is in `parent`; the caller writes both.

    Raises: ENOENT where it is one that has lost its name, ENOSPC, EDQUOT.
    """
    row = keys.inode_row(attr.ino)
    if txn.get(row, keys.NAMELESS_FIELD) is None:
        raise OSError(errno.ENOENT, "the file has no name left")
    txn.delete(row, keys.NAMELESS_FIELD)
    txn.delete(keys.ORPHANS, keys.pack_u64(attr.ino))
    named = attr._replace(nlink=1, ctime_ns=env.now_ns, parent=parent)
    quota.charge(txn, env, named, space=attr.space, inodes=1)
    return named

"""create, mknod, mkdir, symlink: a new inode under a new name."""

from __future__ import annotations

import errno
import stat
from typing import NamedTuple

from fsmeta.ops.names.acl import inherit
from fsmeta.rules import access, quota
from fsmeta.rules.context import Env, get_place, put_attr, put_dentry, require, touch_dir
from fsmeta.schema import inode, keys
from fsmeta.schema.inode import Stable
from fsmeta.txn.txn import Txn
from fsmeta.types import FLAGS_INHERITED, SYMLINK_MAX, Attr, FileType, Ino


class NewNode(NamedTuple):
    """What is to be made."""

    ino: Ino  # from `Meta`'s supply; a retry uses the same one
    mode: int  # with the S_IFMT bits
    rdev: int = 0
    target: bytes = b""
    umask: int = 0  # counts where the directory has no default ACL


def create(txn: Txn, env: Env, parent: Ino, name: bytes, node: NewNode) -> Attr:
    """Make an inode of any type and give it a name; one round trip when the parent is known.

    Raises: EEXIST, ENOENT, ENOTDIR, EACCES, ENAMETOOLONG, ENOSPC, EDQUOT.
    """
    directory, dentry = get_place(txn, env, parent, name, vacant=True)
    if dentry is not None:
        raise OSError(errno.EEXIST, "the name exists")
    require(txn, env, directory, access.WRITE)
    access.require_making(env.caller, node.mode, node.rdev)
    attr = put_new(txn, env, directory, parent, name, node)
    touch_dir(txn, parent, env.now_ns, nlink_delta=int(attr.is_dir))
    return attr


def put_new(txn: Txn, env: Env, directory: Stable, parent: Ino, name: bytes, node: NewNode) -> Attr:
    """Make an inode that has one name; the caller has checked both, and touches the directory.

    Raises: ENAMETOOLONG, ENOENT for a symlink's target; ENOSPC, EDQUOT.
    """
    attr = born(txn, env, directory, parent, node)
    mode = attr.mode
    is_dir = stat.S_ISDIR(mode)
    txn.require_empty(keys.inode_row(node.ino))  # true, and so we know that it has no xattrs
    if is_dir:
        txn.require_empty(keys.dir_row(node.ino))  # nor names
    elif stat.S_ISLNK(mode):
        attr = attr._replace(size=len(node.target))
        _put_target(txn, node)
    put_attr(txn, attr)
    put_dentry(txn, parent, name, FileType.of_mode(mode), node.ino)
    quota.charge(txn, env, attr, space=0, inodes=1)
    return attr


def born(txn: Txn, env: Env, directory: Stable, parent: Ino, node: NewNode) -> Attr:
    """The attributes of a new inode in `directory`, with what that passes on."""
    caller = env.caller
    mode, gid = access.inherit(caller, directory, node.mode)
    if not directory.default_acl:
        mode &= ~node.umask
    owner = (caller.uid, gid)
    attr = inode.new_attr(node.ino, mode, owner, parent, env.now_ns, node.rdev, env.born)
    if directory.flags or directory.default_acl:
        attr = inherit(txn, env, attr._replace(flags=directory.flags & FLAGS_INHERITED), directory)
    return attr


def _put_target(txn: Txn, node: NewNode) -> None:
    if len(node.target) > SYMLINK_MAX:
        raise OSError(errno.ENAMETOOLONG, "symlink target is longer than 4095 bytes")
    if not node.target:
        raise OSError(errno.ENOENT, "empty symlink target")
    txn.put(keys.inode_row(node.ino), keys.LINK_FIELD, node.target)

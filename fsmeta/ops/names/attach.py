"""Attached files: inodes without slices that name objects of a bucket.

A file whose object has changed is replaced by a rename of a new one, whose name says what the old
file shows (`replacement_name`). The commit of the rename checks that, so it never replaces bytes
that a client has given the old file meanwhile.
"""

from __future__ import annotations

import errno
import hashlib
import stat
from collections.abc import Sequence
from typing import Final, NamedTuple

from fsmeta.ops.names.create import NewNode, put_new
from fsmeta.rules import access
from fsmeta.rules.context import Env, get_place, put_attr, require, touch_dir
from fsmeta.schema import inode, keys
from fsmeta.txn.txn import Txn
from fsmeta.types import FILE_SIZE_MAX, FLAG_ATTACHED, AttachedObject, Attr, Ino

FILES_MAX: Final = 100  # of one commit
REPLACEMENT: Final = b".slicefs-attach-"
_DIGEST_CHARS: Final = 32


class NewAttached(NamedTuple):
    """A file to be made."""

    name: bytes
    ino: Ino  # from the client's supply
    found: AttachedObject
    size: int
    mtime_ns: int


def attach(txn: Txn, env: Env, parent: Ino, mode: int, files: Sequence[NewAttached]) -> list[Attr]:
    """Make files of one directory that show objects; they take an inode each, and no space.

    Only root may: the mounts read the bucket with their own keys.
    Raises: EPERM, EEXIST, ENOENT, ENOTDIR, EFBIG, ENOSPC, EDQUOT.
    """
    if env.caller.uid != 0:
        raise OSError(errno.EPERM, "only root attaches objects")
    made: list[Attr] = []
    for each in files:
        if each.size > FILE_SIZE_MAX:
            raise OSError(errno.EFBIG, f"an object of {each.size} bytes")
        directory, dentry = get_place(txn, env, parent, each.name, vacant=True)
        if dentry is not None:
            raise OSError(errno.EEXIST, "the name exists")
        require(txn, env, directory, access.WRITE)
        node = NewNode(each.ino, stat.S_IFREG | mode)
        attr = put_new(txn, env, directory, parent, each.name, node)
        attr = attr._replace(
            size=each.size, mtime_ns=each.mtime_ns, flags=attr.flags | FLAG_ATTACHED
        )
        put_attr(txn, attr)
        txn.put(keys.inode_row(each.ino), keys.OBJECT_FIELD, inode.pack_object(each.found))
        made.append(attr)
    touch_dir(txn, parent, env.now_ns)
    return made


def replacement_name(shown: AttachedObject, token: str) -> bytes:
    """A name for a new file that may replace one that shows `shown`, and no other."""
    return REPLACEMENT + _digest(shown) + b"-" + token.encode()


def _digest(shown: AttachedObject) -> bytes:
    text = "\0".join(shown).encode(errors="surrogateescape")
    return hashlib.sha256(text).hexdigest()[:_DIGEST_CHARS].encode()


def require_shown(txn: Txn, target: Attr, name: bytes) -> None:
    """A replacement called `name` is renamed over `target`.

    Raises: EBUSY where that shows no object any more, or another one.
    """
    value = txn.get(keys.inode_row(target.ino), keys.OBJECT_FIELD)
    wanted = name[len(REPLACEMENT) : len(REPLACEMENT) + _DIGEST_CHARS]
    if value is None or _digest(inode.unpack_object(target.ino, value)) != wanted:
        raise OSError(errno.EBUSY, "the file was written, or replaced, meanwhile")


def attached_object(txn: Txn, env: Env, ino: Ino) -> AttachedObject:
    """What an attached file shows. Raises: ENODATA for another file, and for one that is gone."""
    del env
    value = txn.get(keys.inode_row(ino), keys.OBJECT_FIELD)
    if value is None:
        raise OSError(errno.ENODATA, f"inode {ino} shows no object")
    return inode.unpack_object(ino, value)

"""Copy-up: an attached file gets slices with the bytes of its object, and is a file like any other.

The slices are in the store when the verb runs. One commit lists them, charges their space and takes
the flag and the object's record away: no client sees a part of it, and one that is killed before
leaves the file as it was.

Called by fsclient's `attached/copy_up`.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fsmeta.rules import quota
from fsmeta.rules.context import Changed, Env, get_attr, put_attr, require_unsealed
from fsmeta.schema import inode, keys, slices
from fsmeta.txn.txn import Txn
from fsmeta.types import (
    FLAG_APPEND,
    FLAG_ATTACHED,
    FLAG_IMMUTABLE,
    AttachedObject,
    Ino,
    Slice,
)


class CopiedObject(NamedTuple):
    """The first bytes of an object, in slices: one for each chunk, in order."""

    found: AttachedObject
    slices: Sequence[Slice]
    size: int  # of the file from then on
    fence: Callable[[], bytes | None]  # of the session that has the slices' ids


def copy_up(txn: Txn, env: Env, ino: Ino, copied: CopiedObject) -> Changed | None:
    """Give an attached file its own bytes; None where another client has, so these are not used.

    Its times stay but ctime: what the file shows has not changed.
    Raises: ESTALE where the file is gone or shows another object, EPERM, EDQUOT, ENOSPC, EROFS.
    """
    require_unsealed(ino)
    txn.fence = copied.fence()
    attr = get_attr(txn, ino)
    row = keys.inode_row(ino)
    value = txn.get(row, keys.OBJECT_FIELD)
    if value is None:
        return None
    if inode.unpack_object(ino, value) != copied.found:
        raise OSError(errno.ESTALE, f"inode {ino} shows another object now")
    if attr.flags & FLAG_IMMUTABLE or (attr.flags & FLAG_APPEND and copied.size < attr.size):
        raise OSError(errno.EPERM, "the file has become immutable, or append-only")
    for index, piece in enumerate(copied.slices):
        txn.append(row, keys.chunk_field(index), slices.pack_slices([piece]))
    after = attr._replace(
        size=copied.size,
        used=attr.used + sum(piece.length for piece in copied.slices),  # its xattrs may take some
        flags=attr.flags & ~FLAG_ATTACHED,
        ctime_ns=max(attr.ctime_ns, env.now_ns),
    )
    if attr.nlink:
        quota.charge(txn, env, attr, space=after.space - attr.space, inodes=0)
    put_attr(txn, after)
    txn.delete(row, keys.OBJECT_FIELD)
    return Changed(attr, after)

"""unlink and rmdir, and how an inode loses a name.

An inode that loses its last name becomes an orphan: it keeps its row with `nlink` 0 and is listed
in O until every session has confirmed to the background worker that it does not hold it open. Where
the volume has a trash, it goes there instead, unless that is where it loses its name.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence

from fsmeta.ops.names.trash import put_away, still_there
from fsmeta.rules import access, quota
from fsmeta.rules.context import Env, FoundInode, find, get_place, put_attr, require, touch_dir
from fsmeta.schema import inode, keys
from fsmeta.schema.inode import Stable
from fsmeta.schema.trash import TRASH_INO
from fsmeta.txn.txn import Txn
from fsmeta.types import NO_PARENT, SNAPSHOTS_SHIFT, Attr, Dentry, FileType, Ino


def unlink(txn: Txn, env: Env, parent: Ino, name: bytes) -> Attr:
    """Remove the name of anything but a directory; returns what is left of the inode.

    Raises: ENOENT, EISDIR, EACCES, EPERM, ENOTDIR.
    """
    victim = _find_victim(txn, env, parent, name)
    if victim.type is FileType.DIR:
        raise OSError(errno.EISDIR, "is a directory")
    txn.delete(keys.dir_row(parent), name)
    touch_dir(txn, parent, env.now_ns)
    return drop_name(txn, env, victim.attr, parent, name)


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
    txn.delete(keys.dir_row(parent), name)
    touch_dir(txn, parent, env.now_ns, nlink_delta=-1)
    return drop_dir(txn, env, victim.attr, parent, name)


def _find_victim(txn: Txn, env: Env, parent: Ino, name: bytes) -> FoundInode:
    # first what is less often known: one request brings a name and its inode
    victim = find(txn, parent, name)
    directory, _ = get_place(txn, env, parent, name)
    if victim is None:
        raise OSError(errno.ENOENT, "no such name")
    require_removable(txn, env, directory, victim.attr)
    return victim


def require_removable(txn: Txn, env: Env, directory: Stable, attr: Attr) -> None:
    """Raises: EACCES, EPERM unless the caller may take a name of `attr` out of `directory`."""
    require(txn, env, directory, access.WRITE | access.EXECUTE)
    access.require_unsticky(env.caller, directory, attr)


def drop_name(txn: Txn, env: Env, attr: Attr, parent: Ino, name: bytes) -> Attr:
    """A file loses its name `name` in `parent`; returns its new attributes."""
    if attr.nlink == 1 and env.trash and parent < TRASH_INO:
        return put_away(txn, env, attr, parent, name)
    left = attr._replace(nlink=attr.nlink - 1, ctime_ns=env.now_ns)
    if left.nlink == 0:
        return _orphan(txn, env, left)
    if attr.parent == NO_PARENT and not move_parent_count(txn, attr.ino, parent, -1):
        _leave_home(txn, env, attr, parent)
    row = keys.inode_row(attr.ino)
    txn.put(row, keys.VOLATILE_FIELD, inode.pack_volatile(left))
    return left


def drop_dir(txn: Txn, env: Env, attr: Attr, parent: Ino, name: bytes) -> Attr:
    """An empty directory loses its name. The commit is ENOTEMPTY if it is not empty.

    Raises: ENOTEMPTY where it has snapshots.
    """
    if attr.flags >> SNAPSHOTS_SHIFT:
        raise OSError(errno.ENOTEMPTY, "it has snapshots: delete those first")
    txn.require_empty(keys.dir_row(attr.ino))
    quota.forget_dir(txn, env, attr.ino)
    if env.trash and parent < TRASH_INO:
        return put_away(txn, env, attr, parent, name)
    return _orphan(txn, env, attr._replace(nlink=0, ctime_ns=env.now_ns))


def _orphan(txn: Txn, env: Env, attr: Attr) -> Attr:
    # with a new `a` record, a client that still caches this directory can't create in it
    orphan = attr._replace(parent=NO_PARENT)
    put_attr(txn, orphan)
    txn.put(keys.ORPHANS, keys.pack_u64(attr.ino), keys.pack_u64(env.now_ns // 10**9))
    quota.charge(txn, env, attr, space=-attr.space, inodes=-1)
    return orphan


def expire(txn: Txn, env: Env, directory: Ino, names: Sequence[Dentry]) -> int:
    """Delete for good what `directory` has under `names`: an hour of the trash, or part of a clone
    that will never be seen. Returns how many of them went.

    The commit is ENOTEMPTY where one of them is a directory with names.
    """
    directories = 0
    seen: set[Ino] = set()
    for name, attr in still_there(txn, directory, names):
        if attr.ino in seen:
            continue  # its other names: in a later commit
        seen.add(attr.ino)
        txn.delete(keys.dir_row(directory), name)
        if attr.is_dir:
            directories += 1
            drop_dir(txn, env, attr, directory, name)
        else:
            drop_name(txn, env, attr, directory, name)
    if names:
        touch_dir(txn, directory, env.now_ns, -directories)
    return len(seen)


def drop_root(txn: Txn, env: Env, attr: Attr) -> Attr:
    """An empty directory that has no name goes. The commit is ENOTEMPTY if it is not empty."""
    txn.require_empty(keys.dir_row(attr.ino))
    quota.forget_dir(txn, env, attr.ino)
    return _orphan(txn, env, attr._replace(nlink=0, ctime_ns=env.now_ns))


def _leave_home(txn: Txn, env: Env, attr: Attr, parent: Ino) -> None:
    """A file with other names has none in `parent` any more: if it counted there, it moves.

    No limit stops that: else the name could not be deleted.
    """
    if not quota.counts_in(txn, env, attr, parent):
        return
    new = quota.first_parent(txn, attr, without=parent)
    quota.settle(txn, env, attr.ino, new)
    quota.leave(txn, env, attr, parent, new)
    quota.arrive(txn, env, attr, parent, new, limited=False)


def move_parent_count(txn: Txn, ino: Ino, parent: Ino, delta: int) -> int:
    """A hard-linked file has `delta` more names in `parent`; how many there are then."""
    row, field = keys.inode_row(ino), keys.parent_field(parent)
    count = keys.unpack_count(row, field, txn.get(row, field)) + delta
    if count < 0:
        raise keys.corrupt(ino, field, "fewer names than links")
    if count:
        txn.put(row, field, b"%d" % count)
    else:
        txn.delete(row, field)
    return count

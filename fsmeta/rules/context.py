"""How verbs read inodes and names, and what they know of the call that runs them."""

from __future__ import annotations

import errno
import stat
from typing import NamedTuple

from fsmeta.errors import ShowsObject
from fsmeta.rules import access
from fsmeta.schema import inode as schema_inode, keys as schema
from fsmeta.schema.acl import Acl, unpack_record
from fsmeta.schema.inode import Stable
from fsmeta.schema.snapshot_inos import (
    SEALED_INO,
    SHELVES,
    is_snapshot_dir,
    is_snapshot_ino,
    snapshot_dir_attr,
)
from fsmeta.schema.trash import TRASH_INO, directory_attr, is_trash
from fsmeta.txn.txn import Txn
from fsmeta.types import (
    FLAG_ATTACHED,
    NAME_MAX,
    NO_PARENT,
    ROOT_INO,
    Attr,
    Caller,
    FileType,
    Ino,
    SpaceUsage,
    is_name,
)


class Env(NamedTuple):
    """The caller, the time, and the settings of the volume that hold."""

    caller: Caller
    now_ns: int
    limits: SpaceUsage
    epoch: int = 0  # inodes with this mark are charged to quotas; 0: none is
    born: int = 0  # the mark of new inodes: the epoch, or 0 while not all clients charge
    trash: Ino = NO_PARENT  # where what loses its last name goes; NO_PARENT: away
    trash_is_new: bool = False  # T may not list it yet


class Changed(NamedTuple):
    """An inode before and after a change."""

    before: Attr
    after: Attr


class FoundInode(NamedTuple):
    """A name that exists, and its inode."""

    type: FileType
    attr: Attr


def get_attr(txn: Txn, ino: Ino) -> Attr:
    """The attributes of an inode.

    Raises: ESTALE where it is gone: a caller that has its number must look its name up again.
    """
    a, v = txn.get_many(schema_inode.attr_keys(ino))
    if a is None or v is None:
        return _unstored(ino)
    return schema_inode.unpack_inode(ino, a, v)


def get_stable(txn: Txn, ino: Ino) -> Stable:
    """What does not change with every write. Raises: ESTALE."""
    a = txn.get(schema.inode_row(ino), schema.ATTR_FIELD)
    if a is None:
        attr = _unstored(ino)
        return Stable(attr.mode, attr.uid, attr.gid, 0, 0, attr.parent, attr.btime_ns, 0, 0, 0)
    return schema_inode.unpack_stable(ino, a)


def _unstored(ino: Ino) -> Attr:
    """The attributes of an inode without records. Raises: ESTALE."""
    if is_trash(ino):
        return directory_attr(ino)
    if is_snapshot_dir(ino):
        return snapshot_dir_attr(ino)
    raise OSError(errno.ESTALE, f"inode {ino} is gone")


def require_unsealed(ino: Ino) -> None:
    """Raises: EROFS for what is in a snapshot, for every caller."""
    if ino >= SEALED_INO and is_snapshot_ino(ino):
        raise OSError(errno.EROFS, "is in a snapshot")


def require_own_bytes(attr: Attr) -> None:
    """Raises: ShowsObject for an attached file, see `ops/data/copy_up`."""
    if attr.flags & FLAG_ATTACHED:
        raise ShowsObject(attr.ino)


def get_acl(txn: Txn, number: int) -> Acl:
    """The ACL that an inode names. Raises: Corrupt."""
    return unpack_record(number, txn.get(schema.acl_row(number), schema.ACL_FIELD))


def require(txn: Txn, env: Env, inode: access.Owned, mask: int) -> None:
    """`access.require` with the ACL where it counts. Raises: EACCES, EPERM."""
    if env.caller.checked and not inode.flags:
        return
    acl = get_acl(txn, inode.acl) if access.needs_acl(env.caller, inode) else None
    access.require(env.caller, inode, mask, acl)


def get_parent(txn: Txn, env: Env, ino: Ino, mask: int) -> Stable:
    """A directory in which the caller may do what `mask` says (access(2) bits).

    Raises: ENOTDIR, EACCES, ENOENT where the directory itself has been removed.
    """
    parent = get_stable(txn, ino)
    if not stat.S_ISDIR(parent.mode):
        raise OSError(errno.ENOTDIR, f"inode {ino} is not a directory")
    require(txn, env, parent, mask)
    above = parent.parent
    if (above == NO_PARENT and ino != ROOT_INO) or above > TRASH_INO:
        raise OSError(errno.ENOENT, f"directory {ino} has been removed")
    return parent


def get_place(
    txn: Txn, env: Env, parent: Ino, name: bytes, vacant: bool = False
) -> tuple[Stable, bytes | None]:
    """The directory `parent`, searchable by the caller, and the dentry of `name` in it, if any.

    For a verb that changes the name. One request where neither is known. `vacant`: the verb wants
    the name to be free, which the kernel has just looked up, so the name alone is not worth a
    request.
    Raises: as `get_parent`, ENAMETOOLONG, EINVAL, EROFS.
    """
    if parent >= SEALED_INO:
        require_unsealed(parent)
    if not is_name(name):
        if not 0 < len(name) <= NAME_MAX:
            get_parent(txn, env, parent, access.EXECUTE)  # EACCES comes before other errors
        check_name(name)
    key = (schema.dir_row(parent), name)
    free = key if vacant and env.caller.checked else None
    txn.get_many(((schema.inode_row(parent), schema.ATTR_FIELD), key), vacant=free)
    return get_parent(txn, env, parent, access.EXECUTE), txn.reads[key]


def check_name(name: bytes) -> None:
    """Raises: ENAMETOOLONG, EINVAL for what can't be a name."""
    if len(name) > NAME_MAX:
        raise OSError(errno.ENAMETOOLONG, "name is longer than 255 bytes")
    if not is_name(name):
        raise OSError(errno.EINVAL, f"{name!r} is no name")


def fetch(txn: Txn, stables: tuple[Ino, ...], names: tuple[tuple[Ino, bytes], ...]) -> None:
    """Bring directories' stable records and dentries in one request, for the reads that follow."""
    keys = [(schema.inode_row(ino), schema.ATTR_FIELD) for ino in stables]
    txn.get_many(keys + [(schema.dir_row(parent), name) for parent, name in names])


def find(txn: Txn, parent: Ino, name: bytes) -> FoundInode | None:
    """What `name` in `parent` leads to, with attributes; one request when nothing is known."""
    row = schema.dir_row(parent)
    value, records = txn.get_linked(
        row, name, schema.DENTRY_INO_AT, schema.INODE_PREFIX, schema.ATTR_FIELDS
    )
    if value is None:
        return None
    kind, ino = schema.unpack_dentry(row, name, value)
    a, v = records
    if a is None or v is None:
        # a name and its inode go together, so one of the two was read before a change
        raise OSError(errno.ESTALE, f"inode {ino} is gone")
    return FoundInode(kind, schema_inode.unpack_inode(ino, a, v))


def put_attr(txn: Txn, attr: Attr) -> None:
    """Write both records of an inode."""
    row = schema.inode_row(attr.ino)
    txn.put(row, schema.ATTR_FIELD, schema_inode.pack_attr(attr))
    txn.put(row, schema.VOLATILE_FIELD, schema_inode.pack_volatile(attr))


def change_attr(txn: Txn, before: Attr, after: Attr) -> None:
    """Write what a verb has made of attributes that it has read; of a directory mode, owner, flags,
    ACLs and times alone.

    Names made in a directory meanwhile change its times and links, which is no conflict with that.
    So from the second attempt on the commit changes what is new and does not prove the rest.
    """
    if txn.first or not after.is_dir:
        put_attr(txn, after)
        return
    row = schema.inode_row(after.ino)
    txn.drop_check(row, schema.VOLATILE_FIELD)
    txn.put(row, schema.ATTR_FIELD, schema_inode.pack_attr(after))
    txn.merge(row, schema.VOLATILE_FIELD, schema_inode.times_parts(before, after))


def put_dentry(txn: Txn, parent: Ino, name: bytes, kind: FileType, ino: Ino) -> None:
    """Give `ino` the name `name` in `parent`."""
    txn.put(schema.dir_row(parent), name, schema.pack_dentry(kind, ino))


def touch_dir(txn: Txn, ino: Ino, now_ns: int, nlink_delta: int = 0) -> None:
    """Names in a directory have changed: mtime and ctime, and its count of subdirectories."""
    if ino >= SHELVES:
        return  # these, and the trash's directories, have no times
    row = schema.inode_row(ino)
    txn.merge(row, schema.VOLATILE_FIELD, schema_inode.touch_parts(now_ns, nlink_delta))

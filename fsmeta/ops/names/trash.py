"""Trash: what loses its last name gets one in the directory of the hour, as part of that verb.

It keeps its inode, so it still counts for the volume, its owner and its group, but in no directory,
until it expires, is removed from there or gets a name elsewhere again (`rename`). Nothing is made
in the trash or linked from it; a directory in it stays empty, since a removed directory takes no
new names.
"""

from __future__ import annotations

from collections.abc import Sequence

from fsmeta.rules import quota
from fsmeta.rules.context import Env, put_dentry
from fsmeta.schema import inode, keys as schema
from fsmeta.schema.trash import Origin, entry_name, is_cut
from fsmeta.txn.txn import Txn
from fsmeta.types import NO_PARENT, Attr, Dentry, Ino


def put_away(txn: Txn, env: Env, attr: Attr, parent: Ino, name: bytes) -> Attr:
    """Move `attr`, whose only name is `name` in `parent`, into the trash; the name is the caller's
    to delete."""
    origin = Origin(parent, attr.ino, name)
    row = schema.inode_row(attr.ino)
    kept = attr._replace(parent=env.trash, ctime_ns=env.now_ns)
    # with a new `a` record, a client that still caches this directory can't create in it
    txn.put(row, schema.ATTR_FIELD, inode.pack_attr(kept))
    txn.merge(row, schema.VOLATILE_FIELD, inode.ctime_parts(env.now_ns))
    if attr.parent == NO_PARENT:
        txn.delete(row, schema.parent_field(parent))
        txn.delete(row, schema.HOME_FIELD)
    quota.leave_all(txn, env, attr, parent)
    if is_cut(origin):
        txn.put(row, schema.ORIGIN_FIELD, name)
    put_dentry(txn, env.trash, entry_name(origin), attr.type, attr.ino)
    if env.trash_is_new:
        txn.put(schema.TRASH, schema.pack_u64(env.trash), schema.pack_u64(env.now_ns))
    return kept


def hours(txn: Txn, env: Env) -> dict[Ino, bytes]:
    """The directories in the trash, the oldest first, and what was noted of each."""
    del env
    fields = txn.get_row(schema.TRASH)
    return {Ino(schema.id_of(field)): fields[field] for field in sorted(fields)}


def origin_name(txn: Txn, env: Env, ino: Ino, entry: bytes) -> bytes:
    """The whole of a name of which the trash has `entry`."""
    del env
    return txn.get(schema.inode_row(ino), schema.ORIGIN_FIELD) or entry


def still_there(txn: Txn, hour: Ino, names: Sequence[Dentry]) -> list[tuple[bytes, Attr]]:
    """Those of a listing of the trash that are there now, with their attributes."""
    row = schema.dir_row(hour)
    keys = [key for each in names for key in ((row, each.name), *inode.attr_keys(each.ino))]
    values = iter(txn.get_many(keys))
    found: list[tuple[bytes, Attr]] = []
    for each, dentry, a, v in zip(names, values, values, values, strict=False):
        if dentry is not None and a is not None and v is not None:
            found.append((each.name, inode.unpack_inode(each.ino, a, v)))
    return found


def forget_hour(txn: Txn, env: Env, hour: Ino, noted: bytes) -> bool:
    """The directory of an hour stays empty; False if `noted` is not what was noted of it last.

    Raises: ENOTEMPTY.
    """
    del env
    if txn.get(schema.TRASH, schema.pack_u64(hour)) != noted:
        return False
    txn.require_empty(schema.dir_row(hour))
    txn.delete(schema.TRASH, schema.pack_u64(hour))
    return True

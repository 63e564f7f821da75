"""Snapshots: a sealed clone gets a name on its directory's shelf, and loses it.

A snapshot is built as clones are (`ops.clone`), of inodes that are sealed by their numbers: no
other verb changes them. A directory counts its snapshots in its flags, so removing it is refused
without a read of its shelf. A snapshot that has lost its name is listed as a clone whose builder
has died, and the leader removes it as it removes those.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Final, NamedTuple

from fsmeta.ops.trees.clone import NOBODY, Building, require_building
from fsmeta.rules.context import Env, check_name, get_attr, get_stable, put_dentry
from fsmeta.schema import inode, keys, slices
from fsmeta.schema.snapshot_inos import is_snapshot_ino, snapshot_dir_of
from fsmeta.schema.snapshots import (
    SNAPSHOTS,
    SNAPSHOTS_MAX,
    Snapshot,
    pack_snapshot,
    unpack_snapshot,
)
from fsmeta.schema.trash import TRASH_INO
from fsmeta.slices import resolve
from fsmeta.txn.txn import Txn
from fsmeta.types import (
    FLAGS_INHERITED,
    NO_PARENT,
    ROOT_INO,
    SNAPSHOTS_SHIFT,
    Attr,
    FileType,
    Ino,
    SliceId,
    SliceKind,
)

_OWN: Final = (keys.ATTR_FIELD[0], keys.VOLATILE_FIELD[0], *b"phtoy")  # fields a copy has anew
_CHUNK: Final = b"c"[0]


def require_root(env: Env) -> None:
    """Raises: EPERM. Snapshots hold what their owners can't delete, so they are root's to make."""
    if env.caller.uid != 0:
        raise OSError(errno.EPERM, "only root makes and deletes snapshots")


def require_new(txn: Txn, env: Env, source: Ino, name: bytes) -> Attr:
    """The directory `source`, of which there can be a snapshot `name`.

    Raises: EPERM, EROFS in a snapshot, ENOTDIR, ENOENT for what has been removed, ESTALE, EEXIST,
    EINVAL, ENAMETOOLONG.
    """
    require_root(env)
    attr = _source(txn, source)
    check_name(name)
    if name in (b".", b".."):
        raise OSError(errno.EINVAL, "no name for a snapshot")
    if txn.get(keys.dir_row(snapshot_dir_of(source)), name) is not None:
        raise OSError(errno.EEXIST, "there is a snapshot of that name")
    return attr


def _source(txn: Txn, source: Ino) -> Attr:
    if is_snapshot_ino(source):
        raise OSError(errno.EROFS, "there are no snapshots of snapshots")
    attr = get_attr(txn, source)
    if not attr.is_dir:
        raise OSError(errno.ENOTDIR, "no directory")
    gone = attr.parent == NO_PARENT and source != ROOT_INO
    if gone or attr.parent >= TRASH_INO or source >= TRASH_INO:
        raise OSError(errno.ENOENT, "the directory has been removed")
    return attr


def publish(txn: Txn, env: Env, building: Building, snapshot: Snapshot) -> Attr:
    """Give a sealed clone its name on the shelf: from here on it is seen.

    Raises: EMLINK where there are too many, ECANCELED, and as `require_new`.
    """
    require_building(txn, building)
    source = require_new(txn, env, snapshot.source, snapshot.name)
    snapshot_dir = snapshot_dir_of(snapshot.source)
    if len(txn.get_row(SNAPSHOTS)) >= SNAPSHOTS_MAX:
        raise OSError(errno.EMLINK, f"the volume has {SNAPSHOTS_MAX} snapshots")
    root = get_attr(txn, building.root)._replace(parent=snapshot_dir)
    txn.put(keys.inode_row(root.ino), keys.ATTR_FIELD, inode.pack_attr(root))
    put_dentry(txn, snapshot_dir, snapshot.name, FileType.DIR, root.ino)
    txn.put(SNAPSHOTS, keys.pack_u64(root.ino), pack_snapshot(snapshot))
    _count(txn, source, +1)
    txn.delete(keys.CLONES, keys.pack_u64(root.ino))
    return root


def _count(txn: Txn, source: Attr, delta: int) -> None:
    """A directory has another number of snapshots."""
    attr = source._replace(flags=source.flags + (delta << SNAPSHOTS_SHIFT))
    txn.put(keys.inode_row(attr.ino), keys.ATTR_FIELD, inode.pack_attr(attr))


def withdraw(txn: Txn, env: Env, source: Ino, name: bytes) -> Attr:
    """A snapshot loses its name; the leader removes the rest. Raises: EPERM, ENOENT, ESTALE."""
    require_root(env)
    snapshot_dir = keys.dir_row(snapshot_dir_of(source))
    value = txn.get(snapshot_dir, name)
    if value is None:
        raise OSError(errno.ENOENT, "no such snapshot")
    _, root = keys.unpack_dentry(snapshot_dir, name, value)
    attr = get_attr(txn, root)._replace(parent=TRASH_INO)
    txn.put(keys.inode_row(root), keys.ATTR_FIELD, inode.pack_attr(attr))
    txn.delete(snapshot_dir, name)
    txn.delete(SNAPSHOTS, keys.pack_u64(root))
    txn.put(keys.CLONES, keys.pack_u64(root), NOBODY)
    _count(txn, get_attr(txn, source), -1)
    return attr


def snapshots(txn: Txn, env: Env) -> list[Snapshot]:
    """All of the volume, the oldest first."""
    del env
    found = [unpack_snapshot(field, value) for field, value in txn.get_row(SNAPSHOTS).items()]
    return sorted(found, key=lambda each: (each.at_ns, each.root))


def one(txn: Txn, root: Ino) -> Snapshot | None:
    """The snapshot with this root."""
    field = keys.pack_u64(root)
    value = txn.get(SNAPSHOTS, field)
    return None if value is None else unpack_snapshot(field, value)


def has_snapshots(txn: Txn, directory: Ino) -> bool:
    """Whether a directory has some. Raises: ESTALE."""
    return bool(get_stable(txn, directory).flags >> SNAPSHOTS_SHIFT)


def same(ino: Ino, fields: dict[bytes, bytes], copy: Ino, copied: dict[bytes, bytes]) -> bool:
    """Whether a snapshot's inode is what its source, of which `fields` are all, is now."""
    try:
        attr, kept = _kept(ino, fields), _kept(copy, copied)
    except KeyError:
        return False
    if attr != kept or _others(fields) != _others(copied):
        return False
    now, then = _shown(ino, fields), _shown(copy, copied)
    return now.keys() == then.keys() and all(
        part == then[place] or (part.length == then[place].length and part.packed)
        for place, part in now.items()
    )


def _kept(ino: Ino, fields: dict[bytes, bytes]) -> Sequence[int]:
    """The attributes that a snapshot has from its source. Raises: KeyError where it is gone."""
    a, v = fields[keys.ATTR_FIELD], fields[keys.VOLATILE_FIELD]
    attr = inode.unpack_inode(ino, a, v)
    times = attr.atime_ns, attr.mtime_ns, attr.ctime_ns, attr.btime_ns
    owner = attr.mode, attr.uid, attr.gid, attr.acl, attr.default_acl
    return *owner, *times, attr.rdev, attr.flags & FLAGS_INHERITED, attr.size


def _others(fields: dict[bytes, bytes]) -> dict[bytes, bytes]:
    """What a snapshot has from its source besides attributes and content."""
    return {
        field: value
        for field, value in fields.items()
        if field[0] != _CHUNK and field[0] not in _OWN
    }


class _ShownRange(NamedTuple):
    """Bytes that a chunk shows from some place on.

    Where they are `packed` that says nothing of a change: a file comes into a segment, or into
    another one, as it was when it was alone, and none of its times is moved by that (`packing`).
    """

    length: int
    slice: SliceId
    off: int
    packed: bool


def _shown(ino: Ino, fields: dict[bytes, bytes]) -> dict[tuple[bytes, int], _ShownRange]:
    """What chunks show, by chunk and where in it."""
    return {
        (field, part.pos): _ShownRange(
            part.length, part.slice.id, part.off, part.slice.kind is SliceKind.SEGMENT
        )
        for field, value in fields.items()
        if field[0] == _CHUNK
        for part in resolve(slices.unpack_slices(ino, keys.id_of(field), value))
        if part.slice is not None
    }

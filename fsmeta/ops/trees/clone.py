"""Clones of trees: new inodes that list the same slices, built out of sight and then given a name.

The root of a clone that is being built has no name, and TRASH_INO above it, so that it is in no
directory's usage; table K says which session builds it. Each step checks that, so a builder that
the leader took for dead adds nothing to what is being removed. Everything below the root is a tree
like any other and counts against the limits. A clone that becomes a snapshot has sealed inodes
(`sealed`), which keep all times of their sources and count for the volume alone.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Final, NamedTuple

from fsmeta.ops.data import ranges
from fsmeta.ops.data.gc import share
from fsmeta.ops.names.link import add_name
from fsmeta.ops.names.remove import drop_root
from fsmeta.rules import access, quota
from fsmeta.rules.context import (
    Env,
    check_name,
    get_attr,
    get_place,
    put_attr,
    put_dentry,
    require,
    touch_dir,
)
from fsmeta.schema import inode, keys, slices
from fsmeta.schema.inode_rows import InodeRow
from fsmeta.schema.segments import is_open_segment
from fsmeta.schema.snapshot_inos import is_snapshot_ino
from fsmeta.schema.trash import TRASH_INO
from fsmeta.schema.xattrs import (
    CAPABILITY_FIELD,
    XATTRS_COUNT_MAX,
    XATTRS_FIELD,
    XATTRS_MAX,
    charged,
    cost_of,
    counted,
)
from fsmeta.slices import covered
from fsmeta.store.contract import COMMIT_OPS_ENOUGH, COMMIT_OPS_MAX
from fsmeta.txn.txn import Txn
from fsmeta.types import (
    FLAG_ATTACHED,
    FLAGS_INHERITED,
    Attr,
    Caller,
    FileType,
    Ino,
    SessionId,
    SliceId,
)

CHILDREN_MAX: Final = 300  # of one step: their rows come in one request
NOBODY: Final = keys.pack_u64(0)  # a builder that is no session, so has ended
_DEVICES: Final = (FileType.CHR, FileType.BLK)
_USER_FIELDS: Final = keys.xattr_field(b"user.")
_SLICES_INLINE: Final = 400  # of one file; one with more is filled by copy_file_range
# one child alone: its attributes, and what each chunk and slice needs to be checked and shared
assert XATTRS_COUNT_MAX + 3 * _SLICES_INLINE < COMMIT_OPS_MAX


class Building(NamedTuple):
    """A clone that is being built: its root, the session that builds it, and its later owner."""

    root: Ino
    session: SessionId
    owner: tuple[int, int] | None  # uid and gid; None: everything keeps its own


class Child(NamedTuple):
    """A name to be cloned, and the number that its clone gets."""

    name: bytes
    source: Ino
    ino: Ino


class Cloned(NamedTuple):
    """A child that was cloned: `attr` is the source's."""

    child: Child
    attr: Attr
    filled: bool  # False: it has no content yet


def begin(txn: Txn, env: Env, building: Building, source: Ino) -> Attr:
    """Make the root of a clone of the directory `source`. Raises: ENOTDIR, EACCES, ESTALE."""
    (found,) = txn.get_inodes([keys.inode_row(source)])
    attr = _attr(txn, source, found.fields)
    if attr is None:
        raise OSError(errno.ESTALE, f"inode {source} is gone")
    if not attr.is_dir:
        raise OSError(errno.ENOTDIR, "no directory")
    _require_copyable(txn, env, attr)
    root = _copy(txn, env, building, Child(b"", source, building.root), TRASH_INO, attr, found)
    txn.put(keys.CLONES, keys.pack_u64(building.root), keys.pack_u64(building.session))
    quota.charge(txn, env, root, space=root.space, inodes=1)
    return attr


def _attr(txn: Txn, ino: Ino, fields: dict[bytes, bytes]) -> Attr | None:
    """The attributes in a row; the commit checks them."""
    a, v = fields.get(keys.ATTR_FIELD), fields.get(keys.VOLATILE_FIELD)
    row = keys.inode_row(ino)
    txn.expect(row, keys.ATTR_FIELD, a)
    txn.expect(row, keys.VOLATILE_FIELD, v)
    return inode.unpack_inode(ino, a, v) if a and v else None


def _require_copyable(txn: Txn, env: Env, attr: Attr) -> None:
    """Raises: EACCES; EPERM for a device, which only root makes: mknod(2)."""
    whiteout = attr.type is FileType.CHR and attr.rdev == 0
    if attr.type in _DEVICES and not whiteout and env.caller.uid != 0:
        raise OSError(errno.EPERM, "only root makes devices")
    if attr.is_dir:
        require(txn, env, attr, access.READ | access.EXECUTE)
    elif attr.type is FileType.REG:
        require(txn, env, attr, access.READ)


def require_building(txn: Txn, building: Building) -> None:
    """Raises: ECANCELED where another client is removing what is built."""
    session = txn.get(keys.CLONES, keys.pack_u64(building.root))
    if session != keys.pack_u64(building.session):
        raise OSError(errno.ECANCELED, "the clone was treated as abandoned")


def _copy(
    txn: Txn,
    env: Env,
    building: Building,
    child: Child,
    parent: Ino,
    attr: Attr,
    found: InodeRow,
) -> Attr:
    """Write a clone's own records: attributes with ACLs, symlink target, extended attributes.

    What is immutable or append-only has a clone that is not, as another copy would be; nor has it
    extended attributes that the caller could not set, or file capabilities for another owner.
    Raises: ENOSPC where there are more of them than an inode may have, as earlier versions allowed.
    """
    new = attr._replace(
        ino=child.ino, parent=parent, nlink=2 if attr.is_dir else 1,
        flags=attr.flags & (FLAGS_INHERITED | FLAG_ATTACHED), mark=0,
    )  # fmt: skip
    if not is_snapshot_ino(child.ino):
        new = new._replace(ctime_ns=env.now_ns, btime_ns=env.now_ns, mark=env.born)
    uid, gid = building.owner or (attr.uid, attr.gid)
    given = (uid, gid) != (attr.uid, attr.gid)
    if given:
        mode = attr.mode if attr.is_dir else attr.mode & ~0o6000
        new = new._replace(uid=uid, gid=gid, mode=mode)
    kept = {
        field: value
        for field, value in found.fields.items()
        if field in (keys.LINK_FIELD, keys.OBJECT_FIELD) or _is_kept(env.caller, field, given)
    }
    total = cost_of(kept)
    if found.left_out or total > XATTRS_MAX:
        raise OSError(errno.ENOSPC, f"inode {attr.ino} has too many extended attributes to copy")
    beside = charged(counted(keys.inode_row(attr.ino), found.fields))
    new = new._replace(used=attr.used - beside + charged(total))
    row = keys.inode_row(child.ino)
    txn.require_empty(row)
    put_attr(txn, new)
    for field, value in kept.items():
        txn.put(row, field, value)
    if total:
        txn.put(row, XATTRS_FIELD, b"%d" % total)
    return new


def _is_kept(caller: Caller, field: bytes, given: bool) -> bool:
    """Whether `field` is an extended attribute that the clone has, too; `given`: to another."""
    if caller.uid != 0:
        return field.startswith(_USER_FIELDS)
    return field[:1] == b"x" and not (given and field == CAPABILITY_FIELD)


def children(
    txn: Txn, env: Env, building: Building, parent: Ino, wanted: Sequence[Child]
) -> tuple[int, list[Cloned]]:
    """Clone the first of `wanted` into the directory `parent` of the clone: how many of them one
    commit takes, and what was cloned, for of some the source is gone.

    Raises: ECANCELED, EACCES, EPERM, ENOSPC, EDQUOT.
    """
    require_building(txn, building)
    done: list[Cloned] = []
    uses: dict[SliceId, int] = {}
    made: list[Attr] = []
    rows = txn.get_inodes([keys.inode_row(each.source) for each in wanted])
    taken = 0
    for child, found in zip(wanted, rows, strict=True):
        fields = found.fields
        if taken and txn.ops + len(uses) + 3 * len(fields) > COMMIT_OPS_ENOUGH:
            break
        taken += 1
        check_name(child.name)  # a source may have names that can't be used
        attr = _attr(txn, child.source, fields)
        if attr is None:
            continue
        _require_copyable(txn, env, attr)
        chunks, given_up = _unreserved(attr, fields)
        listed = _listed(attr, chunks)
        filled = len(listed) + sum(map(len, listed.values())) <= _SLICES_INLINE
        beside = charged(counted(keys.inode_row(child.source), fields))
        used, size = (attr.used - given_up, attr.size) if filled else (beside, 0)
        kept = attr._replace(size=size, used=used)
        made.append(_copy(txn, env, building, child, parent, kept, found))
        if filled:
            for field in _chunks(fields):
                txn.expect(keys.inode_row(child.source), field, fields[field])
            _share(txn, child, listed, chunks, uses)
        put_dentry(txn, parent, child.name, attr.type, child.ino)
        done.append(Cloned(child, attr, filled))
    share(txn, uses)
    directories = sum(each.is_dir for each in made)
    if directories:
        row = keys.inode_row(parent)
        txn.merge(row, keys.VOLATILE_FIELD, inode.nlink_parts(directories))
    _charge(txn, env, made)
    return taken, done


def _charge(txn: Txn, env: Env, made: Sequence[Attr]) -> None:
    """Charge inodes of one directory: once for each owner, for all of them together."""
    by_owner: dict[tuple[int, int], list[Attr]] = {}
    for each in made:
        by_owner.setdefault((each.uid, each.gid), []).append(each)
    for inodes in by_owner.values():
        space = sum(each.space for each in inodes)
        quota.charge(txn, env, inodes[0], space=space, inodes=len(inodes))


def _chunks(fields: dict[bytes, bytes]) -> list[bytes]:
    return [field for field in fields if field[:1] == b"c"]


def _unreserved(attr: Attr, fields: dict[bytes, bytes]) -> tuple[dict[bytes, bytes], int]:
    """A file's chunks with holes for what is reserved, and how many bytes less they cover."""
    chunks: dict[bytes, bytes] = {}
    given_up = 0
    for field in _chunks(fields):
        value = fields[field]
        if slices.has_reserved(value):
            old = slices.unpack_slices(attr.ino, keys.id_of(field), value)
            new = [each if each.stored else slices.hole(each.pos, each.length) for each in old]
            left = covered(new)
            given_up += covered(old) - left
            if not left:
                continue
            value = slices.pack_slices(new)
        chunks[field] = value
    return chunks, given_up


def _listed(attr: Attr, chunks: dict[bytes, bytes]) -> dict[bytes, set[SliceId]]:
    """Which slices each chunk of a file uses."""
    return {
        field: {
            each.id
            for each in slices.unpack_slices(attr.ino, keys.id_of(field), value)
            if each.stored
        }
        for field, value in chunks.items()
    }


def _share(
    txn: Txn,
    child: Child,
    listed: dict[bytes, set[SliceId]],
    chunks: dict[bytes, bytes],
    uses: dict[SliceId, int],
) -> None:
    """Let the clone of a file list `chunks`."""
    for field, ids in listed.items():
        txn.put(keys.inode_row(child.ino), field, chunks[field])
        for sid in ids:
            uses[sid] = uses.get(sid, 0) + 1


def link_child(txn: Txn, env: Env, building: Building, parent: Ino, name: bytes, ino: Ino) -> None:
    """One more name in the clone for what has one in it already. Raises: ECANCELED, EMLINK."""
    require_building(txn, building)
    check_name(name)
    attr = get_attr(txn, ino)
    linked = add_name(txn, env, attr, parent)
    put_attr(txn, linked if is_snapshot_ino(ino) else linked._replace(ctime_ns=env.now_ns))
    put_dentry(txn, parent, name, attr.type, ino)


def fill(
    txn: Txn, env: Env, building: Building, source: ranges.Span, ino: Ino, begin: int
) -> ranges.Ranged:
    """`ranges.copy_file_range` into a file of the clone. Raises: ECANCELED, EDQUOT, ENOSPC."""
    require_building(txn, building)
    return ranges.copy_range(txn, env, source, ino, begin)


def settle(txn: Txn, env: Env, building: Building, ino: Ino, like: Attr) -> None:
    """A file that was filled gets its source's times. Raises: ECANCELED."""
    require_building(txn, building)
    attr = get_attr(txn, ino)
    ctime_ns = like.ctime_ns if is_snapshot_ino(ino) else env.now_ns
    put_attr(
        txn,
        attr._replace(atime_ns=like.atime_ns, mtime_ns=like.mtime_ns, ctime_ns=ctime_ns),
    )


def finish(txn: Txn, env: Env, building: Building, parent: Ino, name: bytes) -> Attr:
    """Give the clone its name: from here on it is seen.

    What it takes up comes to count in the directories above.
    Raises: EEXIST, EACCES, ENOENT, EDQUOT, ECANCELED.
    """
    require_building(txn, building)
    directory, dentry = get_place(txn, env, parent, name)
    if dentry is not None:
        raise OSError(errno.EEXIST, "the name exists")
    require(txn, env, directory, access.WRITE | access.EXECUTE)
    root = get_attr(txn, building.root)
    quota.arrive(txn, env, root, root.parent, parent)
    attr = root._replace(parent=parent)
    txn.put(keys.inode_row(attr.ino), keys.ATTR_FIELD, inode.pack_attr(attr))
    put_dentry(txn, parent, name, FileType.DIR, attr.ino)
    touch_dir(txn, parent, env.now_ns, nlink_delta=1)
    txn.delete(keys.CLONES, keys.pack_u64(attr.ino))
    return attr


def abandoned(txn: Txn, env: Env, alive: set[SessionId]) -> list[Building]:
    """Clones whose builders have ended."""
    del env
    fields = txn.get_row(keys.CLONES)
    found = [
        Building(Ino(keys.id_of(field)), SessionId(keys.id_of(value)), None)
        for field, value in fields.items()
        if not is_open_segment(field)
    ]
    return [each for each in found if each.session not in alive]


def take_over(txn: Txn, env: Env, building: Building, session: SessionId) -> Building:
    """From here on only `session` may change this clone. Raises: ECANCELED."""
    del env
    require_building(txn, building)
    key = keys.pack_u64(building.root)
    txn.put(keys.CLONES, key, keys.pack_u64(session))
    return building._replace(session=session)


def leave_behind(txn: Txn, env: Env, building: Building) -> None:
    """Let the leader go on with `building`, now or later. Raises: ECANCELED."""
    del env
    require_building(txn, building)
    txn.put(keys.CLONES, keys.pack_u64(building.root), NOBODY)


def discard_root(txn: Txn, env: Env, building: Building) -> None:
    """The empty root of a clone that will never be seen goes. Raises: ECANCELED, ENOTEMPTY."""
    require_building(txn, building)
    drop_root(txn, env, get_attr(txn, building.root))
    txn.delete(keys.CLONES, keys.pack_u64(building.root))

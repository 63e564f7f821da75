"""What counts against a limit, and where: the volume, directories, users and groups.

The rule: an inode counts 1 while it has a name; a file counts the space its data covers, in 4 KiB
units, while it has a name. Directories, symlinks and holes take no space.

What is in the trash has a name: it counts for the volume, at its owner and its group, but in no
directory. So does the root of a clone that is being built; what is below that counts up to it.

While the volume has accounting (docs/design/locks-permissions-quotas), an inode with the current
mark counts at its owner, at its group and at every directory above it but the root, whose usage is
the volume's. A file with several names counts where its `home` is. The commit checks the reads of
the directories above; limits are in the store, beside the counters.

Called by the verbs, with attributes from before the change unless it says otherwise.
"""

from __future__ import annotations

import stat
from collections.abc import Sequence
from math import inf
from typing import Final, NamedTuple

from fsmeta.rules.context import Env, get_attr, get_stable
from fsmeta.rules.settings import require
from fsmeta.schema import inode, keys as schema
from fsmeta.schema.keys import ACCOUNTS, ATTR_FIELD
from fsmeta.schema.snapshot_inos import SEALED_INO
from fsmeta.store.writes import limit_field
from fsmeta.txn.txn import Txn
from fsmeta.types import NO_PARENT, ROOT_INO, Attr, Ino, SpaceUsage, StatFs

DIR: Final = b"d"
USER: Final = b"u"
GROUP: Final = b"g"
_ROOT_ROW: Final = schema.inode_row(ROOT_INO)
_OUTSIDE: Final = schema.inode_row(SEALED_INO)  # this and higher numbers are not below the root
_NONE: Final = schema.pack_u64(NO_PARENT)
_PARENT_AT: Final = inode.ATTR_PARENT_AT


def dir_node(ino: int) -> bytes:
    """Where all that is below a directory counts."""
    return DIR + schema.pack_u64(ino)


def user_node(uid: int) -> bytes:
    """Where what a user owns counts."""
    return USER + schema.pack_u32(uid)


def group_node(gid: int) -> bytes:
    """Where what a group owns counts."""
    return GROUP + schema.pack_u32(gid)


def space_field(node: bytes) -> bytes:
    """The counter of space at a node."""
    return node + b"s"


def inodes_field(node: bytes) -> bytes:
    """The counter of inodes at a node."""
    return node + b"i"


def node_fields(node: bytes) -> tuple[bytes, bytes, bytes, bytes]:
    """Usage and limits of a node: space, inodes, limit of space, of inodes."""
    space, inodes = space_field(node), inodes_field(node)
    return space, inodes, limit_field(space), limit_field(inodes)


def charge(txn: Txn, env: Env, attr: Attr, space: int, inodes: int, limited: bool = True) -> None:
    """Move the usage by `space` bytes and `inodes` wherever `attr` counts.

    Past a limit the commit is ENOSPC (the volume) or EDQUOT, unless it is not `limited`.
    """
    limits = env.limits if limited else SpaceUsage(0, 0)
    txn.add(schema.USAGE, schema.SPACE, space, limits.space, "ENOSPC")
    txn.add(schema.USAGE, schema.INODES, inodes, limits.inodes, "ENOSPC")
    if attr.mark == env.epoch and attr.mark and (space or inodes):
        nodes = [*owners(attr.uid, attr.gid), *above(txn, home(txn, attr))]
        _charge(txn, nodes, space, inodes, limited)


def owners(uid: int, gid: int) -> tuple[bytes, bytes]:
    """The nodes of a user and a group."""
    return user_node(uid), group_node(gid)


def above(txn: Txn, directory: Ino) -> list[bytes]:
    """The nodes of `directory` and of all above it but the root; the innermost first.

    Above what is in the trash or in a snapshot there are none, nor above a clone being built.
    A rename of one of them shifts what it counts, and conflicts there with a commit that adds to
    it.
    """
    nodes: list[bytes] = []
    row = schema.inode_row(directory)
    while row != _ROOT_ROW and row < _OUTSIDE:
        a = txn.read_unvalidated(row, ATTR_FIELD)
        parent = a[_PARENT_AT : _PARENT_AT + 8] if a is not None else _NONE
        if parent == _NONE or len(nodes) > len(txn.reads):  # it has come twice
            raise schema.corrupt(directory, ATTR_FIELD, "is not below the root")
        nodes.append(DIR + row[1:])
        row = schema.INODE_PREFIX + parent
    return nodes


def home(txn: Txn, attr: Attr) -> Ino:
    """The directory in which a marked inode counts."""
    if attr.parent != NO_PARENT:
        return attr.parent
    value = txn.get(schema.inode_row(attr.ino), schema.HOME_FIELD)
    if value is None or len(value) != 8:
        raise schema.corrupt(attr.ino, schema.HOME_FIELD, "a file with several names has no home")
    return Ino(schema.id_of(value))


def counts_in(txn: Txn, env: Env, attr: Attr, directory: Ino) -> bool:
    """Whether `attr` counts, and in `directory`."""
    return attr.mark == env.epoch and attr.mark != 0 and home(txn, attr) == directory


def first_parent(txn: Txn, attr: Attr, without: Ino = NO_PARENT) -> Ino:
    """Where a file with several names is to count, if not in `without`: where it does, if it has a
    name there, or in the oldest other directory; in the root only if there is no other.

    It is asked for anew, and checked by the commit.
    """
    row = schema.inode_row(attr.ino)
    fields = txn.get_inodes([row])[0].fields
    for field in schema.ATTR_FIELDS:
        txn.expect_same(row, field, fields.get(field))
    parents = [schema.id_of(field) for field in fields if field[:1] == b"p" and len(field) == 9]
    others = [ino for ino in parents if ino != without]
    if not others:
        raise schema.corrupt(attr.ino, ATTR_FIELD, "has links and no names")
    before = fields.get(schema.HOME_FIELD, b"")
    known = schema.id_of(before) if len(before) == 8 else NO_PARENT
    return Ino(known if known in others else min(others, key=lambda ino: (ino == ROOT_INO, ino)))


def settle(txn: Txn, env: Env, ino: Ino, directory: Ino) -> None:
    """A file that has, or gets, several names counts in `directory`."""
    if env.epoch:
        txn.put(schema.inode_row(ino), schema.HOME_FIELD, schema.pack_u64(directory))


def hand_over(txn: Txn, env: Env, attr: Attr, uid: int, gid: int) -> None:
    """chown(2): the usage of `attr` counts for new owners. Past their limits it is EDQUOT."""
    if attr.mark != env.epoch or not attr.mark or not attr.nlink:
        return
    before, after = owners(attr.uid, attr.gid), owners(uid, gid)
    _charge(txn, [node for node in before if node not in after], -attr.space, -1)
    _charge(txn, [node for node in after if node not in before], attr.space, 1)


def leave(txn: Txn, env: Env, attr: Attr, old: Ino, new: Ino) -> None:
    """`attr` is about to move from directory `old` to `new`: it counts above `old` no more."""
    _move(txn, env, attr, above_but(txn, env, old, new), add=False)


def arrive(txn: Txn, env: Env, attr: Attr, old: Ino, new: Ino, limited: bool = True) -> None:
    """The second half of `leave`: it counts above `new`. Past a limit there it is EDQUOT."""
    _move(txn, env, attr, above_but(txn, env, new, old), add=True, limited=limited)


def leave_all(txn: Txn, env: Env, attr: Attr, old: Ino) -> None:
    """A file or an empty directory goes from `old` to where no directory counts it."""
    if attr.mark == env.epoch and attr.mark:
        _charge(txn, above(txn, old), -attr.space, -1)


def above_but(txn: Txn, env: Env, directory: Ino, other: Ino) -> list[bytes]:
    """`above` of `directory`, without what is above `other`, too."""
    if not env.epoch or directory == other:
        return []
    shared = set(above(txn, other))
    return [node for node in above(txn, directory) if node not in shared]


def _move(
    txn: Txn, env: Env, attr: Attr, nodes: Sequence[bytes], add: bool, limited: bool = True
) -> None:
    if attr.is_dir:  # what is counted below it goes along, whether it is counted itself or not
        own = dir_node(attr.ino)
        for node in nodes:
            txn.shift(ACCOUNTS, space_field(node), space_field(own), add)
            txn.shift(ACCOUNTS, inodes_field(node), inodes_field(own), add)
    if attr.mark == env.epoch and attr.mark:
        sign = 1 if add else -1
        _charge(txn, nodes, sign * attr.space, sign, limited)


def forget_dir(txn: Txn, env: Env, ino: Ino) -> None:
    """A directory is gone: it was empty, so its counters are 0; nor has it a limit any more."""
    if env.epoch:
        node = dir_node(ino)
        for field in node_fields(node):
            txn.delete(ACCOUNTS, field)
        txn.delete(schema.LIMITED, node)


def _charge(
    txn: Txn, nodes: Sequence[bytes], space: int, inodes: int, limited: bool = True
) -> None:
    for field, delta in ((b"s", space), (b"i", inodes)):
        if not delta:
            continue
        for node in nodes:
            if limited:
                txn.charge(ACCOUNTS, node + field, delta)
            else:
                txn.add(ACCOUNTS, node + field, delta)


class Headroom(NamedTuple):
    """What counts at a node, and its limits; 0 means none."""

    used: SpaceUsage
    limit: SpaceUsage


def rooms(txn: Txn, nodes: Sequence[bytes]) -> list[Headroom]:
    """What counts at some nodes, in one request; no commit relies on it."""
    keys = [(ACCOUNTS, field) for node in nodes for field in node_fields(node)]
    counts = [
        schema.unpack_count(row, field, value)
        for (row, field), value in zip(keys, txn.get_many(keys), strict=True)
    ]
    return [
        Headroom(SpaceUsage(*counts[at : at + 2]), SpaceUsage(*counts[at + 2 : at + 4]))
        for at in range(0, len(counts), 4)
    ]


def free_space(txn: Txn, env: Env, ino: Ino) -> int | None:
    """How much a file may still grow before a quota refuses it; None where there is no limit."""
    return _least(_quotas_of(txn, env, get_attr(txn, ino)))


def free_space_of_all(txn: Txn, env: Env, attr: Attr) -> int | None:
    """As `free_space`, before a quota or the volume refuses it."""
    if not attr.nlink:
        return None
    return _least([volume_room(txn), *_quotas_of(txn, env, attr)])


def _quotas_of(txn: Txn, env: Env, attr: Attr) -> list[Headroom]:
    """What counts a file, but for the volume."""
    if attr.mark != env.epoch or not attr.mark or not attr.nlink:
        return []
    return rooms(txn, [*owners(attr.uid, attr.gid), *above(txn, home(txn, attr))])


def _least(found: Sequence[Headroom]) -> int | None:
    """The least space that limits leave; None where there is none of them."""
    limited = [room for room in found if room.limit.space]
    return min((room.limit.space - room.used.space for room in limited), default=None)


def statfs(txn: Txn, env: Env, ino: Ino) -> StatFs:
    """statfs(2) in a directory: of all limits above it, the one that leaves least."""
    found = [volume_room(txn)]
    if env.epoch and ino != ROOT_INO:
        stable = get_stable(txn, ino)
        if stable.parent != NO_PARENT:  # else it has been removed, or has several names
            directory = ino if stat.S_ISDIR(stable.mode) else stable.parent
            found += rooms(txn, above(txn, directory))
    space = min(found, key=lambda room: _left(room.used.space, room.limit.space))
    inodes = min(found, key=lambda room: _left(room.used.inodes, room.limit.inodes))
    return StatFs(space.used.space, space.limit.space, inodes.used.inodes, inodes.limit.inodes)


def _left(used: int, limit: int) -> float:
    return limit - used if limit else inf


def volume_room(txn: Txn) -> Headroom:
    """What the volume takes up now, and its limits as they are now, in one request."""
    counters = (schema.USAGE, schema.SPACE), (schema.USAGE, schema.INODES)
    *counts, settings = txn.get_many((*counters, (schema.FORMAT, schema.FORMAT_FIELD)))
    space, inodes = map(schema.unpack_count, *zip(*counters, strict=True), counts)
    return Headroom(SpaceUsage(space, inodes), require(settings).limits)

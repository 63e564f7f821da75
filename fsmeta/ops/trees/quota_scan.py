"""Quota scan: count each inode of a volume once, with its mark and its usage in one commit.

The commit checks what was read, so what changes meanwhile is read again. An inode that has the mark
is skipped, so an interrupted scan can be continued by any client.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fsmeta.rules import quota
from fsmeta.rules.context import Env
from fsmeta.rules.settings import COUNTING, load_format
from fsmeta.schema import inode, keys
from fsmeta.schema.snapshot_inos import is_snapshot_ino
from fsmeta.txn.txn import Txn
from fsmeta.types import NO_PARENT, ROOT_CALLER, Attr, Ino, SpaceUsage

# Checks and writes of one commit besides those of its first inode, which take what its depth takes:
# a commit blocks Redis for some milliseconds.
OPS_MAX: Final = 1000


def take(txn: Txn, epoch: int, inos: Sequence[Ino]) -> int:
    """Count the first of `inos`, as many as fit; returns how many were looked at.

    That is at least one, and none where the volume is not being counted in this epoch any more.
    """
    settings = load_format(txn)
    if settings.accounting != COUNTING or settings.epoch != epoch:
        return 0
    env = Env(ROOT_CALLER, 0, SpaceUsage(0, 0), epoch, epoch)
    sums: dict[bytes, list[int]] = {}
    txn.get_many([key for ino in inos for key in inode.attr_keys(ino)])
    done, enough = 0, 0
    for ino in inos:
        a, v = (txn.reads[key] for key in inode.attr_keys(ino))
        done += 1
        if a is None or v is None or is_snapshot_ino(ino):
            continue  # purged since, or in a snapshot
        attr = inode.unpack_inode(ino, a, v)
        if attr.mark != epoch:
            _take(txn, env, attr._replace(mark=epoch), sums)
        ops = txn.ops + 2 * len(sums)
        enough = enough or ops + OPS_MAX
        if ops >= enough:
            break
    for later in inos[done:]:  # not relied on
        for key in inode.attr_keys(later):
            txn.reads.pop(key, None)
    for node, (space, inodes) in sums.items():
        txn.add(keys.ACCOUNTS, quota.space_field(node), space)
        txn.add(keys.ACCOUNTS, quota.inodes_field(node), inodes)
    return done


def _take(txn: Txn, env: Env, attr: Attr, sums: dict[bytes, list[int]]) -> None:
    txn.put(keys.inode_row(attr.ino), keys.ATTR_FIELD, inode.pack_attr(attr))
    if not attr.nlink:
        return  # charged when it gets a name
    place = attr.parent
    if place == NO_PARENT:
        place = quota.first_parent(txn, attr)
        quota.settle(txn, env, attr.ino, place)
    for node in (*quota.owners(attr.uid, attr.gid), *quota.above(txn, place)):
        counted = sums.setdefault(node, [0, 0])
        counted[0] += attr.space
        counted[1] += 1

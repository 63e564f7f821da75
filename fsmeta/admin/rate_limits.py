"""Rate limits of a volume: set, listed, removed; and what sessions do under them.

Mounts look at both tables every few seconds; nothing waits for them to have seen a change.

Threading: functions only, from any thread.
"""

from __future__ import annotations

from functools import partial
from typing import Final, NamedTuple

from fsmeta.errors import Corrupt
from fsmeta.meta.meta import Meta
from fsmeta.rules import quota, rate_limits
from fsmeta.rules.rate_limits import DEMANDS, LIMITS, NO_LIMITS, Demand, RateLimits
from fsmeta.schema import keys
from fsmeta.schema.inode import ATTR_PARENT_AT
from fsmeta.schema.scan import fields_of
from fsmeta.schema.snapshot_inos import SEALED_INO
from fsmeta.txn.txn import Txn
from fsmeta.types import NO_PARENT, ROOT_INO, Ino, SessionId

NAMES_MAX: Final = 8  # of one inode
DEPTH_MAX: Final = 10_000


class RateLimitChange(NamedTuple):
    """What is to be set; None leaves a limit as it is, 0 takes it away."""

    read: int | None = None
    write: int | None = None
    ops: int | None = None


def set_limits(meta: Meta, node: bytes, change: RateLimitChange) -> RateLimits:
    """Change the limits of a node; what they are then. Without any it is forgotten."""
    return meta.transactor.run(partial(_set, node=node, change=change))


def _set(txn: Txn, node: bytes, change: RateLimitChange) -> RateLimits:
    before = _limits_of(node, txn.get(LIMITS, node))
    after = RateLimits(
        *(old if new is None else new for old, new in zip(before, change, strict=True))
    )
    if any(after):
        txn.put(LIMITS, node, rate_limits.pack_limits(after))
    else:
        txn.delete(LIMITS, node)
    return after


def _limits_of(node: bytes, value: bytes | None) -> RateLimits:
    return NO_LIMITS if value is None else rate_limits.unpack_limits(node, value)


def get_limits(meta: Meta, node: bytes) -> RateLimits:
    """The limits of a node."""
    return meta.transactor.view(lambda txn: _limits_of(node, txn.get(LIMITS, node)))


def delete_limits(meta: Meta, node: bytes) -> bool:
    """Take all limits of a node away; False where it has none."""

    def verb(txn: Txn) -> bool:
        found = txn.get(LIMITS, node) is not None
        if found:
            txn.delete(LIMITS, node)
        return found

    return meta.transactor.run(verb)


def all_limits(meta: Meta) -> dict[bytes, RateLimits]:
    """The limits of all nodes that have some."""
    return read_limits(meta)[0]


def read_limits(meta: Meta) -> tuple[dict[bytes, RateLimits], list[Corrupt]]:
    """The same, and what is left out: damaged, or of a later version."""
    found: dict[bytes, RateLimits] = {}
    others: list[Corrupt] = []
    for node, value in _table(meta, LIMITS).items():
        try:
            found[node] = rate_limits.unpack_limits(node, value)
        except Corrupt as error:
            others.append(error)
    return found, others


def all_demands(meta: Meta) -> dict[bytes, bytes]:
    """What each session has said of its demands, as it is stored."""
    return _table(meta, DEMANDS)


def say_demands(meta: Meta, session: SessionId, beat: int, demands: dict[bytes, Demand]) -> None:
    """What our session has done of late; without `demands` it says nothing any more."""
    field = keys.pack_u64(session)

    def verb(txn: Txn) -> None:
        if demands:
            txn.put(DEMANDS, field, rate_limits.pack_demands(beat, demands))
        else:
            txn.delete(DEMANDS, field)

    meta.transactor.run(verb)


def forget_demands(meta: Meta, session: bytes, said: bytes) -> None:
    """A session says nothing new any more: forget what it has said, unless it is new after all."""

    def verb(txn: Txn) -> None:
        if txn.get(DEMANDS, session) == said:
            txn.delete(DEMANDS, session)

    meta.transactor.run(verb)


def nodes_above(meta: Meta, ino: Ino) -> list[bytes] | None:
    """The nodes of the directories that a file or directory is in, itself included; without the
    root. Of a file with several names those above each of them, as far as NAMES_MAX.

    None where it has no name, or none below the root.
    """
    return meta.transactor.view(partial(_nodes_above, ino=ino))


def _nodes_above(txn: Txn, ino: Ino) -> list[bytes] | None:
    parents = [ino]
    if ino != ROOT_INO and _parent(txn, ino) == NO_PARENT:
        fields = txn.get_inodes([keys.inode_row(ino)])[0].fields
        parents = [
            Ino(keys.id_of(field)) for field in fields if field[:1] == b"p" and len(field) == 9
        ][:NAMES_MAX]
    chains = [chain for each in parents if (chain := _chain(txn, each)) is not None]
    return [*dict.fromkeys(node for chain in chains for node in chain)] if chains else None


def _chain(txn: Txn, ino: Ino) -> list[bytes] | None:
    """From an inode up to the root, without that; None where it is not below it."""
    nodes: list[bytes] = []
    while ino != ROOT_INO:
        parent = _parent(txn, ino)
        if parent is None or not NO_PARENT < parent < SEALED_INO or len(nodes) > DEPTH_MAX:
            return None
        nodes.append(quota.dir_node(ino))
        ino = parent
    return nodes


def _parent(txn: Txn, ino: Ino) -> Ino | None:
    stable = txn.read_unvalidated(keys.inode_row(ino), keys.ATTR_FIELD)
    if stable is None:
        return None
    return Ino(keys.id_of(stable[ATTR_PARENT_AT : ATTR_PARENT_AT + 8]))


def _table(meta: Meta, row: bytes) -> dict[bytes, bytes]:
    return meta.transactor.view(lambda _txn: dict(fields_of(meta.store, row)))

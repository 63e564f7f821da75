"""Deleting for good what has no name: orphan inodes, then slices nobody refers to.

Deletion waits for readers, on every mount. One client leads. It notes what is in O and X, then asks
for a new *round*. A session that confirms round N says: those of my open files that are orphans are
recorded as held, and no read of mine still uses a slice list from before N. When every live session
has confirmed, what was noted before N and is not held may go.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fsmeta import schema
from fsmeta.ops.extent import bury
from fsmeta.schema import SessionRecord
from fsmeta.transact import Txn
from fsmeta.types import Ino, SessionId

CHUNKS_A_PURGE: Final = 800  # of one inode; a larger file takes several commits


def take_lead(txn: Txn, sid: SessionId, believed_dead: SessionId | None) -> bool:
    """Become the leader where there is none, or where the one there is is `believed_dead`."""
    value = txn.get(schema.BACKGROUND, schema.LEADER)
    leader = SessionId(schema.id_of(value)) if value else None
    if leader == sid:
        return True
    if leader is not None and leader != believed_dead:
        alive = txn.get(schema.SESSIONS, schema.pack_u64(leader))
        if alive is not None:
            return False
    txn.put(schema.BACKGROUND, schema.LEADER, schema.pack_u64(sid))
    return True


def leader(txn: Txn) -> SessionRecord | None:
    """The session that leads, unless it has ended."""
    value = txn.get(schema.BACKGROUND, schema.LEADER)
    record = txn.get(schema.SESSIONS, value) if value else None
    return schema.unpack_session(value, record) if value and record else None


def current_round(txn: Txn) -> int:
    """The round that sessions are asked to confirm; 0 before the first."""
    value = txn.get(schema.BACKGROUND, schema.ROUND)
    return schema.unpack_count(schema.BACKGROUND, schema.ROUND, value)


def next_round(txn: Txn, sid: SessionId) -> int | None:
    """Ask all sessions to confirm a new round; None where `sid` no longer leads."""
    leader, value = txn.get_many(
        ((schema.BACKGROUND, schema.LEADER), (schema.BACKGROUND, schema.ROUND))
    )
    if leader != schema.pack_u64(sid):
        return None
    number = schema.unpack_count(schema.BACKGROUND, schema.ROUND, value) + 1
    txn.put(schema.BACKGROUND, schema.ROUND, b"%d" % number)
    return number


def purge(txn: Txn, inos: Sequence[Ino]) -> int:
    """Remove orphan inodes; their slices join the dead ones. Returns how many have yet to be done.

    A file of very many chunks loses CHUNKS_A_PURGE of them in one call and stays an orphan.
    """
    budget = CHUNKS_A_PURGE
    left = 0
    rows = txn.get_rows([schema.inode_row(ino) for ino in inos])
    for ino, fields in zip(inos, rows, strict=True):
        row = schema.inode_row(ino)
        txn.expect(row, schema.VOLATILE_FIELD, fields.get(schema.VOLATILE_FIELD))
        chunks = [field for field in fields if field[:1] == b"c"]
        for field in chunks[:budget]:
            txn.expect(row, field, fields[field])
            bury(txn, schema.unpack_slices(ino, schema.id_of(field), fields[field]))
            txn.delete(row, field)
        if len(chunks) > budget:
            left += 1
            budget = 0
            continue
        budget -= len(chunks)
        txn.delete_row(row)
        txn.delete(schema.ORPHANS, schema.pack_u64(ino))
    return left


def forget_dead(txn: Txn, keys: Sequence[bytes]) -> None:
    """The objects of these entries of X are deleted."""
    for key in keys:
        txn.delete(schema.DEAD_SLICES, key)

"""Deleting for good what has no name: orphan inodes, then slices that no chunk lists.

Deletion waits for readers, on every mount. One client leads. It notes what is in O and X, then
begins a new *round*. A session that confirms round N states that those of its open files that are
orphans are recorded as held, and that no read still uses a slice list from before N. When every
live session has confirmed, what was noted before N and is not held may go.

X lists what chunks have *dropped*. A slice that is shared (R) is used until each of its users has
dropped it; `last_uses` finds that out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from fsmeta.ops.data.extent import bury
from fsmeta.schema import inode, keys as schema, slices as schema_slices
from fsmeta.schema.segments import PACKED
from fsmeta.schema.sessions import SessionRecord, unpack_session
from fsmeta.store.contract import COMMIT_OPS_ENOUGH, Key
from fsmeta.txn.txn import Txn
from fsmeta.types import Ino, SessionId, SliceId

Drops: TypeAlias = Mapping[bytes, list[tuple[SliceId, int]]]  # by field of X
FIELDS_A_PURGE: Final = 400  # of a long row: with values of 64 KiB that is 26 MiB of memory


def take_lead(txn: Txn, sid: SessionId, believed_dead: SessionId | None) -> bool:
    """Become the leader where there is none, or where the present one is `believed_dead`."""
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


def leader(txn: Txn, guess: SessionId | None = None) -> SessionRecord | None:
    """The session that leads, unless it has ended. One request if `guess` is right."""
    keys = [(schema.BACKGROUND, schema.LEADER)]
    if guess is not None:
        keys.append((schema.SESSIONS, schema.pack_u64(guess)))
    value = txn.get_many(keys)[0]
    record = txn.get(schema.SESSIONS, value) if value else None
    return unpack_session(value, record) if value and record else None


def round_and_ids(txn: Txn, sid: SessionId | None) -> tuple[int, int, bytes | None]:
    """The current round, 0 before the first; the next free slice id; and the record that a session
    has written of itself."""
    keys = [(schema.BACKGROUND, schema.ROUND), (schema.COUNTERS, schema.NEXT_SLICE)]
    if sid is not None:
        keys.append((schema.SESSIONS, schema.pack_u64(sid)))
    current, slices, *ours = txn.get_many(keys)
    return (
        schema.unpack_count(schema.BACKGROUND, schema.ROUND, current),
        schema.unpack_count(schema.COUNTERS, schema.NEXT_SLICE, slices),
        ours[0] if ours else None,
    )


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

    One of very many chunks, slices or attributes loses some of them in a call and stays an orphan.
    """
    left = 0
    rows = txn.get_short_rows([schema.inode_row(ino) for ino in inos])
    for ino, found in zip(inos, rows, strict=True):
        row = schema.inode_row(ino)
        if found is None and txn.ops > COMMIT_OPS_ENOUGH:
            left += 1
            continue
        fields, rest = (found, False) if found is not None else _begin_of(txn, row)
        a, v = fields.get(schema.ATTR_FIELD), fields.get(schema.VOLATILE_FIELD)
        txn.expect(row, schema.VOLATILE_FIELD, v)
        if a and v and inode.unpack_inode(ino, a, v).nlink:
            continue  # link(2) has given it a name since
        done = _bury_chunks(txn, ino, fields)
        if rest:
            for field in fields.keys() - schema.ATTR_FIELDS:
                if field[:1] != b"c":
                    txn.delete(row, field)
        if rest or not done:
            left += 1
            continue
        txn.delete_row(row)
        txn.delete(schema.ORPHANS, schema.pack_u64(ino))
    return left


def _bury_chunks(txn: Txn, ino: Ino, fields: Mapping[bytes, bytes]) -> bool:
    """Drop the chunks of a file; False where one commit has enough before all are."""
    row = schema.inode_row(ino)
    for field, value in fields.items():
        if field[:1] != b"c":
            continue
        if txn.ops > COMMIT_OPS_ENOUGH:
            return False
        txn.expect(row, field, value)
        bury(txn, schema_slices.unpack_slices(ino, schema.id_of(field), value))
        txn.delete(row, field)
    return True


def _begin_of(txn: Txn, row: bytes) -> tuple[dict[bytes, bytes], bool]:
    """Attributes and some more fields of a long row, and whether that is not all of it."""
    a, v = txn.get_many([(row, field) for field in schema.ATTR_FIELDS])
    fields = {
        field: value
        for field, value in zip(schema.ATTR_FIELDS, (a, v), strict=True)
        if value is not None
    }
    for field, value in txn.fields_of(row):
        if len(fields) >= FIELDS_A_PURGE:
            return fields, True
        if field not in schema.ATTR_FIELDS:
            fields[field] = value
    return fields, False


class LastUses(NamedTuple):
    """What is to become of drops: slices that are unused now, and those with other uses."""

    gone: list[tuple[SliceId, int]]
    shared: list[SliceId]


def last_uses(txn: Txn, sid: SessionId, number: int, noted: Drops) -> LastUses | None:
    """Which of the slices in `noted` were dropped by all chunks that used them.

    None where `sid` leads no longer, or another round than `number` has begun: then another client
    may have dealt with these. All is read at one moment.
    """
    counts = count_drops(noted)
    keys: list[Key] = [(schema.BACKGROUND, schema.LEADER), (schema.BACKGROUND, schema.ROUND)]
    keys += [(schema.SHARED_SLICES, schema.pack_u64(each)) for each in counts]
    lead, current, *uses = txn.get_many(keys)
    ours = lead == schema.pack_u64(sid)
    if not ours or schema.unpack_count(schema.BACKGROUND, schema.ROUND, current) != number:
        return None
    gone: list[tuple[SliceId, int]] = []
    shared: list[SliceId] = []
    for (slice_id, (drops, size)), value in zip(counts.items(), uses, strict=True):
        if value is not None:
            shared.append(slice_id)
        if drops > schema.unpack_count(schema.SHARED_SLICES, schema.pack_u64(slice_id), value):
            gone.append((slice_id, size))
    return LastUses(gone, shared)


def forget_dead(txn: Txn, noted: Drops, shared: Sequence[SliceId]) -> None:
    """Forget drops: their objects are deleted, or other chunks use the slices of `shared`.

    What has been added to a field since it was noted stays; what another client has forgotten is
    not counted off again.
    """
    row = schema.DEAD_SLICES
    shares = [(schema.SHARED_SLICES, schema.pack_u64(each)) for each in shared]
    values = txn.get_many([*((row, field) for field in noted), *shares])
    done: dict[bytes, list[tuple[SliceId, int]]] = {}
    for (field, dead), value in zip(noted.items(), values[: len(noted)], strict=True):
        packed = schema_slices.pack_dead(dead)
        if value is None or not value.startswith(packed):
            continue
        done[field] = dead
        if value == packed:
            txn.delete(row, field)
        else:
            txn.put(row, field, value[len(packed) :])
    counts = count_drops(done)
    for slice_id, key, value in zip(shared, shares, values[len(noted) :], strict=True):
        drops, _ = counts.get(slice_id, (0, 0))
        if not drops or value is None:
            continue
        left = schema.unpack_count(*key, value) - drops
        if left > 0:
            txn.put(*key, b"%d" % left)
        else:
            txn.delete(*key)
            txn.delete(PACKED, key[1])


def count_drops(noted: Drops) -> dict[SliceId, tuple[int, int]]:
    """How often each slice was dropped, and its size."""
    counts: dict[SliceId, tuple[int, int]] = {}
    for dead in noted.values():
        for slice_id, size in dead:
            counts[slice_id] = (counts.get(slice_id, (0, 0))[0] + 1, size)
    return counts

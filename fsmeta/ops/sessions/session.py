"""Sessions: the clients of a volume, whether they live, and their open inodes without a name.

A session lives while its row does; every commit checks that (`Commit.fence`), so deleting the row
fences the client off. When another client ends a session, the records of its workers stay until its
client has come back and has seen what became of its last commits. Only the beat decides whether a
session *should* live: a watcher that has seen the same beat for a whole lease, on its own clock,
may end it. Wall clocks do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final, NamedTuple

from fsmeta.errors import StoreRolledBack
from fsmeta.schema import keys as schema
from fsmeta.schema.locks import Kind, grant_row, places_in
from fsmeta.schema.sessions import SessionRecord, pack_session, unpack_session
from fsmeta.store.contract import EDITION, FENCE_FIELD
from fsmeta.txn.txn import Txn
from fsmeta.types import Ino, SessionId

JOINING: Final = (
    (schema.COUNTERS, schema.NEXT_SESSION),
    (schema.BACKGROUND, schema.ROUND),
    (schema.COUNTERS, schema.NEXT_SLICE),
    (schema.BACKGROUND, schema.VOID),
)  # what `open_session` reads
TIDIED_MAX: Final = 1000  # other fields of a session that is ended; the rest goes with its row
_NO_PROOF: Final = b"1"
_RECORD: Final = schema.worker_field(0)[:1]  # how fields of workers begin
ENDED_MAX: Final = 1000  # ended sessions that are remembered; older ones are refused
ROWS_AT_ONCE: Final = 200  # of sessions; one request for thousands would delay all clients


class Joined(NamedTuple):
    """A session that has begun."""

    record: SessionRecord
    void: int  # slices below it that are not committed may have lost their objects (`collect`)


def open_session(
    txn: Txn,
    info: dict[str, Any],
    ended: SessionId | None = None,
    is_proven: Callable[[bytes, bytes | None], bool] | None = None,
    floor: Callable[[int], int] | None = None,
    at_ns: int = 0,
    edition: bytes = EDITION,
) -> Joined:
    """Begin a session that follows settings of `edition`.

    It has nothing open, so it agrees to every deletion round so far.

    One after another that was `ended` by another client may hold orphans and read old slices: the
    round under way waits for it. It must be proven to go on where that one ended. `floor`: the
    lowest slice that it may commit, given the next free id.
    Raises: Rewound.
    """
    rejoins = ended is not None
    if ended is not None and is_proven is not None:
        proof = txn.get(schema.ENDED, schema.pack_u64(ended))
        if not is_proven(schema.session_row(ended), proof):
            raise StoreRolledBack(
                f"the store has gone back to an older state: it does not know that session {ended}"
                " of this mount was ended, or not all that was stored in its name"
            )
    number, current, slices, void = txn.get_many(JOINING)
    sid = schema.unpack_count(schema.COUNTERS, schema.NEXT_SESSION, number) + 1
    confirmed = schema.unpack_count(schema.BACKGROUND, schema.ROUND, current) - rejoins
    lowest = schema.unpack_count(schema.COUNTERS, schema.NEXT_SLICE, slices)
    if floor is not None:
        lowest = floor(lowest)
    record = SessionRecord(SessionId(sid), 0, confirmed, info, lowest, at_ns)
    txn.put(schema.COUNTERS, schema.NEXT_SESSION, b"%d" % sid)
    txn.durable = True  # journals name the session, and no other one gets its number
    txn.put(schema.session_row(sid), FENCE_FIELD, edition)
    put_session(txn, record)
    below = schema.unpack_count(schema.BACKGROUND, schema.VOID, void)
    return Joined(record, below)


def put_session(txn: Txn, record: SessionRecord) -> None:
    """Show this session's beat and what it has confirmed."""
    txn.put(schema.SESSIONS, schema.pack_u64(record.id), pack_session(record))


def beat(txn: Txn, record: SessionRecord, before: Collection[bytes], first: bool) -> bool:
    """Show a new beat; False where the last one is none of `before`, which we have written.

    Then another client uses this session: a copy of this process, with all its state.
    """
    key = schema.SESSIONS, schema.pack_u64(record.id)
    if first:
        txn.expect(*key, next(iter(before)))  # as a rule it is, so no read is needed
    elif txn.get(*key) not in before:
        return False
    put_session(txn, record)
    return True


def raise_fence(txn: Txn, sid: SessionId, edition: bytes) -> bool:
    """Let a session commit under settings of `edition` only; False where it has ended.

    Its workers' records are written, too, as they are: on TiKV commits under way meet nothing else.
    """
    row = schema.session_row(sid)
    fields = txn.get_row(row)
    current = fields.get(FENCE_FIELD)
    txn.expect(row, FENCE_FIELD, current)
    if current is not None and current != edition:
        txn.put(row, FENCE_FIELD, edition)
        for field in fields:
            if field[:1] == _RECORD:
                txn.append(row, field, b"")
    return current is not None


def close_session(txn: Txn, sid: SessionId) -> None:
    """End a session, our own or a dead one: it holds nothing, and can't commit any more.

    Raises: ENOTEMPTY where its `g` row is not empty: then `fence_off` and `bury_session`.
    """
    txn.require_empty(grant_row(sid))
    txn.delete_row(schema.session_row(sid))
    txn.delete(schema.SESSIONS, schema.pack_u64(sid))


def end_dead_session(txn: Txn, sid: SessionId) -> None:
    """`close_session` for another client's session, with proof for that client if it comes back.

    Raises: ENOTEMPTY as `close_session`.
    """
    if txn.get(schema.SESSIONS, schema.pack_u64(sid)) is None:
        return  # it has ended itself
    txn.require_empty(grant_row(sid))
    _retire(txn, sid)
    txn.delete(schema.SESSIONS, schema.pack_u64(sid))


def _retire(txn: Txn, sid: SessionId) -> None:
    """Let a session commit nothing any more; nothing is done where it already can't.

    What it has committed last stays in its row, for its client may come back in doubt. The records
    are written as they are: on TiKV they are all that commits under way conflict with.
    """
    row = schema.session_row(sid)
    fields = txn.get_row(row)
    alive, proof = fields.get(FENCE_FIELD), fields.get(schema.PROOF_FIELD)
    txn.expect(row, FENCE_FIELD, alive)
    txn.expect(row, schema.PROOF_FIELD, proof)
    if alive is None:
        return
    remembered = sorted(txn.get_row(schema.ENDED))
    for old in remembered[: max(0, len(remembered) - ENDED_MAX + 1)]:
        _forget(txn, old)
    txn.put(schema.ENDED, schema.pack_u64(sid), proof or _NO_PROOF)
    txn.delete(row, FENCE_FIELD)
    for field in fields:
        if field[:1] == _RECORD:
            txn.append(row, field, b"")
    held = [field for field in fields if field[:1] not in (_RECORD, FENCE_FIELD)]
    for field in held[:TIDIED_MAX]:
        txn.delete(row, field)


def fence_off(txn: Txn, sid: SessionId) -> None:
    """Let a session commit nothing any more. It stays in S until it is buried, by whomever."""
    if txn.get(schema.SESSIONS, schema.pack_u64(sid)) is not None:
        _retire(txn, sid)


def bury_session(txn: Txn, sid: SessionId) -> None:
    """A session that was fenced off, and whose locks are given up, is one no more."""
    txn.delete_row(grant_row(sid))
    txn.delete(schema.SESSIONS, schema.pack_u64(sid))


def erase_session(txn: Txn, sid: SessionId) -> None:
    """`bury_session` of one that no client will come back to."""
    bury_session(txn, sid)
    txn.delete_row(schema.session_row(sid))


def forget_ended(txn: Txn, sid: SessionId) -> None:
    """The client of a session that was ended is back, and has read what that one left."""
    _forget(txn, schema.pack_u64(sid))


def _forget(txn: Txn, field: bytes) -> None:
    """Keep nothing more of an ended session; `field` of E is its number."""
    txn.delete(schema.ENDED, field)
    if len(field) == len(schema.pack_u64(0)):
        txn.delete_row(schema.session_row(schema.id_of(field)))


def forget_last_commit(txn: Txn, sid: SessionId) -> None:
    """The one that has ended our own session was recorded in it: nothing is left to be repeated."""
    txn.expect(schema.session_row(sid), FENCE_FIELD, None)
    txn.delete_row(schema.session_row(sid))


def get_session(txn: Txn, sid: SessionId) -> SessionRecord | None:
    """A session that has not been ended."""
    field = schema.pack_u64(sid)
    value = txn.get(schema.SESSIONS, field)
    return None if value is None else unpack_session(field, value)


def list_sessions(txn: Txn) -> list[SessionRecord]:
    """Every session that has not been ended, by id."""
    fields = txn.get_row(schema.SESSIONS)
    return sorted(unpack_session(field, value) for field, value in fields.items())


def hold_orphans(txn: Txn, sid: SessionId, opened: Iterable[Ino]) -> list[Ino]:
    """Record those of `opened` that have no name any more as held by this session."""
    inos = list(opened)
    keys = [(schema.ORPHANS, schema.pack_u64(ino)) for ino in inos]
    held = [ino for ino, since in zip(inos, txn.get_many(keys), strict=True) if since is not None]
    for ino in held:
        txn.put(schema.session_row(sid), schema.hold_field(ino), b"1")
    return held


def release_orphans(txn: Txn, sid: SessionId, inos: Iterable[Ino]) -> None:
    """Closed at last."""
    for ino in inos:
        txn.delete(schema.session_row(sid), schema.hold_field(ino))


def held_orphans(txn: Txn, sessions: Iterable[SessionId]) -> set[Ino]:
    """Every inode without a name that one of `sessions` holds open."""
    held: set[Ino] = set()
    rows = [schema.session_row(sid) for sid in sessions]
    for begin in range(0, len(rows), ROWS_AT_ONCE):
        for row in txn.get_rows(rows[begin : begin + ROWS_AT_ONCE]):
            held |= {Ino(schema.id_of(field)) for field in row if field[:1] == b"h"}
    return held


class Belongings(NamedTuple):
    """What a session has: inodes without a name that it holds open, and files it has locks of."""

    orphans: list[Ino]
    locks: list[tuple[Ino, Kind]]


def belongings(txn: Txn, sessions: Sequence[SessionId]) -> dict[SessionId, Belongings]:
    """What each of them has, or has had a moment ago."""
    found = {}
    for begin in range(0, len(sessions), ROWS_AT_ONCE):
        part = sessions[begin : begin + ROWS_AT_ONCE]
        held = txn.get_rows([schema.session_row(sid) for sid in part])
        locks = txn.get_rows([grant_row(sid) for sid in part])
        for sid, row, notes in zip(part, held, locks, strict=True):
            orphans = sorted(Ino(schema.id_of(field)) for field in row if field[:1] == b"h")
            found[sid] = Belongings(orphans, places_in(notes))
    return found

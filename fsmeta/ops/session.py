"""Sessions: who uses the volume, whether they live, and what they hold open without a name.

A session lives while its row does; every commit checks that (`Commit.fence`), so deleting the row
fences the client off. Whether a session *should* live is judged by its beat alone: a watcher that
has seen the same beat for a whole lease, on its own clock, may end it. Nobody's wall clock counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fsmeta import schema
from fsmeta.schema import SessionRecord
from fsmeta.store import FENCE_FIELD
from fsmeta.transact import Txn
from fsmeta.types import Ino, SessionId


def open_session(txn: Txn, info: dict[str, Any], rejoins: bool = False) -> SessionRecord:
    """Begin a session; it has nothing open, so it agrees to every deletion round so far.

    One that `rejoins` may hold orphans and read old slices: the round under way waits for it.
    """
    number, current = txn.get_many(
        ((schema.COUNTERS, schema.NEXT_SESSION), (schema.BACKGROUND, schema.ROUND))
    )
    sid = schema.unpack_count(schema.COUNTERS, schema.NEXT_SESSION, number) + 1
    confirmed = schema.unpack_count(schema.BACKGROUND, schema.ROUND, current) - rejoins
    record = SessionRecord(SessionId(sid), 0, confirmed, info)
    txn.put(schema.COUNTERS, schema.NEXT_SESSION, b"%d" % sid)
    txn.put(schema.session_row(sid), FENCE_FIELD, b"1")
    put_session(txn, record)
    return record


def put_session(txn: Txn, record: SessionRecord) -> None:
    """Show this session's beat and what it has confirmed."""
    txn.put(schema.SESSIONS, schema.pack_u64(record.id), schema.pack_session(record))


def close_session(txn: Txn, sid: SessionId) -> None:
    """End a session, our own or a dead one: it holds nothing, and can't commit any more."""
    txn.delete_row(schema.session_row(sid))
    txn.delete(schema.SESSIONS, schema.pack_u64(sid))


def list_sessions(txn: Txn) -> list[SessionRecord]:
    """Every session that has not been ended, by id."""
    fields = txn.get_row(schema.SESSIONS)
    return sorted(schema.unpack_session(field, value) for field, value in fields.items())


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
    rows = txn.get_rows([schema.session_row(sid) for sid in sessions])
    return {Ino(schema.id_of(field)) for row in rows for field in row if field[:1] == b"h"}

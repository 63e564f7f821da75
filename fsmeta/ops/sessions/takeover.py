"""Takeover of a session: a process goes on with the session of one that has died.

The session stays, with its locks and what it holds open. Commits that the dead process has sent may
still be on their way. So the record of each worker moves to a sequence that is above all of theirs:
a commit that arrives later counts as a repeat and changes nothing.

A process may die while it takes over, when it has moved the records and not used what they were. So
that stays beside them for those workers that the next process will ask about as well.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

from fsmeta.errors import Fenced
from fsmeta.ops.sessions.session import put_session
from fsmeta.schema import keys as schema
from fsmeta.schema.sessions import SessionRecord, unpack_session
from fsmeta.store.contract import FENCE_FIELD
from fsmeta.txn.txn import Txn
from fsmeta.types import SessionId

_NUMBER: Final = 8  # bytes of a sequence
_WORKER: Final = schema.worker_field(0)[:1]  # how fields of workers begin


def take_over(
    txn: Txn,
    sid: SessionId,
    info: dict[str, Any],
    at_ns: int,
    sealed: int,
    asked: Collection[bytes] = (),
) -> tuple[SessionRecord, dict[bytes, int]]:
    """The session's record, and the last sequence that each worker of dead processes committed.

    `sealed` is above all sequences of those processes; `asked` are the workers of whose commits it
    is not settled yet whether they were applied. Raises: Fenced.
    """
    row = schema.session_row(sid)
    fields = txn.get_row(row)
    shown = txn.get(schema.SESSIONS, schema.pack_u64(sid))
    if FENCE_FIELD not in fields or shown is None:
        raise Fenced(f"session {sid} has ended")
    workers: dict[bytes, int] = {}
    for field, value in fields.items():
        if field[:1] == _WORKER:
            before = schema.taken_over_field(field)
            kept = fields.get(before, b"")
            # what was kept counts as long as the record is what the takeover put there
            committed = kept[_NUMBER:] if kept[:_NUMBER] == value else value
            txn.expect(row, field, value)
            txn.put(row, field, schema.pack_u64(sealed))
            if field in asked:
                txn.put(row, before, schema.pack_u64(sealed) + committed)
            elif before in fields:
                txn.delete(row, before)
            workers[field] = schema.id_of(committed)
    last = unpack_session(schema.pack_u64(sid), shown)
    record = last._replace(beat=last.beat + 1, info=info, at_ns=at_ns)
    put_session(txn, record)
    return record, workers

"""The record by which a session shows that it lives: what is in table S.

Called by `ops/sessions/session` and by all readers of S. `docs/FORMAT.md` is this page in prose.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from fsmeta.errors import Corrupt
from fsmeta.schema import keys
from fsmeta.types import SessionId


class SessionRecord(NamedTuple):
    """One row of `slicefs status`, and the beat by which other clients see that it lives."""

    id: SessionId
    beat: int  # grows with every heartbeat
    confirmed: int  # the last deletion round this session has agreed to
    info: dict[str, Any]  # host, pid, mountpoint, version, started
    floor: int = 0  # it will commit no slice below
    at_ns: int = 0  # when it beat, by its own clock: to be shown, and no two beats are the same


def pack_session(record: SessionRecord) -> bytes:
    """The value of a session in S."""
    shown = {"beat": record.beat, "confirmed": record.confirmed, "info": record.info}
    if record.floor:
        shown["floor"] = record.floor
    if record.at_ns:
        shown["at"] = record.at_ns
    return keys.pack_map(shown)


def unpack_session(field: bytes, value: bytes) -> SessionRecord:
    """Raises: Corrupt."""
    record = keys.unpack_map(keys.SESSIONS, field, value)
    try:
        session = SessionId(keys.id_of(field))
    except ValueError as error:
        raise Corrupt(keys.SESSIONS, field, str(error)) from error
    whole = {"floor": 0, "at": 0, **record}  # earlier clients don't say these two
    numbers = [whole.get(name) for name in ("beat", "confirmed", "floor", "at")]
    info = record.get("info")
    if any(type(each) is not int for each in numbers) or not isinstance(info, dict):
        raise Corrupt(keys.SESSIONS, field, f"not a session: {record!r}")
    beat, confirmed, floor, at_ns = (each for each in numbers if isinstance(each, int))
    return SessionRecord(session, beat, confirmed, info, floor, at_ns)

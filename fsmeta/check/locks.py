"""The part of `check` for locks: the invariants of `schema/locks`.

A volume in use may show a session that is being ended, or a note of a place that has just been
given up: as everywhere in `check`, a report is a fault only if the volume is at rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from fsmeta.errors import Corrupt
from fsmeta.rules import locks
from fsmeta.schema import keys, locks as rows
from fsmeta.schema.locks import Kind
from fsmeta.store.contract import Store

Report = Callable[[int, str], None]
_FIELDS = frozenset({b"fh", b"ph", b"fq", b"pq"})


def check_locks(
    store: Store, lock_rows: Iterable[bytes], grant_rows: Iterable[bytes], report: Report
) -> None:
    """Judge rows of locks, and rows of what sessions have of them."""
    sessions = _sessions(store)
    places: dict[tuple[int, Kind], set[int]] = {}
    for row in lock_rows:
        ino = keys.id_of(row)
        fields = store.read_rows([row])[0]
        if not fields.keys() <= _FIELDS:
            report(ino, f"has locks in fields {sorted(fields)}: some are nothing we know")
        for kind in Kind:
            try:
                places[ino, kind] = _check_kind(ino, kind, fields, sessions, report)
            except Corrupt as error:
                report(ino, str(error))
    for row in grant_rows:
        session = keys.id_of(row)
        if session not in sessions:
            report(0, f"session {session} has ended and has notes of locks")
        _check_places(session, store.read_rows([row])[0], places, report)
    for (ino, kind), missing in places.items():
        for session in missing:
            report(ino, f"has {kind.name} locks of session {session}, which does not say so")


def _sessions(store: Store) -> set[int]:
    found: set[int] = set()
    cursor: bytes | None = b""
    while cursor is not None:
        page = store.scan(keys.SESSIONS, cursor)
        found.update(keys.id_of(field) for field, _ in page.items if len(field) == 8)
        cursor = page.cursor
    return found


def _check_kind(
    ino: int, kind: Kind, fields: dict[bytes, bytes], sessions: set[int], report: Report
) -> set[int]:
    """Judge the locks of one kind; the sessions that have to do with them."""
    held_key, queue_key = rows.held_key(ino, kind), rows.queue_key(ino, kind)
    held = rows.unpack_locks(held_key, fields.get(held_key[1]))
    queue = rows.unpack_waits(queue_key, fields.get(queue_key[1]))
    if not locks.is_sound(held):
        report(ino, f"has {kind.name} locks that can't be held at once: {held}")
    if locks.handed_over(held, queue)[2]:
        report(ino, f"has {kind.name} locks with waiters that need not wait: {queue}")
    concerned = {lock.owner.session for lock in held}
    concerned |= {wait.lock.owner.session for wait in queue}
    for session in concerned - sessions:
        report(ino, f"has {kind.name} locks of session {session}, which has ended")
    return concerned


def _check_places(
    session: int,
    fields: dict[bytes, bytes],
    places: dict[tuple[int, Kind], set[int]],
    report: Report,
) -> None:
    """Judge what a session says of its places, and strike them off `places`."""
    for field in fields:
        if len(field) != 9 or field[:1] not in (b"f", b"p", b"t", b"w"):
            report(0, f"session {session} has a note {field!r} that is nothing we know")
        elif field[:1] in (b"f", b"p"):
            there = places.get((keys.id_of(field), Kind(field[0])), set())
            if session not in there:
                report(keys.id_of(field), f"has no locks of session {session}, which says so")
            there.discard(session)

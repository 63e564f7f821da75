"""P3: the records of locks, byte by byte; what does not decode is Corrupt."""

from __future__ import annotations

import pytest

from fsmeta.check.check import check
from fsmeta.errors import Corrupt
from fsmeta.schema import locks as rows
from fsmeta.schema.locks import LOCK_END, Kind, LockRecord, LockWait, Owner
from fsmeta.store.writes import DeleteRow, Put
from tests.fsmeta.engines import Engine, change

HELD = LockRecord(Owner(5, 2**63 + 1), 77, True, 0, LOCK_END)
WANTED = LockRecord(Owner(6, 9), 78, False, 10, 20)
GOLDEN = {
    "lock row": (rows.lock_row(7), "6c 0000000000000007"),
    "grant row": (rows.grant_row(5), "67 0000000000000005"),
    "held": (rows.held_key(7, Kind.FLOCK)[1], "6668"),
    "queue": (rows.queue_key(7, Kind.POSIX)[1], "7071"),
    "place": (rows.place_field(7, Kind.POSIX), "70 0000000000000007"),
    "ticket": (rows.ticket_field(8), "74 0000000000000008"),
    "waits": (rows.waits_field(9), "77 0000000000000009"),
    "places": (rows.pack_places({3, 2}, 1), "0000000000000001 0000000000000002 0000000000000003"),
    "locks": (
        rows.pack_locks([HELD]),
        "11 0000004d 0000000000000005 8000000000000001 0000000000000000 8000000000000000",
    ),
    "queue of one": (
        rows.pack_waits([LockWait(WANTED, 4)]),
        "10 0000004e 0000000000000006 0000000000000009 000000000000000a 0000000000000014"
        "0000000000000004",
    ),
}
KEY = rows.held_key(7, Kind.POSIX)


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_bytes(name: str) -> None:
    packed, text = GOLDEN[name]
    assert packed == bytes.fromhex(text)


def test_what_is_packed_is_unpacked() -> None:
    assert rows.unpack_locks(KEY, rows.pack_locks([HELD, WANTED])) == [HELD, WANTED]
    assert rows.unpack_waits(KEY, rows.pack_waits([LockWait(WANTED, 4)])) == [LockWait(WANTED, 4)]
    assert rows.unpack_places(KEY, rows.pack_places({3, 2}, 1)) == [2, 3]
    assert rows.unpack_locks(KEY, None) == []
    assert rows.unpack_waits(KEY, None) == []


@pytest.mark.parametrize(
    "value",
    [
        rows.pack_locks([HELD])[:-1],
        b"\x21" + rows.pack_locks([HELD])[1:],
        b"\x12" + rows.pack_locks([HELD])[1:],
        rows.pack_locks([HELD._replace(begin=5, end=5)]),
        rows.pack_locks([HELD._replace(end=LOCK_END + 1)]),
    ],
)
def test_what_does_not_decode_is_corrupt(value: bytes) -> None:
    with pytest.raises(Corrupt):
        rows.unpack_locks(KEY, value)
    with pytest.raises(Corrupt):
        rows.unpack_waits(KEY, value + bytes(8) if len(value) % 37 == 0 else value)


@pytest.mark.parametrize("engine", ["mem"], indirect=True)
def test_check_finds_what_can_not_be(engine: Engine) -> None:
    """Two writers at once, a session that has ended, a wait without need, a note of nothing."""
    meta = engine.meta()
    assert meta.session is not None
    sid = meta.session.id
    one, two = (LockRecord(Owner(sid, each), 1, True, 0, 10) for each in (1, 2))
    bad: list[tuple[bytes, bytes, bytes, str]] = [
        (*rows.held_key(1, Kind.POSIX), rows.pack_locks([one, two]), "can't be held at once"),
        (*rows.held_key(1, Kind.FLOCK), rows.pack_locks([HELD]), "session 5, which has ended"),
        (*rows.queue_key(1, Kind.FLOCK), rows.pack_waits([LockWait(one, 1)]), "that need not wait"),
        (*rows.held_key(1, Kind.POSIX), rows.pack_locks([one]), "which does not say so"),
        (*rows.held_key(1, Kind.POSIX), b"?", "length 1"),
        (rows.lock_row(1), b"zz", b"1", "nothing we know"),
        (rows.grant_row(sid), rows.place_field(3, Kind.POSIX), b"1", "which says so"),
        (rows.grant_row(sid), b"??", b"1", "nothing we know"),
        (rows.grant_row(99), rows.ticket_field(1), b"1", "has ended and has notes"),
    ]
    for row, field, value, complaint in bad:
        engine.first.commit(change(Put(row, field, value)))
        problems = [str(each) for each in check(engine.first).problems]
        assert any(complaint in each for each in problems), (complaint, problems)
        engine.first.commit(change(DeleteRow(row)))
    assert check(engine.first).problems == []

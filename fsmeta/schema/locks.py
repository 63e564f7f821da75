"""Keys and values of locks; the rest of the store's is in `schema/keys`.

    row          field        value
    l<ino8>      fh ph        LOCK records: flock(2), fcntl(2) locks of the inode that are held
                 fq pq        WAIT records: the waits for them, in order of arrival
    g<session8>  f<ino8>      1: the session holds or awaits a flock lock of this inode
                 p<ino8>      the same of fcntl locks
                 t<ticket8>   1: this wait of the session is over, the lock is its
                 w<owner8>    ticket of its last wait, then inodes at which this owner may
                              await fcntl locks, 8 bytes each

Invariants (what `check` verifies):
- locks of different owners that overlap are all for reading; an owner's are sorted and apart;
- no wait is for a lock that could be granted;
- a session in `l` is in S, and its row `g` names the inode; `g` belongs to a session in S.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Final, NamedTuple, TypeAlias

from fsmeta.errors import Corrupt
from fsmeta.store.contract import Key
from fsmeta.types import Ino

LOCK_PREFIX: Final = b"l"
GRANT_PREFIX: Final = b"g"
LOCK_END: Final = 1 << 63  # behind the last byte that a lock can cover: OFFSET_MAX + 1
RECORDS_MAX: Final = 4096  # locks of one inode, and waits for them: about 180 kB

_U64: Final = struct.Struct(">Q")


class Kind(IntEnum):
    """Which of an inode's two sets of locks, which don't know of each other."""

    FLOCK = ord("f")
    POSIX = ord("p")  # fcntl(2): of a process, or of an open file description (OFD)


class Owner(NamedTuple):
    """An owner of locks: a session, and its kernel's id of the process or the open file."""

    session: int
    id: int


class LockRecord(NamedTuple):
    """A range that an owner holds, or wants."""

    owner: Owner
    pid: int
    write: bool
    begin: int
    end: int

    def overlaps(self, other: LockRecord) -> bool:
        """Whether both cover a byte."""
        return self.begin < other.end and other.begin < self.end

    def bars(self, other: LockRecord) -> bool:
        """Whether both can't be held at once."""
        return (
            (self.write or other.write)
            and self.begin < other.end
            and other.begin < self.end
            and self.owner != other.owner
        )


class LockWait(NamedTuple):
    """A wait for a lock, and the number that its session gave it."""

    lock: LockRecord
    ticket: int


Records: TypeAlias = tuple[list[LockRecord], list[LockWait]]

# version in the upper half of the first byte and 1 for writing in the lower, pid, session, owner,
# begin, end
_LOCK: Final = struct.Struct(">BIQQQQ")
_WAIT: Final = struct.Struct(">BIQQQQQ")  # the same, and the ticket
assert _LOCK.size == 37
assert _WAIT.size == 45
_V1: Final = 0x10


def lock_row(ino: int) -> bytes:
    """The row of an inode's locks."""
    return b"l" + _U64.pack(ino)


def grant_row(session: int) -> bytes:
    """The row in which other clients note grants for a session, and it notes where it has locks."""
    return b"g" + _U64.pack(session)


def held_key(ino: int, kind: Kind) -> Key:
    """Where the holders are."""
    return lock_row(ino), bytes((kind,)) + b"h"


def queue_key(ino: int, kind: Kind) -> Key:
    """Where the waits are."""
    return lock_row(ino), bytes((kind,)) + b"q"


def place_field(ino: int, kind: Kind) -> bytes:
    """Where a session says that it has locks of an inode."""
    return bytes((kind,)) + _U64.pack(ino)


def places_in(fields: Iterable[bytes]) -> list[tuple[Ino, Kind]]:
    """Where a session has locks, by the fields of its row `g`."""
    found = (field for field in fields if field[:1] in (b"f", b"p") and len(field) == 9)
    return sorted((Ino(_U64.unpack(field[1:])[0]), Kind(field[0])) for field in found)


def ticket_field(ticket: int) -> bytes:
    """Where it is noted for a session that a wait is over."""
    return b"t" + _U64.pack(ticket)


def waits_field(owner: int) -> bytes:
    """Where a session says at which inodes an owner waits."""
    return b"w" + _U64.pack(owner)


def _pack_lock(lock: LockRecord) -> bytes:
    (session, owner), pid, write, begin, end = lock
    return _LOCK.pack(_V1 | write, pid, session, owner, begin, end)


def pack_locks(locks: Iterable[LockRecord]) -> bytes:
    """The value of a `fh` or `ph` field; empty is to be a deletion."""
    return b"".join(map(_pack_lock, locks))


def pack_waits(waits: Iterable[LockWait]) -> bytes:
    """The value of a `fq` or `pq` field, and what is appended to it."""
    return b"".join(_pack_lock(lock) + _U64.pack(ticket) for lock, ticket in waits)


def _lock(key: Key, head: int, numbers: Sequence[int]) -> LockRecord:
    pid, session, owner, begin, end = numbers
    if head >> 4 != _V1 >> 4 or head & 0xE or not begin < end <= LOCK_END:
        raise Corrupt(*key, f"lock {head:#x} {begin} to {end}")
    return LockRecord(Owner(session, owner), pid, bool(head & 1), begin, end)


def unpack_locks(key: Key, value: bytes | None) -> list[LockRecord]:
    """Raises: Corrupt."""
    if not value:
        return []
    if len(value) % _LOCK.size:
        raise Corrupt(*key, f"length {len(value)}")
    return [_lock(key, head, numbers) for head, *numbers in _LOCK.iter_unpack(value)]


def unpack_waits(key: Key, value: bytes | None) -> list[LockWait]:
    """Raises: Corrupt."""
    if not value:
        return []
    if len(value) % _WAIT.size:
        raise Corrupt(*key, f"length {len(value)}")
    return [
        LockWait(_lock(key, head, numbers), ticket)
        for head, *numbers, ticket in _WAIT.iter_unpack(value)
    ]


def pack_places(inos: Iterable[int], ticket: int) -> bytes:
    """The value of a `w` field; the ticket makes it another one each time."""
    return b"".join(map(_U64.pack, (ticket, *sorted(inos))))


def unpack_places(key: Key, value: bytes | None) -> list[Ino]:
    """Raises: Corrupt."""
    if value and len(value) % 8:
        raise Corrupt(*key, f"length {len(value)}")
    return [Ino(ino) for (ino,) in _U64.iter_unpack(value or b"")][1:]

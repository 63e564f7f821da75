"""The tables that the last worker has left: handles, locks, waits, pages of listings.

Called by the process that takes over, before it serves. The records are those of `survival/kept`.
"""

from __future__ import annotations

from fsclient.survival.arena import Arena
from fsclient.survival.kept import (
    BACKING_SHIFT,
    COUNTED,
    DIRECT,
    FLAGS,
    HANDLE,
    LOCK,
    PAGE,
    TICKET,
    U64,
    WRITE_KEY,
)
from fsclient.survival.records import KeptHandle, KeptLock, KeptPage
from fsmeta.types import Ino


def handles(arena: Arena) -> list[KeptHandle]:
    """What was open."""
    found = []
    for key, value in arena.items(b"H"):
        ino, flags, is_dir, unique = HANDLE.unpack(value)
        (fh,) = U64.unpack(key[1:])
        direct = bool(flags & DIRECT)
        backing = flags >> BACKING_SHIFT if flags & COUNTED else None
        plain = flags & FLAGS
        found.append(KeptHandle(fh, Ino(ino), plain, direct, bool(is_dir), unique, backing))
    return found


def locks(arena: Arena) -> list[KeptLock]:
    """What was locked."""
    found = []
    for key, value in arena.items(b"L"):
        ino, kind, owner = LOCK.unpack(key[1:])
        found.append(KeptLock(Ino(ino), kind, owner, tuple(fh for (fh,) in U64.iter_unpack(value))))
    return found


def tickets(arena: Arena) -> dict[tuple[Ino, int], list[int]]:
    """The waits that the store has in line, by inode and kind of lock."""
    found: dict[tuple[Ino, int], list[int]] = {}
    for key, value in arena.items(b"T"):
        ino, kind = TICKET.unpack(value)
        found.setdefault((Ino(ino), kind), []).append(U64.unpack(key[1:])[0])
    return found


def pages(arena: Arena) -> list[KeptPage]:
    """The pages of listings that the kernel may come back to."""
    found = []
    for key, value in arena.items(b"P"):
        ino, has_end, begin_bytes, end_bytes = PAGE.unpack_from(value)
        at = PAGE.size + begin_bytes
        begin, end = value[PAGE.size : at], value[at : at + end_bytes]
        found.append(KeptPage(U64.unpack(key[1:])[0], Ino(ino), begin, end if has_end else None))
    return found


def last_number(arena: Arena) -> int:
    """A number above those of all writes that are kept."""
    numbers = [WRITE_KEY.unpack(key[1:])[1] for key, _ in arena.items(b"W")]
    return max(numbers, default=0)

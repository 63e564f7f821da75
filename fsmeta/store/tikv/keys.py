"""Where a row and a field are in TiKV's one ordered map; `tikv/engine` and `group_commit` use it.

    S <prefix> / <length of row, 2 bytes> <row> <field>

All keys of a volume begin with its space, so volumes share a cluster. The length keeps each row in
one piece whatever its name, and rows of one length in order. `docs/FORMAT.md` says the same.

Counters that all clients add to (in rows of SUMS) are in parts: behind `<field>` come `<field> 00
<part>`, decimal like it, and the value is the sum of all. `tikv/escrow_counters` says what is
where.
"""

from __future__ import annotations

import struct
from typing import Final

from fsmeta.store.contract import SUMS
from fsmeta.store.writes import BESIDE

PARTS: Final = 64  # of one counter: so many clients, or threads of some, add without meeting
_LENGTH: Final = struct.Struct(">H")
_PART: Final = b"\0"


class KeySpace:
    """The keys of one volume."""

    def __init__(self, prefix: str) -> None:
        self.space = b"S" + prefix.encode() + b"/"

    def key(self, row: bytes, field: bytes) -> bytes:
        """Where a field is."""
        return self.space + _LENGTH.pack(len(row)) + row + field

    def begin(self, row: bytes) -> bytes:
        """Where the fields of `row` begin."""
        return self.key(row, b"")

    def end(self, row: bytes) -> bytes:
        """Where they have ended."""
        return after(self.begin(row))

    def seek(self, length: int, prefix: bytes) -> bytes:
        """Where rows of at least `length` bytes that begin with `prefix` can first be."""
        return self.space + _LENGTH.pack(length) + prefix

    def end_of_all(self) -> bytes:
        """Where the volume's keys have ended."""
        return after(self.space)

    def row_of(self, key: bytes) -> bytes:
        """The row that `key` is in."""
        at = len(self.space) + _LENGTH.size
        return key[at : at + _LENGTH.unpack_from(key, len(self.space))[0]]


def after(prefix: bytes) -> bytes:
    """The first key behind all that begin with `prefix`."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1])


def part_of(field: bytes, number: int) -> bytes:
    """Where part `number` of a counter is."""
    return field + _PART + bytes([number % PARTS])


def counter_of(stored: bytes) -> bytes:
    """The counter that a field of a row of SUMS is part of, which may be all of it."""
    return stored[:-2] if stored[-2:-1] == _PART and stored[-1] < PARTS else stored


def is_sum(row: bytes) -> bool:
    """Whether the counters of `row` lie in parts."""
    return row in SUMS


def is_counter(row: bytes, field: bytes) -> bool:
    """Whether this is a counter in parts, and no limit of one."""
    return row in SUMS and not field.endswith(BESIDE)

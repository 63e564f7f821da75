"""What each worker counts, and their sum. No locks: a slot has one writer, readers may lag."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from fsclient.fuse.dispatch.dispatch import operation_name
from fsclient.fuse.wire.protocol import OPCODES

_NS_PER_S: Final = 1_000_000_000


class OpStats(NamedTuple):
    """One opcode since the mount began."""

    calls: int
    errors: int
    total_ns: int


class SlotStats:
    """The counters of one worker slot, by opcode and together."""

    __slots__ = ("counts", "errors", "seconds", "served")

    def __init__(self) -> None:
        self.served = 0
        self.counts = [0] * OPCODES
        self.errors = [0] * OPCODES
        self.seconds = [0.0] * OPCODES


def summed(slots: Iterable[SlotStats]) -> dict[str, OpStats]:
    """The sums by operation name, of operations that occurred."""
    rows = list(slots)
    sums: dict[str, OpStats] = {}
    for opcode in range(OPCODES):
        count = sum(row.counts[opcode] for row in rows)
        if count:
            errors = sum(row.errors[opcode] for row in rows)
            seconds = sum(row.seconds[opcode] for row in rows)
            sums[operation_name(opcode)] = OpStats(count, errors, int(seconds * _NS_PER_S))
    return sums

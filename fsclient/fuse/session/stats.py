"""What each worker counts, and their sum. No locks: a slot has one writer, readers may lag."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from fsclient.fuse.dispatch.dispatch import operation_name
from fsclient.fuse.session.tap import NO_TAP, Tap
from fsclient.fuse.wire.protocol import OPCODES
from fsmeta.latency import BUCKETS, HistogramReading

_NS_PER_S: Final = 1_000_000_000


class OpStats(NamedTuple):
    """One opcode since the mount began."""

    calls: int
    errors: int
    total_ns: int
    bytes: int  # of file data, that reads have brought or writes have taken
    latency: HistogramReading


class SlotStats:
    """The counters of one worker slot, by opcode and together."""

    __slots__ = ("bytes", "counts", "errors", "latencies", "seconds", "served", "tap")

    def __init__(self, tap: Tap = NO_TAP) -> None:
        self.tap = tap
        self.served = 0
        self.counts = [0] * OPCODES
        self.errors = [0] * OPCODES
        self.seconds = [0.0] * OPCODES
        self.bytes = [0] * OPCODES
        # by opcode and bucket of `fsmeta/latency`; 32 KB, so only once a worker has the slot
        self.latencies: list[int] = []

    def begin(self) -> list[int]:
        """A worker takes the slot: its histograms."""
        if not self.latencies:
            self.latencies = [0] * (OPCODES * BUCKETS)
        return self.latencies


def summed(slots: Iterable[SlotStats]) -> dict[str, OpStats]:
    """The sums by operation name, of operations that occurred."""
    used = [row for row in slots if row.latencies]  # the rest has never had a worker
    sums: dict[str, OpStats] = {}
    for opcode in range(OPCODES):
        rows = [row for row in used if row.counts[opcode]]
        if rows:
            count = sum(row.counts[opcode] for row in rows)
            errors = sum(row.errors[opcode] for row in rows)
            seconds = sum(row.seconds[opcode] for row in rows)
            moved = sum(row.bytes[opcode] for row in rows)
            begin, end = opcode * BUCKETS, (opcode + 1) * BUCKETS
            buckets = tuple(map(sum, zip(*(row.latencies[begin:end] for row in rows), strict=True)))
            sums[operation_name(opcode)] = OpStats(
                count, errors, int(seconds * _NS_PER_S), moved, HistogramReading(buckets, seconds)
            )
    return sums

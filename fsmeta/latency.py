"""Latency histograms: how many requests took how long, by powers of two of microseconds.

Bucket `n` counts requests that took less than 2^n µs and at least half of that; adding to one is an
index and two sums. Called by whatever measures requests; `fsclient/observe` shows the readings.

Threading: a `Histogram` has one writer at a time, which its owner sees to; a reading may lag.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

BUCKETS: Final = 64  # 2^63 µs are 292,000 years: no index needs to be judged
MICROSECONDS: Final = 1e6  # in a second


class Reading(NamedTuple):
    """What a histogram held at one moment."""

    buckets: tuple[int, ...]
    seconds: float

    @property
    def requests(self) -> int:
        """How many requests there were."""
        return sum(self.buckets)

    def quantile(self, share: float) -> float:
        """Seconds within which `share` of the requests ended, rounded up to a bucket's bound."""
        wanted = share * self.requests
        seen = 0
        for index, count in enumerate(self.buckets):
            seen += count
            if count and seen >= wanted:
                return upper_bound(index)
        return 0.0


class Histogram:
    """Counts requests by how long they took."""

    __slots__ = ("_buckets", "_seconds")

    def __init__(self) -> None:
        self._buckets = [0] * BUCKETS
        self._seconds = 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        """`count` requests took `seconds` each."""
        self._buckets[int(seconds * MICROSECONDS).bit_length()] += count
        self._seconds += seconds * count

    def reading(self) -> Reading:
        """What it holds now."""
        return Reading(tuple(self._buckets), self._seconds)


def upper_bound(index: int) -> float:
    """Seconds that no request in a bucket reaches."""
    return float((1 << index) / MICROSECONDS)


def summed(readings: Sequence[Reading]) -> Reading:
    """All of them as one."""
    buckets = tuple(map(sum, zip(*(each.buckets for each in readings), strict=True)))
    return Reading(buckets or (0,) * BUCKETS, sum(each.seconds for each in readings))

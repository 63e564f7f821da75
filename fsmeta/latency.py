"""Latency histograms: how many requests took how long, by powers of two of microseconds.

Bucket `n` counts requests that took less than 2^n µs and at least half of that; adding to one is an
index and two sums. Called by components that measure requests; `fsclient/observe` shows the
readings.

Threading: the owner of a `Histogram` ensures one writer at a time; a reading may lag.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

BUCKETS: Final = 64  # 2^63 µs are 292,000 years: no index needs to be judged
MICROSECONDS: Final = 1e6  # in a second


class HistogramReading(NamedTuple):
    """What a histogram held at one moment."""

    buckets: tuple[int, ...]
    seconds: float

    @property
    def requests(self) -> int:
        """How many requests there were."""
        return sum(self.buckets)

    def quantile(self, share: float) -> float:
        """Seconds within which `share` of the requests ended, rounded up to a bucket's bound."""
        return self.quantiles((share,))[0]

    def quantiles(self, shares: Sequence[float]) -> list[float]:
        """`quantile` of each of `shares`, which ascend, in one pass; zeros of no requests."""
        found: list[float] = []
        requests = sum(self.buckets)
        if not requests:
            return [0.0] * len(shares)
        wanted, seen = shares[0] * requests, 0
        for index, count in enumerate(self.buckets):
            seen += count
            while count and seen >= wanted:
                found.append(upper_bound(index))
                if len(found) == len(shares):
                    return found
                wanted = shares[len(found)] * requests
        raise AssertionError("shares are at most 1")


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

    def reading(self) -> HistogramReading:
        """What it holds now."""
        return HistogramReading(tuple(self._buckets), self._seconds)


def upper_bound(index: int) -> float:
    """Seconds that no request in a bucket reaches."""
    return float((1 << index) / MICROSECONDS)


def summed(readings: Sequence[HistogramReading]) -> HistogramReading:
    """All of them as one."""
    buckets = tuple(map(sum, zip(*(each.buckets for each in readings), strict=True)))
    return HistogramReading(buckets or (0,) * BUCKETS, sum(each.seconds for each in readings))

"""A token bucket: what passes in a second, and when more may.

It fills with time, up to BURST_S of its rate. A request passes where the bucket is not in debt, and
takes what it costs, so that one which costs more than the bucket holds passes, too: the next one
waits until that is made good. Nothing is taken for requests that wait.

Threading: the caller holds a lock.
"""

from __future__ import annotations

from typing import Final

BURST_S: Final = 0.1  # of a rate that was not used can be caught up with
DEBT_S: Final = 5.0  # of a rate: the most that requests leave behind which did not wait


class TokenBucket:
    """Lets `rate` tokens pass in a second."""

    __slots__ = ("_at", "_level", "_refused", "done", "rate")

    def __init__(self, rate: float, now: float) -> None:
        self.rate = rate
        self._at = now
        self._level = rate * BURST_S
        self.done = 0  # tokens since `take_demand`
        self._refused = False  # whether a request had to wait since then

    def set_rate(self, rate: float, now: float) -> None:
        """From now on it fills so fast; what it owes stays, and is made good at the new rate."""
        self._fill(now)
        self.rate = rate

    def ready_at(self, now: float) -> float:
        """When a request may pass: not after `now` where it may."""
        self._fill(now)
        if self._level >= 0:
            return now
        self._refused = True
        return now - self._level / self.rate

    def take(self, tokens: int, now: float) -> None:
        """A request passes, in its turn."""
        self._fill(now)
        self._level -= tokens
        self.done += tokens

    def take_out_of_turn(self, tokens: int, now: float) -> None:
        """A request passes that can't wait; what it leaves behind is bounded."""
        self._fill(now)
        self._level = max(self._level - tokens, min(self._level, -DEBT_S * self.rate))
        self.done += tokens

    def take_demand(self, now: float) -> tuple[int, bool]:
        """Tokens since this was asked last, and whether there would have been more."""
        self._fill(now)
        found = self.done, self._refused or self._level < 0
        self.done, self._refused = 0, False
        return found

    def _fill(self, now: float) -> None:
        passed_s = max(0.0, now - self._at)
        self._level = min(self.rate * BURST_S, self._level + passed_s * self.rate)
        self._at = max(self._at, now)

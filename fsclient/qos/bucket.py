"""A token bucket that takes reservations: each says when what it pays for may begin.

What is reserved is taken at once, so requests begin in the order in which they came, and one that
is larger than the bucket passes like any other: the next one waits for it.

Threading: the caller holds a lock.
"""

from __future__ import annotations

from typing import Final

BURST_S: Final = 0.1  # of a rate that was not used can be caught up with


class TokenBucket:
    """Lets `rate` tokens pass in a second."""

    __slots__ = ("_free_at", "done", "hungry", "rate")

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._free_at = 0.0  # when everything that was reserved has passed
        self.done = 0  # tokens since `take_demand`
        self.hungry = False  # whether one had to wait since then

    def reserve(self, tokens: int, now: float) -> float:
        """When what costs so many tokens may begin; not after `now`: at once."""
        begin = max(self._free_at, now - BURST_S)
        self._free_at = begin + tokens / self.rate
        self.done += tokens
        if begin > now:
            self.hungry = True
        return begin

    def refund(self, tokens: int) -> None:
        """What was reserved does not take place."""
        self._free_at -= tokens / self.rate
        self.done = max(0, self.done - tokens)  # it may have been told of before

    def take_demand(self) -> tuple[int, bool]:
        """Tokens since this was asked last, and whether there would have been more."""
        found = self.done, self.hungry
        self.done, self.hungry = 0, False
        return found

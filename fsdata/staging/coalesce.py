"""Small objects that wait in a journal for each other, so that many go to the store as one.

`UploadScheduler` owns one and asks it under its lock. An object waits until the waiting objects
fill a block, or it has waited for `LINGER_S`, or a caller waits for the store (`flush_now`). The
caller gives the size of an object; an object of size 0 does not wait.

Threading: none; the owner's lock is held around every call.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from math import inf
from typing import Final, Protocol

LINGER_S: Final = 0.2  # how much later other clients see a lone small file
SETTLE_S: Final = 0.02  # the commit that names an object follows so soon, as a rule
MEMBERS_MAX: Final = 128  # of a group, as of a segment (`fsmeta/ops/data/packing`)


class Coalescer(Protocol):
    """Stores small objects together; called by the threads that upload."""

    def size_of(self, key: str) -> int:
        """How many bytes of a group this object is; 0 where it is to go alone."""

    def pack(self, keys: Sequence[str]) -> Collection[str]:
        """Have these in the store as one object; which of them are. Raises: StoreError, OSError."""

    def make_room(self) -> None:
        """Release what need not stay on the disk."""


class NoCoalescing:
    """No packing."""

    def size_of(self, key: str) -> int:
        """See `Coalescer`."""
        del key
        return 0

    def pack(self, keys: Sequence[str]) -> Collection[str]:
        """See `Coalescer`."""
        raise AssertionError(f"no entry was to be packed: {keys}")

    def make_room(self) -> None:
        """See `Coalescer`."""


class SmallObjects:
    """Keys that wait, the oldest first."""

    def __init__(
        self, clock: Callable[[], float], size_of: Callable[[str], int], room: int, wait: bool
    ) -> None:
        """A group weighs at most `room`. `wait`: hand nothing out before `begin`."""
        self._clock = clock
        self._weigh = size_of
        self._room = room
        self._open = not wait
        self._since: OrderedDict[str, float] = OrderedDict()
        self._weights: dict[str, int] = {}  # of the same keys
        self._weight = 0
        self._not_before = -inf  # some that were handed out came back too early

    def __contains__(self, key: str) -> bool:
        return key in self._since

    def __len__(self) -> int:
        return len(self._since)

    def begin(self) -> None:
        """Groups can be made from here on."""
        self._open = True

    def add(self, key: str, since: float | None = None) -> bool:
        """Let an object wait, if it is a small one; since some earlier time if it came back."""
        weight = self._weigh(key)
        if not weight:
            return False
        now = self._clock()
        if since is not None:
            if now - since >= LINGER_S:
                return False
            self._not_before = now + SETTLE_S
        self._since[key] = now if since is None else since
        if since is not None:
            self._since.move_to_end(key, last=False)
        self._weights[key] = weight
        self._weight += weight
        return True

    def discard(self, key: str) -> None:
        """It need not wait any more."""
        if self._since.pop(key, None) is not None:
            self._weight -= self._weights.pop(key)

    def flush_now(self) -> None:
        """Let none of them wait for others."""
        for key in self._since:
            self._since[key] = -inf

    def first(self) -> str | None:
        """The oldest of those that `take` would hand out now; None where it would not."""
        return next(iter(self._since), None) if self.due() <= self._clock() else None

    @property
    def is_full(self) -> bool:
        """Whether there are enough for a group."""
        return self._weight >= self._room or len(self._since) >= MEMBERS_MAX

    def due(self) -> float:
        """When `take` will hand some out at the latest; inf: not before something changes."""
        if not self._since or not self._open:
            return inf
        oldest = next(iter(self._since.values()))
        wait = SETTLE_S if self.is_full else LINGER_S
        return max(self._not_before, oldest + wait)

    def take(self) -> dict[str, float]:
        """Those that are to go together now, and since when each has waited."""
        if self.due() > self._clock():
            return {}
        room = self._room
        taken: dict[str, float] = {}
        for key, since in self._since.items():
            room -= self._weights[key]
            if room < 0 or len(taken) == MEMBERS_MAX:
                break
            taken[key] = since
        for key in taken:
            self.discard(key)
        return taken


_CONFORMS: Callable[[], Coalescer] = NoCoalescing

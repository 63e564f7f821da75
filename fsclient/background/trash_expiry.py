"""Emptying the trash: expired buckets go, and the oldest ones where space is short.

What is in the trash counts against the volume's limits. So that deleting helps where a volume is
full, the oldest buckets go early from FULL on, until it is filled to ROOMY or the trash is empty.

A client may put things into any bucket, for its clock may be wrong. So an empty bucket is dropped
only if no client re-registers it for FORGET_S.

Threading: the leader's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from fsclient.background.steady_clock import SteadyClock
from fsmeta.admin.trash_expiry import FORGET_S, expiring, forget, hours
from fsmeta.meta.meta import Meta
from fsmeta.runtime import Runtime
from fsmeta.schema.trash import hour_at
from fsmeta.types import Ino

LOOK_EVERY_S: Final = 10.0
TURN_S: Final = 2.0  # then other work has its turn, and this goes on with the next one
FULL: Final = 0.95  # of a limit
ROOMY: Final = 0.90
HOURS_A_DAY: Final = 24


class TrashExpiry:
    """Lets go of what has been in the trash for long enough."""

    def __init__(self, meta: Meta, runtime: Runtime, stopping: Callable[[], bool]) -> None:
        self._meta = meta
        self._runtime = runtime
        self._stopping = stopping
        self._clock = SteadyClock(meta.now_ns, runtime.monotonic)
        self._looked = -LOOK_EVERY_S
        self._until = 0.0  # when this turn is over
        self.unfinished = False  # it was over too early
        self._emptied: dict[Ino, tuple[bytes, float]] = {}  # what was noted of it then, and when
        self.expired = 0  # inodes

    def turn(self) -> None:
        """Empty what is to be emptied, if it is time to look. Raises: StoreError."""
        now = self._runtime.monotonic()
        if now - self._looked < LOOK_EVERY_S:
            return
        self._looked = now
        self._until = now + TURN_S
        self.unfinished = False
        current = hour_at(self._clock.now_ns())
        kept = HOURS_A_DAY * self._meta.format.trash_days
        found = hours(self._meta)
        for hour in self._emptied.keys() - found.keys():
            del self._emptied[hour]
        for hour, noted in found.items():
            if hour + kept < current and not self._is_known_empty(hour, noted):
                self._empty(hour, noted, lambda: False)
        if self._filled() < FULL:
            return
        for hour, noted in found.items():
            if self._filled() < ROOMY:
                return
            self._empty(hour, noted, lambda: self._filled() < ROOMY)

    def _empty(self, hour: Ino, noted: bytes, enough: Callable[[], bool]) -> None:
        """Delete what is in an hour's directory, a page at a time."""
        if self._is_late() or enough():
            return
        for gone in expiring(self._meta, hour):
            self.expired += gone
            if self._is_late() or enough():
                return
        self._forget(hour, noted)

    def _is_late(self) -> bool:
        """Whether the rest is for another turn, which may be the next one."""
        if self._runtime.monotonic() <= self._until:
            return self._stopping()
        self._looked, self.unfinished = -LOOK_EVERY_S, True
        return True

    def _is_known_empty(self, hour: Ino, noted: bytes) -> bool:
        return 0 <= self._empty_s(hour, noted) < FORGET_S

    def _empty_s(self, hour: Ino, noted: bytes) -> float:
        """How long ago an hour was empty that was noted last as it is now; -1: it was not."""
        was_noted, when = self._emptied.get(hour, (b"", 0.0))
        return self._runtime.monotonic() - when if was_noted == noted else -1.0

    def _forget(self, hour: Ino, noted: bytes) -> None:
        """A bucket was empty: it is not listed any more, once no client has registered it for
        long."""
        empty_s = self._empty_s(hour, noted)
        if empty_s < 0:
            self._emptied[hour] = noted, self._runtime.monotonic()
        elif empty_s >= FORGET_S and forget(self._meta, hour, noted):
            del self._emptied[hour]

    def _filled(self) -> float:
        """How full the volume is, by the limit that is nearest."""
        used = self._meta.statfs()
        space = used.space_used / used.space_limit if used.space_limit else 0.0
        inodes = used.inodes_used / used.inodes_limit if used.inodes_limit else 0.0
        return max(space, inodes)

"""Emptying the trash: hours that are over their days go, and the oldest where room is short.

What is in the trash counts against the volume's limits. So that deleting helps where a volume is
full, the oldest hours go early from FULL on, until it is filled to ROOMY or the trash is empty.

Threading: the leader's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from fsmeta.engine import Meta
from fsmeta.runtime import Runtime
from fsmeta.trash import hour_at
from fsmeta.trash_hours import expire, hours
from fsmeta.types import Ino

LOOK_EVERY_S: Final = 10.0
FULL: Final = 0.95  # of a limit
ROOMY: Final = 0.90
HOURS_A_DAY: Final = 24
EMPTY_HOURS_AGO: Final = 2  # an empty hour is forgotten when no clock can be in it any more


class TrashKeeper:
    """Lets go of what has been in the trash for long enough."""

    def __init__(self, meta: Meta, runtime: Runtime, stopping: Callable[[], bool]) -> None:
        self._meta = meta
        self._runtime = runtime
        self._stopping = stopping
        self._looked = -LOOK_EVERY_S
        self.expired = 0  # inodes

    def turn(self) -> None:
        """Empty what is to be emptied, if it is time to look. Raises: StoreError."""
        now = self._runtime.monotonic()
        if now - self._looked < LOOK_EVERY_S:
            return
        self._looked = now
        current = hour_at(self._runtime.now_ns())
        kept = HOURS_A_DAY * self._meta.format.trash_days
        for hour in hours(self._meta):
            if hour + kept < current:
                self._empty(hour, lambda: False)
        if self._filled() < FULL:
            return
        for hour in hours(self._meta):
            if self._filled() < ROOMY:
                return
            self._empty(hour, lambda: self._filled() < ROOMY)

    def _empty(self, hour: Ino, enough: Callable[[], bool]) -> None:
        """Delete what is in an hour's directory, a page at a time."""
        while not self._stopping() and not enough():
            if hour + EMPTY_HOURS_AGO > hour_at(self._runtime.now_ns()) and not self._any(hour):
                return
            count = expire(self._meta, hour)
            self.expired += count
            if not count:
                return

    def _any(self, hour: Ino) -> bool:
        return bool(self._meta.names(hour)[0])

    def _filled(self) -> float:
        """How full the volume is, by the limit that is nearest."""
        used = self._meta.statfs()
        space = used.space_used / used.space_limit if used.space_limit else 0.0
        inodes = used.inodes_used / used.inodes_limit if used.inodes_limit else 0.0
        return max(space, inodes)

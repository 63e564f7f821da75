"""Which directory of the trash `Meta` puts things into.

Each client notes that an hour is in use with the first thing that it puts there, and with the
first one NOTE_S after that. So the client that empties the trash knows: no client puts anything
into an hour that was not noted for long, whatever clocks say. `TrashBucket` remembers when that was
done. Threading: any thread; one that does not know yet notes it once more.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Final, NamedTuple

from fsmeta.ops.names.rename import Renamed
from fsmeta.schema.trash import hour_at, is_trash
from fsmeta.types import NO_PARENT, Attr, Ino

NOTE_S: Final = 600.0


class TrashLocation(NamedTuple):
    """Where what loses its last name goes."""

    hour: Ino
    is_new: bool  # the commit is to note the hour
    chosen_s: float


class TrashBucket:
    """See the module."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._noted = TrashLocation(NO_PARENT, True, -inf)  # the last one that was; replaced whole

    def place(self, now_ns: int) -> TrashLocation:
        """For a verb that begins now."""
        hour, now, noted = hour_at(now_ns), self._clock(), self._noted
        return TrashLocation(hour, hour != noted.hour or now - noted.chosen_s >= NOTE_S, now)

    def committed(self, place: TrashLocation | None, result: object) -> None:
        """Such a verb has been committed; it may have put something there."""
        if place is None or not place.is_new:
            return
        left = result.replaced if isinstance(result, Renamed) else result
        if isinstance(left, Attr) and is_trash(left.parent):
            self._noted = place

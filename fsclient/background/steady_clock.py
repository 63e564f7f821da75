"""The time, for work that deletes by age: the metadata store's clock, whose leaps do not count.

All clients ask one clock where the store has one; that of a host may be wrong by days, and so may
the store's. A clock that is set, forwards or back, is trusted only after BELIEVE_S; until then
time goes on as it did. So an hour of a wrong clock lets nothing expire too early.

Threading: each user has one of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

log = logging.getLogger(__name__)

LEAP_S: Final = 600.0  # clocks that are kept right are never set by so much
BELIEVE_S: Final = 86_400.0  # a wrong clock is noticed and put right by then


class SteadyClock:
    """See the module."""

    def __init__(self, wall_ns: Callable[[], int], monotonic: Callable[[], float]) -> None:
        self._wall_ns = wall_ns
        self._monotonic = monotonic
        self._offset: float | None = None  # of the wall clock to the monotonic one, as trusted
        self._other = 0.0  # what the clock says since it has leapt
        self._since: float | None = None  # when it did

    def now_ns(self) -> int:
        """The time, as far as it is trusted. Raises: StoreError."""
        wall_s, now = self._wall_ns() / 1e9, self._monotonic()
        offset = wall_s - now
        if self._offset is None or abs(offset - self._offset) <= LEAP_S:
            self._offset, self._since = offset, None
        elif self._since is None or abs(offset - self._other) > LEAP_S:
            self._other, self._since = offset, now
            hours = (offset - self._offset) / 3600
            log.warning(
                "the clock was set by %+.1f h: what goes by age waits until it was so for a day",
                hours,
            )
        elif now - self._since > BELIEVE_S:
            self._offset, self._since = offset, None
        return int((now + self._offset) * 1e9)

"""Quotas that are nearly full: a warning in the log, numbers in `.stats`, lines in `status`.

The leader looks for all every LOOK_S and warns once when a quota passes a mark; each client looks
when its `.stats` is read.

Threading: any method from any thread; what was found is replaced whole.
"""

from __future__ import annotations

import logging
from typing import Final

from fsclient.volume.quota_names import fullness, titles
from fsmeta.admin import quota_admin
from fsmeta.admin.quota_admin import Quota
from fsmeta.errors import StoreError
from fsmeta.meta.meta import Meta
from fsmeta.runtime import Runtime

log = logging.getLogger(__name__)

MARKS: Final = (0.8, 0.9, 1.0)  # of a limit: where the log warns
LOOK_S: Final = 30.0  # between two looks of the leader: all limits are read each time
FRESH_S: Final = 5.0  # how old the numbers in `.stats` may be
NEAR_MAX: Final = 10_000  # quotas that are remembered as warned of; beyond, none is


def near_full(meta: Meta) -> tuple[int, list[Quota]]:
    """How many quotas there are, and those past the first mark."""
    count = 0
    near: list[Quota] = []
    for each in quota_admin.list_quotas(meta):
        count += 1
        if fullness(each) >= MARKS[0] and len(near) < NEAR_MAX:
            near.append(each)
    return count, near


class QuotaAlerts:
    """Looks at the quotas of one volume."""

    def __init__(self, meta: Meta, runtime: Runtime) -> None:
        self._meta = meta
        self._clock = runtime.monotonic
        self._looked = -LOOK_S
        self._numbers: dict[str, float] = {}
        self._numbers_at = -FRESH_S
        self._warned: dict[bytes, int] = {}  # how many marks a quota had passed; the worker's only

    def numbers(self) -> dict[str, float]:
        """For `.stats`."""
        if not self._meta.has_quotas:
            return _numbers(0, [])
        if self._clock() - self._numbers_at >= FRESH_S:
            try:
                self._numbers = _numbers(*near_full(self._meta))
                self._numbers_at = self._clock()
            except (StoreError, OSError):
                pass  # the last ones will do
        return self._numbers

    def turn(self) -> None:
        """The leader's: warn of what has passed a mark since. Raises: StoreError."""
        if not self._meta.has_quotas or self._clock() - self._looked < LOOK_S:
            return
        self._looked = self._clock()
        _, near = near_full(self._meta)
        now = {each.node: sum(fullness(each) >= mark for mark in MARKS) for each in near}
        risen = [each for each in near if now[each.node] > self._warned.get(each.node, 0)]
        self._warned = now
        names = titles(self._meta, [each.node for each in risen])
        for each in risen:
            log.warning("quota of %s: %.0f%% full", names[each.node], 100 * fullness(each))


def _numbers(count: int, near: list[Quota]) -> dict[str, float]:
    return {
        "quotas": count,
        "quotas_near_full": len(near),
        "quotas_full": sum(fullness(each) >= 1 for each in near),
    }

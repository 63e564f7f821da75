"""Divides the volume's limits among its mounts, and brings changes of the limits to this one.

Every second each mount that works under a limit says in the metadata store what it has done, and
whether requests had to wait. From what all have said each computes its own part: `fair_share`. A
mount of which nothing new is heard for FORGET_S has no part. No clock of another host is looked at,
and no request waits for the metadata store; while that is away, each mount keeps the part it has.

Threading: one thread, which `start` makes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from fsclient.qos.fair_share import fair_share, need_of
from fsclient.qos.limiter import RateLimiter
from fsclient.qos.throttle import Throttle
from fsmeta.admin import rate_limits
from fsmeta.errors import Corrupt, StoreError
from fsmeta.meta.meta import Meta
from fsmeta.rules.rate_limits import Demand, unpack_demands
from fsmeta.runtime import Runtime, Thread, spawn_lasting
from fsmeta.schema import keys

log = logging.getLogger(__name__)

LOOK_S: Final = 5.0  # between two looks at a volume without limits
EXCHANGE_S: Final = 1.0  # and at one that has some
CROWD: Final = 50  # mounts that say something; more look as much less often
FORGET_S: Final = 10.0  # and at least ten times the pause


class LimitExchange:
    """See the module."""

    def __init__(
        self, meta: Meta, limiter: RateLimiter, throttle: Throttle, runtime: Runtime
    ) -> None:
        self._meta = meta
        self._limiter = limiter
        self._throttle = throttle
        self._runtime = runtime
        self._stop = runtime.event()
        self._thread: Thread | None = None
        self._beat = 0
        self._left_out = 0  # limits
        self._said = False  # whether the store has demands of ours
        self._asked_at = runtime.monotonic()
        self._heard: dict[bytes, tuple[bytes, float]] = {}  # what each session said, and since when
        self.parts = 1  # mounts that divide the limits

    def start(self) -> None:
        """Look for limits from now on."""
        self._asked_at = self._runtime.monotonic()
        self._thread = spawn_lasting(self._runtime, "qos-exchange", self._run)

    def stop(self) -> None:
        """Leave the limits to the other mounts."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if self._said:
            self._try(lambda: self._say({}))

    def _run(self) -> None:
        while True:
            self._try(self.turn)
            pause_s = LOOK_S
            if self._limiter.active:
                pause_s = EXCHANGE_S * max(1.0, self.parts / CROWD)
            if self._stop.wait(pause_s):
                return

    def _try(self, act: Callable[[], None]) -> None:
        try:
            act()
        except (StoreError, OSError) as error:
            log.debug("rate limits: %s", error)  # parts stay; the store's absence is told elsewhere

    def turn(self) -> None:
        """Learn the limits and what others do, say what we do. Raises: StoreError."""
        limits, others = rate_limits.read_limits(self._meta)
        if len(others) != self._left_out:
            for error in others:
                log.warning("a rate limit that this version does not know is left out: %s", error)
            self._left_out = len(others)
        if self._limiter.obey(limits):
            count = len(self._limiter.limits)
            log.info("%d rate limits hold on this mount: see `slicefs qos list`", count)
            self._throttle.limits_changed()
        now = self._runtime.monotonic()
        seconds, self._asked_at = max(0.001, now - self._asked_at), now
        demands = self._limiter.take_demands(seconds)
        if demands or self._said:
            self._say(demands)
        if self._limiter.active:
            self._divide(self._others(now))
            self._throttle.look()

    def _say(self, demands: dict[bytes, Demand]) -> None:
        session = self._meta.session
        if session is not None:
            self._beat += 1
            rate_limits.say_demands(self._meta, session.id, self._beat, demands)
            self._said = bool(demands)

    def _others(self, now: float) -> list[dict[bytes, Demand]]:
        """What other mounts have said of late. What is old is forgotten for all."""
        session = self._meta.session
        own = b"" if session is None else keys.pack_u64(session.id)
        said = rate_limits.all_demands(self._meta)
        self.parts = len(said.keys() | {own})
        forget_s = max(FORGET_S, 10 * EXCHANGE_S * self.parts / CROWD)
        heard: dict[bytes, tuple[bytes, float]] = {}
        found = []
        for each, value in said.items():
            before, since = self._heard.get(each, (b"", now))
            heard[each] = (value, since if value == before else now)
            if each == own:
                continue
            if now - heard[each][1] > forget_s:
                rate_limits.forget_demands(self._meta, each, value)
                continue
            try:
                found.append(unpack_demands(each, value))
            except Corrupt as error:
                log.debug("of session %s: %s", each.hex(), error)
        self._heard = heard
        return found

    def _divide(self, others: list[dict[bytes, Demand]]) -> None:
        def share(node: bytes, kind: int, limit: int) -> float:
            demands = [each[node] for each in others if node in each]
            return fair_share(
                limit, [need_of(each.done[kind], each.hungry[kind]) for each in demands]
            )

        self._limiter.divide(share)

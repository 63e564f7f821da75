"""Whether a cache disk is to be trusted: healthy → suspect → aside (in quarantine), and back.

    healthy   used; an error makes it suspect
    suspect   used; ERRORS_MAX errors within WINDOW_S put it aside, none for WINDOW_S: healthy
    aside     neither read nor written; PROBES_GOOD good probes in a row make it healthy

A disk that is full or read-only is none of these: it is read, and not written until PAUSE_S are
over. `disk_cache/directory/disk` reports errors and asks before each use; its keeper probes.

Threading: one lock, a leaf; `usable` and `writable` read without it.
"""

from __future__ import annotations

import logging
from enum import Enum

from fsmeta.runtime import Runtime

log = logging.getLogger(__name__)

ERRORS_MAX = 3  # one may be an accident of a block; three are the disk
WINDOW_S = 60.0
PROBE_S = 1.0  # the first pause between probes; each bad one doubles it
PROBE_S_MAX = 60.0
PROBES_GOOD = 3  # a loose cable works now and then
PAUSE_S = 10.0  # how long a full or read-only disk is not written


class HealthState(Enum):
    """How far a disk is trusted; the value is the number that `.stats` shows."""

    HEALTHY = 0
    SUSPECT = 1
    ASIDE = 2


class Health:
    """What is known of one disk. `name` is for the log."""

    def __init__(self, runtime: Runtime, name: str) -> None:
        self._runtime = runtime
        self._name = name
        self._lock = runtime.lock()
        self.state = HealthState.HEALTHY  # written under _lock, as are all below
        self.errors = 0  # ever
        self._recent: list[float] = []
        self._good = 0
        self._pause_s = PROBE_S
        self._paused_until = 0.0
        self._why_paused = ""

    def usable(self) -> bool:
        """Whether it may be read."""
        return self.state is not HealthState.ASIDE

    def writable(self) -> bool:
        """Whether it may be written."""
        return self.usable() and (
            not self._paused_until or self._runtime.monotonic() >= self._paused_until
        )

    def failed(self, why: str) -> None:
        """Something went wrong that should not."""
        now = self._runtime.monotonic()
        with self._lock:
            self.errors += 1
            if self.state is HealthState.ASIDE:
                return
            self._recent = [at for at in self._recent if at > now - WINDOW_S] + [now]
            if len(self._recent) >= ERRORS_MAX:
                self._put_aside(why)
            elif self.state is HealthState.HEALTHY:
                self.state = HealthState.SUSPECT
                log.warning("cache disk %s is suspect: %s", self._name, why)

    def lost(self, why: str) -> None:
        """It is not there, or not answering: no use in trying twice."""
        with self._lock:
            if self.state is not HealthState.ASIDE:
                self.errors += 1
                self._put_aside(why)

    def _put_aside(self, why: str) -> None:
        """The caller holds the lock."""
        self.state = HealthState.ASIDE
        self._good = 0
        self._pause_s = PROBE_S
        self._recent = []
        log.warning("cache disk %s is quarantined: %s", self._name, why)

    def pause(self, why: str) -> None:
        """It can't be written for now."""
        with self._lock:
            self._paused_until = self._runtime.monotonic() + PAUSE_S
            if why != self._why_paused:
                self._why_paused = why
                log.info("cache disk %s is not written for now: %s", self._name, why)

    def wrote(self) -> None:
        """It has taken what it was given."""
        if self._paused_until:
            with self._lock:
                self._paused_until = 0.0
                self._why_paused = ""
            log.info("cache disk %s is written again", self._name)

    def calm_down(self) -> None:
        """Time passes: a suspect that did nothing wrong is healthy."""
        now = self._runtime.monotonic()
        with self._lock:
            if self.state is HealthState.SUSPECT and all(
                at < now - WINDOW_S for at in self._recent
            ):
                self.state = HealthState.HEALTHY
                self._recent = []
                log.info("cache disk %s is healthy again", self._name)

    def probed(self, good: bool) -> float:
        """The result of a probe of a disk in quarantine; seconds until the next one."""
        with self._lock:
            if self.state is not HealthState.ASIDE:
                return PROBE_S
            if not good:
                self._good = 0
                self._pause_s = min(PROBE_S_MAX, 2 * self._pause_s)
                return self._pause_s
            self._good += 1
            if self._good >= PROBES_GOOD:
                self.state = HealthState.HEALTHY
                self._paused_until = 0.0
                self._why_paused = ""
                log.warning("cache disk %s is used again", self._name)
            return PROBE_S

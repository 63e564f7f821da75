"""The session's threads: a few that always serve, more while those are blocked.

Called by the session. Python runs one thread at a time, so requests that need only the processor
are served best by few threads (more of them cost up to a fifth of the write throughput: the kernel
wakes sleepers in turn, and each brings a receive buffer that is cold). But a request that waits for
a store occupies its thread, and while every thread waits nobody reads an INTERRUPT. So when none is
left in readv(2), a watcher looks again a moment later: threads that are still at the same request
are blocked, and are made up for. A surplus thread leaves when enough others are idle.

Threading. `serving` of the interrupt table says what each slot does; `_live` is what remains of the
crew. Slots are given out by the watcher alone and given back by their workers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Final

from fsclient.fuse.interrupt import ABSENT, IDLE, Interrupts
from fsclient.fuse.worker import Stop, Worker
from fsmeta.runtime import Runtime

log = logging.getLogger(__name__)

BLOCKED_S: Final = 0.005  # longer at one request than any that needs only the processor


class Crew:
    """Threads that run workers, `least` to `most` of them."""

    def __init__(
        self,
        runtime: Runtime,
        interrupts: Interrupts,
        hire: Callable[[int, Crew], Worker],
        least: int,
        most: int,
    ) -> None:
        """`hire` makes the worker of a slot."""
        assert 0 < least <= most
        self._runtime = runtime
        self._interrupts = interrupts
        self._hire = hire
        self._least = least
        self._most = most
        self._lock = runtime.lock()
        self._live = 0  # guarded by _lock
        self._saturated = runtime.event()
        self.stop = Stop()
        self.ended = runtime.event()

    def start(self) -> None:
        """Start the threads that always serve. Call once."""
        self._live = self._least
        for slot in range(self._least):
            self._spawn(slot)
        if self._most > self._least:
            self._runtime.spawn("fuse-crew", self._watch)

    def nobody_reads(self) -> None:
        """Told by a worker that has taken a request and left nobody to take the next."""
        self._saturated.set()

    def is_surplus(self, slot: int) -> bool:
        """Whether the worker of `slot`, between two requests, should leave."""
        return slot >= self._least and self._interrupts.serving.count(IDLE) > self._least

    def _spawn(self, slot: int) -> None:
        # Taken here, so that nobody else gets the slot before the thread runs.
        self._interrupts.serving[slot] = IDLE
        self._runtime.spawn(f"fuse-{slot}", partial(self._work, slot))

    def _work(self, slot: int) -> None:
        """The body of a worker's thread."""
        self._interrupts.enter(slot)
        try:
            self._hire(slot, self).run(self.stop)
        except Exception:
            log.exception("a FUSE worker died")
            raise
        finally:
            self._leave(slot)

    def _leave(self, slot: int) -> None:
        with self._lock:
            self._interrupts.leave(slot)
            self._live -= 1
            last = self._live == 0
        if last:
            self.ended.set()
            self._saturated.set()

    def _watch(self) -> None:
        """Make up for blocked threads while nobody reads."""
        serving = self._interrupts.serving
        while not self.ended.is_set():
            self._saturated.wait()
            self._saturated.clear()
            while IDLE not in serving and not self.ended.is_set():
                before = list(serving)
                self._runtime.sleep(BLOCKED_S)
                self._make_up(before)

    def _make_up(self, before: list[int]) -> None:
        """Spawn until `least` threads are not at what they served `before`."""
        with self._lock:
            now = self._interrupts.serving
            blocked = sum(
                unique == again and unique not in (ABSENT, IDLE)
                for unique, again in zip(before, now, strict=True)
            )
            wanted = min(self._most, blocked + self._least)
            if self._live == 0 or self.stop.requested:
                return
            while self._live < wanted and ABSENT in now:
                self._live += 1
                self._spawn(now.index(ABSENT))

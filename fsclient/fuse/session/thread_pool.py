"""The session's threads: one reads requests, the others wait for their turn to.

Called by the session. Python runs one thread at a time, and handing over from core to core costs
more than a short request (measured: four threads that read at once take 3.4 times the processor
time of one). So the thread that reads a request serves it and reads the next. Only when it is about
to wait for something else does it let the next thread read: at once before most waits, and while it
waits for Redis when there is a request to read. Where a thread is blocked and has said nothing, a
watcher notices after BLOCKED_S. While all threads are blocked it makes up for them with new ones,
since one thread must be free to read an INTERRUPT; a surplus thread leaves when enough others are
idle.

Threading. `serving` of the interrupt table says what each slot does; the holder of `_turn` is
`reader`. A reader that the watcher has replaced may still be in readv(2): then two read, which is
no harm. Slots are given out by the watcher alone and given back by their workers.
"""

from __future__ import annotations

import errno
import logging
import select
from collections.abc import Callable
from functools import partial
from typing import Final

from fsclient.fuse.session.interrupt import ABSENT, IDLE, Interrupts
from fsclient.fuse.session.worker import Stop, Worker
from fsmeta.runtime import Runtime

log = logging.getLogger(__name__)

BLOCKED_S: Final = 0.005  # longer at one request than any that needs only the processor
ASLEEP_AFTER: Final = 20  # looks of the watcher at a session without requests
NOBODY: Final = -1
_AWAIT_MS: Final = 1000  # then a wait for input goes on without watching for requests


class ThreadPool:
    """Threads that run workers, `least` to `most` of them."""

    def __init__(
        self,
        runtime: Runtime,
        interrupts: Interrupts,
        hire: Callable[[int, ThreadPool], Worker],
        descriptor: int,
        least: int,
        most: int,
        looked: Callable[[bool], None],
    ) -> None:
        """`hire` makes the worker of a slot; requests are read from `descriptor`. `looked` is told
        of each look of the watcher whether it will soon look again."""
        assert 0 < least <= most
        self._runtime = runtime
        self._interrupts = interrupts
        self._add_worker = hire
        self._descriptor = descriptor
        self._least = least
        self._most = most
        self._looked = looked
        self._lock = runtime.lock()
        self._live = 0  # guarded by _lock
        self._turn = runtime.lock()
        self.reader = NOBODY  # the slot whose turn it is to read; written under _lock
        self._polls: dict[tuple[int, int], select.poll] = {}  # by slot and descriptor
        self._busy = runtime.event()
        self.watched = False  # the watcher looks again soon
        self.stop = Stop()
        self.ended = runtime.event()

    def start(self) -> None:
        """Start the threads that always serve. Call once."""
        self._live = self._least
        for slot in range(self._least):
            self._spawn(slot)
        self._runtime.spawn("fuse-crew", self._watch)

    def leave(self, patience_s: float) -> None:
        """End without the workers: what they serve may take `patience_s`, later requests fail."""
        self.stop.refuses = errno.ENOTCONN
        self.stop.requested = True
        give_up = self._runtime.monotonic() + patience_s
        while not self._is_quiet() and self._runtime.monotonic() < give_up:
            self._runtime.sleep(BLOCKED_S)
        self.ended.set()
        self._busy.set()

    def watch(self) -> None:
        """There are requests: let the watcher look."""
        self._busy.set()

    # --- whose turn it is ------------------------------------------------------------------------

    def take_turn(self, slot: int) -> None:
        """Return when `slot` is to read."""
        self._turn.acquire()
        with self._lock:
            self.reader = slot

    def give_turn(self, slot: int) -> None:
        """Let the next one read, if it is the turn of `slot`."""
        with self._lock:
            if self.reader != slot:
                return
            self.reader = NOBODY
        self._turn.release()

    def will_wait(self) -> None:
        """The calling thread is about to wait."""
        slot = self._interrupts.slot()
        if slot is not None and slot == self.reader:
            self.give_turn(slot)

    def await_input(self, descriptor: int) -> None:
        """The calling thread is about to receive: keep its turn while there are no requests."""
        slot = self._interrupts.slot()
        if slot is None or slot != self.reader:
            return
        poll = self._polls.get((slot, descriptor))
        if poll is None:
            poll = self._polls[slot, descriptor] = select.poll()
            poll.register(descriptor, select.POLLIN)
            poll.register(self._descriptor, select.POLLIN)
        if not any(ready == descriptor for ready, _ in poll.poll(_AWAIT_MS)):
            self.give_turn(slot)

    # --- how many there are ----------------------------------------------------------------------

    def is_surplus(self, slot: int) -> bool:
        """Whether the worker of `slot`, between two requests, should leave."""
        return slot >= self._least and self._interrupts.serving.count(IDLE) > self._least

    def _spawn(self, slot: int) -> None:
        # Taken here, so that no other thread gets the slot before this one runs.
        self._interrupts.serving[slot] = IDLE
        self._runtime.spawn(f"fuse-{slot}", partial(self._work, slot))

    def _work(self, slot: int) -> None:
        """The body of a worker's thread."""
        self._interrupts.enter(slot)
        try:
            self._add_worker(slot, self).run(self.stop)
        except Exception:
            log.exception("a FUSE worker died")
            raise
        finally:
            self._leave(slot)

    def _leave(self, slot: int) -> None:
        self.give_turn(slot)
        with self._lock:
            self._interrupts.leave(slot)
            self._live -= 1
            last = self._live == 0
        if last:
            self.ended.set()
            self._busy.set()

    def _watch(self) -> None:
        """Look at the workers every BLOCKED_S while there are requests."""
        while not self.ended.is_set():
            self._busy.wait()
            self._busy.clear()
            self.watched = True
            quiet = 0
            while quiet < ASLEEP_AFTER and not self.ended.is_set():
                quiet = 0 if self._look() else quiet + 1
                self._looked(True)
            self._looked(False)
            self.watched = False
            if not self._is_quiet():
                self._busy.set()

    def _is_quiet(self) -> bool:
        """Whether no request is being served."""
        return all(unique in (ABSENT, IDLE) for unique in self._interrupts.serving)

    def _look(self) -> bool:
        """Replace a reader that is blocked, make up for blocked workers; whether any were busy."""
        serving = self._interrupts.serving
        before = list(serving)
        self._runtime.sleep(BLOCKED_S)
        reader = self.reader
        if reader != NOBODY and serving[reader] == before[reader] != IDLE:
            self.give_turn(reader)
        if IDLE not in serving:
            self._make_up(before)
        return not self._is_quiet()

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

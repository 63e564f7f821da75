"""Which of a journal's objects go to the store next, and which threads take them there.

`StagedObjects` owns one, and shares its lock with it. The oldest goes first; small ones go together
(`staged_small`); what is in flight is bounded in bytes. A thread is woken for something that it can
do: of those without work one keeps the time at which small objects are due, the others follow when
they are called. Who has taken a job calls the next one, where there is something for him.

Threading: the owner's lock is held around every call but `next` and `join`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from math import inf
from typing import Final, TypeAlias

from fsdata.staged_small import Alone, SmallObjects
from fsdata.staging_data import Staged
from fsmeta.runtime import Lock, Runtime, Thread
from fsmeta.types import BLOCK_BYTES_MAX

THREADS: Final = 16  # uploads of small objects at a time

Job: TypeAlias = str | dict[str, float]
"""An object, or small ones that go together, and since when each has waited."""


class Jobs:
    """The queue of uploads, and the threads that serve it."""

    def __init__(
        self,
        runtime: Runtime,
        lock: Lock,
        staged: Mapping[str, Staged],
        flight_max: int,
        work: Callable[[], None],
    ) -> None:
        """`staged`: the owner's objects; `work`: what a thread does, until `next` says None."""
        self._runtime = runtime
        self._lock = lock
        self._staged = staged
        self._flight_max = flight_max
        self._work = work
        self._followers = runtime.condition(lock)
        self._timer = runtime.condition(lock)
        self._queue: OrderedDict[str, None] = OrderedDict()  # guarded by _lock, as all below
        self.small = SmallObjects(runtime.monotonic, Alone().weigh, 0, wait=False)
        self._timed = False  # a thread waits for the moment at which small ones are due
        self._idle = 0  # threads that wait to be called
        self._flying = 0  # bytes
        self._threads: list[Thread] = []
        self.closed = False

    # --- what there is to do ---------------------------------------------------------------------

    def add(self, key: str) -> None:
        """An object is to be uploaded."""
        was_full = self.small.is_full
        if not self.small.add(key):
            self._queue[key] = None
            self._call()
        elif not self._timed:
            self._call()
        elif self.small.is_full and not was_full:
            self._timer.notify()

    def put_back(self, key: str) -> None:
        """An object was not stored after all: it is the first to go, and alone."""
        self._queue[key] = None
        self._queue.move_to_end(key, last=False)

    def wait_again(self, key: str, since: float | None) -> None:
        """An object did not go with the others: it waits for company as before, if not too long."""
        if not self.small.add(key, since):
            self.put_back(key)

    def discard(self, key: str) -> None:
        """An object need not be uploaded any more."""
        self._queue.pop(key, None)
        self.small.discard(key)

    def landed(self, *uploads: Staged) -> None:
        """Uploads have ended, well or not: there may be room for others."""
        for staged in uploads:
            self._flying -= staged.weight
            staged.busy = False
        self._call()

    def hurry(self) -> None:
        """What is here does not wait for company."""
        self.small.hurry()
        self._call()

    def begin(self) -> None:
        """Small ones can go together from here on."""
        self.small.begin()
        self._call()

    def end(self) -> None:
        """No job is given out from here on."""
        self.closed = True
        self._followers.notify_all()
        self._timer.notify_all()

    def join(self) -> None:
        """Return when all threads have ended."""
        for thread in self._threads:
            thread.join()

    # --- who does it -----------------------------------------------------------------------------

    def _call(self) -> None:
        """Have a thread look at what there is, if there is something for it."""
        if self._first() is None and not self._lacks_time():
            return
        if self._idle:
            self._followers.notify()
        elif len(self._threads) < THREADS and not self.closed:
            name = f"stage-{len(self._threads)}"
            self._threads.append(self._runtime.spawn(name, self._work))
        elif self._timed:
            self._timer.notify()

    def _lacks_time(self) -> bool:
        """Whether small ones will be due, and nobody knows."""
        return not self._timed and 0 < self.small.due() - self._runtime.monotonic() < inf

    def next(self) -> Job | None:
        """Wait for what may go to the store now; None at the end."""
        with self._lock:
            while not self.closed:
                job = self._take()
                if not job:
                    self._rest()
                    continue
                for key in [job] if isinstance(job, str) else job:
                    self._staged[key].busy = True
                    self._flying += self._staged[key].weight
                self._call()
                return job
            return None

    def _take(self) -> Job | None:
        first = self._first()
        if first is None or first in self.small:
            return None if first is None else self.small.take()
        del self._queue[first]
        return first

    def _first(self) -> str | None:
        """The oldest object, if it may go now."""
        large, small = next(iter(self._queue), None), self.small.first()
        staged = self._staged
        if small is not None and (large is None or staged[small].spot < staged[large].spot):
            return small if self._may_fly(BLOCK_BYTES_MAX) else None
        return large if large is not None and self._may_fly(staged[large].weight) else None

    def _may_fly(self, size: int) -> bool:
        return not self._flying or self._flying + size <= self._flight_max

    def _rest(self) -> None:
        """Wait to be called, or until small ones are due. The caller holds the lock."""
        left = self.small.due() - self._runtime.monotonic()
        if self._timed or left == inf or (left <= 0 and not self._may_fly(BLOCK_BYTES_MAX)):
            self._idle += 1
            self._followers.wait()
            self._idle -= 1
        else:
            self._timed = True
            self._timer.wait(max(0.0, left))
            self._timed = False

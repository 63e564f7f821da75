"""Which of a journal's objects go to the store next, and which threads take them there.

`StagedUploads` owns one, and shares its lock with it. The oldest goes first; small ones go together
(`staging/coalesce`); what is in flight is bounded in bytes. What the store has refused is offered
again now and then, a few at a time, and nothing else waits for that (docs/design/write-back). A
thread is woken only if there is work for it: one of the idle threads waits for the time at which
the next job is due, the rest until they are woken. A thread that has taken a job wakes the next
one, if there is more work.

Threading: the owner's lock is held around every call but `next` and `join`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from math import inf
from typing import Final, TypeAlias

from fsdata.staging.coalesce import NoCoalescing, SmallObjects
from fsdata.staging.data_segments import Staged
from fsmeta.runtime import Lock, Runtime, Thread
from fsmeta.types import BLOCK_BYTES_MAX

THREADS: Final = 16  # uploads of small objects at a time
PAUSE_FIRST_S: Final = 0.5
PAUSE_MAX_S: Final = 10.0  # between two tries of one object that the store does not take
AGAIN_MAX: Final = 2  # of those that were refused in flight, as long as they still are

Job: TypeAlias = str | dict[str, float]
"""An object, or small ones that go together, and since when each has waited."""


class UploadPace:
    """How often a store that does not take objects is offered another one."""

    def __init__(self, clock: Callable[[], float], free: int) -> None:
        """So many failures in a row cost nothing."""
        self._clock = clock
        self._free = free
        self._in_vain = 0  # tries, since one was not
        self._pause = PAUSE_FIRST_S
        self._due = -inf
        self.spaced = 0  # tries that were spaced out

    @property
    def is_slow(self) -> bool:
        """Whether tries are spaced out."""
        return self._in_vain > self._free

    def due(self) -> float:
        """When the next try may begin; in the past: at once."""
        return self._due if self.is_slow else -inf

    def begun(self, waiting: int) -> None:
        """A try has begun; so many objects share the tries."""
        if self.is_slow:
            self._wait(waiting)
            self.spaced += 1

    def ended(self, taken: bool, waiting: int) -> None:
        """A try has ended."""
        was_slow = self.is_slow
        self._in_vain = 0 if taken else self._in_vain + 1
        if taken:
            self._pause = PAUSE_FIRST_S
        elif self.is_slow and not was_slow:
            self._wait(waiting)

    def _wait(self, waiting: int) -> None:
        self._due = self._clock() + self._pause / max(1, min(waiting, THREADS))
        self._pause = min(PAUSE_MAX_S, 2 * self._pause)


class UploadScheduler:
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
        self._refused: OrderedDict[str, None] = OrderedDict()  # the longest wait first
        self._again = 0  # of those, in flight
        self._fresh_pace = UploadPace(runtime.monotonic, THREADS)
        self._again_pace = UploadPace(runtime.monotonic, 0)
        self.small = SmallObjects(runtime.monotonic, NoCoalescing().size_of, 0, wait=False)
        self._timed_until = inf  # a thread waits for this moment, at which something is due
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
        elif self._timed and self.small.is_full and not was_full:
            self._timer.notify()
        elif self.small.due() < self._timed_until:
            self._call()

    def wait_again(self, key: str, since: float | None) -> None:
        """An object did not go with the others: it waits for other small objects as before.

        If not for too long: then it is the first to go, and alone.
        """
        if not self.small.add(key, since):
            self._queue[key] = None
            self._queue.move_to_end(key, last=False)

    def discard(self, key: str) -> None:
        """An object need not be uploaded any more."""
        self._queue.pop(key, None)
        self._refused.pop(key, None)
        self.small.discard(key)

    def landed(self, key: str, offer_again: bool, taken: bool) -> None:
        """The upload of an object has ended; it may be `taken` by the store, or needed no more."""
        staged = self._staged[key]
        again = staged.refused
        self._again -= again
        if offer_again:
            staged.refused = True
            self._refused[key] = None
        if again or (offer_again and not self._again_pace.is_slow):
            self._again_pace.ended(taken, len(self._refused))
        if taken or not again:
            self._fresh_pace.ended(taken, THREADS)
        self._land(staged)

    def landed_together(self, uploads: Iterable[Staged], taken: bool) -> None:
        """The upload of small objects as one has ended."""
        self._fresh_pace.ended(taken, THREADS)
        self._land(*uploads)

    def _land(self, *uploads: Staged) -> None:
        """There may be room for further objects."""
        for staged in uploads:
            self._flying -= staged.weight
            staged.busy = False
        self._call()

    @property
    def has_refused(self) -> bool:
        """Whether the store did not take something that it is to be offered again."""
        return bool(self._refused) or self._again > 0

    def flush_now(self) -> None:
        """Small objects do not wait for each other."""
        self.small.flush_now()
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

    # --- threads that do it ----------------------------------------------------------------------

    def _call(self) -> None:
        """Have a thread look at what there is, if there is something for it."""
        due = self._due()
        if self._first() is None:
            if due >= self._timed_until:
                return
            if self._timed:
                self._timer.notify()
                return
        if self._idle:
            self._followers.notify()
        elif len(self._threads) < THREADS and not self.closed:
            name = f"stage-{len(self._threads)}"
            self._threads.append(self._runtime.spawn(name, self._work))
        elif self._timed:
            self._timer.notify()

    @property
    def _timed(self) -> bool:
        """Whether a thread keeps the time."""
        return self._timed_until < inf

    def next(self) -> Job | None:
        """Wait for what may go to the store now; None at the end."""
        with self._lock:
            while not self.closed:
                due = self._due()  # before the look: what it is meanwhile is not missed
                job = self._take()
                if not job:
                    self._rest(due)
                    continue
                for key in [job] if isinstance(job, str) else job:
                    self._staged[key].busy = True
                    self._flying += self._staged[key].weight
                self._call()
                return job
            return None

    def _take(self) -> Job | None:
        first = self._first()
        if first is None:
            return None
        if first in self._refused:
            del self._refused[first]
            self._again += 1
            self._again_pace.begun(1 + len(self._refused))
            return first
        self._fresh_pace.begun(THREADS)
        if first in self.small:
            return self.small.take()
        del self._queue[first]
        return first

    def _first(self) -> str | None:
        """What is to go next, if it may go now."""
        again, now = next(iter(self._refused), None), self._runtime.monotonic()
        if again is not None and self._may_try_again() and self._again_pace.due() <= now:
            return again if self._may_start(self._staged[again].weight) else None
        return self._first_fresh() if self._fresh_pace.due() <= now else None

    def _may_try_again(self) -> bool:
        return not self._again_pace.is_slow or self._again < AGAIN_MAX

    def _first_fresh(self) -> str | None:
        """The oldest object that was not refused, if it may go now.

        The youngest in turn with it while the store takes none: it may be another job's, of which
        the store takes what there is.
        """
        large, small = next(iter(self._queue), None), self.small.first()
        if self._queue and self._fresh_pace.is_slow and not self._fresh_pace.spaced % 2:
            large, small = next(reversed(self._queue)), None
        staged = self._staged
        if small is not None and (large is None or staged[small].spot < staged[large].spot):
            return small if self._may_start(BLOCK_BYTES_MAX) else None
        return large if large is not None and self._may_start(staged[large].weight) else None

    def _may_start(self, size: int) -> bool:
        return not self._flying or self._flying + size <= self._flight_max

    def _due(self) -> float:
        """The next moment at which something may go that may not go now; inf: there is none."""
        now = self._runtime.monotonic()
        moments = [self.small.due()]
        if self._refused and self._may_try_again():
            moments.append(self._again_pace.due())
        if self._queue or self.small:
            moments.append(self._fresh_pace.due())
        return min((moment for moment in moments if moment > now), default=inf)

    def _rest(self, due: float) -> None:
        """Wait to be called, or until something is due. The caller holds the lock."""
        if self._timed or due == inf:
            self._idle += 1
            self._followers.wait()
            self._idle -= 1
        else:
            self._timed_until = due
            self._timer.wait(max(0.0, due - self._runtime.monotonic()))
            self._timed_until = inf

"""Locks, conditions, events and threads of the simulation; see `scheduler` for what seams are.

A release wakes all who wait and lets them race, so that a lock can be taken again by the one that
let go of it, as with real locks. Who a notify wakes is chosen by the seed.
"""

from __future__ import annotations

from types import TracebackType

from fsmeta.runtime import Condition, Event, Lock, Thread
from tests.sim.world.core import Deadlock, Scheduler, Task


class SimLock:
    """A mutex; taking it twice is a deadlock and says so."""

    __slots__ = ("_held", "_owner", "_scheduler", "_waiters")

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._held = False
        self._owner: Task | None = None  # None while not held, and outside of a run
        self._waiters: list[Task] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        scheduler = self._scheduler
        scheduler.seam()
        me = scheduler.current
        if self._held and self._owner is me and blocking and timeout < 0:
            raise Deadlock(f"a thread waits for a lock that it holds{scheduler.story()}")
        if blocking and timeout < 0:
            self.in_order(me)
        if not self._held:
            self._take(me)
            return True
        if not blocking:
            return False
        return self._wait(scheduler.deadline(timeout) if timeout >= 0 else None)

    def in_order(self, me: Task | None) -> None:
        """Before a thread takes it, or waits for what it guards. Raises: Inversion."""
        if me is not None and me.held and not me.thrown:
            self._scheduler.lock_order.take(me.held, self)

    def _take(self, me: Task | None) -> None:
        self._held = True
        self._owner = me
        if me is not None:
            me.held.append(self)

    def _wait(self, until_ns: int | None) -> bool:
        scheduler = self._scheduler
        me = scheduler.current
        while self._held:
            if me is not None:
                self._waiters.append(me)
            try:
                woken = scheduler.block(until_ns)
            finally:
                if me in self._waiters:
                    self._waiters.remove(me)
            if self._held and not woken:
                return False
        self._take(me)
        return True

    def release(self) -> None:
        if self.free():
            self._scheduler.seam_after()

    def free(self) -> bool:
        """Release without a seam; False where a dying thread never got it."""
        scheduler = self._scheduler
        me = scheduler.current
        if not self._held or self._owner is not me:
            if me is not None and me.thrown:
                return False
            raise RuntimeError("release of a lock that the thread does not hold")
        self._held = False
        self._owner = None
        if me is not None:
            me.held.remove(self)
        for waiter in self._waiters:
            scheduler.wake(waiter)
        self._waiters.clear()
        return True

    def owned(self) -> bool:
        return self._held and self._owner is self._scheduler.current

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class SimCondition:
    """A condition variable. No spurious wake-ups, as in `threading`."""

    __slots__ = ("_lock", "_scheduler", "_waiters")

    def __init__(self, scheduler: Scheduler, lock: SimLock | None = None) -> None:
        self._scheduler = scheduler
        self._lock = lock or SimLock(scheduler)
        self._waiters: list[Task] = []

    def wait(self, timeout: float | None = None) -> bool:
        scheduler = self._scheduler
        me = scheduler.current
        if me is None or not self._lock.owned():
            raise RuntimeError("wait without the lock, or outside of a run")
        self._lock.in_order(me)
        self._waiters.append(me)
        self._lock.free()
        try:
            woken = scheduler.block(None if timeout is None else scheduler.deadline(timeout))
        finally:
            if me in self._waiters:
                self._waiters.remove(me)
        self._lock._wait(None)
        return woken

    def notify(self, n: int = 1) -> None:
        scheduler = self._scheduler
        if not self._lock.owned():
            if scheduler.current is not None and scheduler.current.thrown:
                return
            raise RuntimeError("notify without the lock")
        for _ in range(min(n, len(self._waiters))):
            scheduler.wake(self._waiters.pop(int(scheduler.choose() * len(self._waiters))))
        scheduler.seam_after()

    def notify_all(self) -> None:
        self.notify(len(self._waiters))

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lock.release()


class SimEvent:
    """A flag that threads wait for."""

    __slots__ = ("_flag", "_scheduler", "_waiters")

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._flag = False
        self._waiters: list[Task] = []

    def is_set(self) -> bool:
        self._scheduler.seam()
        return self._flag

    def set(self) -> None:
        self._flag = True
        for waiter in self._waiters:
            self._scheduler.wake(waiter)
        self._waiters.clear()
        self._scheduler.seam_after()

    def clear(self) -> None:
        self._flag = False
        self._scheduler.seam_after()

    def wait(self, timeout: float | None = None) -> bool:
        scheduler = self._scheduler
        scheduler.seam()
        me = scheduler.current
        if self._flag or me is None:
            return self._flag
        self._waiters.append(me)
        try:
            woken = scheduler.block(None if timeout is None else scheduler.deadline(timeout))
        finally:
            if me in self._waiters:
                self._waiters.remove(me)
        return woken or self._flag


class SimThread:
    """A started thread."""

    __slots__ = ("_scheduler", "_task")

    def __init__(self, scheduler: Scheduler, task: Task) -> None:
        self._scheduler = scheduler
        self._task = task

    def join(self, timeout: float | None = None) -> None:
        scheduler = self._scheduler
        scheduler.seam()
        me = scheduler.current
        if self._task.done:
            return
        if me is not None:
            self._task.joiners.append(me)
        scheduler.block(None if timeout is None else scheduler.deadline(timeout))

    def is_alive(self) -> bool:
        self._scheduler.seam()
        return not self._task.done


_LOCK: type[Lock] = SimLock
_CONDITION: type[Condition] = SimCondition
_EVENT: type[Event] = SimEvent
_THREAD: type[Thread] = SimThread

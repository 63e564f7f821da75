"""A few worker threads and a queue of short jobs, for uploads and read-ahead.

Threads start when there is more to do than threads, and then stay: a hand-over costs one wake-up
and only where a worker sleeps. The queue's bound is the caller's: writers are bounded by the
budget and `PENDING_MAX`, read-ahead by its share of the budget.

Jobs keep their own failures; one that raises anyway ends its thread, which shows in the log.
Threading: `submit` from any thread, jobs included.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from fsmeta.runtime import Runtime, Thread


class WorkerPool:
    """At most `threads` threads that run what is submitted, in order of submission."""

    def __init__(self, runtime: Runtime, name: str, threads: int) -> None:
        assert threads > 0, threads
        self._runtime = runtime
        self._name = name
        self._max = threads
        self._cond = runtime.condition()
        self._jobs: deque[Callable[[], None]] = deque()  # guarded by _cond, as all below
        self._threads: list[Thread] = []
        self._idle = 0
        self._closed = False

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job` soon on another thread. After `close` it is run at once, on this one."""
        with self._cond:
            closed = self._closed
            if not closed:
                self._jobs.append(job)
                if self._idle >= len(self._jobs):
                    self._cond.notify()
                elif len(self._threads) < self._max:
                    name = f"{self._name}-{len(self._threads)}"
                    self._threads.append(self._runtime.spawn(name, self._work))
        if closed:
            job()

    def _work(self) -> None:
        while (job := self._next()) is not None:
            job()

    def _next(self) -> Callable[[], None] | None:
        """The next job; None once the pool is closed and empty."""
        with self._cond:
            while not self._jobs:
                if self._closed:
                    return None
                self._idle += 1
                self._cond.wait()
                self._idle -= 1
            return self._jobs.popleft()

    def close(self) -> None:
        """Finish what was submitted and end the threads."""
        with self._cond:
            self._closed = True
            self._cond.notify_all()
            threads = list(self._threads)
        for thread in threads:
            thread.join()

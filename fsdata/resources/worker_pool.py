"""A few worker threads and a queue of short jobs, for uploads and read-ahead.

Threads start when there is more to do than threads, and then stay: a hand-over costs one wake-up
and only where a worker sleeps. The queue's bound is the caller's: writers are bounded by the
budget and `PENDING_MAX`, read-ahead by its share of the budget.

Jobs keep their own failures; one that raises anyway ends its thread, which shows in the log, and
another thread takes its place.
Threading: `submit` from any thread, jobs included.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeVar

from fsmeta.errors import StoreError
from fsmeta.runtime import Condition, Runtime, Thread
from fsmeta.spans import Spans

T = TypeVar("T")

TOGETHER_MIN: Final = 64  # objects: fewer in a request save little
FEW = 4  # jobs that are done in less time than it takes to wake threads for them


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
        self._count = 0  # of those that have not been asked to end
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
                elif self._count < self._max:
                    self._spawn()
        if closed:
            job()

    def resize(self, threads: int) -> None:
        """From now on at most so many threads; those that are too many end behind their job."""
        assert threads > 0, threads
        with self._cond:
            self._max = threads
            if self._count < threads and self._idle < len(self._jobs) and not self._closed:
                self._spawn()

    def _spawn(self) -> None:
        """One more thread. The caller holds the lock."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._threads.append(self._runtime.spawn(f"{self._name}-{self._count}", self._work))
        self._count += 1

    def _work(self) -> None:
        try:
            while (job := self._next()) is not None:
                job()
        except Exception:
            with self._cond:
                self._count -= 1  # there is room for another one
                if self._jobs and not self._idle:
                    self._spawn()
            raise

    def _next(self) -> Callable[[], None] | None:
        """The next job; None once the pool is closed and empty, or this thread is one too many."""
        with self._cond:
            while not self._jobs or self._count > self._max:
                if self._closed and not self._jobs:
                    return None
                if self._count > self._max:
                    self._count -= 1
                    self._cond.notify()  # it may have been the one that was woken for a job
                    return None
                self._idle += 1
                self._cond.wait()
                self._idle -= 1
            return self._jobs.popleft()

    def close(self, timeout_s: float | None = None) -> bool:
        """Finish what was submitted and end the threads; False if that takes longer than allowed.

        The threads are daemons: one that hangs is left behind and ends with the process.
        """
        with self._cond:
            self._closed = True
            self._cond.notify_all()
            threads = list(self._threads)
        deadline = None if timeout_s is None else self._runtime.monotonic() + timeout_s
        for thread in threads:
            if deadline is None:
                thread.join()
            else:
                thread.join(max(0.0, deadline - self._runtime.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def parts(self, items: Sequence[T]) -> list[Sequence[T]]:
        """`items` for its threads, in no smaller parts than are worth a request each."""
        size = max(TOGETHER_MIN, -(-len(items) // self._max))
        return [items[begin : begin + size] for begin in range(0, len(items), size)]

    def run_all(self, jobs: Sequence[Callable[[], None]]) -> None:
        """Run `jobs`, several at a time, and return when all have ended; not from a job.

        Raises: the first OSError or StoreError of one; those that had not begun are left out.
        """
        if len(jobs) < FEW:
            for job in jobs:
                job()
            return
        batch = _JobBatch(self._runtime.condition(), len(jobs))
        for job in jobs:
            self.submit(partial(batch.run, job))
        batch.wait()


def run_told(
    job: Callable[[], None], undone: str, tell: Callable[[OSError | StoreError | None], None]
) -> None:
    """Run a job for a thread that waits, and tell what it has failed with, if it has.

    An error that nothing foresees ends this thread; `tell` has EIO and `undone` then.
    """
    error: OSError | StoreError | None = OSError(errno.EIO, undone)
    try:
        job()
        error = None
    except (OSError, StoreError) as caught:
        error = caught
    finally:
        tell(error)


class TracedPool(WorkerPool):
    """Jobs belong to the trace of the thread that submits them: on mounts with `--trace`."""

    def __init__(self, spans: Spans, runtime: Runtime, name: str, threads: int) -> None:
        super().__init__(runtime, name, threads)
        self._spans = spans

    def submit(self, job: Callable[[], None]) -> None:
        """As `WorkerPool.submit`."""
        super().submit(self._spans.carry(job))


class _JobBatch:
    """Jobs that a caller waits for."""

    def __init__(self, cond: Condition, count: int) -> None:
        self._cond = cond
        self._left = count  # guarded by _cond, as is _error
        self._error: OSError | StoreError | None = None

    def run(self, job: Callable[[], None]) -> None:
        """One of them, unless another has failed."""
        if self._error is None:
            run_told(job, "a job was not done", self._ended)
        else:
            self._ended(None)

    def _ended(self, error: OSError | StoreError | None) -> None:
        with self._cond:
            self._error = self._error or error
            self._left -= 1
            if not self._left:
                self._cond.notify_all()

    def wait(self) -> None:
        """Until all have ended. Raises: what the first one that failed did."""
        with self._cond:
            while self._left:
                self._cond.wait()
            if self._error is not None:
                raise self._error

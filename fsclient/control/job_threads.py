"""Runs long jobs of requests on threads of its own, so that no serving thread is held.

Called by what answers a request with a `Later`. Threads come with the first job, a few at most, and
end when there is none; the others wait in order. An interrupted request is answered, and a job that
has begun goes on.

Threading: any thread; `_lock` is a leaf, jobs run and outcomes are given without it.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar

from fsclient.kernel.later import Later, Outcome, Take, interrupted, outcome_of
from fsmeta.runtime import Runtime, Thread

T = TypeVar("T")

QUEUE_MAX: Final = 10_000  # jobs that wait; each is a process that waits for its answer


class _QueuedJob:
    """Something to do, and the taker of its outcome; `take` is None once it has that."""

    def __init__(self, work: Callable[[], Any], take: Take[Any]) -> None:
        self.work = work
        self.take: Take[Any] | None = take


class JobThreads:
    """Runs jobs, `at_once` at most."""

    def __init__(self, runtime: Runtime, name: str, at_once: int) -> None:
        self._runtime = runtime
        self._name = name
        self._at_once = at_once
        self._lock = runtime.lock()
        self._queue: deque[_QueuedJob] = deque()  # guarded by _lock
        self._threads: list[Thread] = []  # guarded by _lock

    def later(self, work: Callable[[], T]) -> Later[T]:
        """What `work` returns or raises. Raises: EAGAIN where too much waits."""
        jobs: list[_QueuedJob] = []

        def begin(take: Take[T]) -> None:
            jobs.append(_QueuedJob(work, take))
            self._add(jobs[0])

        def cancel() -> None:
            for job in jobs:
                self._tell(job, interrupted)

        if len(self._queue) >= QUEUE_MAX:
            raise OSError(errno.EAGAIN, "too many requests of this kind")
        return Later(begin, cancel)

    def close(self) -> None:
        """Return when nothing runs and nothing waits."""
        while True:
            with self._lock:
                threads = list(self._threads)
            if not threads:
                return
            for thread in threads:
                thread.join()

    def _add(self, job: _QueuedJob) -> None:
        with self._lock:
            self._queue.append(job)
            if len(self._threads) >= self._at_once:
                return
            slot: list[Thread] = []
            slot.append(self._runtime.spawn(self._name, partial(self._run, slot)))
            self._threads += slot

    def _run(self, slot: list[Thread]) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._threads.remove(slot[0])
                    return
                job = self._queue.popleft()
            if job.take is not None:  # else it was cancelled while it waited
                self._tell(job, outcome_of(job.work))

    def _tell(self, job: _QueuedJob, outcome: Outcome[Any]) -> None:
        with self._lock:
            take, job.take = job.take, None
        if take is not None:
            take(outcome)

"""Threads that run the reads of a batch, made at the first batch and anew after a fork.

Called by `Client` and the trees. Threading: any method from any thread, but not from a job.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

from fsmeta.runtime import Condition, SystemRuntime

J = TypeVar("J")

RUNTIME: Final = SystemRuntime()
FEW: Final = 2  # jobs that this thread runs itself: a hand-over costs more


class Readers:
    """At most so many threads for one tree or client."""

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def read_all(
        self,
        jobs: Sequence[J],
        read: Callable[[J], Sequence[tuple[int, memoryview]]],
        count: int,
    ) -> list[memoryview]:
        """`read` each job; what they bring, by index. Raises: what the first failed one did."""
        out: list[memoryview] = [memoryview(b"")] * count

        def run(job: J) -> None:
            for index, view in read(job):
                out[index] = view

        self.run(jobs, run)
        return out

    def run(self, jobs: Sequence[J], work: Callable[[J], object]) -> None:
        """Do `work` for each job, several at a time; return when all have ended.

        Raises: what the first failed one did; those that had not begun then are left out.
        """
        if len(jobs) < FEW:
            for job in jobs:
                work(job)
            return
        batch = _OrderedJobs(jobs, work, RUNTIME.condition())
        helpers = [
            RUNTIME.spawn(f"slicefs-read-{number}", batch.run)
            for number in range(min(self._threads, len(jobs)) - 1)
        ]
        batch.run()
        for helper in helpers:
            helper.join()
        batch.check()

    def close(self) -> None:
        """Threads end with their batch; there is nothing to let go of."""


class _OrderedJobs(Generic[J]):
    """Jobs that threads take in order."""

    def __init__(self, jobs: Sequence[J], work: Callable[[J], object], lock: Condition) -> None:
        self._jobs = jobs
        self._work = work
        self._lock = lock
        self._next = 0  # guarded by _lock, as is _error
        self._error: BaseException | None = None

    def _take(self) -> J | None:
        with self._lock:
            if self._error is not None or self._next == len(self._jobs):
                return None
            self._next += 1
            return self._jobs[self._next - 1]

    def run(self) -> None:
        """Take jobs until there are none, or one has failed."""
        while (job := self._take()) is not None:
            try:
                self._work(job)
            except BaseException as error:  # noqa: BLE001  (raised by `check`, in the caller)
                with self._lock:
                    self._error = self._error or error

    def check(self) -> None:
        """Raises: what the first failed job did."""
        if self._error is not None:
            raise self._error

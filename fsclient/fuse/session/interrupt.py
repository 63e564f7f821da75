"""Which request each worker serves, and which of them the kernel wants ended.

A signal to a process that waits for us makes the kernel send INTERRUPT with the request's unique
id; the process goes on waiting until the request itself is answered. So an operation that may wait
long asks `interrupted()` between waits, or registers a wake-up with `waking`, and raises EINTR.

Threading. One slot per worker; a slot's owner alone writes `serving`, only the thread that reads an
INTERRUPT writes `ended` and calls wakers. Item reads and writes of a list are atomic and in order,
so there is no lock: the owner registers its waker before it looks at `ended`, the interrupter
writes `ended` before it looks for a waker. A wake-up may come late, to an operation that is over:
wakers must tolerate that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

IDLE: Final = 0  # the kernel starts its unique ids above it
ABSENT: Final = -1  # a slot without a worker

# The slot of the thread that asks. Every thread has a context of its own, so this is thread-local.
_slot: ContextVar[int] = ContextVar("fuse_worker_slot")


class Interrupts:
    """The workers' slots."""

    def __init__(self, slots: int) -> None:
        self.serving = [ABSENT] * slots  # unique id of the request that is served
        self.aside: dict[int, Callable[[], None]] = {}  # how to cancel a parked request, by id
        self._ended = [ABSENT] * slots  # unique id of the last request that was interrupted
        self._wakers: list[Callable[[], None] | None] = [None] * slots

    def enter(self, slot: int) -> None:
        """Bind the calling thread to `slot`."""
        _slot.set(slot)

    def slot(self) -> int | None:
        """The slot of the calling thread, if it is a worker."""
        return _slot.get(None)

    def leave(self, slot: int) -> None:
        """The calling thread serves no more."""
        self.serving[slot] = ABSENT

    def under_way(self) -> frozenset[int]:
        """Requests that are being served, or whose answers are being written."""
        return frozenset(unique for unique in self.serving if unique > IDLE)

    def interrupt(self, unique: int) -> bool:
        """End the request `unique`; False where it is not parked and not served (or not yet)."""
        cancel = self.aside.get(unique)
        if cancel is not None:
            cancel()
            return True
        return self.interrupt_served(unique)

    def interrupt_served(self, unique: int) -> bool:
        """The same of a request that a thread serves."""
        try:
            slot = self.serving.index(unique)
        except ValueError:
            return False
        self._ended[slot] = unique
        wake = self._wakers[slot]
        if wake is not None:
            wake()
        return True

    def interrupted(self) -> bool:
        """Whether the request that the calling thread serves is to end with EINTR."""
        slot = _slot.get(None)
        return slot is not None and self._ended[slot] == self.serving[slot]

    @contextmanager
    def waking(self, wake: Callable[[], None]) -> Iterator[None]:
        """Have `wake` called, from another thread, when this thread's request is interrupted.

        Ask `interrupted()` after entering and after every wait.
        """
        slot = _slot.get(None)
        if slot is None:
            yield
            return
        self._wakers[slot] = wake
        try:
            yield
        finally:
            self._wakers[slot] = None

"""One request on pyfuse3: from the event loop to a worker thread and back.

pyfuse3 calls an operation in its event loop and writes the answer there, in the step in which the
operation returns. The file system waits for stores, so each of its calls runs in a thread of
trio's, at most THREADS_MAX at a time; what comes later (`Later`) needs none meanwhile.

Threading: everything but `_attempt` runs in the thread of the event loop.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any, Final, TypeVar

from fsclient.fuse.dispatch.dispatch import operation_name
from fsclient.fuse.dispatch.errnos import Errnos
from fsclient.fuse.pyfuse3.binding import Binding
from fsclient.fuse.session.session import SessionConfig
from fsclient.fuse.session.stats import SlotStats
from fsclient.fuse.wire.protocol import Opcode
from fsclient.kernel.later import Later, Outcome
from fsmeta.latency import BUCKETS, MICROSECONDS

T = TypeVar("T")
THREADS_MAX: Final = 64  # as the native session has while threads are blocked


class Serving:
    """Serves requests in threads; counts them."""

    def __init__(self, binding: Binding, config: SessionConfig, clock: Callable[[], float]) -> None:
        self._fuse, self._trio = binding
        self._limiter = self._trio.CapacityLimiter(THREADS_MAX)
        self._errnos = Errnos(config.on_corrupt)
        self._trace = config.trace
        self._clock = clock
        self._begun = self._trio.Event()
        self._last = 0  # the number of the last request
        self._under_way: set[int] = set()
        self.stats = SlotStats()
        self._latencies = self.stats.begin()
        self.refuses = 0  # the errno of every request from now on; written by any thread

    def begin(self) -> None:
        """What has come so far has waited, and is served."""
        self._begun.set()

    def under_way(self) -> frozenset[int]:
        """Requests whose answers are not written."""
        return frozenset(self._under_way)

    async def serve(self, opcode: Opcode, ino: int, body: Callable[[], T | Later[T]]) -> T:
        """What `body` returns, or what comes later. Raises: FUSEError."""
        if not self._begun.is_set():
            await self._begun.wait()
        begun = self._clock()
        self._last = number = self._last + 1
        self._under_way.add(number)
        try:
            value, code = await self._run(operation_name(opcode), ino, body)
        finally:
            self._under_way.discard(number)
        code = self.refuses or code
        self._count(opcode, self._clock() - begun, code)
        if self._trace is not None:
            outcome = errno.errorcode.get(code, str(code)) if code else "done"
            self._trace(f"{operation_name(opcode)}({ino}) -> {outcome}")
        if code:
            raise self._fuse.FUSEError(code)
        found: T = value
        return found

    def moved(self, opcode: Opcode, size: int) -> None:
        """Bytes that a READ has brought or a WRITE has taken."""
        self.stats.bytes[opcode] += size

    async def _run(self, name: str, ino: int, body: Callable[[], T | Later[T]]) -> tuple[Any, int]:
        if self.refuses:
            return None, self.refuses
        value, code = await self._trio.to_thread.run_sync(
            self._attempt, name, ino, body, limiter=self._limiter
        )
        if isinstance(value, Later):
            return self._attempt(name, ino, await self._await(value))
        return value, code

    async def _await(self, later: Later[T]) -> Outcome[T]:
        """Have it begun, and return when its outcome has come."""
        token = self._trio.lowlevel.current_trio_token()
        come = self._trio.Event()
        outcomes: list[Outcome[T]] = []

        def take(outcome: Outcome[T]) -> None:
            outcomes.append(outcome)
            try:
                token.run_sync_soon(come.set)
            except self._trio.RunFinishedError:
                pass  # the mount has gone

        await self._trio.to_thread.run_sync(later.begin, take, limiter=self._limiter)
        await come.wait()
        return outcomes[0]

    def _attempt(self, name: str, ino: int, body: Callable[[], object]) -> tuple[Any, int]:
        try:
            return body(), 0
        except Exception as error:  # noqa: BLE001  (the edge: whatever it is, the kernel waits)
            return None, self._errnos.judge(error, name, ino)

    def _count(self, opcode: Opcode, spent: float, code: int) -> None:
        stats = self.stats
        stats.served += 1
        stats.counts[opcode] += 1
        stats.seconds[opcode] += spent
        self._latencies[opcode * BUCKETS + int(spent * MICROSECONDS).bit_length()] += 1
        if code:
            stats.errors[opcode] += 1

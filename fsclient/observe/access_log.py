"""The access log: a line for each request, for `.accesslog`, for a file, and for slow operations.

Workers call `take`, which costs nothing while the log has no reader. Each reader has a queue of its
own with a limit: a reader that is too slow loses lines, which are counted and said in their place.
Requests for virtual files are left out, or a reader would read of its own reading.

Threading: `take` from any worker; a reader's methods from any thread. `_lock` guards the list of
readers, a queue's `_lock` its lines; both are leaves. A waiting read is answered outside of them.
"""

from __future__ import annotations

import errno
import logging
from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from typing import Final

from fsclient.fuse.session.tap import ServedRequest, Tap
from fsclient.kernel.contract import Buffer
from fsclient.kernel.later import Later, Outcome, Take, interrupted
from fsclient.kernel.virtual import FIRST_INO, VirtualStream
from fsclient.observe.access_line import line_of
from fsmeta.runtime import Runtime

log = logging.getLogger(__name__)

QUEUE_BYTES_MAX: Final = 4 << 20  # a reader's lines that wait: some 40,000; then they are dropped
READERS_MAX: Final = 16  # handles at a time: each costs a mount what it formats and keeps


class _Queue:
    """Lines for one reader, in order."""

    def __init__(self, runtime: Runtime) -> None:
        self._lock = runtime.lock()
        self._lines: deque[bytes] = deque()  # guarded by _lock, as all below
        self._bytes = 0
        self._missed = 0  # dropped, and not said yet
        self.dropped = 0
        self._wait: Take[Sequence[Buffer]] | None = None
        self._wait_bytes = 0
        self._ended = False

    def put(self, line: bytes) -> None:
        """Add a line; drop it where the reader has too many."""
        with self._lock:
            if self._bytes + len(line) > QUEUE_BYTES_MAX:
                self._missed += 1
                self.dropped += 1
                return
            if self._missed:
                note = b"# %d lines dropped: the reader was too slow\n" % self._missed
                self._missed = 0
                self._lines.append(note)
                self._bytes += len(note)
            self._lines.append(line)
            self._bytes += len(line)
            take, self._wait = self._wait, None
            piece = b"" if take is None else self._pop(self._wait_bytes)
        if take is not None:
            take(lambda: [piece])

    def read(self, size: int) -> bytes:
        """At most `size` bytes of what is there."""
        with self._lock:
            return self._pop(size)

    def _pop(self, size: int) -> bytes:
        parts: list[bytes] = []
        while self._lines and size > 0:
            line = self._lines.popleft()
            if len(line) > size:
                self._lines.appendleft(line[size:])
                line = line[:size]
            parts.append(line)
            size -= len(line)
            self._bytes -= len(line)
        return b"".join(parts)

    def wait(self, size: int, take: Take[Sequence[Buffer]]) -> None:
        """Give `take` the next bytes when there are any; nothing once the log has ended."""
        with self._lock:
            if not self._lines and not self._ended and self._wait is None:
                self._wait, self._wait_bytes = take, size
                return
            busy = not self._lines and not self._ended
            piece = self._pop(size)
        take(interrupted if busy else lambda: [piece])

    def give_up(self, outcome: Outcome[Sequence[Buffer]]) -> None:
        """Answer the read that waits, if one does."""
        with self._lock:
            take, self._wait = self._wait, None
        if take is not None:
            take(outcome)

    def end(self) -> None:
        """There will be no more lines."""
        with self._lock:
            self._ended = True
        self.give_up(list)


class _AccessLogReader:
    """One open handle of `.accesslog`."""

    def __init__(self, queue: _Queue, close: Callable[[], None]) -> None:
        self._queue = queue
        self.close = close

    def read(self, size: int) -> Sequence[Buffer] | Later[Sequence[Buffer]]:
        piece = self._queue.read(size)
        if piece:
            return [piece]
        queue = self._queue
        return Later(lambda take: queue.wait(size, take), lambda: queue.give_up(interrupted))


class AccessLog:
    """Tells readers of requests, and the log of those that were slow."""

    def __init__(self, runtime: Runtime, slow_ms: float | None = None) -> None:
        """Requests that take `slow_ms` are logged as a warning; None: none."""
        self._runtime = runtime
        self._slow_s = inf if slow_ms is None else slow_ms / 1000
        self._lock = runtime.lock()
        self._queues: tuple[_Queue, ...] = ()  # replaced under _lock
        self._dropped = 0  # by readers that have left; guarded by _lock
        self._slow = 0  # about: workers may miss each other's additions
        self.floor_s = self._slow_s

    def take(self, request: ServedRequest) -> None:
        """A request was served."""
        if request.ino >= FIRST_INO:
            return
        line = line_of(request, self._runtime.now_ns())
        if request.seconds >= self._slow_s:
            self._slow += 1
            log.warning("slow operation: %s", line.decode(errors="replace").rstrip())
        for queue in self._queues:
            queue.put(line)

    def open(self) -> VirtualStream:
        """A reader from now on. Raises: EMFILE."""
        queue = self.subscribe()
        return _AccessLogReader(queue, lambda: self._leave(queue))

    def subscribe(self) -> _Queue:
        """A queue of the lines from now on. Raises: EMFILE."""
        queue = _Queue(self._runtime)
        with self._lock:
            if len(self._queues) >= READERS_MAX:
                raise OSError(errno.EMFILE, f"the access log has {READERS_MAX} readers")
            self._queues = (*self._queues, queue)
            self.floor_s = 0.0
        return queue

    def _leave(self, queue: _Queue) -> None:
        with self._lock:
            if queue in self._queues:
                self._queues = tuple(each for each in self._queues if each is not queue)
                self._dropped += queue.dropped
            if not self._queues:
                self.floor_s = self._slow_s
        queue.end()

    def end(self) -> None:
        """The mount leaves: readers get what there is, and then the end of the file."""
        for queue in self._queues:
            queue.end()

    def numbers(self) -> dict[str, float]:
        """For `.stats`."""
        with self._lock:
            dropped = self._dropped + sum(queue.dropped for queue in self._queues)
            readers = len(self._queues)
        return {
            "accesslog_readers": readers,
            "accesslog_dropped_total": dropped,
            "slow_operations_total": self._slow,
        }


_CONFORMS: tuple[type[Tap], type[VirtualStream]] = (AccessLog, _AccessLogReader)

"""Requests that wait for a copy-up, without a serving thread each.

A few threads copy, each a file at a time. Requests for a file that is being copied, or that waits
for its turn, are answered when that copy has ended. The threads come with the first copy and end
when there is none. A copy goes on as long as one of its requests waits.

Called by `FileOpening`. Threading: any thread; `_lock` is a leaf, copies and completions run
without it.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import Any, Final, TypeVar

from fsclient.kernel.later import Later, Take, failure, interrupted, outcome_of
from fsmeta.runtime import Runtime
from fsmeta.types import Ino

T = TypeVar("T")
AT_ONCE: Final = 16  # files: each has 8 blocks on their way at most, so 512 MiB together

Copy = Callable[[Ino, Callable[[], bool]], None]
"""Copies a file; the second argument tells that no request waits for it any more.

Raises: EINTR then, and why it can't be copied.
"""


class _WaitingOpen:
    """A request that waits."""

    def __init__(
        self, complete: Callable[[], Any], give_up: Callable[[], None], take: Take[Any]
    ) -> None:
        self.complete = complete
        self.give_up = give_up
        self.take = take
        self.context: Context = copy_context()  # of the request: its span, its records


class CopyUpQueue:
    """See the module."""

    def __init__(self, runtime: Runtime, copy: Copy) -> None:
        self._runtime = runtime
        self._copy = copy
        self._lock = runtime.lock()
        self._waiting: dict[Ino, list[_WaitingOpen]] = {}  # guarded by _lock, as below
        self._queue: deque[Ino] = deque()
        self._threads = 0

    def later(self, ino: Ino, complete: Callable[[], T], give_up: Callable[[], None]) -> Later[T]:
        """What `complete` returns or raises once `ino` is copied; it runs on a copying thread.

        Where the copy fails, or the request is interrupted, `give_up` is called instead.
        """
        made: list[_WaitingOpen] = []

        def begin(take: Take[T]) -> None:
            made.append(_WaitingOpen(complete, give_up, take))
            try:
                self._add(ino, made[0])
            except RuntimeError as error:
                _answer(made[0], OSError(errno.EAGAIN, f"no thread to copy the file: {error}"))

        def cancel() -> None:
            for each in made:
                if self._drop(ino, each):
                    each.context.run(each.give_up)
                    each.take(interrupted)

        return Later(begin, cancel)

    def _add(self, ino: Ino, request: _WaitingOpen) -> None:
        """Raises: RuntimeError where there is no thread for it."""
        with self._lock:
            there = self._waiting.get(ino)
            if there is not None:
                there.append(request)
                return
            if self._threads < AT_ONCE:
                try:
                    self._runtime.spawn("copy-up", self._run)
                    self._threads += 1
                except RuntimeError:  # the system has no more threads
                    if not self._threads:
                        raise
            self._waiting[ino] = [request]
            self._queue.append(ino)

    def _drop(self, ino: Ino, request: _WaitingOpen) -> bool:
        """Whether a request was still waiting."""
        with self._lock:
            there = self._waiting.get(ino, [])
            if request not in there:
                return False
            there.remove(request)
            return True

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._threads -= 1
                    return
                ino = self._queue.popleft()
            self._serve(ino)

    def _serve(self, ino: Ino) -> None:
        """Copy a file until no request waits for it."""
        waiting = self._waiting[ino]
        error: Exception | None = None
        is_copied = False
        if waiting:
            try:
                self._copy(ino, lambda: not waiting)
                is_copied = True
            except Exception as failed:  # noqa: BLE001  (the takers of the outcome meet it)
                error = failed
        with self._lock:
            if waiting and not is_copied and (error is None or _is_interrupted(error)):
                self._queue.append(ino)  # they came after the last one had left
                return
            del self._waiting[ino]
        for request in waiting:
            request.context.run(_answer, request, error)


def _answer(request: _WaitingOpen, error: Exception | None) -> None:
    if error is None:
        request.take(outcome_of(request.complete))
    else:
        request.give_up()
        request.take(failure(error))


def _is_interrupted(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno == errno.EINTR

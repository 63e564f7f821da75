"""The queue of copy-ups, step by step: its threads run when the test runs them."""

from __future__ import annotations

import errno
from collections.abc import Callable
from types import TracebackType
from typing import Any

from fsclient.kernel.copy_up_queue import CopyUpQueue
from fsclient.kernel.later import Later, Outcome
from fsmeta.runtime import SystemRuntime
from fsmeta.types import Ino

FILE = Ino(7)
NO_THREADS = "can't start new thread"  # as the interpreter says it


class Steps(SystemRuntime):
    """A runtime whose threads wait to be run, and whose locks can be watched."""

    def __init__(self) -> None:
        super().__init__()
        self.bodies: list[Callable[[], None]] = []
        self.has_threads = True
        self.before_lock: list[Callable[[], None]] = []  # what happens before each time, in order

    def spawn(self, name: str, body: Callable[[], None]) -> Any:
        del name
        if not self.has_threads:
            raise RuntimeError(NO_THREADS)
        self.bodies.append(body)

    def lock(self) -> Any:
        return _WatchedLock(self.before_lock)

    def run(self) -> None:
        """Have the threads run to their end."""
        while self.bodies:
            self.bodies.pop(0)()


class _WatchedLock:
    def __init__(self, before: list[Callable[[], None]]) -> None:
        self._before = before

    def __enter__(self) -> None:
        if self._before:
            self._before.pop(0)()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class Opens:
    """Opens that wait, and what has become of them."""

    def __init__(self) -> None:
        self.runtime = Steps()
        self.copied: list[Ino] = []
        self.ended: list[str] = []
        self.queue = CopyUpQueue(self.runtime, lambda ino, _stopped: self.copied.append(ino))

    def begin(self, name: str) -> Later[str]:
        later = self.queue.later(FILE, lambda: name, lambda: self.ended.append(f"{name} given up"))

        def take(outcome: Outcome[str]) -> None:
            try:
                self.ended.append(f"{outcome()} open, {len(self.copied)} copied")
            except OSError as error:
                self.ended.append(f"{name} {errno.errorcode[error.errno or 0]}")

        later.begin(take)
        return later


def test_an_open_is_not_completed_without_a_copy() -> None:
    """The one that waited is interrupted before the thread looks, another one comes just then."""
    opens = Opens()
    opens.begin("first").cancel()
    assert opens.ended == ["first given up", "first EINTR"]

    def come() -> None:
        opens.begin("second")

    opens.runtime.before_lock += [lambda: None, come]
    opens.runtime.run()
    assert opens.ended[2:] == ["second open, 1 copied"]


def test_without_a_thread_an_open_fails_and_the_next_one_does_not() -> None:
    opens = Opens()
    opens.runtime.has_threads = False
    for _ in range(20):
        opens.begin("refused")
    assert opens.ended == ["refused given up", "refused EAGAIN"] * 20
    opens.runtime.has_threads = True
    opens.begin("next")
    opens.runtime.run()
    assert opens.ended[40:] == ["next open, 1 copied"]


def test_what_waits_shares_one_copy_and_the_others_go_on_without_a_further_thread() -> None:
    opens = Opens()
    opens.begin("first")
    opens.runtime.has_threads = False
    opens.begin("second")
    opens.runtime.run()
    assert opens.ended == ["first open, 1 copied", "second open, 1 copied"]

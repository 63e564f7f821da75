"""The seam to the outside: time, randomness, sleeping, threads and their locks.

Everything below the command line takes a `Runtime` and uses no other source of these. Production
passes `SystemRuntime`; `tests/sim` passes a scheduler that runs one thread at a time and picks the
next by seed, so that a whole run, faults included, follows from one number.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, Protocol, cast

log = logging.getLogger(__name__)

AGAIN_S: Final = 1.0  # until an indispensable thread begins anew; then twice as long
AGAIN_MAX_S: Final = 60.0


class Lock(Protocol):
    """A mutex. Not reentrant."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool: ...
    def release(self) -> None: ...
    def __enter__(self) -> bool: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class Condition(Protocol):
    """A condition variable with a lock, its own or a shared one."""

    def wait(self, timeout: float | None = None) -> bool: ...
    def notify(self, n: int = 1) -> None: ...
    def notify_all(self) -> None: ...
    def __enter__(self) -> bool: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class Event(Protocol):
    """A flag that threads wait for."""

    def is_set(self) -> bool: ...
    def set(self) -> None: ...
    def clear(self) -> None: ...
    def wait(self, timeout: float | None = None) -> bool: ...


class Thread(Protocol):
    """A started thread."""

    def join(self, timeout: float | None = None) -> None: ...
    def is_alive(self) -> bool: ...


class Waits(Protocol):
    """A component that is called before threads wait."""

    def will_wait(self) -> None:
        """The calling thread is about to wait for something."""

    def await_input(self, descriptor: int) -> None:
        """It is about to receive. May wait until there is input."""


class Runtime(Waits, Protocol):
    """Where time, chance and threads come from.

    Its own waits (sleep, conditions, events) report themselves; a thread that waits otherwise calls
    `will_wait` before.
    """

    def tell(self, waits: Waits) -> None:
        """Let `waits` know of every wait from now on."""

    def now_ns(self) -> int:
        """Wall-clock time in nanoseconds since the epoch."""

    def monotonic(self) -> float:
        """Seconds on a clock that never goes back."""

    def sleep(self, seconds: float) -> None: ...

    def random(self) -> float:
        """A number in [0, 1)."""

    def random_bits(self, bits: int) -> int: ...

    def spawn(self, name: str, body: Callable[[], None]) -> Thread:
        """Start a daemon thread that runs `body` once."""

    def lock(self) -> Lock: ...
    def condition(self, lock: Lock | None = None) -> Condition: ...
    def event(self) -> Event: ...


class _Untold:
    """No component wants to know of waits."""

    def will_wait(self) -> None:
        pass

    def await_input(self, descriptor: int) -> None:
        pass


class _ToldCondition(threading.Condition):
    """A condition that reports its waits.

    `with` enters and leaves its lock itself, in C. In Python's own methods Ctrl-C can come right
    behind taking the lock, or before it is given back; then no thread ever gets it again.
    """

    def __init__(self, runtime: SystemRuntime, lock: Lock | None) -> None:
        inner = cast("threading.Lock", lock or threading.Lock())
        super().__init__(inner)
        self._inner = inner
        self._runtime = runtime

    @property
    def __enter__(self) -> Callable[[], bool]:
        return self._inner.__enter__

    @property
    def __exit__(self) -> Callable[..., None]:
        return self._inner.__exit__

    def wait(self, timeout: float | None = None) -> bool:
        self._runtime.will_wait()
        return super().wait(timeout)


class _ToldEvent(threading.Event):
    """An event whose waiters say so."""

    def __init__(self, runtime: SystemRuntime) -> None:
        super().__init__()
        self._runtime = runtime

    def wait(self, timeout: float | None = None) -> bool:
        if not self.is_set():
            self._runtime.will_wait()
        return super().wait(timeout)


class SystemRuntime:
    """The real clock, the system's randomness and plain threads."""

    def __init__(self) -> None:
        self._random = random.SystemRandom()
        self.now_ns = time.time_ns
        self.monotonic = time.monotonic
        self.tell(_Untold())
        self.random = self._random.random
        self.random_bits = self._random.getrandbits

    def tell(self, waits: Waits) -> None:
        self.will_wait = waits.will_wait
        self.await_input = waits.await_input

    def sleep(self, seconds: float) -> None:
        self.will_wait()
        time.sleep(seconds)

    def spawn(self, name: str, body: Callable[[], None]) -> Thread:
        thread = threading.Thread(target=body, name=name, daemon=True)
        thread.start()
        return thread

    def lock(self) -> Lock:
        return threading.Lock()

    def condition(self, lock: Lock | None = None) -> Condition:
        return _ToldCondition(self, lock)

    def event(self) -> Event:
        return _ToldEvent(self)


_CONFORMS: Callable[[], Runtime] = SystemRuntime


def spawn_lasting(runtime: Runtime, name: str, body: Callable[[], None]) -> Thread:
    """Start a thread that a mount can't do without; it ends when `body` returns.

    An unforeseen error is logged, and `body` begins anew after a while.
    """

    def run() -> None:
        pause_s = AGAIN_S
        while True:
            try:
                return body()
            except Exception:
                log.exception("thread %s failed; it starts again in %.0f s", name, pause_s)
            runtime.sleep(pause_s)
            pause_s = min(AGAIN_MAX_S, 2 * pause_s)

    return runtime.spawn(name, run)

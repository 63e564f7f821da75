"""Tells the kernel which names to forget, in threads that a directory's lock may stop.

FUSE_NOTIFY_INVAL_ENTRY takes the lock of the directory. A process can hold that lock for as long as
it likes: getdents(2) holds it while it copies into the caller's buffer, which may be mapped from a
file that does not answer. So a directory is one job at a time of a small pool, and the notifier,
which tells everything else, waits for none of them. Where a job takes longer than SLOW_S the
notifier starts another thread for the rest, up to THREADS_MAX.

Called by `CacheLeases`: `submit`, `look` and `stop` by its notifier thread, `is_slow` by any.
Threading: `_cond` guards all fields; it is held across nothing. `is_slow` takes no lock, nor does
a thread that notes when it begins with the next name: each is one step on a set, flag or dict.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from fsmeta.runtime import Runtime, Thread, spawn_lasting
from fsmeta.types import Ino

SLOW_S: Final = 1.0  # a notification takes microseconds, or as long as a request of the directory
THREADS_MAX: Final = 32  # of directories that are stuck; a thread takes 100 kB
STOP_S: Final = 1.0  # for threads that are stuck in the kernel

Then = Callable[[], None]


class _NamesToForget:
    """Names of one directory that the kernel is to forget."""

    def __init__(self) -> None:
        self.names: dict[bytes, None] = {}  # in order, each once
        self.then: list[Then] = []


class NameNotices:
    """See the module."""

    def __init__(
        self, runtime: Runtime, tell: Callable[[Ino, bytes], None], on_slow: Callable[[], object]
    ) -> None:
        """`tell` may wait; `on_slow` is called by `look` where a directory has become slow."""
        self._runtime = runtime
        self._tell = tell
        self._on_slow = on_slow
        self._cond = runtime.condition()
        self._jobs: dict[Ino, _NamesToForget] = {}  # not begun
        self._ready: deque[Ino] = deque()  # of those, whose directory has no thread
        self._begun: dict[Ino, float] = {}  # directories that have a thread, and since when
        self._slow: set[Ino] = set()  # those of them that take longer than SLOW_S
        self._is_full = False  # there is no thread left for other directories
        self._threads: list[Thread] = []
        self._stopped = False

    def submit(self, parent: Ino, names: Iterable[bytes], then: Then) -> None:
        """Have the kernel forget `names`; `then` is called by the thread that has told it."""
        with self._cond:
            job = self._jobs.get(parent)
            if job is None:
                job = self._jobs[parent] = _NamesToForget()
                if parent not in self._begun:
                    self._ready.append(parent)
            job.names.update(dict.fromkeys(names))
            job.then.append(then)
            if not self._threads:
                self._add_thread()
            self._cond.notify()

    def is_slow(self, parent: Ino) -> bool:
        """Whether the kernel may learn of names in this directory too late."""
        return self._is_full or parent in self._slow

    def look(self) -> float | None:
        """Find what is stuck; when to look again, in seconds. None: nothing is under way."""
        with self._cond:
            if not self._begun and not self._ready:
                return None
            now = self._runtime.monotonic()
            late = {ino for ino, since in self._begun.items() if now - since >= SLOW_S}
            fresh = late - self._slow
            self._slow |= late
            free = len(self._threads) - len(self._begun)
            if late and self._ready and free <= 0 and not self._stopped:
                more = min(len(self._ready), len(self._threads), THREADS_MAX - len(self._threads))
                for _ in range(more):
                    self._add_thread()
                if len(late) == THREADS_MAX and not self._is_full:
                    self._is_full = True
                    fresh = late
            waits = [since + SLOW_S - now for ino, since in self._begun.items() if ino not in late]
            if self._ready:
                waits.append(SLOW_S)
        if fresh:
            self._on_slow()
        return min(waits, default=None)  # what is late ends by itself, if ever

    def stop(self) -> None:
        """End the threads; those that are stuck end with the process."""
        with self._cond:
            self._stopped = True
            self._cond.notify_all()
        for thread in self._threads:
            thread.join(STOP_S if self._begun else None)

    def _add_thread(self) -> None:
        name = f"names-{len(self._threads)}"
        self._threads.append(spawn_lasting(self._runtime, name, self._run))

    def _run(self) -> None:
        while True:
            with self._cond:
                while not self._ready and not self._stopped:
                    self._cond.wait()
                if self._stopped:
                    return
                parent = self._ready.popleft()
                job = self._jobs.pop(parent)
                self._begun[parent] = self._runtime.monotonic()
            try:
                for name in job.names:
                    self._begun[parent] = self._runtime.monotonic()
                    self._tell(parent, name)
            finally:
                self._end(parent)
                for then in job.then:
                    then()

    def _end(self, parent: Ino) -> None:
        """A directory has been told of all; it may have more by now."""
        with self._cond:
            del self._begun[parent]
            self._slow.discard(parent)
            self._is_full = False
            if parent in self._jobs:
                self._ready.append(parent)
                self._cond.notify()

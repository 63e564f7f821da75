"""Parked requests of a mount that writes back: they wait until other clients see earlier writes.

`LockReleases` has one: a lock is given up when other clients see what was written under it, which
takes as long as the object store does. No thread that serves requests waits for that.

Threading: any method from any thread; `_cond` guards all and is held across nothing. The thread
`parking` is there while something waits; it alone runs what was parked.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

from fsclient.kernel.later import Later, Take
from fsmeta.errors import StoreError
from fsmeta.runtime import Runtime, Thread
from fsmeta.types import Ino

log = logging.getLogger(__name__)

LOOK_FIRST_S: Final = 0.005  # then twice as long each time: so late an answer is at most
LOOK_MAX_S: Final = 0.1


class Publishing(Protocol):
    """What a mount that writes back tells of its changes."""

    def mark(self) -> int:
        """The number of the last change that was accepted."""

    def await_written(self, ino: Ino, since: int, upto: int, wait_s: float) -> bool:
        """Wait until other clients see all changes of the order domain of `ino` up to number
        `upto`, and those of other domains behind `since`; False where that takes longer.
        """


class Parked:
    """A request that waits; `go` is told whether other clients see what it waits for."""

    def __init__(self, ino: Ino, since: int, upto: int, request: int = 0) -> None:
        self.ino = ino
        self.since = since
        self.upto = upto
        self.request = request
        self.cancelled = False
        self.go: Callable[[bool], object] = bool


class Parking:
    """See the module."""

    def __init__(self, runtime: Runtime, publishing: Publishing) -> None:
        self._runtime = runtime
        self._publishing = publishing
        self._cond = runtime.condition()
        self._parked: list[Parked] = []  # guarded by _cond, as below
        self._thread: Thread | None = None
        self._stopped = False

    def is_seen(self, parked: Parked) -> bool:
        """Whether other clients see what a request waits for. Raises: StoreError."""
        return self._publishing.await_written(parked.ino, parked.since, parked.upto, 0.0)

    def later(self, parked: Parked, then: Callable[[bool], None]) -> Later[None]:
        """`then`, as the answer of a request, when it is its turn."""

        def begin(take: Take[None]) -> None:
            parked.go = lambda seen: take(partial(then, seen))
            self.put(parked)

        return Later(begin, partial(self._cancel, parked))

    def put(self, parked: Parked) -> None:
        """Have `go` run, on the thread of this."""
        with self._cond:
            self._parked.append(parked)
            if self._thread is None:
                self._thread = self._runtime.spawn("parking", self._run)
            self._cond.notify_all()

    def cancel(self, request: int) -> bool:
        """INTERRUPT: have a request run at once; False where it does not wait here."""
        with self._cond:
            found = [each for each in self._parked if each.request == request]
        for each in found:
            self._cancel(each)
        return bool(found)

    def _cancel(self, parked: Parked) -> None:
        with self._cond:
            parked.cancelled = True
            self._cond.notify_all()

    def stop(self) -> None:
        """Have all that waits run, and end the thread."""
        with self._cond:
            self._stopped = True
            self._cond.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        pause = LOOK_FIRST_S
        while True:
            with self._cond:
                if not self._parked:
                    self._thread = None
                    return
                waiting, stopped = list(self._parked), self._stopped
            over: list[tuple[Parked, bool]] = []
            for each in waiting:
                seen = self._has_come(each)
                if seen or each.cancelled or stopped:
                    over.append((each, seen))
            for each, seen in over:
                with self._cond:
                    self._parked.remove(each)
                each.go(seen)
            with self._cond:
                interrupted = any(each.cancelled for each in self._parked)
                if self._parked and not over and not interrupted and not self._stopped:
                    self._cond.wait(pause)
            pause = LOOK_FIRST_S if over else min(2 * pause, LOOK_MAX_S)

    def _has_come(self, parked: Parked) -> bool:
        try:
            return self.is_seen(parked)
        except StoreError as error:
            log.debug("a request at inode %d: %s", parked.ino, error)
            return False
        except OSError:
            return True  # there is no such inode any more, and nothing to see of it

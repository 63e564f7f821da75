"""The xattr `user.slicefs.durable`: whether other clients see a file, and the store has its data.

`1`, or `0` while something of it waits; of a directory: while anything waits that is published in
order with it. `….flush` first stores what is written to files that are open; `….wait` answers when
it is `1`, or after WAIT_S: `slicefs flush` asks anew. Any user may ask, as often as programs can be
started: what takes a while holds no thread that serves.

Threading: any thread. The thread `durable` is there while anything waits; `_cond` guards what does,
and is held across nothing. It is that of `WriteBack`, which is notified of publications.
"""

from __future__ import annotations

import errno
from functools import partial
from typing import Final

from fsclient.control.job_threads import JobThreads
from fsclient.files.file_io import FileIO
from fsclient.kernel.later import Later, Outcome, Take, interrupted
from fsclient.writeback.writeback import WriteBack
from fsmeta.meta.meta import Meta
from fsmeta.runtime import Runtime, Thread
from fsmeta.types import ROOT_CALLER, Ino
from fsmeta.writeback.backlog.publish_queue import Goal

DURABLE_XATTR: Final = b"user.slicefs.durable"
FLUSH_XATTR: Final = DURABLE_XATTR + b".flush"
WAIT_XATTR: Final = DURABLE_XATTR + b".wait"
WAIT_S: Final = 2.0
LOOK_S: Final = 0.1  # publications wake the thread, other events don't
WAITS_MAX: Final = 10_000  # beyond them a request is answered at once
FLUSHES_AT_ONCE: Final = 4


class _Wait:
    """A request that waits for all that was accepted when it came."""

    def __init__(self, ino: Ino, goal: Goal, until: float, take: Take[bytes]) -> None:
        self.ino = ino
        self.goal = goal
        self.until = until
        self.take = take
        self.cancelled = False


class Durable:
    """Answers for one mount."""

    def __init__(
        self, meta: Meta, io: FileIO, runtime: Runtime, writeback: WriteBack | None
    ) -> None:
        self._meta = meta
        self._io = io
        self._runtime = runtime
        self._flushes = JobThreads(runtime, "flush", FLUSHES_AT_ONCE)
        self._cond = runtime.condition() if writeback is None else writeback.publications
        self._waits: list[_Wait] = []  # guarded by _cond
        self._thread: Thread | None = None  # guarded by _cond
        self._closed = False  # guarded by _cond

    def later(self, writeback: WriteBack | None, ino: Ino, name: bytes) -> Later[bytes] | None:
        """The value of FLUSH_XATTR or WAIT_XATTR; None where that is what `tell` says.

        Raises: ESTALE, EAGAIN where too many ask.
        """
        if name == FLUSH_XATTR:
            return self._flushes.later(partial(self._flush, writeback, ino))
        if name == WAIT_XATTR and writeback is not None and len(self._waits) < WAITS_MAX:
            return None if self._unstored(ino) else self._wait(writeback, ino)
        return None

    def tell(self, writeback: WriteBack | None, ino: Ino, name: bytes) -> bytes:
        """How it is now. Raises: ENODATA, ESTALE, EIO where something is lost."""
        if name not in (DURABLE_XATTR, FLUSH_XATTR, WAIT_XATTR):
            raise OSError(errno.ENODATA, "no such attribute")
        return self._tell(writeback, ino)

    def syncfs(self) -> Later[None]:
        """syncfs(2), which takes as long as a flush of all. Raises: EAGAIN."""
        return self._flushes.later(self._io.unstored.syncfs)

    def close(self) -> None:
        """Answer all waiting requests, and end the threads."""
        self._flushes.close()
        with self._cond:
            self._closed = True
            self._cond.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _whole(self, ino: Ino) -> Ino | None:
        """None for a directory: anything may be below it."""
        return None if self._meta.getattr(ROOT_CALLER, ino).is_dir else ino

    def _unstored(self, ino: Ino) -> bool:
        return self._io.unstored.has_any(self._whole(ino))

    def _tell(self, writeback: WriteBack | None, ino: Ino) -> bytes:
        if self._unstored(ino):
            return b"0"
        return b"1" if writeback is None or writeback.is_durable(ino) else b"0"

    def _flush(self, writeback: WriteBack | None, ino: Ino) -> bytes:
        self._io.unstored.flush_open(self._whole(ino))
        return self._tell(writeback, ino)

    # --- waiting ---------------------------------------------------------------------------------

    def _wait(self, writeback: WriteBack, ino: Ino) -> Later[bytes]:
        goal, until = writeback.goal(ino), self._runtime.monotonic() + WAIT_S
        begun: list[_Wait] = []

        def begin(take: Take[bytes]) -> None:
            begun.append(_Wait(ino, goal, until, take))
            with self._cond:
                self._waits += begun
                if self._thread is None:
                    self._thread = self._runtime.spawn("durable", partial(self._run, writeback))
                self._cond.notify_all()

        def cancel() -> None:
            with self._cond:
                for wait in begun:
                    wait.cancelled = True
                self._cond.notify_all()

        return Later(begin, cancel)

    def _run(self, writeback: WriteBack) -> None:
        """Answer requests that have waited long enough, until none waits."""
        while True:
            with self._cond:
                if not self._waits:
                    self._thread = None
                    return
                waits, closed = list(self._waits), self._closed
            now = self._runtime.monotonic()
            over = [
                wait
                for wait in waits
                if closed or wait.cancelled or now >= wait.until or writeback.has_reached(wait.goal)
            ]
            for wait in over:
                wait.take(self._outcome(writeback, wait))
            with self._cond:
                self._waits = [wait for wait in self._waits if wait not in over]
                if self._waits and not over and not self._closed:
                    self._cond.wait(LOOK_S)

    def _outcome(self, writeback: WriteBack, wait: _Wait) -> Outcome[bytes]:
        return interrupted if wait.cancelled else partial(self._tell, writeback, wait.ino)

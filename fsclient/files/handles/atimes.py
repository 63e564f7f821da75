"""What reading does to atime: noted as files are closed, put down later by a thread of its own.

The kernel leaves atime to us (S_NOATIME is set on every inode of FUSE) and tells us nothing of
reads that its own pages answer, so what counts is a handle: one that was read from, or that was
opened for reading while the kernel held pages of the file. When it is closed, that is noted; what
is due (`ops/names/atime`) is committed some 50 ms later, many files at a time. No reader waits for
it, and a client that dies takes with it what was not committed yet.

It is off unless the mount has atime at all: the flags that the kernel shows for the mount decide
(`obey`), at the mount and at each remount. What is off costs its callers one comparison.

Threading: any thread; one thread commits, from the first note on.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Final

from fsclient.kernel.cache_leases import CacheLeases
from fsmeta.errors import StoreError
from fsmeta.meta.meta import Meta
from fsmeta.ops.names.atime import USES_MAX, Use, is_due, touch_atime
from fsmeta.runtime import Runtime, Thread, spawn_lasting
from fsmeta.schema.snapshot_inos import SEALED_INO
from fsmeta.types import ROOT_CALLER, Ino

log = logging.getLogger(__name__)

GATHER_S: Final = 0.05  # how long a note waits for others to be committed with
HELD_S: Final = 5.0  # how long it waits where a change of its inode is not published yet
NOTES_MAX: Final = 100_000  # about 20 MB; more are dropped, which costs an atime and no data


class Atimes:
    """Notes of what was read, and the thread that puts them down."""

    def __init__(self, meta: Meta, coherence: CacheLeases, runtime: Runtime) -> None:
        self._meta = meta
        self._coherence = coherence
        self._runtime = runtime
        self.on = False  # replaced by `obey`, as the next two
        self.directories = False
        self._strict = False
        self._find_flags: Callable[[], Collection[str]] | None = None  # before it is served
        self._cond = runtime.condition()
        self._notes: dict[Ino, Use] = {}  # guarded by _cond
        self._held: dict[Ino, Use] = {}  # guarded by _cond: not published yet
        self._again = 0.0  # guarded by _cond: when those are due once more
        self._stopped = False  # guarded by _cond
        self._frozen = False  # set once
        self._thread: Thread | None = None  # guarded by _cond
        self.moved = 0  # written by the thread, as the next one
        self.dropped = 0

    def obey(self, words: Collection[str]) -> None:
        """The mount has these flags now, as /proc/self/mountinfo shows them."""
        self._strict = "relatime" not in words
        self.on = not self._frozen and "noatime" not in words and "ro" not in words
        self.directories = self.on and "nodiratime" not in words
        if not self.on:
            with self._cond:
                self._notes.clear()
                self._held.clear()

    def follow(self, find_flags: Callable[[], Collection[str]]) -> None:
        """The mount is served: obey the flags that `find_flags` finds, now and at each remount."""
        self._find_flags = find_flags
        self.look_again()

    def look_again(self) -> None:
        """The flags of the mount may have changed."""
        if self._find_flags is not None:
            self.obey(self._find_flags())

    def freeze(self) -> None:
        """Write nothing any more."""
        self._frozen = True
        self.obey(("ro",))

    def used(self, ino: Ino, since_ns: int) -> None:
        """What has been open since then was read, and is closed."""
        if not self.on or ino >= SEALED_INO:
            return
        at_ns = self._runtime.now_ns()
        with self._cond:
            before = self._notes.get(ino)
            if before is None and len(self._notes) >= NOTES_MAX:
                self.dropped += 1
                return
            since_ns = since_ns if before is None else max(since_ns, before.since_ns)
            self._notes[ino] = Use(ino, since_ns, at_ns)
            if before is None and len(self._notes) == 1:
                self._wake()

    def _wake(self) -> None:
        """There is something to be done. The caller holds the lock."""
        if self._thread is None and not self._stopped:
            self._thread = spawn_lasting(self._runtime, "atime", self._run)
        self._cond.notify()

    def followed(self, ino: Ino) -> None:
        """The target of a symlink was asked for."""
        if self.on:
            self.used(ino, self._runtime.now_ns())

    def stop(self) -> None:
        """Put down what is noted, and end."""
        with self._cond:
            self._stopped = True
            self._cond.notify()
        if self._thread is not None:
            self._thread.join()

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._await():
            if not self._stopped:
                self._runtime.sleep(GATHER_S)
            while uses := self._take():
                try:
                    self._commit(uses)
                except (OSError, StoreError) as error:
                    self.dropped += len(uses)
                    log.debug("atime of %d inodes stays as it is: %s", len(uses), error)

    def _await(self) -> bool:
        """Wait for notes; False at the end."""
        with self._cond:
            while not self._notes:
                left = None
                if self._held:
                    left = 0.0 if self._stopped else self._again - self._runtime.monotonic()
                if left is not None and left <= 0:
                    self._notes, self._held = {**self._held, **self._notes}, {}
                elif self._stopped:
                    return False
                else:
                    self._cond.wait(left)
            return True

    def _take(self) -> list[Use]:
        """Some of the notes."""
        with self._cond:
            uses = [use for use, _ in zip(self._notes.values(), range(USES_MAX), strict=False)]
            for use in uses:
                del self._notes[use.ino]
            return uses

    def _commit(self, uses: Sequence[Use]) -> None:
        """Commit those that are due. Raises: OSError, StoreError."""
        strict = self._strict
        known = self._meta.attrs([use.ino for use in uses])
        due = [use for use in uses if use.ino in known and is_due(known[use.ino], use, strict)]
        if not due:
            return
        try:
            moved = self._meta.run(touch_atime, ROOT_CALLER, due, strict)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            self._hold(due)
            return
        self.moved += len(moved)
        for ino in moved:
            self._coherence.notices.stale(ino)

    def _hold(self, uses: Sequence[Use]) -> None:
        """A change of one of them is not published yet: that one waits, the others do not."""
        if len(uses) > 1:
            for use in uses:
                self._commit([use])
            return
        with self._cond:
            if self._stopped:
                self.dropped += 1
                return
            self._held[uses[0].ino] = uses[0]
            self._again = self._runtime.monotonic() + HELD_S

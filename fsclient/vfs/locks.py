"""File locks of one mount: requests that wait are put aside, and the kernel believes nothing older.

Called by the VFS for GETLK, SETLK and SETLKW, at close(2), and by `Background` when others have
ended our session. What locks mean is `fsmeta.ops.sessions.lock`'s, who may have some
`vfs/lock_table`'s; here is what a mount adds: whoever learns what has become of a wait answers it,
what was written is stored before a lock is given up, and pages and sizes from before a lock are
dropped when it is had.

A file that nobody here locks costs nothing: `OpenFiles.locked` does not have it.

Threading: `_cond` is the table's, guards the other fields too, and is held across nothing. The
thread `locks` begins with the first wait; it alone asks what has become of waits, and ends those
that were interrupted.
"""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Sequence
from functools import partial
from typing import Final

from fsclient.files.file_io import FileIO
from fsclient.files.open_files import OpenFiles
from fsclient.kernel.cache_leases import CacheLeases
from fsclient.kernel.contract import FileLock, LockReplies
from fsclient.kernel.later import Later
from fsclient.vfs.lock_releases import LockReleases
from fsclient.vfs.lock_table import HeldLock, Holder, LockTable, Waiter
from fsclient.vfs.parking import Publishing
from fsmeta.errors import StoreError
from fsmeta.meta.locks import Range
from fsmeta.meta.meta import Meta
from fsmeta.ops.sessions.lock import LockAnswer, LockOutcome
from fsmeta.runtime import Runtime, Thread, spawn_lasting
from fsmeta.schema.locks import Kind
from fsmeta.types import Attr, Ino

log = logging.getLogger(__name__)

POLL_FIRST_S: Final = 0.002  # where no news come: a lock that is held for a moment is soon had
POLL_MAX_S: Final = 0.1  # and one that is held for long costs ten requests a second and mount
RETRY_S: Final = 1.0  # the store is away, or our session is
SHARED_MAX: Final = 100_000  # files of which we know that others lock them
TIDY_AT: Final = 64  # waits that are over before their notes are removed
TIDY_AFTER_S: Final = 5.0  # or so long after the last wait


class FileLocks:
    """See the module."""

    def __init__(
        self, meta: Meta, io: FileIO, files: OpenFiles, coherence: CacheLeases, runtime: Runtime
    ) -> None:
        self._meta = meta
        self._io = io
        self._files = files
        self._coherence = coherence
        self._runtime = runtime
        self._host = socket.gethostname()
        self._table = LockTable(runtime, files.locked)
        self._cond = self._table.cond
        self._releases = LockReleases(meta, self._table, self._wake)
        self._strays: list[Waiter] = []  # nobody knows whether the store has them in line
        self._ended = 0  # a session that others have ended; the next one is on its way
        self._shared: set[Ino] = set()  # others lock these, too: ask before supposing
        self._news = False
        self._stopped = False
        self._replies: LockReplies | None = None
        self._thread: Thread | None = None
        self.numbers = self._table.numbers
        meta.on_change(self._changed)
        meta.locks.on_handed = self._nudge

    def start(self, replies: LockReplies) -> None:
        """Requests that wait are answered through `replies` from now on."""
        self._replies = replies

    def wait_for(self, publishing: Publishing) -> None:
        """What was written under a lock is seen by others before it is given up."""
        self._releases.wait_for(publishing, self._runtime)
        self._table.mark = publishing.mark

    def stop(self) -> None:
        """End the threads; who still waits gets EIO."""
        self._releases.stop()
        with self._cond:
            self._stopped = True
            self._cond.notify_all()
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        for waiter in list(self._table.waiters.values()):
            self._end(waiter, errno.EIO)

    # --- requests --------------------------------------------------------------------------------

    def getlk(self, ino: Ino, owner: int, lock: FileLock) -> FileLock | None:
        """F_GETLK: what is in the way. A process of another host has no number here."""
        bar = self._meta.locks.getlk(ino, owner, Range(lock.write, lock.begin, lock.end))
        if bar is None:
            return None
        pid = bar.pid
        session = self._meta.session
        if session is None or bar.owner.session != session.id:
            there = self._meta.locks.session_info(bar.owner.session).get("host")
            pid = pid if there == self._host else 0
        return FileLock(bar.write, bar.begin, bar.end, pid)

    def setlk(
        self, fh: int, kind: Kind, owner: int, lock: FileLock, request: int, wait: bool
    ) -> bool:
        """Take a lock; False where the answer will come through `LockReplies`.

        Raises: EAGAIN, EDEADLK, ENOLCK, EIO where this handle's locks were lost.
        """
        file = self._io.handle(fh).file
        held = self._table.holding(file.ino, (kind, owner))
        waiter = Waiter(request, file, (kind, owner), lock)
        wait = wait and self._replies is not None
        if not lock.write and held is not None and held.since is not None:
            self._io.flush_file(file)  # readers get in when it turns into a read lock
            parked = self._releases.unseen(file.ino, held, self._replies is None, request)
            if parked is not None:
                parked.go = partial(self._setlk_parked, waiter, fh, wait)
                parked.cancelled = self._replies is not None and self._replies.interrupted()
                self._releases.parking.put(parked)
                return False
        return self._setlk(waiter, fh, wait)

    def _setlk_parked(self, waiter: Waiter, fh: int, wait: bool, seen: bool) -> None:
        """`_setlk` of a request that was put aside, and its answer."""
        code = errno.EINTR
        if seen:
            try:
                if not self._setlk(waiter, fh, wait):
                    return
                code = 0
            except StoreError as error:
                log.error("setlk ino %d: %s", waiter.ino, error)
                code = errno.EIO
            except OSError as error:
                code = error.errno or errno.EIO
        self._answer(waiter, code)

    def _setlk(self, waiter: Waiter, fh: int, wait: bool) -> bool:
        """As `setlk`, once others see what was written under a lock that this one replaces."""
        holding = self._table.begin(waiter, fh, wait)
        try:
            answer = self._ask(waiter)
        except BaseException as error:
            self._failed(waiter, holding, isinstance(error, StoreError))
            raise
        if answer.outcome is LockOutcome.QUEUED:
            self._put_aside(waiter, answer)
            return False
        granted = answer.outcome is LockOutcome.GRANTED
        with self._cond:
            self._table.end(waiter, holding, granted)
        if not granted:
            raise OSError(errno.EAGAIN, "somebody else has it")
        assert answer.attr is not None
        return self._refresh(waiter, answer.attr)

    def _ask(self, waiter: Waiter) -> LockAnswer:
        waiter.commits = waiter.file.commits
        ino, (kind, owner) = waiter.ino, waiter.holder
        guess = ino not in self._shared
        answer = self._meta.locks.setlk(
            ino,
            kind,
            owner,
            waiter.want,
            waiter.pid,
            waiter.ticket,
            lambda: self._table.waits_at(owner),
            guess,
        )
        if answer.shared and guess:
            if len(self._shared) >= SHARED_MAX:
                self._shared.clear()
            self._shared.add(ino)
        return answer

    def _failed(self, waiter: Waiter, holding: HeldLock, doubtful: bool) -> None:
        """A request ended with an error; where the outcome is open we may have the lock."""
        with self._cond:
            self._table.end(waiter, holding, doubtful)
            if doubtful and waiter.ticket:
                self._strays.append(waiter)
                self._wake()

    def _put_aside(self, waiter: Waiter, answer: LockAnswer) -> None:
        """The store has the request in line."""
        assert self._replies is not None
        with self._cond:
            waiter.session = answer.session
            if self._replies.interrupted():
                waiter.cancelled = True
            self._wake()

    def _nudge(self) -> None:
        """What we have given up may be for one of our own, of which the store does not tell us."""
        if self._table.waiters:
            with self._cond:
                self._wake()

    def _wake(self) -> None:
        """Have the thread look; `_cond` is held."""
        self._news = True
        if self._thread is None and not self._stopped:
            self._thread = spawn_lasting(self._runtime, "locks", self._run)
        self._cond.notify_all()

    def cancel(self, request: int) -> bool:
        """INTERRUPT: let the request end with EINTR; False where it does not wait here."""
        if self._releases.cancel(request):
            return True
        with self._cond:
            waiter = self._table.waiters.get(request)
            if waiter is None:
                return False
            waiter.cancelled = True
            self._wake()
            return True

    def _refresh(self, waiter: Waiter, attr: Attr) -> bool:
        """Believe nothing older than the lock; False where that answers the request later."""
        if self._io.refresh(waiter.file, attr, waiter.commits):
            return True
        return not self._coherence.drop_pages(attr.ino, lambda: self._answer(waiter, 0))

    def _answer(self, waiter: Waiter, code: int) -> None:
        if self._replies is not None:
            self._replies.answer(waiter.request, code)

    # --- giving up -------------------------------------------------------------------------------

    def unlock(self, fh: int, kind: Kind, owner: int, begin: int, end: int) -> Later[None] | None:
        """F_UNLCK, LOCK_UN: what was written is stored first, and others see it.

        None where it is done. Raises: EIO where the lock was lost; what storing met, and then the
        lock stays: else what is stored later would hide what the next holder has written.
        """
        file = self._files.file_handle(fh).file
        holder = kind, owner
        holding = self._table.holding(file.ino, holder)
        if holding is not None and holder not in self._table.lost.get(file.ino, ()):
            self._io.flush_file(file)
            parked = self._releases.unseen(file.ino, holding, self._replies is None)
            if parked is not None:
                then = partial(self._unlock_now, file.ino, holder, begin, end)
                return self._releases.parking.later(parked, then)
        self._unlock_now(file.ino, holder, begin, end)
        return None

    def _unlock_now(
        self, ino: Ino, holder: Holder, begin: int, end: int, seen: bool = True
    ) -> None:
        """Raises: EINTR, and the lock stays; EIO where it was lost."""
        if not seen:
            raise OSError(errno.EINTR, "others do not see yet what was written under the lock")
        if holder not in self._table.lost.get(ino, ()):
            self._releases.unlock(ino, holder, begin, end)
        if self._forget_lost(ino, holder):  # before, or while we gave it up
            raise OSError(errno.EIO, f"inode {ino}: the lock was lost with the session")

    def closed(self, ino: Ino, owner: int) -> Later[None] | None:
        """close(2) of one descriptor, and all is stored: the process loses its fcntl locks.

        None where it is done, or where nobody waits for it.
        """
        holder = Kind.POSIX, owner
        holding = self._table.holding(ino, holder)
        parked = None
        try:
            if holding is not None:
                parked = self._releases.unseen(ino, holding, self._replies is None)
        except StoreError as error:  # then it is owed
            log.debug("giving up locks of inode %d: %s", ino, error)
        if parked is None:
            self._releases.give_up(ino, holder)
            return None

        def then(seen: bool) -> None:
            del seen  # where it is not, they are given up when it is
            try:
                self._releases.give_up(ino, holder, parked.upto)
            finally:
                self.told(ino, owner)

        return self._releases.parking.later(parked, then)

    def told(self, ino: Ino, owner: int) -> None:
        """close(2) has said that locks are lost, or what else was wrong."""
        self._forget_lost(ino, (Kind.POSIX, owner))

    def released(self, ino: Ino, fh: int) -> None:
        """The last close of a handle: what was locked through it alone is free, soon at least."""
        alone, lost = self._table.leave_handle(ino, fh)
        file = self._files.get(ino)
        if alone and file is not None:
            self._io.store_or_void(file)
        for holder in lost:
            self._forget_lost(ino, holder, fh)
        for holder in alone:
            self._releases.give_up(ino, holder)

    # --- waiting ---------------------------------------------------------------------------------

    def _changed(self, rows: Sequence[bytes] | None) -> None:
        """Called by the store's thread: rows that others have changed, None for any."""
        if not self._table.waiters:
            return
        if rows is None or self._meta.session is None or self._meta.locks.news_row() in rows:
            with self._cond:
                self._wake()

    def _run(self) -> None:
        pause = POLL_FIRST_S
        told = False
        while True:
            with self._cond:
                if not self._news and not self._stopped:
                    self._cond.wait(self._sleep_s(told, pause))
                pause = POLL_FIRST_S if self._news else min(2 * pause, POLL_MAX_S)
                self._news = False
                if self._stopped:
                    return
            try:
                told = self._look()
            except (StoreError, OSError) as error:
                log.debug("waiting for locks: %s", error)
                told, pause = False, RETRY_S

    def _sleep_s(self, told: bool, pause: float) -> float | None:
        """How long to wait for news at most; `_cond` is held."""
        session = self._meta.session
        if self._strays or self._releases.owed or session is None or session.id == self._ended:
            return RETRY_S
        if any(waiter.session for waiter in self._table.waiters.values()):
            return None if told else pause
        return TIDY_AFTER_S if self._table.has_spent() else None

    def _look(self) -> bool:
        """Ask what has become of the waits; whether we shall hear when that changes."""
        self._rejoin()
        self._releases.pay()
        self._cancel()
        with self._cond:
            waiting = {w.ticket: w for w in self._table.waiters.values() if w.session}
        self._tidy(TIDY_AT if waiting else 1)
        if not waiting:
            return False
        for waiter in waiting.values():
            waiter.commits = waiter.file.commits
        over = self._meta.locks.granted({ticket: w.ino for ticket, w in waiting.items()})
        for ticket, attr in over.items():
            self._granted(waiting[ticket], attr)
        return self._meta.locks.is_told()

    def _granted(self, waiter: Waiter, attr: Attr | None) -> None:
        """A wait has come to its end."""
        if attr is None:
            self._end(waiter, errno.ESTALE, granted=True)
        elif self._table.settle(waiter, granted=True) and self._refresh(waiter, attr):
            self._answer(waiter, 0)

    def _end(self, waiter: Waiter, code: int, granted: bool = False) -> None:
        if self._table.settle(waiter, granted):
            self._answer(waiter, code)

    def _cancel(self) -> None:
        """Get those out of line who don't want to wait any more, and who may be in it by error."""
        with self._cond:
            leaving = [w for w in self._table.waiters.values() if w.cancelled and w.session]
            strays, self._strays = self._strays, []
        groups: dict[tuple[Ino, Kind], list[Waiter]] = {}
        for waiter in leaving + strays:
            groups.setdefault((waiter.ino, waiter.holder[0]), []).append(waiter)
        for (ino, kind), group in groups.items():
            try:
                had = self._meta.locks.cancel(ino, kind, [waiter.ticket for waiter in group])
            except BaseException:
                with self._cond:
                    self._strays += strays
                raise
            for waiter in group:
                if waiter in strays and waiter.ticket in had:
                    # nobody waits for it; had it something there before, that goes with it
                    self._releases.unlock(ino, waiter.holder, waiter.want.begin, waiter.want.end)
                elif waiter not in strays and waiter.ticket not in had:
                    self._end(waiter, errno.EINTR)
                # else it has its lock, as it will be told in a moment

    def _tidy(self, at_least: int) -> None:
        """Remove notes in the store that say nothing any more."""
        spent = self._table.take_spent(at_least)
        if spent.tickets:
            self._meta.locks.tidy(*spent, lambda owner: bool(self._table.waits_at(owner)))

    # --- a session that was ended ----------------------------------------------------------------

    def lost(self) -> None:
        """Others have ended our session, and given our locks away.

        Before there is a new one: nothing that was written under a lock may be committed in it.
        """
        inos, count = self._table.lose(self._releases.released())
        for ino in inos:
            self._mark(ino, void=True)
        if count:
            log.warning("%d owners have lost their locks: using those files is EIO", count)
        session = self._meta.session
        with self._cond:
            self._ended = 0 if session is None else session.id
            self._strays.clear()
            self._releases.owed.clear()
            if self._table.waiters:
                self._wake()

    def _mark(self, ino: Ino, void: bool = False) -> None:
        """Let a file know which of its handles are not to be used; `void`: as in `set_lost`."""
        file = self._files.get(ino)
        handles = self._table.lost_handles(ino)
        if file is not None:
            self._files.set_lost(file, handles, void)
        if void:
            self._coherence.drop_pages(ino, _nothing)

    def _forget_lost(self, ino: Ino, holder: Holder, fh: int = 0) -> bool:
        """The owner knows, or its handle is gone; whether it had lost anything."""
        had = self._table.forget_lost(ino, holder, fh)
        if had:
            self._mark(ino)
        return had

    def _rejoin(self) -> None:
        """Get in line again, under our new session. Raises: StoreError."""
        session = self._meta.session
        if session is None:
            return
        with self._cond:
            waiters = list(self._table.waiters.values())
        for waiter in waiters:
            if not waiter.session or waiter.session == session.id:
                continue
            if waiter.cancelled:
                self._end(waiter, errno.EINTR)
                continue
            try:
                answer = self._ask(waiter)
            except OSError as error:
                self._end(waiter, error.errno or errno.EIO)
                continue
            if answer.outcome is LockOutcome.QUEUED:
                waiter.session = answer.session
            else:
                self._granted(waiter, answer.attr)


def _nothing() -> None:
    """Nobody waits for it."""

"""Requests for locks: the store is asked, and one thread learns what has become of those that wait.

`FileLocks` has one. A request that the store has put in line holds no thread: it is noted in the
`LockTable`, and answered through `LockReplies` when its end is known.

Threading: any method from any thread. `_cond` is the table's, guards the other fields too, and is
held across nothing. The thread `locks` begins with the first wait; it alone asks what has become of
waits, and ends those that were interrupted.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Sequence
from functools import partial
from typing import Final

from fsclient.files.file_io import FileIO
from fsclient.kernel.contract import LockReplies
from fsclient.vfs.locks.lock_releases import LockReleases
from fsclient.vfs.locks.lock_table import HeldLock, LockTable, Waiter
from fsmeta.errors import StoreError
from fsmeta.meta.locks import LockTicket
from fsmeta.meta.meta import Meta
from fsmeta.ops.sessions.lock import LockAnswer, LockOutcome
from fsmeta.runtime import Runtime, Thread, spawn_lasting
from fsmeta.schema.locks import Kind
from fsmeta.types import Attr, Ino

log = logging.getLogger(__name__)

POLL_FIRST_S: Final = 0.002  # without invalidations: a lock held briefly is soon free
POLL_MAX_S: Final = 0.1  # and one that is held for long costs ten requests a second and mount
RETRY_S: Final = 1.0  # the store is away, or our session is
SHARED_MAX: Final = 100_000  # files that other clients are known to lock
TIDY_AT: Final = 64  # waits that are over before their notes are removed
TIDY_AFTER_S: Final = 5.0  # or so long after the last wait


class LockRequests:
    """See the module."""

    def __init__(self, meta: Meta, io: FileIO, runtime: Runtime, table: LockTable) -> None:
        self._meta = meta
        self._io = io
        self._runtime = runtime
        self._table = table
        self._cond = table.cond
        self.releases = LockReleases(meta, table, self._wake, self._nudge)
        self.replies: LockReplies | None = None  # None: no request can wait
        self._strays: list[Waiter] = []  # unknown whether the store has them in line
        self._ended = 0  # a session that was ended; the next one is on its way
        self._shared: set[Ino] = set()  # other clients lock these, too: ask first
        self._news = False
        self._stopped = False
        self._thread: Thread | None = None
        meta.on_change(self._changed)

    def stop(self) -> None:
        """End the threads; requests that still wait get EIO."""
        self.releases.stop()
        with self._cond:
            self._stopped = True
            self._cond.notify_all()
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        for waiter in list(self._table.waiters.values()):
            self._end(waiter, errno.EIO)

    # --- asking ----------------------------------------------------------------------------------

    def take(self, waiter: Waiter, fh: int, wait: bool) -> bool:
        """As `FileLocks.setlk`, once other clients see what was written under a lock that this one
        replaces."""
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
            raise OSError(errno.EAGAIN, "another owner has it")
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
            LockTicket(waiter.ticket, lambda: self._table.waits_at(owner)),
            guess,
        )
        self._nudge()  # where it replaces another lock
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
        assert self.replies is not None
        with self._cond:
            waiter.session = answer.session
            if self.replies.interrupted():
                waiter.cancelled = True
            self._wake()

    def _refresh(self, waiter: Waiter, attr: Attr) -> bool:
        """Drop what was cached before the lock; False where that answers the request later."""
        then = partial(self.answer, waiter, 0)
        return self._io.refresh(waiter.file, attr, waiter.commits, then)

    def answer(self, waiter: Waiter, code: int) -> None:
        """The end of a request that has waited."""
        if self.replies is not None:
            self.replies.answer(waiter.request, code)

    # --- waiting ---------------------------------------------------------------------------------

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
        if self.releases.cancel(request):
            return True
        with self._cond:
            waiter = self._table.waiters.get(request)
            if waiter is None:
                return False
            waiter.cancelled = True
            self._wake()
            return True

    def _changed(self, rows: Sequence[bytes] | None) -> None:
        """Called by the store's thread: rows that other clients have changed, None for any."""
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
        """How long to wait for invalidations at most; `_cond` is held."""
        session = self._meta.session
        if self._strays or self.releases.owed or session is None or session.id == self._ended:
            return RETRY_S
        if any(waiter.session for waiter in self._table.waiters.values()):
            return None if told else pause
        return TIDY_AFTER_S if self._table.has_spent() else None

    def _look(self) -> bool:
        """Ask what has become of the waits; whether an invalidation will tell when that changes."""
        self._rejoin()
        self.releases.pay()
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
            self.answer(waiter, 0)

    def _end(self, waiter: Waiter, code: int, granted: bool = False) -> None:
        if self._table.settle(waiter, granted):
            self.answer(waiter, code)

    def _cancel(self) -> None:
        """Take cancelled requests out of line, and those that may be in it by error."""
        with self._cond:
            leaving = [w for w in self._table.waiters.values() if w.cancelled and w.session]
            strays, self._strays = self._strays, []
        groups: dict[tuple[Ino, Kind], list[Waiter]] = {}
        for waiter in leaving + strays:
            groups.setdefault((waiter.ino, waiter.holder[0]), []).append(waiter)
        for (ino, kind), group in groups.items():
            try:
                had = self._meta.locks.cancel(ino, kind, [waiter.ticket for waiter in group])
                self._nudge()
            except BaseException:
                with self._cond:
                    self._strays += strays
                raise
            for waiter in group:
                if waiter in strays and waiter.ticket in had:
                    # no request waits for it; had it something there before, that goes with it
                    self.releases.unlock(ino, waiter.holder, waiter.want.begin, waiter.want.end)
                elif waiter not in strays and waiter.ticket not in had:
                    self._end(waiter, errno.EINTR)
                # else it has its lock, as it will be told in a moment

    def _tidy(self, at_least: int) -> None:
        """Remove notes in the store that say nothing any more."""
        spent = self._table.take_spent(at_least)
        if spent.tickets:
            self._meta.locks.tidy(*spent, lambda owner: bool(self._table.waits_at(owner)))

    # --- a session that was ended ----------------------------------------------------------------

    def session_ended(self) -> None:
        """Another client has ended our session: get in line again when there is a new one."""
        session = self._meta.session
        with self._cond:
            self._ended = 0 if session is None else session.id
            self._strays.clear()
            self.releases.owed.clear()
            if self._table.waiters:
                self._wake()

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

"""An engine before an engine: commits that must not be seen yet are held back, in order.

`MountClient` puts it before the volume's store where a mount writes back. Until `attach` it only
passes through. A commit is held back if its verb is one that `entry` names and something of its
domain still waits, or blocks it relies on are not in the store yet, or it changes what a held one
has changed. All else passes: it commutes with what is held, and new directories go first on
purpose.

A held commit is validated like any other: what it relies on is compared with the overlay, the rest
with the store: with the leased rows that `beneath` caches, or in one request. The store may have
changed when it is published; `writeback/replay` decides. Reads see overlay and store together.

`held` has what is held back until it is published, for the publisher and those that wait for it.
`_cond` guards all state, never across requests: a held commit disturbed meanwhile is a Conflict.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Final

from fsmeta.errors import Conflict
from fsmeta.runtime import Runtime
from fsmeta.store import contract
from fsmeta.store.contract import Applied, Call, Commit, Listener, Record, RowPage, Store
from fsmeta.txn.row_cache import RowCache
from fsmeta.writeback.backlog.publish_queue import HoldingPorts
from fsmeta.writeback.entries.intents import CreateIntent
from fsmeta.writeback.entries.log_entry import GIVING_WAY, NAMES, SHARING, Log, LogEntry
from fsmeta.writeback.entries.log_entry_of import entry_of, is_first_name
from fsmeta.writeback.entries.order_domains import reading
from fsmeta.writeback.held_commits import HeldCommits
from fsmeta.writeback.overlay.overlay import Over, Overlay
from fsmeta.writeback.overlay.overlay_reads import OverlaidReads
from fsmeta.writeback.overlay.validation import DISTURBED_S, Base, Validation, is_fresh, written
from fsmeta.writeback.passing import Passing

BENEATH_ROWS: Final = 10_000  # what the verbs of a few trees read again and again


class StagedStore:
    """Holds commits back until they are published."""

    def __init__(self, inner: Store, runtime: Runtime) -> None:
        self._inner = inner
        self._cond = runtime.condition()
        self._overlay = Overlay()  # guarded by _cond
        self.beneath = RowCache(runtime, BENEATH_ROWS)  # what the store has, without the overlay
        reads = OverlaidReads(inner, self._overlay, self._cond, self.beneath, runtime)
        self.read, self.read_many, self.read_linked = reads.read, reads.read_many, reads.read_linked
        self.read_rows, self.read_short_rows = reads.read_rows, reads.read_short_rows
        self.scan, self._require_empty = reads.scan, reads.require_empty
        self.name, self.history = inner.name, inner.history
        self._accept = Validation(inner, self._overlay, self._cond, self.beneath)
        self.held = HeldCommits(self._cond, runtime, self._overlay, reads, self._accept, self.tell)
        self._backlog, self._settling = self.held.backlog, self.held.settling
        self._runtime = runtime
        self._log: Log | None = None
        self._passing = Passing(inner)
        self._replayed: LogEntry | None = None  # while a journal is read, by one thread
        self._listener: Listener | None = None
        self.sync_waits = False  # sync means published, not only journalled

    def attach(self, log: Log, depth: int, sequence: int, ports: HoldingPorts) -> None:
        """Hold back from now on; the last entry ever made had the number `sequence`."""
        self.held.attach(depth, sequence, ports)
        self._log = log

    # --- the store's other methods ---------------------------------------------------------------

    @property
    def round_trips(self) -> int:
        return self._inner.round_trips

    def watch(self, listener: Listener) -> None:
        self._listener = listener
        self._inner.watch(self._news)

    def _news(self, rows: Sequence[bytes] | None) -> None:
        self.beneath.downgrade(rows)
        self.held.domains.forget(rows)
        if self._overlay:
            with self._cond:
                touched = self._overlay.rows() if rows is None else rows
                self.held.changed_beneath(row for row in touched if self._overlay.touches(row))
        self.tell(rows)

    def tell(self, rows: Sequence[bytes] | None) -> None:
        """What this mount remembers of `rows` is not what the store has, or will have."""
        if self._listener is not None:
            self._listener(rows)

    def poll_invalidations(self) -> None:
        self._inner.poll_invalidations()

    def has_leases(self) -> bool:
        return self._inner.has_leases()

    def now_ns(self) -> int:
        return self._inner.now_ns()

    def tidy(self) -> None:
        self._inner.tidy()

    def scan_rows(
        self, prefix: bytes, cursor: bytes = b"", limit: int = contract.SCAN_PAGE
    ) -> RowPage:
        """Of the store alone: a walk over all rows wants what is published."""
        return self._inner.scan_rows(prefix, cursor, limit)

    def everything(self) -> AbstractContextManager[Iterator[Record]]:
        """Of the store alone, too."""
        return self._inner.everything()

    def sync(self) -> None:
        if self._log is None:
            self._inner.sync()
        elif self.sync_waits or not self._log.sync():
            self._settling.await_what_moves(self.held.sequence)  # of the rest `require_whole` tells
            self._inner.sync()

    def close(self) -> None:
        self._inner.close()

    # --- commits ---------------------------------------------------------------------------------

    def commit(self, commit: Commit) -> Applied | None:
        """See `Store`. Its rows stay watched: the publisher caches rows, too."""
        if self._log is None:
            return self._inner.commit(commit)
        if commit.busy:
            commit = commit._replace(busy=())
        name = NAMES.get(commit.call.verb) if commit.call else None
        if not commit.writes:
            self._validate(commit)
        elif self._passing.is_doubtful(commit):
            self._pass_again(commit)
        elif commit.call and commit.call.verb in SHARING:
            self._pass_shared(commit, commit.call)
        elif name is None:
            self._pass_free(commit)
        else:
            return Applied(held=self._in_order(self._log, name, commit))
        return None

    def _in_order(self, log: Log, name: str, commit: Commit) -> bool:
        """Commit what others are to see in order, now or later; whether it is held back."""
        reads = {(row, field): value for row, field, value in commit.checks}
        get = reading(reads, self.read)
        entry = self._replayed or entry_of(name, commit, reads, log, self.held.domains, get)
        self._inner.poll_invalidations()  # other clients were answered by now
        position: int | None = None
        with self._cond:
            self._backlog.require_whole(entry.domains)
            over, held = self._judge(entry, commit)
            if held:
                mark = self._accept.mark()
                base = self._accept.recall(commit, over)
                if base is not None:
                    position = self._lay(log, entry, commit, over, mark, base)
            else:
                self._accept.take_off(commit)
        if not held:
            self._fetch_once(commit)
        elif position is None:
            self._write_down(log, entry, commit, self._ask_and_lay(log, entry, commit, mark))
        else:
            self._write_down(log, entry, commit, position)
        return held

    def _judge(self, entry: LogEntry, commit: Commit) -> tuple[list[Over | None], bool]:
        """What is over the checks of a commit, and whether it is held back: then there is room.

        The caller holds the lock. Raises: Unavailable.
        """
        while True:
            over = self._accept.over(commit)
            held = self._must_wait(entry, commit, over)
            if not held or self._replayed is not None or not self.held.room.wait(entry.domains):
                return over, held

    def _must_wait(self, entry: LogEntry, commit: Commit, over: Sequence[Over | None]) -> bool:
        """Whether a commit is held back, given what is `over` its checks; lock held."""
        if self._replayed is not None or entry.needs or self._accept.concerns(commit, over):
            return True
        early = isinstance(entry.intent, CreateIntent) and entry.intent.makes_dir
        return not early and self._backlog.busy(entry.domains)

    # --- what passes -----------------------------------------------------------------------------

    def _validate(self, commit: Commit) -> None:
        """A commit of checks alone."""
        rest, empties = self._accept.split(commit)
        for row in empties:
            self._require_empty(row)
        empties = [row for row in commit.empties if row not in empties]
        if rest or empties:
            self._inner.commit(commit._replace(checks=rest, empties=empties))

    def _pass_free(self, commit: Commit) -> None:
        """A commit that is no program's doing; one that is in the way of a held one waits for it.

        What it relies on may be held back: then it is true of this mount, and the store is not
        asked.
        """
        rest, empties = self._accept.split(commit)
        with self._cond:
            if empties or self._accept.blocks(commit):
                if commit.call and commit.call.verb in GIVING_WAY:
                    raise OSError(errno.EBUSY, "what it changes is held back")
                self._cond.wait(DISTURBED_S)
                raise Conflict("what it changes is held back")
            self._accept.take_off(commit)
        self._fetch_once(commit._replace(checks=rest))

    def _pass_shared(self, commit: Commit, call: Call) -> None:
        """A commit of `SHARING`. Raises: EOPNOTSUPP where other clients could not read it all."""
        source, ino, _ = call.args
        get = reading({(row, field): value for row, field, value in commit.checks}, self.read)
        domains = {self.held.domains.home(get, each) for each in (source.ino, ino)}
        with self._cond:
            self._backlog.require_whole(domains)
            over = self._accept.over(commit)
            if self._accept.concerns(commit, over) or self._backlog.busy(domains):
                raise OSError(errno.EOPNOTSUPP, "not all of it is published: copy the bytes")
            self._accept.take_off(commit)
        self._fetch_once(commit)

    def commit_beneath(self, commit: Commit) -> None:
        """A commit of a caller that does not see held commits; it waits for those that it would be
        in the way of. Raises: as `commit`.
        """
        if self._passing.is_doubtful(commit):
            self._pass_again(commit)
        else:
            with self._cond:
                if self._accept.blocks(commit):
                    self._cond.wait(DISTURBED_S)
                    raise Conflict("what it changes is held back")
                self._accept.take_off(commit)
            self._fetch_once(commit)
        self.tell(list({row for row, _ in written(commit)}))

    def _fetch_once(self, commit: Commit) -> None:
        """Pass, and wake the threads whose commits it disturbs."""
        mark = self.beneath.mark()
        try:
            self._pass(commit)
        except BaseException:
            self._forget_row(commit)
            raise
        else:
            leased = self._inner.has_leases()
            self.beneath.settle(mark, commit.empties, commit.writes, leased, commit.proven())
        finally:
            with self._cond:
                self._accept.landed(commit)
                self._cond.notify_all()

    def _pass_again(self, commit: Commit) -> None:
        """Pass what may have been applied: only the store knows."""
        try:
            self._pass(commit)
        finally:
            self._forget_row(commit)

    def _forget_row(self, commit: Commit) -> None:
        """What the store has of the rows of a commit is not known."""
        rows = {row for row, _ in written(commit)}.union(commit.empties)
        self.beneath.drop(rows.union([row for row, _, _ in commit.checks]))

    def _pass(self, commit: Commit) -> None:
        self._passing.send(commit)
        if self._overlay:
            # both merge into the same records: the overlay's are to show this, too
            with self._cond:
                self.held.changed_beneath(self._overlay.follow(commit.writes))

    # --- what is held back -----------------------------------------------------------------------

    def _ask_and_lay(self, log: Log, entry: LogEntry, commit: Commit, mark: int) -> int:
        """`_lay` with what the store says. Raises: as that."""
        base = self._accept.read_base(commit)
        for row in commit.empties:
            if not is_fresh(row, commit):
                self._require_empty(row)
        with self._cond:
            return self._lay(log, entry, commit, self._accept.over(commit), mark, base)

    def _lay(
        self,
        log: Log,
        entry: LogEntry,
        commit: Commit,
        over: Sequence[Over | None],
        mark: int,
        base: Base,
    ) -> int:
        """Accept a commit, and have it noted; where the log has it. The caller holds the lock.

        Raises: Conflict, NotEmpty, LimitExceeded, Unavailable.
        """
        self._accept.require_undisturbed(commit, over, mark, base)
        replayed = self._replayed is not None
        if not replayed:
            self._accept.require_limits(commit, base)
            writers = self._accept.writers(commit, over)
            entry.domains = self._backlog.joined(entry.domains, writers)
            self._backlog.require_whole(entry.domains)
            entry.sequence, entry.after = self.held.number(), self._passing.last
        fresh = [row for row in commit.empties if is_fresh(row, commit)]
        shifts = self._accept.shifts(commit, base)
        entry.laid = self._overlay.lay(entry.sequence, commit.writes, fresh, base, shifts)
        entry.since = self._runtime.monotonic()
        payload = self.held.add(entry)
        position = 0 if replayed else log.append(entry.sequence, payload)
        if self._backlog.leads(entry):
            self._cond.notify_all()  # the publisher waits for the first of a domain
        return position

    def _write_down(self, log: Log, entry: LogEntry, commit: Commit, position: int) -> None:
        """Return when the journal has an entry, or the store where the disk failed."""
        if self._replayed is not None:
            return
        # where the disk failed this one is written through
        if not log.flush(position) or is_first_name(entry, commit):
            self._settling.await_entry(entry)

    @contextmanager
    def replaying(self, entry: LogEntry) -> Iterator[None]:
        """The next commit is that of an entry that is in the journal already."""
        self._replayed = entry
        try:
            yield
        finally:
            self._replayed = None


_CONFORMS: Callable[[Store, Runtime], Store] = StagedStore

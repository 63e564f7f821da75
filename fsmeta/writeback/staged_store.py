"""An engine before an engine: commits that must not be seen yet are held back, in order.

`Client` puts it before the volume's store where a mount writes back. Until `attach` it only passes
through. A commit is held back if its verb is one that `entry` names and something of its domain
still waits, or blocks it relies on are not in the store yet, or it changes what a held one has
changed. All else passes: it commutes with what is held, and new directories go first on purpose.

A held commit is validated like any other: what it relies on is compared with the overlay, the rest
with the store: with what `beneath` remembers of it and it vouches for, or in one request. It may be
different when it is published; `writeback/replay` decides. Reads see overlay and store together.

`_cond` guards all state, never across requests: a held commit disturbed meanwhile is a Conflict.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Final

from fsmeta.errors import Conflict
from fsmeta.runtime import Runtime
from fsmeta.schema import inode, keys
from fsmeta.store import contract
from fsmeta.store.contract import Applied, Commit, Listener, Record, RowPage, Store
from fsmeta.txn.row_cache import RowCache
from fsmeta.types import FileType, Ino
from fsmeta.writeback.held_room import HeldRoom
from fsmeta.writeback.log_entry import GIVING_WAY, NAMES, SHARING, Log, LogEntry, Moved, slices_of
from fsmeta.writeback.log_entry_of import entry_of, is_first_name
from fsmeta.writeback.order_domains import OrderDomains, reading
from fsmeta.writeback.overlay import Over, Overlay
from fsmeta.writeback.overlay_reads import OverlaidReads
from fsmeta.writeback.passing import Passing
from fsmeta.writeback.publish_queue import Goal, PublishQueue
from fsmeta.writeback.settling import Settling
from fsmeta.writeback.validation import DISTURBED_S, Base, Validation, is_fresh, written

BENEATH_ROWS: Final = 10_000  # what the verbs of a few trees read again and again


class StagedStore:
    """Holds commits back until somebody has published them."""

    def __init__(self, inner: Store, runtime: Runtime) -> None:
        self._inner = inner
        self._cond = runtime.condition()
        self._overlay = Overlay()  # guarded by _cond
        self.beneath = RowCache(runtime, BENEATH_ROWS)  # what the store has, without the overlay
        reads = OverlaidReads(inner, self._overlay, self._cond, self.beneath)
        self.read, self.read_many, self.read_linked = reads.read, reads.read_many, reads.read_linked
        self.read_rows, self.read_short_rows = reads.read_rows, reads.read_short_rows
        self.scan, self._require_empty = reads.scan, reads.require_empty
        self.name = inner.name
        self.backlog = PublishQueue()  # guarded by _cond, as all below
        self._room = HeldRoom(self._cond, runtime)
        self._settling = Settling(self._cond, self.backlog, runtime)
        self._runtime = runtime
        self._log: Log | None = None
        self._domains = OrderDomains(1)
        self._passing = Passing(inner)
        self._sequence = 0
        self._accept = Validation(inner, self._overlay, self._cond, self.beneath)
        self._foreign: set[bytes] = set()  # overlaid rows that others have changed meanwhile
        self._replayed: LogEntry | None = None  # while a journal is read, by one thread
        self._listener: Listener | None = None
        self.on_kept: Callable[[Sequence[int], bool], None] = lambda *_: None  # slices held, or not
        self.history = inner.history
        self.on_held: Callable[[LogEntry], object] = bool  # told of each entry; under the lock
        self.sync_waits = False  # sync means published, not only journalled

    def attach(self, log: Log, depth: int, sequence: int) -> None:
        """Hold back from now on; the last entry ever made had the number `sequence`."""
        self._domains = OrderDomains(depth)
        self._sequence = sequence
        self._log = log

    # --- the store's other methods ---------------------------------------------------------------

    @property
    def round_trips(self) -> int:
        return self._inner.round_trips

    def watch(self, listener: Listener) -> None:
        self._listener = listener
        self._inner.watch(self._news)

    def _news(self, rows: Sequence[bytes] | None) -> None:
        self.beneath.distrust(rows)
        self._domains.forget(rows)
        if self._overlay:
            with self._cond:
                touched = self._overlay.rows() if rows is None else rows
                self._foreign.update(row for row in touched if self._overlay.touches(row))
        self.tell(rows)

    def tell(self, rows: Sequence[bytes] | None) -> None:
        """What this mount remembers of `rows` is not what the store has, or will have."""
        if self._listener is not None:
            self._listener(rows)

    def hear(self) -> None:
        self._inner.hear()

    def vouches(self) -> bool:
        return self._inner.vouches()

    def now_ns(self) -> int:
        return self._inner.now_ns()

    def tidy(self) -> None:
        self._inner.tidy()

    def scan_rows(
        self, prefix: bytes, cursor: bytes = b"", limit: int = contract.SCAN_PAGE
    ) -> RowPage:
        """Of the store alone: who walks over all rows wants what is published."""
        return self._inner.scan_rows(prefix, cursor, limit)

    def everything(self) -> AbstractContextManager[Iterator[Record]]:
        """Of the store alone, too."""
        return self._inner.everything()

    def sync(self) -> None:
        if self._log is None:
            self._inner.sync()
        elif self.sync_waits or not self._log.sync():
            self._settling.await_what_moves(self._sequence)  # of the rest `require_whole` tells
            self._inner.sync()

    def close(self) -> None:
        self._inner.close()

    # --- commits ---------------------------------------------------------------------------------

    def commit(self, commit: Commit) -> Applied | None:
        """See `Store`. Its rows stay watched: who publishes remembers rows, too."""
        if self._log is None:
            return self._inner.commit(commit)
        if commit.busy:
            commit = commit._replace(busy=())
        name = NAMES.get(commit.call[0]) if commit.call else None
        if not commit.writes:
            self._validate(commit)
        elif self._passing.is_doubtful(commit):
            self._pass_again(commit)
        elif commit.call and commit.call[0] in SHARING:
            self._pass_shared(commit)
        elif name is None:
            self._pass_free(commit)
        else:
            return Applied(held=self._in_order(self._log, name, commit))
        return None

    def _in_order(self, log: Log, name: str, commit: Commit) -> bool:
        """Commit what others are to see in order, now or later; whether it is held back."""
        reads = {(row, field): value for row, field, value in commit.checks}
        get = reading(reads, self.read)
        entry = self._replayed or entry_of(name, commit, reads, log, self._domains, get)
        self._inner.hear()  # what others were answered by now is not believed to be otherwise
        position: int | None = None
        with self._cond:
            self.backlog.require_whole(entry.domains)
            over, held = self._judge(entry, commit)
            if held:
                mark = self._accept.mark()
                base = self._accept.recall(commit, over)
                if base is not None:
                    position = self._lay(log, entry, commit, over, mark, base)
            else:
                self._accept.take_off(commit)
        if not held:
            self._fly(commit)
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
            if not held or self._replayed is not None or not self._room.wait():
                return over, held

    def _must_wait(self, entry: LogEntry, commit: Commit, over: Sequence[Over | None]) -> bool:
        """Whether a commit is held back, given what is `over` its checks; lock held."""
        if self._replayed is not None or entry.needs or self._accept.concerns(commit, over):
            return True
        early = entry.name == "create" and FileType.of_mode(entry.args[2].mode) is FileType.DIR
        return not early and self.backlog.busy(entry.domains)

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
                if commit.call and commit.call[0] in GIVING_WAY:
                    raise OSError(errno.EBUSY, "what it changes is held back")
                self._cond.wait(DISTURBED_S)
                raise Conflict("what it changes is held back")
            self._accept.take_off(commit)
        self._fly(commit._replace(checks=rest))

    def _pass_shared(self, commit: Commit) -> None:
        """A commit of `SHARING`. Raises: EOPNOTSUPP where others could not read it all."""
        _, _, _, (source, ino, _) = commit.call
        get = reading({(row, field): value for row, field, value in commit.checks}, self.read)
        domains = {self._domains.home(get, each) for each in (source.ino, ino)}
        with self._cond:
            self.backlog.require_whole(domains)
            over = self._accept.over(commit)
            if self._accept.concerns(commit, over) or self.backlog.busy(domains):
                raise OSError(errno.EOPNOTSUPP, "not all of it is published: copy the bytes")
            self._accept.take_off(commit)
        self._fly(commit)

    def commit_beneath(self, commit: Commit) -> None:
        """A commit of who sees nothing of what is held back; it waits for what it would be in the
        way of. Raises: as `commit`.
        """
        if self._passing.is_doubtful(commit):
            self._pass_again(commit)
        else:
            with self._cond:
                if self._accept.blocks(commit):
                    self._cond.wait(DISTURBED_S)
                    raise Conflict("what it changes is held back")
                self._accept.take_off(commit)
            self._fly(commit)
        self.tell(list({row for row, _ in written(commit)}))

    def _fly(self, commit: Commit) -> None:
        """Pass, and let those know whom it disturbs."""
        mark = self.beneath.mark()
        try:
            self._pass(commit)
        except BaseException:
            self._unlearn(commit)
            raise
        else:
            vouched = self._inner.vouches()
            self.beneath.settle(mark, commit.empties, commit.writes, vouched, commit.checks)
        finally:
            with self._cond:
                self._accept.landed(commit)
                self._cond.notify_all()

    def _pass_again(self, commit: Commit) -> None:
        """Pass what may have been applied: only the store knows."""
        try:
            self._pass(commit)
        finally:
            self._unlearn(commit)

    def _unlearn(self, commit: Commit) -> None:
        """What the store has of the rows of a commit is not known."""
        rows = {row for row, _ in written(commit)}.union(commit.empties)
        self.beneath.drop(rows.union([row for row, _, _ in commit.checks]))

    def _pass(self, commit: Commit) -> None:
        self._passing.send(commit)
        if self._overlay:
            # both merge into the same records: the overlay's are to show this, too
            with self._cond:
                merges = [write for write in commit.writes if write[0] == contract.MERGE]
                self._foreign.update(self._overlay.follow(merges))

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
            entry.domains = self.backlog.joined(entry.domains, writers)
            self.backlog.require_whole(entry.domains)
            self._sequence += 1
            entry.sequence, entry.after = self._sequence, self._passing.last
        fresh = [row for row in commit.empties if is_fresh(row, commit)]
        shifts = self._accept.shifts(commit, base)
        entry.laid = self._overlay.lay(entry.sequence, commit.writes, fresh, base, shifts)
        entry.since = self._runtime.monotonic()
        self.backlog.add(entry)
        self.on_held(entry)
        self.on_kept([slice_id for slice_id, _ in slices_of(entry.name, entry.args)], True)
        payload = entry.pack()
        self._room.add(entry.sequence, len(payload))
        position = 0 if replayed else log.append(entry.sequence, payload)
        if self.backlog.leads(entry):
            self._cond.notify_all()  # who publishes waits for the first of a domain
        return position

    def _write_down(self, log: Log, entry: LogEntry, commit: Commit, position: int) -> None:
        """Return when the journal has an entry, or the store where the disk failed."""
        if self._replayed is not None:
            return
        # where the disk failed this one is written through
        if not log.flush(position) or is_first_name(entry, commit):
            self._settling.await_entry(entry)

    # --- publication -----------------------------------------------------------------------------

    def add_unshown(self, entry: LogEntry) -> None:
        """An entry of a journal that can't be shown: `publish` says what becomes of it."""
        with self._cond:
            self.backlog.add(entry)
            self.on_kept([slice_id for slice_id, _ in slices_of(entry.name, entry.args)], True)

    @contextmanager
    def replaying(self, entry: LogEntry) -> Iterator[None]:
        """The next commit is that of an entry that is in the journal already."""
        self._replayed = entry
        try:
            yield
        finally:
            self._replayed = None

    def next_run(
        self, ready: Callable[[LogEntry], bool], ended: Callable[[], bool], most: int
    ) -> list[LogEntry]:
        """Wait for entries to be published, at most so many; none once `ended`."""
        with self._cond:
            while not ended():
                run = self.backlog.next_run(ready, most)
                if run:
                    for entry in run:
                        if entry.laid is not None:
                            self._accept.publishing(entry.sequence, entry.laid)
                    return run
                self._cond.wait()
            return []

    def wake(self) -> None:
        """What `next_run` waits for may have come."""
        with self._cond:
            self._cond.notify_all()

    def move(self, entry: LogEntry, moved: Moved | None) -> bool:
        """The bytes of a write are elsewhere, or where it says; False where it waits no more."""
        with self._cond:
            waits = self.backlog.has(entry.sequence)
            if waits:
                old, entry.moved = entry.record, moved
                key = (keys.inode_row(entry.args[0]), keys.chunk_field(0))
                self._overlay.exchange(key, old, entry.record)
                self._accept.changed([key])
            return waits

    def published(self, outcomes: Iterable[tuple[LogEntry, bool]]) -> None:
        """The store has entries; with each: whether what this mount shows is what became of it."""
        rows: set[bytes] = set()
        with self._cond:
            for entry, as_meant in outcomes:
                self.backlog.remove(entry)
                self._room.remove(entry.sequence)
                self.on_kept([slice_id for slice_id, _ in slices_of(entry.name, entry.args)], False)
                if entry.laid is not None:
                    free = self._overlay.lift(entry.sequence, entry.laid)
                    self._accept.published(entry.sequence, entry.laid)
                    rows |= free & self._foreign
                    self._foreign -= free
                    if not as_meant:
                        rows.update(row for row, _ in entry.laid.keys)
            self._cond.notify_all()
        if rows:
            self._domains.forget(None)
            self.tell(list(rows))

    def settle(self, ino: Ino | None, deadline: float, upto: int | None = None) -> bool:
        """Wait until what is accepted by now is published, or up to the sequence `upto`.

        `ino`: only of its domain. False when the monotonic `deadline` passes first.
        """
        goal = self.goal(ino)
        if upto is not None:
            goal = goal._replace(upto=upto)
        return self._settling.await_goal(goal, deadline)

    def goal(self, ino: Ino | None) -> Goal:
        """What is accepted by now; `ino`: in its domain."""
        domain = None if ino is None else self._domains.home(reading({}, self.read), ino)
        return Goal(domain, self._sequence)

    def has_reached(self, goal: Goal) -> bool:
        """Whether all of it is published."""
        with self._cond:
            return not self.backlog.waits(*goal)

    def await_written(self, ino: Ino, since: int, upto: int, deadline: float) -> bool:
        """Wait until others see what a program wrote that changed `ino` between two sequences."""
        if not self.backlog:
            return True
        domain = self._domains.home(reading({}, self.read), ino)
        return self._settling.await_written(domain, since, upto, deadline)

    def refuse(self, domains: Iterable[int]) -> int:
        """Accept nothing more in these domains; the number of the last entry that was."""
        with self._cond:
            self.backlog.refuse(domains)
            self._cond.notify_all()
            return self._sequence

    def refuse_behind(self, key: str) -> list[LogEntry]:
        """As `refuse`, where something waits for an object; what is refused for the first time."""
        with self._cond:
            found = self.backlog.refuse_behind(key)
            self._cond.notify_all()
            return found

    @property
    def sequence(self) -> int:
        """The number of the last entry."""
        return self._sequence

    def held(self) -> tuple[int, float]:
        """How many entries wait, and since when the oldest does by the monotonic clock."""
        with self._cond:
            oldest = self.backlog.oldest()
            return len(self.backlog), oldest.since if oldest else self._runtime.monotonic()

    def first_waiting(self) -> int:
        """The sequence below which everything is published."""
        with self._cond:
            oldest = self.backlog.oldest()
            return self._sequence + 1 if oldest is None else oldest.sequence

    def held_inodes(self) -> list[int]:
        """The inodes that held changes are about: they are in use."""
        with self._cond:
            return self.backlog.inos()

    def require_whole(self, ino: Ino) -> None:
        """Raises: EIO where what was accepted in the domain of an inode is lost."""
        if self.backlog.lost:
            self.backlog.require_whole({self._domains.home(reading({}, self.read), ino)})

    def is_held(self, ino: Ino) -> bool:
        """Whether a change of this file waits; of a directory, whether any in its domain does.

        Raises: EIO where what was accepted in its domain is lost.
        """
        self.require_whole(ino)
        value = self.read([(keys.inode_row(ino), keys.ATTR_FIELD)])[0]
        with self._cond:
            if value is None or not self.backlog:
                return bool(self.backlog) and self.backlog.changes(ino)
        kind = FileType.of_mode(inode.unpack_stable(ino, value).mode)
        if kind is not FileType.DIR:
            return self.backlog.changes(ino)
        return self.backlog.waits(self._domains.home(reading({}, self.read), ino), None)


def _conforms(store: StagedStore) -> Store:
    return store

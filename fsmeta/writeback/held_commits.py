"""What a mount holds back: the publisher takes entries here, and others ask what still waits.

`StagedStore` owns one and fills it; the publisher, the packer and `WriteBack` call it as
`store.held`. An entry that is published leaves the backlog, its room and the overlay at once.

Threading: any method from any thread. `cond` is that of `StagedStore` and guards all state; it is
notified when something was published or refused, or may be published.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from fsmeta.runtime import Condition, Runtime
from fsmeta.schema import inode, keys
from fsmeta.types import FileType, Ino
from fsmeta.writeback.backlog.held_room import HeldRoom
from fsmeta.writeback.backlog.publish_queue import Goal, HoldingPorts, PublishQueue
from fsmeta.writeback.backlog.settling import Settling
from fsmeta.writeback.entries.intents import slices_of
from fsmeta.writeback.entries.log_entry import LogEntry, Moved
from fsmeta.writeback.entries.order_domains import OrderDomains, reading
from fsmeta.writeback.overlay.overlay import Overlay
from fsmeta.writeback.overlay.overlay_reads import OverlaidReads
from fsmeta.writeback.overlay.validation import Validation


class HeldCommits:
    """See the module."""

    def __init__(
        self,
        cond: Condition,
        runtime: Runtime,
        overlay: Overlay,
        reads: OverlaidReads,
        accept: Validation,
        tell: Callable[[Sequence[bytes]], None],
    ) -> None:
        """`tell` is called with published rows that are not what this mount has shown."""
        self._cond = cond
        self._runtime = runtime
        self._reads = reads
        self._tell = tell
        self._overlay = overlay  # guarded by cond, as all below
        self._accept = accept
        self.backlog = PublishQueue()
        self.room = HeldRoom(cond, runtime)
        self.settling = Settling(cond, self.backlog, runtime)
        self.domains = OrderDomains(1)
        self.sequence = 0  # of the last entry
        self._foreign: set[bytes] = set()  # overlaid rows that other clients have changed meanwhile
        self._ports: HoldingPorts

    def attach(self, depth: int, sequence: int, ports: HoldingPorts) -> None:
        """See `StagedStore`."""
        self._ports = ports
        self.domains = OrderDomains(depth)
        self.sequence = sequence

    # --- what StagedStore says, under the lock ---------------------------------------------------

    def number(self) -> int:
        """The number of a new entry; lock held."""
        self.sequence += 1
        return self.sequence

    def add(self, entry: LogEntry) -> bytes:
        """An entry is laid over the store: it waits from now on; its bytes. Lock held."""
        self.backlog.add(entry)
        self._ports.held(entry)
        self._ports.kept([slice_id for slice_id, _ in slices_of(entry.intent)], True)
        payload = entry.pack()
        self.room.add(entry.sequence, len(payload), entry.domains)
        return payload

    def changed_beneath(self, rows: Iterable[bytes]) -> None:
        """Others, or commits that passed, have changed what is laid over; lock held."""
        self._foreign.update(rows)

    # --- publication -----------------------------------------------------------------------------

    def add_unshown(self, entry: LogEntry) -> None:
        """An entry of a journal that can't be shown: `publish` says what becomes of it."""
        with self._cond:
            self.backlog.add(entry)
            self._ports.kept([slice_id for slice_id, _ in slices_of(entry.intent)], True)

    def next_run(
        self, ready: Callable[[LogEntry], bool], ended: Callable[[], bool], most: int
    ) -> list[LogEntry]:
        """Wait for entries to be published, at most so many; none once `ended`.

        The entries of the run before are published, or wait again. Reads of counters go first, as
        long as there are some, but not for ever.
        """
        with self._cond:
            self._overlay.published_none()
            self._cond.notify_all()
            while not ended():
                run = self.backlog.next_run(ready, most)
                if run and self._reads.await_counts():
                    run = self.backlog.next_run(ready, most)
                if run:
                    for entry in run:
                        if entry.laid is not None:
                            self._overlay.publishing(entry.sequence, entry.laid)
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
                key = (keys.inode_row(entry.write.ino), keys.chunk_field(0))
                self._overlay.exchange(key, old, entry.record)
                self._accept.changed([key])
            return waits

    def published(self, outcomes: Iterable[tuple[LogEntry, bool]]) -> None:
        """The store has entries; with each: whether what this mount shows is what became of it."""
        rows: set[bytes] = set()
        with self._cond:
            for entry, as_meant in outcomes:
                self.backlog.remove(entry)
                self.room.remove(entry.sequence)
                self._ports.kept([slice_id for slice_id, _ in slices_of(entry.intent)], False)
                if entry.laid is not None:
                    free = self._overlay.lift(entry.sequence, entry.laid)
                    self._accept.changed(entry.laid.keys)
                    rows |= free & self._foreign
                    self._foreign -= free
                    if not as_meant:
                        rows.update(row for row, _ in entry.laid.keys)
            self._cond.notify_all()
        if rows:
            self.domains.forget(None)
            self._tell(list(rows))

    def settle(self, ino: Ino | None, deadline: float, upto: int | None = None) -> bool:
        """Wait until what is accepted by now is published, or up to the sequence `upto`.

        `ino`: only of its domain. False when the monotonic `deadline` passes first.
        """
        goal = self.goal(ino)
        if upto is not None:
            goal = goal._replace(upto=upto)
        return self.settling.await_goal(goal, deadline)

    def goal(self, ino: Ino | None) -> Goal:
        """What is accepted by now; `ino`: in its domain."""
        domain = None if ino is None else self.domains.home(reading({}, self._reads.read), ino)
        return Goal(domain, self.sequence)

    def has_reached(self, goal: Goal) -> bool:
        """Whether all of it is published."""
        with self._cond:
            return not self.backlog.waits(*goal)

    def await_written(self, ino: Ino, since: int, upto: int, deadline: float) -> bool:
        """Wait until other clients see the changes of `ino` between two sequences."""
        if not self.backlog:
            return True
        domain = self.domains.home(reading({}, self._reads.read), ino)
        return self.settling.await_written(domain, since, upto, deadline)

    def refuse(self, domains: Iterable[int]) -> int:
        """Accept nothing more in these domains; the number of the last entry that was."""
        with self._cond:
            self.backlog.refuse(domains)
            self._cond.notify_all()
            return self.sequence

    def refuse_behind(self, key: str) -> list[LogEntry]:
        """As `refuse`, where something waits for an object; what is refused for the first time."""
        with self._cond:
            found = self.backlog.refuse_behind(key)
            self._cond.notify_all()
            return found

    # --- what is asked ---------------------------------------------------------------------------

    def tally(self) -> tuple[int, float]:
        """How many entries wait, and since when the oldest does by the monotonic clock."""
        with self._cond:
            oldest = self.backlog.oldest()
            return len(self.backlog), oldest.since if oldest else self._runtime.monotonic()

    def first_waiting(self) -> int:
        """The sequence below which everything is published."""
        with self._cond:
            return self.backlog.first(self.sequence + 1)

    def waiting(self) -> tuple[list[int], int]:
        """The sequences that wait, ascending; and the number of the last entry."""
        with self._cond:
            return self.backlog.sequences(), self.sequence

    def inodes(self) -> list[int]:
        """The inodes that held changes are about: they are in use."""
        with self._cond:
            return self.backlog.inos()

    def require_whole(self, ino: Ino) -> None:
        """Raises: EIO where what was accepted in the domain of an inode is lost."""
        if self.backlog.lost:
            self.backlog.require_whole({self.domains.home(reading({}, self._reads.read), ino)})

    def concerns(self, ino: Ino) -> bool:
        """Whether a change of this file waits; of a directory, whether any in its domain does.

        Raises: EIO where what was accepted in its domain is lost.
        """
        self.require_whole(ino)
        value = self._reads.read([(keys.inode_row(ino), keys.ATTR_FIELD)])[0]
        with self._cond:
            if value is None or not self.backlog:
                return bool(self.backlog) and self.backlog.changes(ino)
        kind = FileType.of_mode(inode.unpack_stable(ino, value).mode)
        if kind is not FileType.DIR:
            return self.backlog.changes(ino)
        return self.backlog.waits(self.domains.home(reading({}, self._reads.read), ino), None)

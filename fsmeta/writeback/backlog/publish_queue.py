"""The entries that wait to be published, in the order in which they may be.

An entry is published when all earlier ones of each of its domains have been. Domains do not wait
for each other; an entry of the domain EVERY waits for all before it, and all after it wait for it.

Where something that was accepted is lost, what relied on it must not follow: such a domain takes
nothing more.

Threading: none; the owner's lock is held around every call.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from fsmeta.writeback.entries.log_entry import EVERY, LogEntry


class Goal(NamedTuple):
    """All that is accepted, of one domain or of any, up to a sequence or whatever comes."""

    domain: int | None
    upto: int | None


class HoldingPorts(NamedTuple):
    """What is told of entries, under the lock."""

    held: Callable[[LogEntry], object]  # each one that is shown
    kept: Callable[[Sequence[int], bool], None]  # their slices, and whether they wait still


class PublishQueue:
    """One queue a domain; an entry is in that of each of its domains."""

    def __init__(self) -> None:
        self._entries: dict[int, LogEntry] = {}  # by sequence, in order
        self._queues: dict[int, deque[LogEntry]] = {}
        self._inos: dict[int, int] = {}  # how many entries change an inode
        self.lost: set[int] = set()  # domains in which something that was accepted is lost

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[LogEntry]:
        return iter(self._entries.values())

    def oldest(self) -> LogEntry | None:
        """The entry that waits longest."""
        return next(iter(self._entries.values()), None)

    def first(self, otherwise: int) -> int:
        """The number of the entry that waits longest."""
        return next(iter(self._entries), otherwise)

    def sequences(self) -> list[int]:
        """The numbers of all entries, ascending."""
        return list(self._entries)

    def has(self, sequence: int) -> bool:
        """Whether an entry waits still."""
        return sequence in self._entries

    def joined(self, domains: frozenset[int], sequences: Iterable[int]) -> frozenset[int]:
        """`domains` and those of entries that wait, as of what follows them.

        A hard link has names in several.
        """
        for sequence in sequences:
            domains |= self._entries[sequence].domains
        return frozenset((EVERY,)) if EVERY in domains else domains

    def changes(self, ino: int) -> bool:
        """Whether an entry changes this inode."""
        return ino in self._inos

    def inos(self) -> list[int]:
        """The inodes that entries change."""
        return list(self._inos)

    def busy(self, domains: Collection[int]) -> bool:
        """Whether what belongs to `domains` has to wait for something."""
        if not self._entries:
            return False
        return EVERY in domains or EVERY in self._queues or any(d in self._queues for d in domains)

    def waits(self, domain: int | None, upto: int | None) -> bool:
        """Whether an entry up to a sequence waits, of one domain or of any."""
        if domain is None or domain == EVERY:
            oldest = self.oldest()
            return oldest is not None and (upto is None or oldest.sequence <= upto)
        queue = self._queues.get(domain) or self._queues.get(EVERY)
        return queue is not None and (upto is None or queue[0].sequence <= upto)

    def refuse(self, domains: Iterable[int]) -> None:
        """An acknowledged change of these domains will never be seen."""
        self.lost.update(domains)

    def require_whole(self, domains: Collection[int]) -> None:
        """Raises: EIO where programs rely on what is lost."""
        lost = self.lost
        if lost and (EVERY in lost or EVERY in domains or not lost.isdisjoint(domains)):
            raise OSError(errno.EIO, "what was written there before is lost")

    def is_lost(self, entry: LogEntry) -> bool:
        """Whether an entry may never be published."""
        return bool(self.lost) and not self.lost.isdisjoint((EVERY, *entry.domains))

    def behind(self, first: LogEntry) -> set[int]:
        """The domains in which something waits for `first`, or for what waits for it."""
        found = set(first.domains)
        for entry in self._entries.values():
            if entry.sequence > first.sequence and (
                EVERY in entry.domains | found or not found.isdisjoint(entry.domains)
            ):
                found |= entry.domains
        return found

    def refuse_behind(self, key: str) -> list[LogEntry]:
        """`refuse` where something waits for an object; what is refused for the first time."""
        found = [
            entry
            for entry in self
            if any(need.key == key for need in entry.needs)
            and not self.lost.issuperset(entry.domains)
        ]
        for entry in found:
            self.refuse(self.behind(entry))
        return found

    def moves(self, upto: int) -> bool:
        """Whether an entry up to a sequence waits in a domain that nothing of is lost."""
        if EVERY in self.lost:
            return False
        queues = self._queues.items()
        return any(queue[0].sequence <= upto for domain, queue in queues if domain not in self.lost)

    def leads(self, entry: LogEntry) -> bool:
        """Whether nothing is before an entry."""
        return all(self._queues[d][0] is entry for d in self._standing(entry))

    def add(self, entry: LogEntry) -> None:
        """Put an entry behind all earlier ones of its domains."""
        domains = entry.domains
        if EVERY in domains:
            domains = frozenset((EVERY, *self._queues))
        barriers = self._queues.get(EVERY, ())
        for domain in domains:
            if domain not in self._queues:
                self._queues[domain] = deque(barriers)
            self._queues[domain].append(entry)
        self._entries[entry.sequence] = entry
        for ino in entry.inos:
            self._inos[ino] = self._inos.get(ino, 0) + 1

    def remove(self, entry: LogEntry) -> None:
        """An entry has been published; it was the first of its domains."""
        del self._entries[entry.sequence]
        for domain in self._standing(entry):
            queue = self._queues[domain]
            first = queue.popleft()
            assert first is entry, f"{first} was to be published before {entry}"
            if not queue:
                del self._queues[domain]
        for ino in entry.inos:
            self._inos[ino] -= 1
            if not self._inos[ino]:
                del self._inos[ino]

    def _standing(self, entry: LogEntry) -> list[int]:
        """The queues that an entry is in."""
        if EVERY not in entry.domains:
            return list(entry.domains)
        return [domain for domain, queue in self._queues.items() if entry in queue]

    def next_run(self, ready: Callable[[LogEntry], bool], most: int) -> list[LogEntry]:
        """`next`, and those that follow it where both are of one domain alone; at most so many."""
        first = self.next(ready)
        if first is None:
            return []
        run = [first]
        if len(first.domains) == 1 and EVERY not in first.domains:
            for entry in islice(self._queues[min(first.domains)], 1, most):
                if entry.domains != first.domains or not ready(entry):
                    break
                run.append(entry)
        return run

    def next(self, ready: Callable[[LogEntry], bool]) -> LogEntry | None:
        """The oldest entry whose turn it is, given which have their blocks in the store."""
        heads = {queue[0].sequence: queue[0] for queue in self._queues.values()}
        for sequence in sorted(heads):
            entry = heads[sequence]
            if self.leads(entry) and ready(entry):
                return entry
        return None

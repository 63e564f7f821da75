"""How often the kernel has been told of each inode: lookup counts, as the FUSE protocol has them.

Each answer with an entry (LOOKUP, CREATE, MKNOD, MKDIR, SYMLINK, LINK, TMPFILE, one of READDIRPLUS)
counts one for its inode, and FORGET takes back as many as it says. Only at zero has the kernel
dropped the inode: it may look a name up anew before we read the FORGET of its older reference, and
memory reclaim makes it do so.

Called by `VFS` and `AttrView`. A lookup counts *before* its entry is granted a lease, and what ends
at zero ends under the same lock: a FORGET never takes a lease of a later answer.

Threading: any thread; one lock, under which `gone` is called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from fsmeta.runtime import Runtime
from fsmeta.types import Ino

# The kernel itself needs ten times as much for each inode that it holds. 200 MB.
LOOKUPS_MAX: Final = 2_000_000


class LookupCounts:
    """Counts references of the kernel to inodes."""

    def __init__(self, runtime: Runtime, gone: Callable[[Ino], None]) -> None:
        """`gone` is told of each inode that the kernel has dropped."""
        self._lock = runtime.lock()
        self._counts: dict[Ino, int] = {}  # guarded by _lock
        self._exact = True  # guarded by _lock; False for ever once there were too many inodes
        self._gone = gone

    def __len__(self) -> int:
        """Inodes that the kernel holds: a gauge."""
        return len(self._counts)

    def add(self, ino: Ino) -> None:
        """An entry with this inode is about to be answered."""
        with self._lock:
            counts = self._counts
            counts[ino] = counts.get(ino, 0) + 1
            if len(counts) > LOOKUPS_MAX or not self._exact:
                self._end_counting()

    def add_all(self, inos: Sequence[Ino]) -> None:
        """Entries with these inodes are about to be answered."""
        with self._lock:
            counts = self._counts
            first = dict.fromkeys(inos, 1)
            if len(first) == len(inos) and counts.keys().isdisjoint(first):
                counts.update(first)
            else:
                for ino in inos:
                    counts[ino] = counts.get(ino, 0) + 1
            if len(counts) > LOOKUPS_MAX or not self._exact:
                self._end_counting()

    def forget(self, ino: Ino, lookups: int) -> None:
        """FORGET: the kernel takes back so many."""
        with self._lock:
            left = self._counts.get(ino, lookups) - lookups
            if left > 0:
                self._counts[ino] = left
            elif self._exact:
                self._counts.pop(ino, None)
                self._gone(ino)

    def end_counting(self) -> None:
        """An earlier process has answered entries of this mount, of which nothing is known."""
        with self._lock:
            self._end_counting()

    def _end_counting(self) -> None:
        """Count no more; nothing is then known to be gone. The caller holds the lock.

        Leases then end by the limit on their number alone.
        """
        self._exact = False
        self._counts.clear()

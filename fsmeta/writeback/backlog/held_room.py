"""How much may be held back at a time: in entries, and in bytes of what they say.

A held change is in memory until it is published: its entry, and what it leads to in the overlay.
The value of an extended attribute may be 64 KiB, so entries alone say little. An order domain that
is stuck fills its share only: the others go on.

Threading: none; the owner's lock is held around every call, and `cond` is of that lock.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from fsmeta.errors import Unavailable
from fsmeta.runtime import Condition, Runtime

ENTRIES_MAX: Final = 50_000  # about 60 MB, where each is small
BYTES_MAX: Final = 32 << 20  # of packed entries; in memory each byte is there up to four times
SHARE: Final = 0.75  # of both, for one domain
WAIT_S_MAX: Final = 120.0  # as long as a writer waits for memory


class _Held:
    """A count of entries and of their bytes."""

    __slots__ = ("entries", "size")

    def __init__(self) -> None:
        self.entries = 0
        self.size = 0

    def add(self, entries: int, size: int) -> None:
        self.entries += entries
        self.size += size

    def fills(self, share: float) -> bool:
        """Whether it is that share of what may be held back."""
        return self.entries >= share * ENTRIES_MAX or self.size >= share * BYTES_MAX


class HeldRoom:
    """Counts what is held back, and has changes wait while that is too much."""

    def __init__(self, cond: Condition, runtime: Runtime) -> None:
        self._cond = cond
        self._runtime = runtime
        self._known: dict[int, tuple[int, Collection[int]]] = {}  # by sequence: bytes, domains
        self._all = _Held()
        self._by_domain: dict[int, _Held] = {}

    def add(self, sequence: int, size: int, domains: Collection[int]) -> None:
        """An entry of order domains is held back."""
        self._known[sequence] = size, domains
        self._all.add(1, size)
        for domain in domains:
            self._by_domain.setdefault(domain, _Held()).add(1, size)

    def remove(self, sequence: int) -> None:
        """An entry is published; one of an earlier client may not be counted."""
        size, domains = self._known.pop(sequence, (0, ()))
        if not size:
            return
        self._all.add(-1, -size)
        for domain in domains:
            held = self._by_domain[domain]
            held.add(-1, -size)
            if not held.entries:
                del self._by_domain[domain]

    def wait(self, domains: Collection[int]) -> bool:
        """Wait while too much is held back for one more of `domains`; whether it was.

        Raises: Unavailable.
        """
        if not self.is_full(domains):
            return False
        deadline = self._runtime.monotonic() + WAIT_S_MAX
        while self.is_full(domains):
            left = deadline - self._runtime.monotonic()
            if left <= 0:
                raise Unavailable("too many changes wait for the object store")
            self._cond.wait(left)
        return True

    def is_full(self, domains: Collection[int] = ()) -> bool:
        """Whether a change of `domains` has to wait."""
        if self._all.fills(1.0):
            return True
        found = (self._by_domain.get(domain) for domain in domains)
        return any(held is not None and held.fills(SHARE) for held in found)

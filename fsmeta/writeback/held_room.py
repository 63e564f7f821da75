"""How much may be held back at a time: in entries, and in bytes of what they say.

A held change is in memory until it is published: its entry, and what it leads to in the overlay.
The value of an extended attribute may be 64 KiB, so entries alone say little.

Threading: none; the owner's lock is held around every call, and `cond` is of that lock.
"""

from __future__ import annotations

from typing import Final

from fsmeta.errors import Unavailable
from fsmeta.runtime import Condition, Runtime

ENTRIES_MAX: Final = 50_000  # about 60 MB, where each is small
BYTES_MAX: Final = 32 << 20  # of packed entries; in memory each byte is there up to four times
WAIT_S_MAX: Final = 120.0  # as long as a writer waits for memory


class HeldRoom:
    """Counts what is held back, and has changes wait while that is too much."""

    def __init__(self, cond: Condition, runtime: Runtime) -> None:
        self._cond = cond
        self._runtime = runtime
        self._sizes: dict[int, int] = {}  # bytes of each entry, by its sequence
        self._bytes = 0

    def add(self, sequence: int, size: int) -> None:
        """An entry is held back."""
        self._sizes[sequence] = size
        self._bytes += size

    def remove(self, sequence: int) -> None:
        """An entry is published."""
        self._bytes -= self._sizes.pop(sequence, 0)

    def wait(self) -> bool:
        """Wait while too much is held back; whether it was. Raises: Unavailable."""
        if not self.is_full():
            return False
        deadline = self._runtime.monotonic() + WAIT_S_MAX
        while self.is_full():
            left = deadline - self._runtime.monotonic()
            if left <= 0:
                raise Unavailable("too many changes wait for the object store")
            self._cond.wait(left)
        return True

    def is_full(self) -> bool:
        """Whether a change has to wait."""
        return len(self._sizes) >= ENTRIES_MAX or self._bytes >= BYTES_MAX

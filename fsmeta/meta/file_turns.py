"""Changes of a file wait for the commit of a compaction.

Compaction first rewrites the data of a chunk. Then it replaces the records of the chunk in one
commit, and each change of the file makes this commit fail. Beside a program that never pauses it
would fail for ever, the list of records would grow, and each change would cost more. So changes by
this client wait during the commit, for HOLD_MAX_S at most, because the store may be away. Changes
by other clients do not wait; they still make the commit fail.

`Meta` has one. Threading: any method from any thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from fsmeta.runtime import Runtime
from fsmeta.types import Ino

HOLD_MAX_S: Final = 0.25


class FileTurns:
    """See the module."""

    def __init__(self, runtime: Runtime) -> None:
        self._monotonic = runtime.monotonic
        self._cond = runtime.condition()
        self._taken: dict[Ino, int] = {}  # by how many compactions; written under _cond

    @contextmanager
    def take(self, ino: Ino) -> Iterator[None]:
        """Changes of `ino` that begin from now on wait."""
        with self._cond:
            self._taken[ino] = self._taken.get(ino, 0) + 1
        try:
            yield
        finally:
            with self._cond:
                self._taken[ino] -= 1
                if not self._taken[ino]:
                    del self._taken[ino]
                    self._cond.notify_all()

    def wait(self, ino: Ino) -> None:
        """Let a compaction of `ino` go first, if there is one."""
        if not self._taken:
            return
        end = self._monotonic() + HOLD_MAX_S
        with self._cond:
            while ino in self._taken and (left := end - self._monotonic()) > 0:
                self._cond.wait(left)

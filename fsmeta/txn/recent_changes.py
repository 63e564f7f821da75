"""What changed while a request was under way: numbered logs of the latest changes, for `RowCache`.

A mark is a number; a change noted since may be newer than what the request brings. A log that does
not reach back to the mark says yes to everything. Threading: the cache's lock guards both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

from fsmeta.store.writes import DeleteRow, Write

_REMEMBERED: Final = 4096  # changes while one request is under way; more forget everything

Fields: TypeAlias = Mapping[bytes, bytes | None]
Rows: TypeAlias = Mapping[bytes, Fields | None]  # None: any field


class Invalidations:
    """The rows that other clients changed last."""

    def __init__(self) -> None:
        self.count = 0
        self._recent: deque[tuple[int, bytes]] = deque(maxlen=_REMEMBERED)

    def add(self, row: bytes) -> None:
        """Note a change of `row`."""
        self.count += 1
        self._recent.append((self.count, row))

    def add_everything(self) -> None:
        """Note that any row may have changed."""
        self.count += _REMEMBERED + 1
        self._recent.clear()

    def hit(self, mark: int, row: bytes) -> bool:
        """Whether `row` changed after `mark`, as far as we remember."""
        if self.count - mark > len(self._recent):
            return True
        for at, changed in reversed(self._recent):
            if at <= mark:
                return False
            if changed == row:
                return True
        return False


class LocalWrites:
    """Our own latest commits and reads, as they were taken in.

    A commit must know of reads, too: one that began after it was sent may have seen it applied.
    """

    def __init__(self) -> None:
        self.count = 0
        self._recent: deque[tuple[int, Sequence[Write], Rows]] = deque(maxlen=_REMEMBERED)

    def add(self, writes: Sequence[Write], filled: Rows) -> None:
        """Note what a commit has written, or a read has brought."""
        self.count += 1
        self._recent.append((self.count, writes, filled))

    def add_everything(self) -> None:
        """Note that a read has brought too much to be remembered here."""
        self.count += _REMEMBERED + 1
        self._recent.clear()

    def hit(self, mark: int, row: bytes, field: bytes | None) -> bool:
        """Whether `field` (None: anything) of `row` was taken in after `mark`, if we remember."""
        if self.count - mark > len(self._recent):
            return True
        for at, writes, filled in reversed(self._recent):
            if at <= mark:
                return False
            if row in filled:
                fields = filled[row]
                if field is None or fields is None or field in fields:
                    return True
            for write in writes:
                if write.row == row and (
                    field is None or isinstance(write, DeleteRow) or write.field == field
                ):
                    return True
        return False

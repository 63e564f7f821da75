"""Notices that many files of one directory are being opened, and decides what to prefetch.

A look-up of an unknown name is one request for the name and its inode. The open sends one more,
since a store can lease an inode's row only when the request names it. So where many names are
missed the client reads a page of them: from then on look-up and open are one request together, and
absent names need no request. One page of names costs as much as about ten look-ups.

Once names are known, their inodes can be read many at a time: the request for a missed inode
brings further inodes of its directory. One that is never used costs a tenth of a request. One that
is found when its file is opened has saved a whole request, and earns some more. So a program that
opens all files of a directory, in any order, soon needs no requests; a program that opens a few of
very many files, or more than the cache can hold, has a bounded loss.

Called by `MetadataPrefetch`. Threading: any thread; each step is atomic, and one that is lost costs
a page, or some inodes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from fsmeta.store.contract import SCAN_PAGE
from fsmeta.txn.row_states import ROW_FIELDS_MAX
from fsmeta.types import Ino

MISSES_A_PAGE: Final = 8  # look-ups that asked the store, before a page is read
PAGES_MAX: Final = ROW_FIELDS_MAX // SCAN_PAGE - 1  # more would not be remembered
CROWDS_MAX: Final = 1024  # directories; more forget the one seen first

AHEAD_MAX: Final = 64  # inodes in one request: it delays other requests by less than 1 ms
AHEAD_MIN: Final = 8  # fewer are not worth the while
AHEAD_FREE: Final = 128  # inodes of a directory that may stay unused: a dozen requests
AHEAD_EARNED: Final = 16  # inodes for each that was used
AHEAD_SAVED: Final = 1024  # of what was earned


class _HotDirectory:
    """What was asked for in one directory."""

    __slots__ = ("asked", "at", "cursor", "earned", "inodes", "misses", "pages", "patience")

    def __init__(self) -> None:
        self.misses = 0
        self.patience = MISSES_A_PAGE
        self.pages = 0
        self.cursor: bytes | None = b""  # where the next page begins; None at the end
        self.inodes = 0  # that were missed
        self.at = 0  # how many names were passed
        self.asked = 0  # inodes ahead
        self.earned = AHEAD_FREE


class PrefetchPolicy:
    """Counts what is missed by directory, and says what to read where that is much."""

    def __init__(self, read_page: Callable[[Ino, bytes], bytes | None]) -> None:
        """`read_page(directory, cursor)` remembers a page of names and says what follows."""
        self._read_page = read_page
        self._crowds: dict[Ino, _HotDirectory] = {}

    def missed(self, parent: Ino, remembered: bool) -> None:
        """A look-up in `parent` had to ask the store; `remembered`: it knew some names before."""
        crowd = self._crowds.get(parent) or self._join(parent)
        crowd.misses += 1
        if crowd.pages and not remembered:  # another client has changed it: begin anew, later
            crowd.misses, crowd.pages, crowd.cursor = 1, 0, b""
            crowd.patience *= 2
        if crowd.misses < crowd.patience or crowd.cursor is None or crowd.pages >= PAGES_MAX:
            return
        crowd.misses = 0
        crowd.pages += 1
        crowd.cursor = self._read_page(parent, crowd.cursor)

    def ahead(self, parent: Ino) -> tuple[int, int]:
        """An inode in `parent` has to be asked for, and its name is known: behind how many names
        of the directory, and for how many of them, to ask as well; perhaps none."""
        crowd = self._crowds.get(parent) or self._join(parent)
        crowd.inodes += 1
        if not crowd.pages and crowd.inodes < MISSES_A_PAGE:
            return 0, 0
        crowd.earned = min(crowd.earned, crowd.asked + AHEAD_SAVED)
        count = min(AHEAD_MAX, crowd.earned - crowd.asked)
        if count < AHEAD_MIN:
            return 0, 0
        at = crowd.at
        crowd.at += count
        crowd.asked += count
        return at, count

    def passed(self, parent: Ino) -> None:
        """There are no more names in `parent`: begin anew."""
        crowd = self._crowds.get(parent)
        if crowd is not None:
            crowd.at = 0

    def opened(self, parent: Ino) -> None:
        """A file in `parent` was opened without a request."""
        crowd = self._crowds.get(parent)
        if crowd is not None:
            crowd.earned += AHEAD_EARNED

    def _join(self, parent: Ino) -> _HotDirectory:
        if len(self._crowds) >= CROWDS_MAX:
            self._crowds.pop(next(iter(self._crowds)), None)
        return self._crowds.setdefault(parent, _HotDirectory())

"""What all listings of a mount share: numbers of pages, the names of the latest, and a budget.

The budget counts names that handles hold in memory. Where they hold more than LISTED_MAX together,
the handles that were read longest ago give theirs up; they read their page again when they are
asked for more. So ten thousand open directories cost no more than a few.

Called by `DirStream`. Threading: any thread; the lock is a leaf, `give_up` is called without it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

from fsclient.survival.records import NOT_KEPT, Keeper
from fsmeta.dentries import Dentries
from fsmeta.runtime import Runtime
from fsmeta.types import Ino

EXTENTS_MAX: Final = 100_000  # pages, so 10^8 names; about 25 MB
RECENT_PAGES: Final = 32  # of the mount; about 6 MB
LISTED_MAX: Final = 400_000  # names that handles hold, of about 200 bytes: 80 MB
AHEAD_MAX: Final = 4  # threads that read a page ahead
FIRST_NUMBER: Final = 2  # of pages of directories that have several


class CursorRange(NamedTuple):
    """A part of a directory: from one cursor of the store to another; `end` None: to its end."""

    ino: Ino
    begin: bytes
    end: bytes | None


class NamesPage(NamedTuple):
    """Names in the order of their cookies."""

    extent: CursorRange
    cookies: list[int]
    names: Dentries
    changes: int  # of names in the directory, by when the page was read
    read_at: float


class Holder(Protocol):
    """A handle that holds names."""

    def give_up(self) -> None:
        """Let go of all that can be read again."""


class Pages:
    """A number for each page, and the names of the latest; the oldest are forgotten first."""

    def __init__(
        self,
        runtime: Runtime,
        at_most: int = EXTENTS_MAX,
        listed_max: int = LISTED_MAX,
        keeper: Keeper = NOT_KEPT,
    ) -> None:
        self._keeper = keeper
        self._runtime = runtime
        self._at_most = at_most
        self._listed_max = listed_max
        self._lock = runtime.lock()
        self._numbers: dict[CursorRange, int] = {}  # guarded by _lock, as all below
        self._extents: dict[int, CursorRange] = {}
        self._recent: OrderedDict[int, NamesPage] = OrderedDict()
        self._next = FIRST_NUMBER
        self._held: OrderedDict[int, tuple[Holder, int]] = OrderedDict()  # by id()
        self._ahead = 0
        self.listed = 0  # names that handles hold

    def number(self, extent: CursorRange) -> int:
        """The number of a page."""
        with self._lock:
            number = self._numbers.get(extent)
            if number is None:
                number = self._next
                self._next += 1
                self._numbers[extent] = number
                self._extents[number] = extent
                self._keeper.listed(number, *extent)
                if len(self._extents) > self._at_most:
                    oldest = next(iter(self._extents))
                    del self._numbers[self._extents.pop(oldest)]
                    self._keeper.unlisted(oldest)
            return number

    def restore(self, number: int, extent: CursorRange) -> None:
        """A number that an earlier process has given."""
        with self._lock:
            self._numbers[extent] = number
            self._extents[number] = extent
            self._next = max(self._next, number + 1)

    def extent(self, ino: Ino, number: int) -> CursorRange | None:
        """Where page `number` is; None where that is not known, or of another directory."""
        with self._lock:
            found = self._extents.get(number)
            return found if found is not None and found.ino == ino else None

    def keep(self, number: int, page: NamesPage) -> None:
        """Remember the names of a page for a while."""
        with self._lock:
            self._recent[number] = page
            self._recent.move_to_end(number)
            if len(self._recent) > RECENT_PAGES:
                self._recent.popitem(last=False)

    def recent(self, ino: Ino, number: int) -> NamesPage | None:
        """A page that some handle has read of late."""
        with self._lock:
            page = self._recent.get(number)
            return page if page is not None and page.extent.ino == ino else None

    def hold(self, holder: Holder, names: int) -> None:
        """A handle holds so many names from now on; 0: it is closed. Other handles may have to give
        up theirs."""
        key = id(holder)
        victims: list[Holder] = []
        with self._lock:
            _, before = self._held.pop(key, (holder, 0))
            self.listed += names - before
            if names:
                self._held[key] = holder, names
            while self.listed > self._listed_max and len(self._held) > 1:
                _, (victim, count) = self._held.popitem(last=False)
                self.listed -= count
                victims.append(victim)
        for victim in victims:
            victim.give_up()

    def begin_ahead(self, job: Callable[[], None]) -> bool:
        """Run `job`, which reads a page, on a thread of its own; False where enough do."""
        with self._lock:
            if self._ahead >= AHEAD_MAX:
                return False
            self._ahead += 1

        def run() -> None:
            try:
                job()
            finally:
                with self._lock:
                    self._ahead -= 1

        self._runtime.spawn("listing", run)
        return True

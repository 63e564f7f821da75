"""Listings of directories of any size, in bounded memory: pages, and cookies that outlive them.

A cookie says behind which name a listing goes on: the number of a page, and the name's slot in it,
28 bits of its CRC-32. A page's names are in the order of their slots, so one that is read again is
in the same order, whatever names came and went meanwhile.

Where a page ends depends on how many names there are when it is read. So its number identifies both
of its ends, cursors of the store; read at another time it may be another page. `Pages` keeps that
for the whole mount, and the names of the latest: the kernel keeps listings beyond their handle, and
may ask the next one to go on behind a cookie of the last. It goes on in the page as that was, not
in one that begins at the same place, where a name could stand on the other side of the cut.

A directory that comes in one page, or that we remember whole, is the page WHOLE: its cookies mean
the same to every handle and every process, and fit 32-bit programs.

The store may bring a name twice: Redis does where a hash shrinks while it is scanned. A shrinking
hash only goes over names again that are close to each other in its order, so those brought last
are enough to tell by, if a directory does not shrink to less than a RECENT_MAX-th meanwhile. Names
that await their publication come on the first page, and perhaps again once they are published: so
that page's are remembered to the end.

Called by `Directories`. Threading: any thread; the locks are leaves, and none is held while the
store is asked.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple, TypeAlias
from zlib import crc32

from fsclient.listings.pages import FIRST_NUMBER, CursorRange, NamesPage, Pages
from fsmeta.dentries import NO_NAMES, Dentries
from fsmeta.errors import StoreError
from fsmeta.runtime import Runtime
from fsmeta.txn.row_states import ROW_FIELDS_MAX
from fsmeta.types import Dentry, Ino

SLOT_BITS: Final = 29  # room for 2^34 pages in an off_t; slots take 28, and may be pushed further
PAGES_KEPT: Final = 4  # of a handle; the kernel goes back by what did not fit a program's buffer
RECENT_MAX: Final = 32_768  # names, about 4 MB, only for directories of several pages
WHOLE_MAX: Final = 2 * ROW_FIELDS_MAX  # names; a directory that was listed from memory had half

AHEAD_FROM_S: Final = 0.01  # two threads that take turns on one processor gain nothing

_START: Final = 0  # the number of what comes before every page: `.` and `..`
_WHOLE: Final = 1
assert FIRST_NUMBER > _WHOLE

ReadPage: TypeAlias = Callable[[bytes | None], tuple[Dentries, bytes | None]]
"""The names of a page from a cursor on, each once, and the next cursor: `Meta.listed`."""

Bring: TypeAlias = Callable[[Dentries], object]
"""Told the names of a page that was read ahead: what they lead to will be wanted, too."""


class Part(NamedTuple):
    """Names of one page, the cookie of each, and when that was so."""

    names: Dentries
    cookies: Sequence[int]
    following: Dentries  # those behind them on the same page
    changes: int  # see `Page`
    read_at: float


_NOTHING: Final = Part(NO_NAMES, (), NO_NAMES, 0, 0.0)


class _PageAhead:
    """The page behind the one that is being given out, read by a thread of its own."""

    def __init__(self, begin: bytes, runtime: Runtime) -> None:
        self.begin = begin
        self.done = runtime.event()
        self.found: tuple[Dentries, bytes | None] | None = None  # before `done`
        self.changes = 0
        self.read_at = 0.0


def _no_changes() -> int:
    return 0


class DirStream:
    """One opendir(3), from its last rewind on."""

    def __init__(
        self,
        ino: Ino,
        read: ReadPage,
        known: Pages,
        runtime: Runtime,
        changes: Callable[[], int] = _no_changes,
    ) -> None:
        """`changes` counts changes of names in the directory, as far as we learn of them."""
        self._ino = ino
        self._read = read
        self._known = known
        self._runtime = runtime
        self._changes = changes
        self._lock = runtime.lock()
        self._dots: Sequence[Dentry] | None = None  # once it has begun; written under _lock
        self._begin: NamesPage | None = None  # written under _lock
        self._pages: OrderedDict[int, NamesPage] = OrderedDict()  # written under _lock
        self._recent: deque[list[bytes]] = deque()  # guarded by _lock
        self._seen: set[bytes] = set()  # names of _recent and of the first page; guarded by _lock
        self._pinned = 0  # how many the first page had; guarded by _lock
        self._expected: bytes | None = None  # where the page read last ended; guarded by _lock
        self._ahead: _PageAhead | None = None  # written under _lock
        self._took_s = 0.0  # to read the last page, by whichever thread

    @property
    def is_begun(self) -> bool:
        """Whether its first page was read once."""
        return self._dots is not None

    def begin(self, dots: Sequence[Dentry]) -> None:
        """Read the first page, behind `dots`. To rewind is to do it again."""
        with self._lock:
            self._ahead = None
            self._pages.clear()
            self._dots = dots
        self._read_first()

    def close(self) -> None:
        """Hold nothing any more. What is being read ahead is waited for."""
        ahead = self._ahead
        if ahead is not None:
            ahead.done.wait()
        self._known.hold(self, 0)

    def give_up(self) -> None:
        """See `Holder`. Names may be repeated then, where a table of Redis shrinks meanwhile."""
        with self._lock:
            self._begin = None
            self._pages.clear()
            self._forget()

    def behind(self, cookie: int, at_most: int) -> tuple[Dentries, Sequence[int]]:
        """Some of the names behind `cookie`, and the cookie of each; none at the end."""
        found = self.part(cookie)
        return found.names[:at_most], found.cookies[:at_most]

    def part(self, cookie: int, fits: Callable[[Dentries], int] = len) -> Part:
        """As many names behind `cookie` as `fits`; none at the end."""
        assert self._dots is not None, "no listing without a beginning"
        number = cookie >> SLOT_BITS
        page = self._first() if number == _START else self._page(number)
        if page is None:  # its place is forgotten: rather all of it again than a part never
            page, cookie = self._first(), _START
        at = bisect_right(page.cookies, cookie)
        while at >= len(page.names):
            if page.extent.end is None:
                return _NOTHING
            page, at = self._from(page.extent.end), 0
        rest = page.names[at:]
        count = fits(rest)
        cookies = page.cookies[at : at + count]
        return Part(rest[:count], cookies, rest[count:], page.changes, page.read_at)

    def read_ahead(self, bring: Bring) -> None:
        """Begin to read the page behind the one that was read last, if no thread has.

        Only where the last one has taken a while: a hand-over and two threads cost more otherwise.
        """
        with self._lock:
            begin = self._expected
            if begin is None or self._took_s < AHEAD_FROM_S:
                return
            if any(page.extent.begin == begin for page in self._pages.values()):
                return
            if self._ahead is not None and self._ahead.begin == begin:
                return
            ahead = _PageAhead(begin, self._runtime)
            if self._known.begin_ahead(partial(self._run_ahead, ahead, bring)):
                self._ahead = ahead

    def _run_ahead(self, ahead: _PageAhead, bring: Bring) -> None:
        """What fails here is tried again, and fails, when the page is wanted."""
        try:
            ahead.changes, ahead.read_at = self._changes(), self._runtime.monotonic()
            found = self._read(ahead.begin)
            self._took_s = self._runtime.monotonic() - ahead.read_at
            bring(found[0])
            ahead.found = found
        except (OSError, StoreError):
            pass
        finally:
            ahead.done.set()

    def _first(self) -> NamesPage:
        """The first page, behind `.` and `..`."""
        return self._begin or self._read_first()

    def _read_first(self) -> NamesPage:
        changes, now = self._changes(), self._runtime.monotonic()
        names, end = self._read(None)
        self._took_s = self._runtime.monotonic() - now
        with self._lock:
            extent = CursorRange(self._ino, b"", end)
            number = _WHOLE if end is None else None
            page = self._keep(extent, names, number, changes, now)
            dots = self._dots or ()
            cookies = [*range(1, len(dots) + 1), *page.cookies]
            page = page._replace(cookies=cookies, names=Dentries.of(dots) + page.names)
            self._begin = page
        self._count()
        return page

    def _count(self) -> None:
        """Tell the budget what is held here."""
        with self._lock:
            pages = [*self._pages.values(), *([self._begin] if self._begin else ())]
            names = sum(len(page.names) for page in pages)
            names += len(self._seen) // 2 + 1
        self._known.hold(self, names)

    def _page(self, number: int) -> NamesPage | None:
        """A page by its number; None where it is not known where it begins."""
        page = self._pages.get(number)
        if page is not None:
            return page
        page = self._known.recent(self._ino, number)
        if page is not None:
            with self._lock:
                self._fresh(page.extent, page.names)
                self._put(number, page)
            self._count()
            return page
        if number == _WHOLE:
            return self._read_whole()
        extent = self._known.extent(self._ino, number)
        return None if extent is None else self._from(extent.begin, number)

    def _from(self, begin: bytes, number: int | None = None) -> NamesPage:
        """The page that begins at a cursor, from memory or from the store.

        Cookies are those of page `number`, though it may have come to end elsewhere.
        """
        if number is None:
            with self._lock:
                for page in reversed(self._pages.values()):
                    if page.extent.begin == begin:
                        return page
        ahead = self._ahead
        if ahead is not None and ahead.begin == begin:
            ahead.done.wait()
            self._ahead = None
        if ahead is not None and ahead.begin == begin and ahead.found is not None:
            changes, now = ahead.changes, ahead.read_at
            names, end = ahead.found
        else:
            changes, now = self._changes(), self._runtime.monotonic()
            names, end = self._read(begin)
            self._took_s = self._runtime.monotonic() - now
        with self._lock:
            page = self._keep(CursorRange(self._ino, begin, end), names, number, changes, now)
        self._count()
        return page

    def _read_whole(self) -> NamesPage | None:
        """All names of a directory that was small; None where it is not any more."""
        changes, now = self._changes(), self._runtime.monotonic()
        found: dict[bytes, Dentry] = {}
        names, cursor = self._read(None)
        found.update(zip(names.names, names, strict=True))
        while cursor is not None:
            names, cursor = self._read(cursor)
            found.update(zip(names.names, names, strict=True))
            if len(found) > WHOLE_MAX:
                return None
        with self._lock:
            extent = CursorRange(self._ino, b"", None)
            page = self._keep(extent, Dentries.of(found.values()), _WHOLE, changes, now)
        self._count()
        return page

    def _keep(
        self, extent: CursorRange, names: Dentries, number: int | None, changes: int, now: float
    ) -> NamesPage:
        """Remember a page that has been read, by default with a number of its own.

        The caller holds the lock.
        """
        if number != _WHOLE:
            names = self._fresh(extent, names)
            number = number or self._known.number(extent)
        page = NamesPage(extent, *_in_order(number, names), changes, now)
        self._put(number, page)
        if number != _WHOLE:
            self._known.keep(number, page)
        return page

    def _put(self, number: int, page: NamesPage) -> None:
        self._pages[number] = page
        self._pages.move_to_end(number)
        if len(self._pages) > PAGES_KEPT:
            self._pages.popitem(last=False)

    def _fresh(self, extent: CursorRange, names: Dentries) -> Dentries:
        """Those that have not been brought of late, if this page goes on where the last ended."""
        is_first = not extent.begin
        if is_first or extent.begin != self._expected:
            self._forget()
        self._expected = extent.end
        seen = self._seen
        if not seen.isdisjoint(names.names):
            names = names.pick([at for at, name in enumerate(names.names) if name not in seen])
        latest = names.names
        seen.update(latest)
        if is_first:
            self._pinned = len(latest)
            return names
        self._recent.append(latest)
        while len(seen) > RECENT_MAX + self._pinned:
            seen.difference_update(self._recent.popleft())
        return names

    def _forget(self) -> None:
        self._recent.clear()
        self._seen.clear()
        self._pinned = 0
        self._expected = None


def _in_order(number: int, names: Dentries) -> tuple[list[int], Dentries]:
    """The cookies of a page's names, ascending, and the names in that order."""
    base = (number << SLOT_BITS) + 1
    slots = [base + (crc32(name) >> 4) for name in names.names]
    if len({*slots}) == len(slots):
        order = sorted(range(len(slots)), key=slots.__getitem__)
        return [slots[at] for at in order], names.pick(order)
    order = sorted(range(len(slots)), key=lambda at: (slots[at], names.names[at]))
    cookies = [slots[at] for at in order]
    for at in range(1, len(cookies)):  # of two in one slot the second moves on
        cookies[at] = max(cookies[at], cookies[at - 1] + 1)
    return cookies, names.pick(order)

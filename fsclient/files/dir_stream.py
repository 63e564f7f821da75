"""Listings of directories of any size, in bounded memory: pages, and cookies that outlive them.

A cookie says behind which name a listing goes on: the number of a page, and the name's slot in it,
28 bits of its CRC-32. A page's names are in the order of their slots, so one that is read again is
in the same order, whoever came and went meanwhile.

Where a page ends depends on how many names there are when it is read. So its number stands for
both of its ends, cursors of the store; read at another time it may be another page. `Pages` keeps
that for the whole mount, and the names of the latest: the kernel keeps listings beyond their
handle, and may ask the next one to go on behind a cookie of the last. It goes on in the page as
that was, not in one that begins at the same place, where a name could stand on the other side of
the cut.

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
from typing import Final, NamedTuple, TypeAlias
from zlib import crc32

from fsmeta.runtime import Runtime
from fsmeta.txn.row_cache import ROW_FIELDS_MAX
from fsmeta.types import Dentry, Ino

SLOT_BITS: Final = 29  # room for 2^34 pages in an off_t; slots take 28, and may be pushed further
EXTENTS_MAX: Final = 100_000  # pages, so 10^8 names; about 25 MB
PAGES_KEPT: Final = 4  # of a handle; the kernel goes back by what did not fit a program's buffer
RECENT_PAGES: Final = 32  # of the mount; about 6 MB
RECENT_MAX: Final = 32_768  # names, about 4 MB, only for directories of several pages
WHOLE_MAX: Final = 2 * ROW_FIELDS_MAX  # names; a directory that was listed from memory had half

_START: Final = 0  # the number of what stands before every page: `.` and `..`
_WHOLE: Final = 1
_PAGES: Final = 2  # of directories of several, from here on

ReadPage: TypeAlias = Callable[[bytes | None], tuple[list[Dentry], bytes | None]]
"""The names of a page from a cursor on, each once, and the next cursor: `Meta.names`."""

Names: TypeAlias = tuple[Sequence[Dentry], Sequence[int]]
"""Names, and the cookie of each."""

_NOTHING: Final[Names] = ((), ())


class Extent(NamedTuple):
    """A part of a directory: from one cursor of the store to another; `end` None: to its end."""

    ino: Ino
    begin: bytes
    end: bytes | None


class _Page(NamedTuple):
    """Names in the order of their cookies."""

    extent: Extent
    cookies: list[int]
    names: list[Dentry]


class Pages:
    """A number for each page, and the names of the latest; the oldest are forgotten first."""

    def __init__(self, runtime: Runtime, at_most: int = EXTENTS_MAX) -> None:
        self._at_most = at_most
        self._lock = runtime.lock()
        self._numbers: dict[Extent, int] = {}  # guarded by _lock, as all below
        self._extents: dict[int, Extent] = {}
        self._recent: OrderedDict[int, _Page] = OrderedDict()
        self._next = _PAGES

    def number(self, extent: Extent) -> int:
        """The number of a page."""
        with self._lock:
            number = self._numbers.get(extent)
            if number is None:
                number = self._next
                self._next += 1
                self._numbers[extent] = number
                self._extents[number] = extent
                if len(self._extents) > self._at_most:
                    oldest = next(iter(self._extents))
                    del self._numbers[self._extents.pop(oldest)]
            return number

    def extent(self, ino: Ino, number: int) -> Extent | None:
        """Where page `number` is; None where that is not known, or of another directory."""
        with self._lock:
            found = self._extents.get(number)
            return found if found is not None and found.ino == ino else None

    def keep(self, number: int, page: _Page) -> None:
        """Remember the names of a page for a while."""
        with self._lock:
            self._recent[number] = page
            self._recent.move_to_end(number)
            if len(self._recent) > RECENT_PAGES:
                self._recent.popitem(last=False)

    def recent(self, ino: Ino, number: int) -> _Page | None:
        """A page that some handle has read of late."""
        with self._lock:
            page = self._recent.get(number)
            return page if page is not None and page.extent.ino == ino else None


class DirStream:
    """One opendir(3), from its last rewind on."""

    def __init__(self, ino: Ino, read: ReadPage, known: Pages, runtime: Runtime) -> None:
        self._ino = ino
        self._read = read
        self._known = known
        self._lock = runtime.lock()
        self._begin: _Page | None = None  # written under _lock
        self._pages: OrderedDict[int, _Page] = OrderedDict()  # written under _lock
        self._recent: deque[list[bytes]] = deque()  # guarded by _lock
        self._seen: set[bytes] = set()  # names of _recent and of the first page; guarded by _lock
        self._pinned = 0  # how many the first page had; guarded by _lock
        self._expected: bytes | None = None  # where the page read last ended; guarded by _lock

    def begin(self, dots: Sequence[Dentry]) -> None:
        """Read the first page, behind `dots`. To rewind is to do it again."""
        names, end = self._read(None)
        with self._lock:
            self._pages.clear()
            self._forget()
            page = self._keep(Extent(self._ino, b"", end), names, _WHOLE if end is None else None)
            cookies = [*range(1, len(dots) + 1), *page.cookies]
            self._begin = page._replace(cookies=cookies, names=[*dots, *page.names])

    def behind(self, cookie: int, at_most: int) -> Names:
        """Some of the names behind `cookie`; none at the end."""
        assert self._begin is not None, "no listing without a beginning"
        number = cookie >> SLOT_BITS
        page = self._begin if number == _START else self._page(number)
        if page is None:  # its place is forgotten: rather all of it again than a part never
            page, cookie = self._begin, _START
        at = bisect_right(page.cookies, cookie)
        while at >= len(page.names):
            if page.extent.end is None:
                return _NOTHING
            page, at = self._from(page.extent.end), 0
        return page.names[at : at + at_most], page.cookies[at : at + at_most]

    def _page(self, number: int) -> _Page | None:
        """A page by its number; None where nobody knows where it is."""
        page = self._pages.get(number)
        if page is not None:
            return page
        page = self._known.recent(self._ino, number)
        if page is not None:
            with self._lock:
                self._fresh(page.extent, page.names)
                self._put(number, page)
            return page
        if number == _WHOLE:
            return self._read_whole()
        extent = self._known.extent(self._ino, number)
        return None if extent is None else self._from(extent.begin, number)

    def _from(self, begin: bytes, number: int | None = None) -> _Page:
        """The page that begins at a cursor, from memory or from the store.

        Cookies are those of page `number`, though it may have come to end elsewhere.
        """
        if number is None:
            with self._lock:
                for page in reversed(self._pages.values()):
                    if page.extent.begin == begin:
                        return page
        names, end = self._read(begin)
        with self._lock:
            return self._keep(Extent(self._ino, begin, end), names, number)

    def _read_whole(self) -> _Page | None:
        """All names of a directory that was small; None where it is not any more."""
        found: dict[bytes, Dentry] = {}
        names, cursor = self._read(None)
        found.update([(dentry[0], dentry) for dentry in names])
        while cursor is not None:
            names, cursor = self._read(cursor)
            found.update([(dentry[0], dentry) for dentry in names])
            if len(found) > WHOLE_MAX:
                return None
        with self._lock:
            return self._keep(Extent(self._ino, b"", None), list(found.values()), _WHOLE)

    def _keep(self, extent: Extent, names: list[Dentry], number: int | None) -> _Page:
        """Remember a page that has been read, by default with a number of its own.

        The caller holds the lock.
        """
        if number != _WHOLE:
            names = self._fresh(extent, names)
            number = number or self._known.number(extent)
        page = _Page(extent, *_in_order(number, names))
        self._put(number, page)
        if number != _WHOLE:
            self._known.keep(number, page)
        return page

    def _put(self, number: int, page: _Page) -> None:
        self._pages[number] = page
        self._pages.move_to_end(number)
        if len(self._pages) > PAGES_KEPT:
            self._pages.popitem(last=False)

    def _fresh(self, extent: Extent, names: list[Dentry]) -> list[Dentry]:
        """Those that have not been brought of late, if this page goes on where the last ended."""
        is_first = not extent.begin
        if is_first or extent.begin != self._expected:
            self._forget()
        self._expected = extent.end
        seen = self._seen
        if not seen.isdisjoint([dentry[0] for dentry in names]):
            names = [dentry for dentry in names if dentry[0] not in seen]
        latest = [dentry[0] for dentry in names]
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


def _in_order(number: int, names: list[Dentry]) -> tuple[list[int], list[Dentry]]:
    """The cookies of a page's names, ascending, and the names in that order."""
    base = (number << SLOT_BITS) + 1
    found = {base + (crc32(dentry[0]) >> 4): dentry for dentry in names}
    if len(found) == len(names):
        cookies = sorted(found)
        return cookies, [found[cookie] for cookie in cookies]
    ordered = sorted(names, key=lambda dentry: (crc32(dentry[0]) >> 4, dentry[0]))
    cookies = []
    last = 0
    for dentry in ordered:  # of two in one slot the second moves on
        last = max(base + (crc32(dentry[0]) >> 4), last + 1)
        cookies.append(last)
    return cookies, ordered

"""Listings of directories of any size, in bounded memory: pages, and cookies that outlive them.

A cookie says behind which name a listing goes on: the number of a page, and the name's slot in it,
28 bits of its CRC-32. A page's names are in the order of their slots, so one that is read again is
in the same order, whoever came and went meanwhile. A page is known by the store's cursor at which
it begins; `Positions` remembers that for the whole mount, because the kernel keeps listings beyond
their handle and may ask the next one to go on behind a cookie of the last.

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

from fsmeta.cache import ROW_FIELDS_MAX
from fsmeta.runtime import Runtime
from fsmeta.types import Dentry, Ino

SLOT_BITS: Final = 29  # room for 2^34 pages in an off_t; slots take 28, and may be pushed further
POSITIONS_MAX: Final = 100_000  # pages, so 10^8 names; about 25 MB
PAGES_KEPT: Final = 4  # the kernel goes back by what did not fit a program's buffer, not further
RECENT_MAX: Final = 32_768  # names, about 4 MB, only for directories of several pages
WHOLE_MAX: Final = 2 * ROW_FIELDS_MAX  # names; a directory that was listed from memory had half

_START: Final = 0  # the number of what stands before every page: `.` and `..`
_WHOLE: Final = 1
_FIRST: Final = 2  # of several pages
_PAGES: Final = 3  # further ones, from here on

ReadPage: TypeAlias = Callable[[bytes | None], tuple[list[Dentry], bytes | None]]
"""The names of a page from a cursor on, each once, and the next cursor: `Meta.names`."""

Names: TypeAlias = tuple[Sequence[Dentry], Sequence[int]]
"""Names, and the cookie of each."""

_NOTHING: Final[Names] = ((), ())


class Positions:
    """Where pages begin: a number for each cursor. What was used first is forgotten first."""

    def __init__(self, runtime: Runtime, at_most: int = POSITIONS_MAX) -> None:
        self._at_most = at_most
        self._lock = runtime.lock()
        self._numbers: dict[tuple[Ino, bytes], int] = {}  # guarded by _lock
        self._cursors: dict[int, tuple[Ino, bytes]] = {}  # written under _lock
        self._next = _PAGES  # guarded by _lock

    def number(self, ino: Ino, cursor: bytes) -> int:
        """The number of the page that begins at `cursor`."""
        with self._lock:
            number = self._numbers.get((ino, cursor))
            if number is None:
                number = self._next
                self._next += 1
                self._numbers[ino, cursor] = number
                self._cursors[number] = (ino, cursor)
                if len(self._cursors) > self._at_most:
                    oldest = next(iter(self._cursors))
                    del self._numbers[self._cursors.pop(oldest)]
            return number

    def cursor(self, ino: Ino, number: int) -> bytes | None:
        """Where page `number` begins; None where that is not known, or of another directory."""
        if number == _FIRST:
            return b""
        found = self._cursors.get(number)
        return found[1] if found is not None and found[0] == ino else None


class _Page(NamedTuple):
    """Names in the order of their cookies."""

    cookies: list[int]
    names: list[Dentry]
    following: int | None  # the number of the next page


class Listing:
    """One opendir(3), from its last rewind on."""

    def __init__(self, ino: Ino, read: ReadPage, positions: Positions, runtime: Runtime) -> None:
        self._ino = ino
        self._read = read
        self._positions = positions
        self._lock = runtime.lock()
        self._begin: _Page | None = None  # written under _lock
        self._pages: OrderedDict[int, _Page] = OrderedDict()  # written under _lock
        self._recent: deque[list[bytes]] = deque()  # guarded by _lock
        self._seen: set[bytes] = set()  # names of _recent and of the first page; guarded by _lock
        self._pinned = 0  # how many the first page had; guarded by _lock
        self._expected: int | None = None  # the page behind the one read last; guarded by _lock

    def begin(self, dots: Sequence[Dentry]) -> None:
        """Read the first page, behind `dots`. To rewind is to do it again."""
        names, cursor = self._read(None)
        with self._lock:
            self._pages.clear()
            self._forget()
            number = _WHOLE if cursor is None else _FIRST
            page = self._keep(number, names, cursor)
            cookies = [*range(1, len(dots) + 1), *page.cookies]
            self._begin = page._replace(cookies=cookies, names=[*dots, *page.names])

    def behind(self, cookie: int, at_most: int) -> Names:
        """Some of the names behind `cookie`; none at the end."""
        assert self._begin is not None, "no listing without a beginning"
        number = cookie >> SLOT_BITS
        page = self._begin if number == _START else self._page(number)
        if page is None:  # its position is forgotten: rather all of it again than a part never
            page, cookie = self._begin, _START
        at = bisect_right(page.cookies, cookie)
        while at >= len(page.names):
            if page.following is None:
                return _NOTHING
            page, at = self._page(page.following) or self._begin, 0
        return page.names[at : at + at_most], page.cookies[at : at + at_most]

    def _page(self, number: int) -> _Page | None:
        """A page from memory or from the store; None where nobody knows where it begins."""
        page = self._pages.get(number)
        if page is not None:
            return page
        if number == _WHOLE:
            whole = self._read_whole()
            if whole is None:
                return None
            names, cursor = whole, None
        else:
            begin = self._positions.cursor(self._ino, number)
            if begin is None:
                return None
            names, cursor = self._read(begin)
        with self._lock:
            return self._pages.get(number) or self._keep(number, names, cursor)

    def _read_whole(self) -> list[Dentry] | None:
        """All names of a directory that was small; None where it is not any more."""
        found: dict[bytes, Dentry] = {}
        names, cursor = self._read(None)
        found.update([(dentry[0], dentry) for dentry in names])
        while cursor is not None:
            names, cursor = self._read(cursor)
            found.update([(dentry[0], dentry) for dentry in names])
            if len(found) > WHOLE_MAX:
                return None
        return list(found.values())

    def _keep(self, number: int, names: list[Dentry], cursor: bytes | None) -> _Page:
        """Remember a page that has been read."""
        if number != _WHOLE:
            names = self._fresh(number, names)
        following = None if cursor is None else self._positions.number(self._ino, cursor)
        page = _Page(*_in_order(number, names), following)
        self._expected = following
        self._pages[number] = page
        if len(self._pages) > PAGES_KEPT:
            self._pages.popitem(last=False)
        return page

    def _fresh(self, number: int, names: list[Dentry]) -> list[Dentry]:
        """Those that have not been brought of late, if this page goes on where the last ended."""
        if number != self._expected:
            self._forget()
        seen = self._seen
        if not seen.isdisjoint([dentry[0] for dentry in names]):
            names = [dentry for dentry in names if dentry[0] not in seen]
        latest = [dentry[0] for dentry in names]
        seen.update(latest)
        if number == _FIRST:
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

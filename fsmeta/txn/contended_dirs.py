"""Contended directories: several clients change one, and invalidations cost more than they save.

Each invalidation of a row makes the client read it again, and invalidate the kernel's cache, too,
as often as other clients make names there. So a directory whose invalidations follow each other
closely is *busy* for a while: its two rows (names and attributes) are not leased then, and what the
kernel gets of it is cached for BELIEVED_S. The answer to a commit there has the directory's new
attributes, and they are shown for BELIEVED_S: the kernel asks for them after each change of its
own.

Owned by `RowCache`. Threading: `heard` is called under the cache's lock; all else by any thread,
each step is atomic.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final

from fsmeta.schema.keys import DIR_PREFIX, INODE_PREFIX, dir_row
from fsmeta.store.contract import Key
from fsmeta.types import Ino

GAP_S: Final = 0.03  # invalidations of one directory that follow each other faster make it busy
BUSY_S: Final = 0.5  # for so long; then it is watched, and may become busy, again
BELIEVED_S: Final = 0.02  # about as late as an invalidation may be
DIRS_MAX: Final = 1024  # remembered; the first to come goes first

_PREFIXES: Final = (DIR_PREFIX, INODE_PREFIX)


class _Busy:
    """What is known of one directory."""

    __slots__ = ("fields", "heard", "since", "until")

    def __init__(self, heard: float) -> None:
        self.heard = heard  # when the last invalidation came, or when it was last busy
        self.until = 0.0
        self.since = 0.0
        self.fields: Mapping[bytes, bytes | None] = {}  # of its inode, true at `since` or later


class ContendedDirs:
    """Which directories are busy."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.now = clock
        self._dirs: dict[bytes, _Busy] = {}  # by the id in their rows

    def heard(self, row: bytes) -> bool:
        """`row` was invalidated; whether its directory has become busy by that."""
        if row[:1] != DIR_PREFIX:
            return False
        now = self.now()
        busy = self._dirs.get(row[1:])
        if busy is None:
            if len(self._dirs) >= DIRS_MAX:
                self._dirs.pop(next(iter(self._dirs)))
            self._dirs[row[1:]] = _Busy(now)
            return False
        if now < busy.until:
            return False
        begins = now - busy.heard <= GAP_S
        busy.heard = now
        if begins:
            busy.until = busy.heard = now + BUSY_S
        return begins

    def has(self, row: bytes) -> bool:
        """Whether `row` is one of a busy directory."""
        if not self._dirs or row[:1] not in _PREFIXES:
            return False
        busy = self._dirs.get(row[1:])
        return busy is not None and self.now() < busy.until

    def has_dir(self, ino: Ino) -> bool:
        """Whether a directory is busy; costs nothing where none is."""
        return bool(self._dirs) and self.has(dir_row(ino))

    def has_any(self) -> bool:
        """Whether a directory is, or was, busy; or was invalidated."""
        return bool(self._dirs)

    def among(self, keys: Iterable[Key]) -> Collection[bytes]:
        """The rows of `keys` that `has` says yes to."""
        return {row for row, _ in keys if self.has(row)} if self._dirs else ()

    def learn(self, row: bytes, since: float, fields: Mapping[bytes, bytes | None]) -> None:
        """What a commit that was sent at `since` has left of a directory's inode."""
        busy = self._dirs.get(row[1:])
        if busy is not None:
            busy.since, busy.fields = since, fields

    def forget_row(self, row: bytes) -> None:
        """What was learnt of an inode may be wrong."""
        if row[:1] == INODE_PREFIX:
            self.learn(row, 0.0, {})

    def clear(self) -> None:
        """Anything may have changed."""
        self._dirs.clear()

    def recent(self, row: bytes) -> Mapping[bytes, bytes | None] | None:
        """What a commit of ours has left of a busy directory's inode just now."""
        if not self._dirs or row[:1] != INODE_PREFIX:
            return None
        busy = self._dirs.get(row[1:])
        if busy is None or not busy.fields:
            return None
        now = self.now()
        return busy.fields if now < busy.until and now - busy.since <= BELIEVED_S else None

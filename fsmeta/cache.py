"""What one client remembers of the store, so that a verb's only round trip is its commit.

Reads that only inform a commit may use anything in here: the commit checks them. Reads that are
answered without a commit may use a row only while it is *vouched*: the store has promised to tell
us when others change it (client tracking), and has not.

What comes back from the store may be overtaken, by the news that others have changed it or by a
commit of our own. So whoever is about to read or commit takes a `mark`, and what has changed since
that mark is not stored.

Threading: `get` takes no lock (two dict look-ups, each atomic); everything else takes `_lock`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from fsmeta.apply import merge
from fsmeta.runtime import Runtime
from fsmeta.store import Op, Write, is_table

ROWS_MAX: Final = 100_000  # about 60 MB with two small records a row
_CHANGES_REMEMBERED: Final = 4096  # changes while one request is under way; more forget everything


class Missing:
    """The type of MISSING: not known, as opposed to None, known to be absent."""


MISSING: Final = Missing()


class Mark(NamedTuple):
    """A moment, as the number of changes by others and by ourselves up to it."""

    others: int
    own: int


class _Changes:
    """A numbered log of the latest changes; an entry is a row, or a row and field."""

    def __init__(self) -> None:
        self.count = 0
        self._recent: deque[tuple[int, bytes, bytes]] = deque(maxlen=_CHANGES_REMEMBERED)

    def add(self, row: bytes, field: bytes = b"") -> None:
        """Note a change of `field`, or of the whole row."""
        self.count += 1
        self._recent.append((self.count, row, field))

    def add_everything(self) -> None:
        """Note that any row may have changed."""
        self.count += _CHANGES_REMEMBERED + 1
        self._recent.clear()

    def hit(self, mark: int, row: bytes, field: bytes) -> bool:
        """Whether `field` of `row` changed after `mark`, as far as we remember."""
        if self.count == mark:
            return False
        if self.count - mark > len(self._recent):
            return True
        for at, changed_row, changed_field in reversed(self._recent):
            if at <= mark:
                return False
            if changed_row == row and changed_field in (b"", field):
                return True
        return False


class RowCache:
    """A bounded map row → field → value, with the promise of the store beside it."""

    def __init__(self, runtime: Runtime, rows_max: int = ROWS_MAX) -> None:
        self._rows_max = rows_max
        self._lock = runtime.lock()
        self._rows: dict[bytes, dict[bytes, bytes | None]] = {}  # written under _lock
        self._vouched: set[bytes] = set()  # written under _lock
        self._others = _Changes()  # written under _lock
        self._own = _Changes()  # written under _lock

    def get(self, row: bytes, field: bytes, need_vouched: bool) -> bytes | Missing | None:
        """The value, None where there is none, MISSING where that is not known."""
        if need_vouched and row not in self._vouched:
            return MISSING
        fields = self._rows.get(row)
        return MISSING if fields is None else fields.get(field, MISSING)

    def is_vouched(self, row: bytes) -> bool:
        """Whether the store has promised to tell us when others change `row`."""
        return row in self._vouched

    def mark(self) -> Mark:
        """The moment before a request, for `fill` and `settle`."""
        return Mark(self._others.count, self._own.count)

    def fill(
        self, mark: Mark, row: bytes, fields: Mapping[bytes, bytes | None], vouched: bool
    ) -> None:
        """Remember what a read begun at `mark` found."""
        with self._lock:
            self._store(mark, row, fields, vouched)

    def drop(self, rows: Iterable[bytes]) -> None:
        """Others have changed `rows`, or a commit has shown that we know them wrongly."""
        with self._lock:
            for row in rows:
                self._others.add(row)
                self._rows.pop(row, None)
                self._vouched.discard(row)

    def forget(self) -> None:
        """Anything may have changed."""
        with self._lock:
            self._others.add_everything()
            self._rows.clear()
            self._vouched.clear()

    def settle(
        self,
        mark: Mark,
        checks: Iterable[tuple[bytes, bytes, bytes | None]],
        writes: Sequence[Write],
        vouched: bool,
    ) -> None:
        """The commit that began at `mark` applied: what it checked and wrote is how things are."""
        with self._lock:
            known: dict[bytes, dict[bytes, bytes | None]] = {}
            for row, field, value in checks:
                known.setdefault(row, {})[field] = value
            for write in writes:
                self._follow(known, write)
            for row, fields in known.items():
                self._store(mark, row, fields, vouched)
            for write in writes:
                self._own.add(write[1], write[2] if len(write) > 2 else b"")

    def _follow(
        self, known: dict[bytes, dict[bytes, bytes | None]], write: tuple[object, ...]
    ) -> None:
        """Let one applied write show in `known`; forget a field it changed unseen."""
        match write:
            case (Op.PUT, bytes(row), bytes(field), bytes(value)):
                known.setdefault(row, {})[field] = value
            case (Op.DELETE, bytes(row), bytes(field)):
                known.setdefault(row, {})[field] = None
            case (Op.DELETE_ROW, bytes(row)):
                known.pop(row, None)
                self._rows.pop(row, None)
                self._vouched.discard(row)
            case (Op.APPEND, bytes(row), bytes(field), bytes(suffix)):
                before = self._take(known, row, field)
                if not isinstance(before, Missing):
                    known.setdefault(row, {})[field] = (before or b"") + suffix
            case (Op.MERGE, bytes(row), bytes(field), tuple(parts)):
                before = self._take(known, row, field)
                if isinstance(before, bytes):
                    known.setdefault(row, {})[field] = merge(before, parts)

    def _take(
        self, known: dict[bytes, dict[bytes, bytes | None]], row: bytes, field: bytes
    ) -> bytes | Missing | None:
        """Remove and return what is known of a field, first in `known`, then in the cache."""
        cached = self._rows.get(row, {}).pop(field, MISSING)
        return known.get(row, {}).pop(field, cached)

    def _store(
        self, mark: Mark, row: bytes, fields: Mapping[bytes, bytes | None], vouched: bool
    ) -> None:
        if is_table(row):
            return
        if self._others.hit(mark.others, row, b""):
            self._rows.pop(row, None)
            self._vouched.discard(row)
            return
        old = self._rows.get(row)
        if old is None or (vouched and row not in self._vouched):
            # what was known before the store's promise may be stale; only `fields` is vouched for
            old = self._rows[row] = {}
        if self._own.count == mark.own:
            old.update(fields)
        else:
            self._update_unless_overtaken(old, mark, row, fields)
        if vouched:
            self._vouched.add(row)
        if len(self._rows) > self._rows_max:
            self._evict()

    def _update_unless_overtaken(
        self,
        old: dict[bytes, bytes | None],
        mark: Mark,
        row: bytes,
        fields: Mapping[bytes, bytes | None],
    ) -> None:
        for field, value in fields.items():
            if self._own.hit(mark.own, row, field):
                old.pop(field, None)
            else:
                old[field] = value

    def _evict(self) -> None:
        """Forget the oldest eighth; insertion order is near enough to age."""
        for row in list(self._rows)[: self._rows_max // 8 + 1]:
            del self._rows[row]
            self._vouched.discard(row)

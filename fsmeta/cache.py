"""What one client remembers of the store, so that a verb's only round trip is its commit.

Reads that only inform a commit may use anything in here: the commit checks them. Reads that are
answered without a commit may use a row only while it is *vouched*: the store has promised to tell
us when others change it (client tracking), and has not.

What comes back from the store may be overtaken, by the news that others have changed it or by a
commit of our own. So whoever is about to read or commit takes a `mark`, and what has changed since
that mark is not stored.

A row that is known to have been empty once is *complete*: what is not remembered of it is absent.
So nobody needs to ask whether a name is free in a directory that was made here.

Threading: `get` takes no lock (a few look-ups, each atomic); everything else takes `_lock`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from fsmeta.apply import merge
from fsmeta.runtime import Runtime
from fsmeta.store import APPEND, DELETE, DELETE_ROW, MERGE, PUT, Write, is_table

ROWS_MAX: Final = 100_000  # about 60 MB with two small records a row
ROW_FIELDS_MAX: Final = 20_000  # of one row, say a directory's names: about 4 MB
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
        self._complete: set[bytes] = set()  # rows of which we know every field; under _lock
        self._others = _Changes()  # written under _lock
        self._own = _Changes()  # written under _lock

    def get(self, row: bytes, field: bytes, need_vouched: bool) -> bytes | Missing | None:
        """The value, None where there is none, MISSING where that is not known."""
        if need_vouched and row not in self._vouched:
            return MISSING
        fields = self._rows.get(row)
        if fields is None:
            return MISSING
        value = fields.get(field, MISSING)
        if value is MISSING and row in self._complete:
            return None
        return value

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
                self._discard(row)

    def forget(self) -> None:
        """Anything may have changed."""
        with self._lock:
            self._others.add_everything()
            self._rows.clear()
            self._vouched.clear()
            self._complete.clear()

    def settle(
        self, mark: Mark, empties: Sequence[bytes], writes: Sequence[Write], vouched: bool
    ) -> None:
        """The commit that began at `mark` applied: rows that were empty, and what it wrote."""
        with self._lock:
            for row in empties:
                self._discard(row)
                self._begin(row, vouched)
                self._complete.add(row)
            alone = self._own.count == mark.own
            for write in writes:
                row, field = write[1], write[2] if len(write) > 2 else b""
                if len(row) > 1:
                    fields = self._rows.get(row)
                    if fields is None:
                        fields = self._begin(row, vouched)
                    if alone or not self._own.hit(mark.own, row, field):
                        self._follow(fields, write)
                    else:
                        self._unlearn(row, fields, field)
            for write in writes:
                self._own.add(write[1], write[2] if len(write) > 2 else b"")
            if self._others.count != mark.others:
                for row in {write[1] for write in writes}.union(empties):
                    if self._others.hit(mark.others, row, b""):
                        self._discard(row)

    def _begin(self, row: bytes, vouched: bool) -> dict[bytes, bytes | None]:
        """A row that we know nothing of but what we have just written."""
        fields: dict[bytes, bytes | None] = {}
        self._rows[row] = fields
        if vouched:
            self._vouched.add(row)
        if len(self._rows) > self._rows_max:
            self._evict()
        return fields

    def _follow(self, fields: dict[bytes, bytes | None], write: Write) -> None:
        """Let one applied write show."""
        op, row = write[:2]
        if op == PUT:
            fields[write[2]] = write[3]
            if len(fields) > ROW_FIELDS_MAX:
                self._discard(row)
        elif op == DELETE:
            fields[write[2]] = None
        elif op == DELETE_ROW:
            self._discard(row)
        else:
            before = fields.pop(write[2], MISSING)
            if op == MERGE and isinstance(before, bytes):
                fields[write[2]] = merge(before, write[3:])
            elif op == APPEND and not isinstance(before, Missing):
                fields[write[2]] = (before or b"") + write[3]

    def _unlearn(self, row: bytes, fields: dict[bytes, bytes | None], field: bytes) -> None:
        """A field that two requests of ours brought at once: which came last is not known."""
        if field:
            fields.pop(field, None)
            self._complete.discard(row)
        else:
            self._discard(row)

    def _discard(self, row: bytes) -> None:
        self._rows.pop(row, None)
        self._vouched.discard(row)
        self._complete.discard(row)

    def _store(
        self, mark: Mark, row: bytes, fields: Mapping[bytes, bytes | None], vouched: bool
    ) -> None:
        if is_table(row):
            return
        if self._others.hit(mark.others, row, b""):
            self._discard(row)
            return
        old = self._rows.get(row)
        if old is None or (vouched and row not in self._vouched):
            # what was known before the store's promise may be stale; only `fields` is vouched for
            self._discard(row)
            old = self._begin(row, vouched)
        elif len(old) > ROW_FIELDS_MAX:
            old.clear()
            self._complete.discard(row)
        if self._own.count == mark.own:
            old.update(fields)
        else:
            self._update_unless_overtaken(old, mark, row, fields)

    def _update_unless_overtaken(
        self,
        old: dict[bytes, bytes | None],
        mark: Mark,
        row: bytes,
        fields: Mapping[bytes, bytes | None],
    ) -> None:
        for field, value in fields.items():
            if self._own.hit(mark.own, row, field):
                self._unlearn(row, old, field)
            else:
                old[field] = value

    def _evict(self) -> None:
        """Forget the oldest eighth; insertion order is near enough to age."""
        for row in list(self._rows)[: self._rows_max // 8 + 1]:
            self._discard(row)

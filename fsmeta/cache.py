"""What one client remembers of the store, so that a verb's only round trip is its commit.

Reads that only inform a commit may use anything in here: the commit checks them. Reads that are
answered without a commit may use a row only while it is *vouched*: the store has promised to tell
us when others change it (client tracking), and has not.

What comes back from the store may be overtaken, by the news that others have changed it or by a
commit of our own. So whoever is about to read or commit takes a `mark`, and what has changed since
that mark is not stored.

A row that is known to have been empty once, or that was scanned to its end undisturbed, is
*complete*: what is not remembered of it is absent. So nobody needs to ask whether a name is free in
a directory that was made or listed here.

Threading: what `get` finds it finds without a lock (a few look-ups, each atomic); that something is
absent from a complete row, and everything else, takes `_lock`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from fsmeta.apply import merge
from fsmeta.runtime import Runtime
from fsmeta.store import APPEND, DELETE, DELETE_ROW, MERGE, PUT, Write, is_table

ROWS_MAX: Final = 100_000  # about 60 MB with two small records a row
ROW_FIELDS_MAX: Final = 20_000  # of one row, say a directory's names: about 4 MB
_CHANGES_REMEMBERED: Final = 4096  # changes while one request is under way; more forget everything


_Fields: TypeAlias = Mapping[bytes, bytes | None]
_Rows: TypeAlias = Mapping[bytes, _Fields]
_NO_ROWS: Final[_Rows] = {}


class Missing:
    """The type of MISSING: not known, as opposed to None, known to be absent."""


MISSING: Final = Missing()


class Mark(NamedTuple):
    """A moment, as the number of changes by others and by ourselves up to it."""

    others: int
    own: int


class _Others:
    """A numbered log of the rows that others changed last."""

    def __init__(self) -> None:
        self.count = 0
        self._recent: deque[tuple[int, bytes]] = deque(maxlen=_CHANGES_REMEMBERED)

    def add(self, row: bytes) -> None:
        """Note a change of `row`."""
        self.count += 1
        self._recent.append((self.count, row))

    def add_everything(self) -> None:
        """Note that any row may have changed."""
        self.count += _CHANGES_REMEMBERED + 1
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


class _Own:
    """A numbered log of our own latest commits and reads, as they were taken in.

    A commit must know of reads, too: one that began after it was sent may have seen it applied.
    """

    def __init__(self) -> None:
        self.count = 0
        self._recent: deque[tuple[int, Sequence[Write], _Rows]] = deque(maxlen=_CHANGES_REMEMBERED)

    def add(self, writes: Sequence[Write], filled: _Rows) -> None:
        """Note what a commit has written, or a read has brought."""
        self.count += 1
        self._recent.append((self.count, writes, filled))

    def add_everything(self) -> None:
        """Note that a read has brought too much to be remembered here."""
        self.count += _CHANGES_REMEMBERED + 1
        self._recent.clear()

    def hit(self, mark: int, row: bytes, field: bytes | None) -> bool:
        """Whether `field` (None: anything) of `row` was taken in after `mark`, if we remember."""
        if self.count - mark > len(self._recent):
            return True
        for at, writes, filled in reversed(self._recent):
            if at <= mark:
                return False
            if row in filled and (field is None or field in filled[row]):
                return True
            for write in writes:
                if write[1] == row and (
                    field is None or write[0] == DELETE_ROW or write[2] == field
                ):
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
        self._scanned: dict[bytes, bytes] = {}  # rows known up to this cursor; under _lock
        self._others = _Others()  # written under _lock
        self._own = _Own()  # written under _lock

    def get(self, row: bytes, field: bytes, need_vouched: bool) -> bytes | Missing | None:
        """The value, None where there is none, MISSING where that is not known."""
        if need_vouched and row not in self._vouched:
            return MISSING
        fields = self._rows.get(row)
        if fields is None:
            return MISSING
        value = fields.get(field, MISSING)
        if value is MISSING and row in self._complete:
            with self._lock:  # it may have become so since
                if row in self._complete:
                    return self._rows[row].get(field)
        return value

    def vouched(self, row: bytes) -> Mapping[bytes, bytes | None] | None:
        """What is remembered of a row that the store vouches for; None where it does not."""
        return self._rows.get(row) if row in self._vouched else None

    def complete(self, row: bytes) -> list[tuple[bytes, bytes]] | None:
        """Every field of a row that the store vouches for; None where we don't know every one."""
        with self._lock:
            if row not in self._complete or row not in self._vouched:
                return None
            fields = list(self._rows[row].items())
        return [(name, value) for name, value in fields if value is not None]

    def is_vouched(self, row: bytes) -> bool:
        """Whether the store has promised to tell us when others change `row`."""
        return row in self._vouched

    def vouched_among(self, rows: Iterable[bytes]) -> set[bytes]:
        """Those of `rows` that `is_vouched` says yes to."""
        return self._vouched.intersection(rows)

    def mark(self) -> Mark:
        """The moment before a request, for `fill` and `settle`."""
        return Mark(self._others.count, self._own.count)

    def fill(
        self, mark: Mark, row: bytes, fields: Mapping[bytes, bytes | None], vouched: bool
    ) -> None:
        """Remember what a read begun at `mark` found."""
        with self._lock:
            self._store(mark, row, fields, vouched)
            self._own.add((), {row: fields})

    def fill_page(
        self,
        mark: Mark,
        row: bytes,
        cursor: bytes,
        fields: Mapping[bytes, bytes | None],
        following: bytes | None,
        vouched: bool,
    ) -> None:
        """`fill` with the page of a scan from `cursor` to `following`; the last one, which has
        none following, makes the row complete."""
        assert not is_table(row)
        with self._lock:
            if not cursor:
                if not vouched:
                    self._discard(row)  # news would not have told what is there no more
                self._store(mark, row, {}, vouched)
                self._scanned[row] = cursor
            alone = self._own.count == mark.own or not self._own.hit(mark.own, row, None)
            self._store(mark, row, fields, vouched)
            self._own.add((), {row: fields})
            if self._scanned.get(row) != cursor:
                return
            del self._scanned[row]
            if not alone:
                return  # what is not on the page may have been changed since, who knows how
            if following is None:
                self._complete.add(row)
            else:
                self._scanned[row] = following

    def fill_rows(
        self, mark: Mark, rows: Mapping[bytes, dict[bytes, bytes | None]], vouched: bool
    ) -> None:
        """`fill` for many rows of one read; the inner dicts become the cache's."""
        with self._lock:
            quiet = self._others.count == mark.others and self._own.count == mark.own
            known = self._rows
            for row, fields in rows.items():
                if quiet and vouched and row not in known:
                    known[row] = fields
                    self._vouched.add(row)
                else:
                    self._store(mark, row, fields, vouched)
            self._own.add_everything()
            if len(known) > self._rows_max:
                self._evict()

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
            self._scanned.clear()

    def settle(
        self, mark: Mark, empties: Sequence[bytes], writes: Sequence[Write], vouched: bool
    ) -> None:
        """The commit that began at `mark` applied: rows that were empty, and what it wrote."""
        with self._lock:
            rows = self._rows
            alone = self._own.count == mark.own
            for row in empties:
                self._discard(row)
                if alone or not self._own.hit(mark.own, row, None):
                    self._begin(row, vouched)
                    self._complete.add(row)
            for write in writes:
                row = write[1]
                if len(row) == 1:
                    continue
                fields = rows.get(row)
                if fields is None:
                    fields = self._begin(row, vouched)
                if not alone and self._overtaken(mark, write):
                    self._unlearn(row, fields, write[2] if len(write) > 2 else b"")
                elif write[0] == PUT and len(fields) < ROW_FIELDS_MAX:
                    fields[write[2]] = write[3]
                else:
                    self._follow(fields, write)
            self._own.add(writes, _NO_ROWS)
            if self._others.count != mark.others:
                for row in {write[1] for write in writes}.union(empties):
                    if self._others.hit(mark.others, row):
                        self._discard(row)

    def _overtaken(self, mark: Mark, write: Write) -> bool:
        """Whether another commit of ours has written the same since `mark`."""
        if write[0] == DELETE_ROW:
            return True
        return self._own.hit(mark.own, write[1], write[2])

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
        if op == DELETE and row in self._complete:
            fields.pop(write[2], None)
        elif op == DELETE:
            fields[write[2]] = None
        elif op == MERGE:
            before = fields.get(write[2])
            if before is not None:
                fields[write[2]] = merge(before, write[3:])
        elif op == APPEND:
            if write[2] in fields or row in self._complete:
                fields[write[2]] = (fields.get(write[2]) or b"") + write[3]
        else:  # DELETE_ROW; PUT into a row that has grown too large
            self._discard(row)

    def _unlearn(self, row: bytes, fields: dict[bytes, bytes | None], field: bytes) -> None:
        """A field that two requests of ours brought at once: which came last is not known."""
        if field:
            fields.pop(field, None)
            self._lapse(row)
        else:
            self._discard(row)

    def _discard(self, row: bytes) -> None:
        self._rows.pop(row, None)
        self._vouched.discard(row)
        self._lapse(row)

    def _lapse(self, row: bytes) -> None:
        """We may no longer know every field."""
        self._complete.discard(row)
        self._scanned.pop(row, None)

    def _store(
        self, mark: Mark, row: bytes, fields: Mapping[bytes, bytes | None], vouched: bool
    ) -> None:
        if is_table(row):
            return
        if self._others.count != mark.others and self._others.hit(mark.others, row):
            self._discard(row)
            return
        old = self._rows.get(row)
        if old is None or (vouched and row not in self._vouched):
            # what was known before the store's promise may be stale; only `fields` is vouched for
            self._discard(row)
            old = self._begin(row, vouched)
        elif len(old) > ROW_FIELDS_MAX:
            old.clear()
            self._lapse(row)
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

"""The client's cache of the store's rows, so that a verb's only round trip is its commit.

Reads that only inform a commit may use anything in here: the commit checks them. Answers without a
commit use a row only while it is *leased*: the store reports each change of it (client tracking).

An answer of the store may be overtaken, by an invalidation or by a commit of this client. So a
caller that is about to read or commit takes a `mark`, and what has changed since that mark is not
stored.

A row that is known to have been empty once, or that was scanned to its end undisturbed, is
*complete*: what is not remembered of it is absent. So no commit asks whether a name is free in a
directory that was made or listed here. An answer without a commit relies on the absence of a name
that was not asked for only in a row that was *empty* once and that no other client has changed.

What rarely changes (`lasting`) may still inform a commit after an invalidation of its row.

Threading: what `get` finds it finds without a lock (a few look-ups, each atomic); that something is
absent from a complete row, and everything else, takes `_lock`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Final, cast

from fsmeta.runtime import Runtime
from fsmeta.schema.inode import split
from fsmeta.schema.keys import INODE_PREFIX
from fsmeta.store.contract import is_table
from fsmeta.txn.applied_commits import AppliedCommits
from fsmeta.txn.cached_fields import MISSING, Fields, Mark, Missing, attr_record, big_bytes
from fsmeta.txn.contended_dirs import ContendedDirs
from fsmeta.txn.row_states import RowStates

ROWS_MAX: Final = 100_000  # about 60 MB with two small records a row
FIELDS_MAX: Final = 1_000_000  # of all rows, and an eighth more: 150 MB of short names
BYTES_MAX: Final = 128 << 20  # of values of more than BIG_BYTES, and an eighth more
_FIELDS_NOTED: Final = 64  # of a read; of a larger one only the row, or a listing stayed in memory

_new: Final = tuple.__new__  # makes a NamedTuple in half the time of its constructor


class RowCache:
    """A bounded map row → field → value, with the promise of the store beside it."""

    def __init__(
        self,
        runtime: Runtime,
        rows_max: int = ROWS_MAX,
        fields_max: int = FIELDS_MAX,
        bytes_max: int = BYTES_MAX,
    ) -> None:
        self.busy = ContendedDirs(runtime.monotonic)
        self._lock = runtime.lock()
        self._states = RowStates(rows_max, fields_max, bytes_max)  # changed under _lock
        # its tables, here as well: a look-up goes straight to them
        self._known = self._states.known
        self._rows = self._states.rows
        self._records = self._states.records
        self._leased = self._states.leased
        self._complete = self._states.complete
        self._empty_once = self._states.empty_once
        self._others = self._states.others
        self._own = self._states.own
        self.settle = AppliedCommits(self._lock, self._states, self.busy).settle

    def get(self, row: bytes, field: bytes, need_vouched: bool) -> bytes | Missing | None:
        """The value, None where there is none, MISSING where that is not known."""
        if need_vouched and row not in self._leased:
            return MISSING
        fields = self._rows.get(row) or self._taken_apart(row)
        if fields is None:
            return MISSING
        value = fields.get(field, MISSING)
        if value is MISSING:
            whole = self._empty_once if need_vouched else self._complete
            if row in whole:
                with self._lock:  # it may have become so since
                    if row in whole:
                        return self._rows[row].get(field)
        return value

    def _taken_apart(self, row: bytes) -> Fields | None:
        """What is known of a row that no fields were found of."""
        if row not in self._records:
            return self._rows.get(row)
        with self._lock:
            return self._known.get(row)

    def leased(self, row: bytes) -> Mapping[bytes, bytes | None] | None:
        """What is cached of a leased row; None where it is not leased."""
        if row not in self._leased:
            return None
        return self._rows.get(row) or self._taken_apart(row)

    def several(self, row: bytes, fields: Sequence[bytes]) -> list[bytes | None] | None:
        """Fields of a leased row, at one moment; None where one of them is not known."""
        with self._lock:
            known = self._known.get(row) if row in self._leased else None
            if known is None or not all(field in known for field in fields):
                return None
            return [known[field] for field in fields]

    def attr_records(self, rows: Sequence[bytes]) -> list[bytes | None]:
        """`a` and `v` of inodes, one behind the other, as far as they are leased: b"" where there
        is no such inode, None where that is not known."""
        if not self._leased.issuperset(rows):
            if not self.has_any(rows):
                return [None] * len(rows)
            return [attr_record(self.leased(row)) for row in rows]
        found: list[bytes | None] = [*map(self._records.get, rows)]
        if None not in found:
            return found
        return [
            attr_record(self._rows.get(row)) if record is None else record
            for row, record in zip(rows, found, strict=True)
        ]

    def values(self, row: bytes, begin: int, count: int) -> list[bytes | None]:
        """Some of what is cached of a leased row, behind `begin` other fields."""
        with self._lock:
            fields = self._rows.get(row) if row in self._leased else None
            return [] if fields is None else list(islice(fields.values(), begin, begin + count))

    def complete(self, row: bytes) -> dict[bytes, bytes] | None:
        """Every field of a leased row; None where not every one is known."""
        with self._lock:
            if row not in self._complete or row not in self._leased:
                return None
            fields = self._rows[row].copy()
        if None in fields.values():
            return {name: value for name, value in fields.items() if value is not None}
        return cast("dict[bytes, bytes]", fields)

    def has_any(self, rows: Iterable[bytes]) -> bool:
        """Whether anything is remembered of any of `rows`."""
        known = self._rows.keys(), self._records.keys()
        return not all(each.isdisjoint(rows) for each in known)

    def is_leased(self, row: bytes) -> bool:
        """Whether the store reports each change of `row` by another client."""
        return row in self._leased

    def unleased(self, rows: Sequence[bytes]) -> Sequence[bytes]:
        """Those of `rows` that `is_leased` says no to; `rows` itself where it is all."""
        leased = self._leased
        return rows if leased.isdisjoint(rows) else [row for row in rows if row not in leased]

    def are_leased(self, rows: Iterable[bytes]) -> bool:
        """Whether `is_leased` says yes to all of `rows`."""
        return self._leased.issuperset(rows)

    def mark(self) -> Mark:
        """The moment before a request, for `fill` and `settle`."""
        return _new(Mark, (self._others.count, self._own.count))

    def fill(
        self, mark: Mark, row: bytes, fields: Mapping[bytes, bytes | None], leased: bool
    ) -> None:
        """Remember what a read begun at `mark` found."""
        with self._lock:
            self._states.store(mark, row, fields, leased)
            self._own.add((), {row: None if big_bytes(fields) else fields})

    def fill_page(
        self,
        mark: Mark,
        row: bytes,
        cursor: bytes,
        fields: Mapping[bytes, bytes | None],
        following: bytes | None,
        leased: bool,
    ) -> None:
        """`fill` with the page of a scan from `cursor` to `following`; the last one, which has
        none following, makes the row complete."""
        assert not is_table(row)
        with self._lock:
            if not cursor:
                if not leased:
                    self._states.discard(row)  # no invalidation has told which fields are gone
                self._states.store(mark, row, {}, leased)
                self._states.scanned[row] = cursor
            alone = self._own.count == mark.own or not self._own.hit(mark.own, row, None)
            self._states.store(mark, row, fields, leased)
            self._own.add((), {row: fields if len(fields) <= _FIELDS_NOTED else None})
            if self._states.scanned.get(row) != cursor:
                return
            del self._states.scanned[row]
            if not alone:
                return  # what is not on the page may have been changed since
            if following is None:
                self._complete.add(row)
            else:
                self._states.scanned[row] = following

    def fill_rows(
        self, mark: Mark, rows: Mapping[bytes, dict[bytes, bytes | None]], leased: bool
    ) -> None:
        """`fill` for many rows of one read; the inner dicts become the cache's."""
        with self._lock:
            quiet = self._states.is_quiet(mark)
            for row, fields in rows.items():
                if quiet and leased and row not in self._rows and row not in self._records:
                    self._rows[row] = fields
                    self._leased.add(row)
                    self._known.note(fields)
                else:
                    self._states.store(mark, row, fields, leased)
            self._own.add_everything()
            self._states.discard_all(self._known.too_big())
            self._states.limit_rows()

    def fill_records(
        self, mark: Mark, rows: Sequence[bytes], records: Sequence[bytes], leased: bool
    ) -> None:
        """`fill` with both records of many inodes, one behind the other, from one read."""
        with self._lock:
            quiet = self._states.is_quiet(mark)
            if quiet and leased and not self.has_any(rows):
                self._records.update(zip(rows, records, strict=True))
                self._leased.update(rows)
            else:
                for row, record in zip(rows, records, strict=True):
                    self._states.store(mark, row, split(record), leased)
            self._own.add_everything()
            self._states.limit_rows()

    def drop(self, rows: Iterable[bytes]) -> None:
        """A commit has shown that the cached `rows` are wrong, or may be."""
        with self._lock:
            for row in rows:
                self._others.add(row)
                self._states.discard(row)
                self.busy.forget_row(row)

    def apply_invalidations(self, rows: Sequence[bytes] | None) -> Sequence[bytes] | None:
        """Other clients have changed `rows` (None: perhaps any): they are not leased any more.

        Returns them, with the rows that lose their lease because they are not watched from now on.
        """
        if rows is None:
            self.forget()
            return None
        further: list[bytes] = []
        with self._lock:
            for row in rows:
                self._others.add(row)
                self._states.downgrade(row)
                if self.busy.heard(row):
                    inode = INODE_PREFIX + row[1:]
                    self._others.add(inode)
                    self._states.downgrade(inode)
                    further.append(inode)
        return [*rows, *further] if further else rows

    def downgrade(self, rows: Sequence[bytes] | None) -> None:
        """`apply_invalidations`, but no directory becomes contended by it."""
        if rows is None:
            self.forget()
            return
        with self._lock:
            for row in rows:
                self._others.add(row)
                self._states.downgrade(row)

    def forget(self) -> None:
        """Anything may have changed."""
        with self._lock:
            self.busy.clear()
            self._states.clear()

"""`RowStates`: in which state each row of a `RowCache` is, and each change of that state.

A row is *leased* while the store reports each change of it, *complete* where every field is known,
and *empty once* where it is complete because it began empty. It is *scanned* up to a cursor while
its pages are read. A state is given up as a whole: nothing keeps half of it.

Owned by `RowCache`, which shares it with `AppliedCommits`; both look into the tables themselves.
Threading: the cache's lock is held, but for tables being looked into.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from fsmeta.store.contract import is_table
from fsmeta.txn.cached_fields import Fields, Mark, lasting
from fsmeta.txn.known_rows import KnownRows
from fsmeta.txn.recent_changes import Invalidations, LocalWrites

ROW_FIELDS_MAX: Final = 20_000  # of one row, say a directory's names: about 4 MB


class RowStates:
    """What is known of rows, how well, and what has changed in them lately."""

    def __init__(self, rows_max: int, fields_max: int, bytes_max: int) -> None:
        self._rows_max = rows_max
        self.known = KnownRows(rows_max, fields_max, bytes_max)
        self.rows = self.known.fields
        self.records = self.known.records
        self.leased: set[bytes] = set()
        self.complete: set[bytes] = set()  # rows of which every field is known
        self.empty_once: set[bytes] = set()  # those of them that were empty once
        self.scanned: dict[bytes, bytes] = {}  # rows known up to this cursor
        self.others = Invalidations()
        self.own = LocalWrites()

    def begin(self, row: bytes, leased: bool) -> Fields:
        """A row of which only what was just written is known."""
        fields: Fields = {}
        self.rows[row] = fields
        if leased:
            self.leased.add(row)
        if len(self.rows) + len(self.records) > self._rows_max:
            self.discard_all(self.known.oldest())
        return fields

    def is_quiet(self, mark: Mark) -> bool:
        """Whether nothing has changed since `mark`."""
        return self.others.count == mark.others and self.own.count == mark.own

    def store(
        self, mark: Mark, row: bytes, fields: Mapping[bytes, bytes | None], leased: bool
    ) -> None:
        """Take in what a request that began at `mark` has brought, if it is not overtaken."""
        if is_table(row):
            return
        if self.others.count != mark.others and self.others.hit(mark.others, row):
            self.downgrade(row)
            fields, leased = lasting(row, dict(fields)), False
            if not fields:
                return
        old = self.known.get(row)
        if old is None or (leased and row not in self.leased):
            # what was known before the lease may be stale; only `fields` is leased
            self.discard(row)
            old = self.begin(row, leased)
        elif len(old) > ROW_FIELDS_MAX:
            old.clear()
            self.mark_incomplete(row)
        if self.own.count == mark.own:
            old.update(fields)
        else:
            self._update_unless_overtaken(old, mark, row, fields)
        if self.known.note(fields):
            self.discard_all(self.known.too_big())
            self.discard_all(self.known.too_many())

    def _update_unless_overtaken(
        self, old: Fields, mark: Mark, row: bytes, fields: Mapping[bytes, bytes | None]
    ) -> None:
        for field, value in fields.items():
            if self.own.hit(mark.own, row, field):
                self.drop_field(row, old, field)
            else:
                old[field] = value

    def drop_field(self, row: bytes, fields: Fields, field: bytes) -> None:
        """A field that two requests of ours brought at once: which came last is not known."""
        if field:
            fields.pop(field, None)
            self.mark_incomplete(row)
        else:
            self.discard(row)

    def downgrade(self, row: bytes) -> None:
        """The lease is over: keep what a commit may still be built on."""
        fields = self.known.get(row)
        kept = lasting(row, fields) if fields else None
        if not kept:
            self.discard(row)
            return
        self.leased.discard(row)
        self.mark_incomplete(row)
        self.rows[row] = kept

    def mark_incomplete(self, row: bytes) -> None:
        """We may no longer know every field."""
        self.complete.discard(row)
        self.empty_once.discard(row)
        self.scanned.pop(row, None)

    def discard(self, row: bytes) -> None:
        """Know nothing of a row."""
        self.known.pop(row)
        self.leased.discard(row)
        self.mark_incomplete(row)

    def discard_all(self, rows: Iterable[bytes]) -> None:
        """`discard` for several."""
        for row in rows:
            self.discard(row)

    def limit_rows(self) -> None:
        """Forget the oldest rows where there are too many."""
        if len(self.rows) + len(self.records) > self._rows_max:
            self.discard_all(self.known.oldest())

    def clear(self) -> None:
        """Know nothing; anything may have changed."""
        self.others.add_everything()
        self.known.clear()
        self.leased.clear()
        self.complete.clear()
        self.empty_once.clear()
        self.scanned.clear()

"""Reads of a store with an overlay over it: the reading half of `StagedStore`.

What is laid over a row is taken before the store is asked and again afterwards: a value that moved
from the overlay to the store in between would otherwise be seen in neither.

Threading: any method from any thread; `_cond` guards the overlay, not held across requests.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from fsmeta.errors import NotEmpty
from fsmeta.runtime import Condition
from fsmeta.store.apply import add_decimal
from fsmeta.store.contract import SCAN_PAGE, Key, Page, Store, is_table
from fsmeta.txn.row_cache import MISSING, Missing, RowCache
from fsmeta.writeback.overlay import Known, Overlay


class OverlaidReads:
    """The reads of `Store`."""

    def __init__(self, inner: Store, overlay: Overlay, cond: Condition, beneath: RowCache) -> None:
        self._inner = inner
        self._beneath = beneath
        self._overlay = overlay  # guarded by _cond
        self._cond = cond

    def _known(self, keys: Sequence[Key]) -> list[Known]:
        with self._cond:
            return [self._overlay.get(key) for key in keys]

    def read(self, keys: Sequence[Key], busy: Collection[bytes] = ()) -> list[bytes | None]:
        if not self._overlay:
            return self._inner.read(keys, busy)
        before = self._known(keys)
        sums = self._sums(keys)
        known = [value for value in before if not isinstance(value, Missing)]
        if len(known) == len(keys):
            return known
        wanted = [key for key, value in zip(keys, before, strict=True) if value is MISSING]
        base = dict(zip(wanted, self._inner.read(wanted, busy), strict=True))
        return self._settled(keys, before, base, sums)

    def _sums(self, keys: Sequence[Key]) -> dict[Key, int]:
        """What is to be added to counters."""
        with self._cond:
            return {key: self._overlay.sum(key) for key in keys if is_table(key[0])}

    def _settled(
        self,
        keys: Sequence[Key],
        before: Sequence[Known],
        base: dict[Key, bytes | None],
        sums: Mapping[Key, int] = MappingProxyType({}),
    ) -> list[bytes | None]:
        """The values of `keys`: what is laid over them now, or was `before`, or the store's.

        A counter may be shown too high, by what is being published, but not too low: `sums` as
        they were before the store was asked.
        """
        out: list[bytes | None] = []
        with self._cond:
            for key, earlier in zip(keys, before, strict=True):
                value = self._overlay.get(key)
                if isinstance(value, Missing):
                    value = earlier
                if isinstance(value, Missing):
                    value = base[key]
                    more = max(self._overlay.sum(key), sums.get(key, 0))
                    if more:
                        value = add_decimal(key[0], key[1], value, more)
                out.append(value)
        return out

    def read_many(
        self, rows: Sequence[bytes], fields: Sequence[bytes]
    ) -> list[Sequence[bytes | None]]:
        with self._cond:
            plain = not any(self._overlay.touches(row) for row in rows)
        if plain:
            return self._inner.read_many(rows, fields)
        keys = [(row, field) for row in rows for field in fields]
        before = self._known(keys)
        asked = [row for row in rows if not self._overlay.is_whole(row)]
        found = dict(zip(asked, self._inner.read_many(asked, fields), strict=True))
        base: dict[Key, bytes | None] = dict.fromkeys(keys)
        for row, values in found.items():
            base.update({(row, name): v for name, v in zip(fields, values, strict=True)})
        flat = self._settled(keys, before, base)
        width = len(fields)
        return [flat[at : at + width] for at in range(0, len(flat), width)]

    def read_linked(
        self,
        row: bytes,
        field: bytes,
        skip: int,
        prefix: bytes,
        fields: Sequence[bytes],
        busy: bool = False,
    ) -> tuple[bytes | None, list[bytes | None]]:
        if not self._overlay:
            return self._read_linked(row, field, skip, prefix, fields, busy)
        lifts = self._overlay.lifts
        (dentry,) = self._known([(row, field)])
        if isinstance(dentry, Missing):
            dentry, found = self._read_linked(row, field, skip, prefix, fields, busy)
            if dentry is None:
                return None, []
            linked = prefix + dentry[skip:]
            if not self._overlay.touches(linked) and self._overlay.lifts == lifts:
                return dentry, found
        if dentry is None:
            return None, []
        linked = prefix + dentry[skip:]
        return dentry, self.read([(linked, name) for name in fields])

    def _read_linked(
        self,
        row: bytes,
        field: bytes,
        skip: int,
        prefix: bytes,
        fields: Sequence[bytes],
        busy: bool,
    ) -> tuple[bytes | None, list[bytes | None]]:
        """As the store; a name that is not there is remembered, as it is about to be made."""
        mark = self._beneath.mark()
        dentry, found = self._inner.read_linked(row, field, skip, prefix, fields, busy)
        if dentry is None and not busy:
            self._beneath.fill(mark, row, {field: None}, self._inner.vouches())
        return dentry, found

    def read_rows(self, rows: Sequence[bytes]) -> list[dict[bytes, bytes]]:
        with self._cond:
            before = [self._overlay.row(row) for row in rows]
        found = self._inner.read_rows(rows)
        return [
            self._merged(row, fields, earlier)
            for row, fields, earlier in zip(rows, found, before, strict=True)
        ]

    def read_short_rows(self, rows: Sequence[bytes]) -> list[dict[bytes, bytes] | None]:
        with self._cond:
            before = [self._overlay.row(row) for row in rows]
        found = self._inner.read_short_rows(rows)
        return [
            None if fields is None else self._merged(row, fields, earlier)
            for row, fields, earlier in zip(rows, found, before, strict=True)
        ]

    def _merged(
        self, row: bytes, fields: dict[bytes, bytes], before: dict[bytes, bytes | None]
    ) -> dict[bytes, bytes]:
        """All of a row, given what the store has of it and what was laid over it before."""
        with self._cond:
            now = self._overlay.row(row)
        if not before and not now:
            return fields
        merged: dict[bytes, bytes | None] = {**fields, **before, **now}
        return {field: value for field, value in merged.items() if value is not None}

    def scan(self, row: bytes, cursor: bytes = b"", limit: int = SCAN_PAGE) -> Page:
        """What is laid over a row and not in the store is on the first page."""
        if is_table(row):
            return self._inner.scan(row, cursor, limit)
        page = self._scan(row, cursor, limit)
        while not page.items and page.cursor is not None:  # all that the store has there goes
            page = self._scan(row, page.cursor, limit)
        return page

    def _scan(self, row: bytes, cursor: bytes, limit: int) -> Page:
        with self._cond:
            before = self._overlay.row(row)
        page = self._inner.scan(row, cursor, limit)
        with self._cond:
            over = {**before, **self._overlay.row(row)}
        if not over:
            return page
        shown: dict[bytes, bytes | None] = {field: over.get(field, v) for field, v in page.items}
        if not cursor:
            shown.update(over)
        return Page([(f, v) for f, v in shown.items() if v is not None], page.cursor)

    def require_empty(self, row: bytes) -> None:
        """Raises: NotEmpty where a row has a field that is not about to go."""
        if self.scan(row).items:
            raise NotEmpty(f"{row!r} is not empty")

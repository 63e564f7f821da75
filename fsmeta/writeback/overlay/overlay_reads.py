"""Reads of a store with an overlay over it: the reading half of `StagedStore`.

What is laid over a row is taken before the store is asked and again afterwards: a value that moved
from the overlay to the store in between would otherwise be seen in neither.

Threading: any method from any thread; `_cond` guards the overlay, not held across requests.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Final

from fsmeta.errors import NotEmpty
from fsmeta.runtime import Condition, Runtime
from fsmeta.store.contract import SCAN_PAGE, SUMS, Key, Page, Store, is_table
from fsmeta.store.writes import add_decimal
from fsmeta.txn.cached_fields import MISSING, Missing
from fsmeta.txn.row_cache import RowCache
from fsmeta.writeback.overlay.overlay import Known, Overlay

COUNTING_S: Final = 0.2  # how long reads of counters and what is published wait for each other


class OverlaidReads:
    """The reads of `Store`."""

    def __init__(
        self,
        inner: Store,
        overlay: Overlay,
        cond: Condition,
        beneath: RowCache,
        runtime: Runtime,
    ) -> None:
        self._inner = inner
        self._beneath = beneath
        self._overlay = overlay  # guarded by _cond
        self._cond = cond
        self._clock = runtime.monotonic
        self._counting = 0  # reads of counters that are under way; guarded by _cond

    def _known(self, keys: Sequence[Key]) -> list[Known]:
        with self._cond:
            return [self._overlay.get(key) for key in keys]

    def read(self, keys: Sequence[Key], busy: Collection[bytes] = ()) -> list[bytes | None]:
        if not self._overlay:
            return self._inner.read(keys, busy)
        counters = [key for key in keys if key[0] in SUMS]
        if not counters:
            return self._read(keys, busy, {})
        with self._pausing(counters):
            return self._read(keys, busy, self._sums(counters))

    @contextmanager
    def _pausing(self, counters: Sequence[Key]) -> Iterator[None]:
        """Have nothing published: a counter that is read meanwhile could show it twice, or not.

        What is being published is waited for, but not for long.
        """
        with self._cond:
            self._counting += 1
        try:
            with self._cond:
                self._wait(lambda: any(map(self._overlay.published_soon, counters)))
            yield
        finally:
            with self._cond:
                self._counting -= 1
                self._cond.notify_all()

    def await_counts(self) -> bool:
        """Wait for reads of counters that are under way, but not for long; whether there were some.

        The caller holds the lock.
        """
        if not self._counting:
            return False
        self._wait(lambda: self._counting > 0)
        return True

    def _wait(self, true: Callable[[], bool]) -> None:
        """Wait while that is so, for COUNTING_S at most; lock held."""
        end = self._clock() + COUNTING_S
        while true() and (left := end - self._clock()) > 0:
            self._cond.wait(left)

    def _read(
        self, keys: Sequence[Key], busy: Collection[bytes], sums: Mapping[Key, int]
    ) -> list[bytes | None]:
        before = self._known(keys)
        known = [value for value in before if not isinstance(value, Missing)]
        if len(known) == len(keys):
            return known
        wanted = [key for key, value in zip(keys, before, strict=True) if value is MISSING]
        base = dict(zip(wanted, self._inner.read(wanted, busy), strict=True))
        return self._settled(keys, before, base, sums)

    def _sums(self, counters: Sequence[Key]) -> dict[Key, int]:
        """What is to be added to counters."""
        with self._cond:
            return {key: self._overlay.sum(key) for key in counters}

    def _settled(
        self,
        keys: Sequence[Key],
        before: Sequence[Known],
        base: dict[Key, bytes | None],
        sums: Mapping[Key, int] = MappingProxyType({}),
    ) -> list[bytes | None]:
        """The values of `keys`: what is laid over them now, or was `before`, or the store's.

        A counter may be shown too high where publishing takes longer than a read waits, but not
        too low: `sums` as they were before the store was asked.
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
            self._beneath.fill(mark, row, {field: None}, self._inner.has_leases())
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

"""The in-memory engine: ordered dicts under one lock; the reference for the other engines.

A `MemBackend` is the database; each client opens its own `MemStore` on it. Tracking works as on
Redis: a client that has read a row is told once when another client changes it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from fsmeta.errors import Unavailable
from fsmeta.runtime import Runtime
from fsmeta.store.apply import apply_commit
from fsmeta.store.contract import (
    SCAN_PAGE,
    Applied,
    Commit,
    Key,
    Listener,
    Page,
    Record,
    RowPage,
    Store,
    is_table,
    short_rows,
)
from fsmeta.store.rollback import STEADY
from fsmeta.store.writes import Merge


class MemBackend:
    """What the clients of one in-memory volume share."""

    def __init__(self, runtime: Runtime) -> None:
        self.lock = runtime.lock()
        self.now_ns = runtime.now_ns
        self.rows: dict[bytes, dict[bytes, bytes]] = {}  # guarded by lock
        self.readers: dict[bytes, dict[MemStore, None]] = {}  # to be invalidated; guarded by lock
        self.commits = 0  # applied so far; guarded by lock

    def apply(self, touched: Mapping[bytes, dict[bytes, bytes]]) -> None:
        """Rows as a commit has left them; lock held."""
        for row, fields in touched.items():
            if fields:
                self.rows[row] = fields
            else:
                self.rows.pop(row, None)
        self.commits += 1

    def sync(self) -> None:
        """All that was applied is durable; lock held. Memory has nothing to do for that."""

    def take_readers(
        self, rows: Iterable[bytes], writer: MemStore
    ) -> list[tuple[MemStore, list[bytes]]]:
        """The clients to invalidate after `writer` changed `rows`, each once; lock held."""
        told: dict[MemStore, list[bytes]] = {}
        for row in rows:
            for reader in self.readers.pop(row, ()):
                if reader is not writer:
                    told.setdefault(reader, []).append(row)
        return list(told.items())


class _MemView:
    """A transaction on the backend: puts land in a copy of each touched row."""

    def __init__(self, rows: dict[bytes, dict[bytes, bytes]]) -> None:
        self._rows = rows
        self.touched: dict[bytes, dict[bytes, bytes]] = {}

    def _row(self, row: bytes) -> dict[bytes, bytes]:
        return self.touched.get(row, self._rows.get(row, {}))

    def _own(self, row: bytes) -> dict[bytes, bytes]:
        if row not in self.touched:
            self.touched[row] = dict(self._rows.get(row, {}))
        return self.touched[row]

    def get(self, row: bytes, field: bytes) -> bytes | None:
        return self._row(row).get(field)

    def put(self, row: bytes, field: bytes, value: bytes) -> None:
        assert value, f"empty value at {row!r} {field!r}"
        self._own(row)[field] = value

    def delete(self, row: bytes, field: bytes) -> None:
        self._own(row).pop(field, None)

    def delete_row(self, row: bytes) -> None:
        self.touched[row] = {}

    def is_empty(self, row: bytes) -> bool:
        return not self._row(row)


class MemStore:
    """One client's connection to a `MemBackend`."""

    name = "mem"
    history = STEADY

    def __init__(self, backend: MemBackend, tracked: bool = True) -> None:
        self._backend = backend
        self._tracked = tracked
        self._listener: Listener | None = None
        self._closed = False
        self.round_trips = 0  # guarded by the backend's lock

    def _enter(self, rows: Sequence[bytes]) -> None:
        """Count a request and note that this client has read `rows`; lock held."""
        if self._closed:
            raise Unavailable("store is closed")
        self.round_trips += 1
        self._note_reader(rows)

    def _note_reader(self, rows: Iterable[bytes]) -> None:
        """Report other clients' changes of `rows` to this client from now on; lock held."""
        if self._listener is not None:
            for row in rows:
                if not is_table(row):
                    self._backend.readers.setdefault(row, {})[self] = None

    def read(self, keys: Sequence[Key], busy: Collection[bytes] = ()) -> list[bytes | None]:
        if not keys:
            return []
        rows = self._backend.rows
        with self._backend.lock:
            self._enter([row for row, _ in keys if row not in busy])
            return [rows.get(row, {}).get(field) for row, field in keys]

    def read_many(
        self, rows: Sequence[bytes], fields: Sequence[bytes]
    ) -> list[Sequence[bytes | None]]:
        return [self.read([(row, field) for field in fields]) for row in rows]

    def read_linked(
        self,
        row: bytes,
        field: bytes,
        skip: int,
        prefix: bytes,
        fields: Sequence[bytes],
        busy: bool = False,
    ) -> tuple[bytes | None, list[bytes | None]]:
        rows = self._backend.rows
        with self._backend.lock:
            self._enter([] if busy else [row])
            value = rows.get(row, {}).get(field)
            if value is None:
                return None, []
            linked = rows.get(prefix + value[skip:], {})
            return value, [linked.get(name) for name in fields]

    def read_rows(self, rows: Sequence[bytes]) -> list[dict[bytes, bytes]]:
        if not rows:
            return []
        with self._backend.lock:
            self._enter(rows)
            return [dict(self._backend.rows.get(row, {})) for row in rows]

    def read_short_rows(self, rows: Sequence[bytes]) -> list[dict[bytes, bytes] | None]:
        if not rows:
            return []
        with self._backend.lock:
            self._enter(rows)
            found = (dict(self._backend.rows.get(row, {})) for row in rows)
            return short_rows(found, len(rows))

    def scan(self, row: bytes, cursor: bytes = b"", limit: int = SCAN_PAGE) -> Page:
        with self._backend.lock:
            self._enter([row])
            fields = self._backend.rows.get(row, {})
            names, following = _page_of(fields, cursor, limit)
            return Page([(name, fields[name]) for name in names], following)

    def scan_rows(self, prefix: bytes, cursor: bytes = b"", limit: int = SCAN_PAGE) -> RowPage:
        with self._backend.lock:
            self._enter(())
            matching = [row for row in self._backend.rows if row.startswith(prefix)]
            return RowPage(*_page_of(matching, cursor, limit))

    def commit(self, commit: Commit) -> Applied | None:
        backend = self._backend
        with backend.lock:
            self._enter(())
            view = _MemView(backend.rows)
            apply_commit(view, commit)
            backend.apply(view.touched)
            if commit.durable:
                backend.sync()
            changed = dict.fromkeys(each.row for each in commit.writes if not is_table(each.row))
            told = backend.take_readers(changed, self)
            # what was checked, found empty or written is as well known as what was read
            named = {*changed, *commit.empties, *(check[0] for check in commit.checks)}
            self._note_reader(named.difference(commit.busy))
        for reader, rows in told:
            if reader._listener is not None:
                reader._listener(rows)
        if not commit.busy:
            return None
        merged = [
            view.get(write.row, write.field) for write in commit.writes if isinstance(write, Merge)
        ]
        known = [record for record in merged if record is not None]
        return Applied(merged=known) if len(known) == len(merged) else None

    @contextmanager
    def everything(self) -> Iterator[Iterator[Record]]:
        with self._backend.lock:
            self._enter(())
            rows = {row: dict(fields) for row, fields in self._backend.rows.items()}
        yield ((row, field, value) for row in rows for field, value in rows[row].items())

    def sync(self) -> None:
        with self._backend.lock:
            self._backend.sync()

    def watch(self, listener: Listener) -> None:
        self._listener = listener if self._tracked else None

    def poll_invalidations(self) -> None:
        """Nothing to do: a client that changes a row calls the listeners."""

    def has_leases(self) -> bool:
        return self._listener is not None

    def now_ns(self) -> int:
        return self._backend.now_ns()

    def tidy(self) -> None:
        """Nothing gathers here."""

    def close(self) -> None:
        self._closed = True
        self._listener = None


def _page_of(
    names: dict[bytes, bytes] | list[bytes], cursor: bytes, limit: int
) -> tuple[list[bytes], bytes | None]:
    """Up to `limit` of `names` from `cursor` on, sorted, and the cursor of the rest."""
    ordered = sorted(names)
    begin = bisect_left(ordered, cursor)
    page = ordered[begin : begin + limit]
    more = begin + limit < len(ordered)
    return page, page[-1] + b"\0" if more else None


def _conforms(store: MemStore) -> Store:
    return store

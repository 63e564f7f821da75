"""The SQLite engine: one `WITHOUT ROWID` table in WAL mode; several processes of one host.

One connection, one lock: SQLite has one writer anyway, and a read takes microseconds. Commits are
safe against the end of any process at once, and against power loss after `sync`.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from fsmeta.errors import ConfigError, StoreError, StoreFull, StoreRolledBack, Unavailable
from fsmeta.runtime import Lock, Runtime
from fsmeta.store.apply import apply_commit
from fsmeta.store.contract import (
    SCAN_PAGE,
    SHORT_ROW_FIELDS,
    Commit,
    Key,
    Listener,
    Page,
    Record,
    RowPage,
    Store,
    short_rows,
)
from fsmeta.store.rollback import STEADY

log = logging.getLogger(__name__)

BUSY_TIMEOUT_MS: Final = 5000  # how long one commit waits for another process's
# A checkpoint writes each changed page once, however many commits have changed it, and syncs both
# files; the commit that it falls to waits. SQLite's own 1,000 pages are a hundred small files: on a
# slow disk the syncs took longer than all else. 8,000 are 32 MiB of log, read again after a crash.
CHECKPOINT_PAGES: Final = 8000
_APPLICATION_ID: Final = 0x536C6346  # "SlcF", so that file(1) and we know the database
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS kv (
    row BLOB NOT NULL, field BLOB NOT NULL, value BLOB NOT NULL, PRIMARY KEY (row, field)
) WITHOUT ROWID
"""
_ROWS_AT_ONCE: Final = 256  # of one statement; it may have 32,766 values, and 999 where it is old
_GET: Final = "SELECT value FROM kv WHERE row = ? AND field = ?"
_PUT: Final = "INSERT OR REPLACE INTO kv VALUES (?, ?, ?)"
_FULL: Final = frozenset({sqlite3.SQLITE_FULL})
_UNSYNCED: Final = frozenset({sqlite3.SQLITE_IOERR_FSYNC, sqlite3.SQLITE_IOERR_DIR_FSYNC})
_BUSY: Final = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})


class _SqliteView:
    """The inside of one write transaction."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def get(self, row: bytes, field: bytes) -> bytes | None:
        found = self._db.execute(_GET, (row, field)).fetchone()
        return None if found is None else found[0]

    def put(self, row: bytes, field: bytes, value: bytes) -> None:
        assert value, f"empty value at {row!r} {field!r}"
        self._db.execute(_PUT, (row, field, value))

    def delete(self, row: bytes, field: bytes) -> None:
        self._db.execute("DELETE FROM kv WHERE row = ? AND field = ?", (row, field))

    def delete_row(self, row: bytes) -> None:
        self._db.execute("DELETE FROM kv WHERE row = ?", (row,))

    def is_empty(self, row: bytes) -> bool:
        sql = "SELECT 1 FROM kv WHERE row = ? LIMIT 1"
        return self._db.execute(sql, (row,)).fetchone() is None


class SqliteStore:
    """One process's connection to a volume in a SQLite file."""

    name = "sqlite"
    history = STEADY

    def __init__(self, path: str, runtime: Runtime, create: bool = False) -> None:
        """Raises: ConfigError where there is no such file (unless `create`) or it is not ours."""
        self._runtime = runtime
        self._path = os.path.abspath(path)
        self._lock = runtime.lock()
        self._closed = False  # guarded by _lock
        # Why nothing counts as durable any more: the kernel says once that it has lost pages, and
        # the next sync succeeds. Guarded by _lock.
        self._unsynced = ""
        self.round_trips = 0  # guarded by _lock
        try:
            self._db = _open(path, create)
            self._file = _file_of(self._path)
        except sqlite3.Error as error:
            raise ConfigError(
                f"can't open metadata file {path}: {error}; check the path and its permissions"
            ) from error

    @property
    def path(self) -> str:
        """The file."""
        return self._path

    @property
    def statements(self) -> Lock:
        """Held while a statement runs: while a fork holds it, no transaction is open."""
        return self._lock

    @contextmanager
    def _using(self) -> Iterator[sqlite3.Connection]:
        """The connection, locked; its errors as ours."""
        with self._lock:
            if self._closed:
                raise Unavailable("sqlite: closed")
            self.round_trips += 1
            try:
                yield self._db
            except sqlite3.Error as error:
                if error.sqlite_errorcode in _UNSYNCED and not self._unsynced:
                    self._unsynced = f"{error}"
                    log.error(
                        "sqlite: %s could not be synced: a power failure may lose what was"
                        " committed since the last sync. fsync fails until the next mount",
                        self._path,
                    )
                raise _translate(error) from error

    def _require_synced(self) -> None:
        """The caller holds the lock. Raises: StoreError."""
        if self._unsynced:
            raise StoreError(f"sqlite: an earlier sync failed: {self._unsynced}")

    def _require_file(self) -> None:
        """What is written goes to the file that others open. Raises: Rewound."""
        if _file_of(self._path) != self._file:
            raise StoreRolledBack(
                f"sqlite: {self._path} was replaced or removed under this mount,"
                " which stops writing"
            )

    def read(self, keys: Sequence[Key], busy: Collection[bytes] = ()) -> list[bytes | None]:
        del busy  # nothing is watched
        if not keys:
            return []
        with self._using() as db:
            if len(keys) == 1:
                return [_first(db, keys[0])]
            with _snapshot(db):
                return [_first(db, key) for key in keys]

    def read_many(
        self, rows: Sequence[bytes], fields: Sequence[bytes]
    ) -> list[Sequence[bytes | None]]:
        found: dict[bytes, Sequence[bytes | None]] = {}
        with self._using() as db, _snapshot(db):
            for begin in range(0, len(rows), _ROWS_AT_ONCE):
                found.update(_of_rows(db, rows[begin : begin + _ROWS_AT_ONCE], fields))
        return [found[row] for row in rows]

    def read_linked(
        self,
        row: bytes,
        field: bytes,
        skip: int,
        prefix: bytes,
        fields: Sequence[bytes],
        busy: bool = False,
    ) -> tuple[bytes | None, list[bytes | None]]:
        del busy
        with self._using() as db, _snapshot(db):
            value = _first(db, (row, field))
            if value is None:
                return None, []
            linked = prefix + value[skip:]
            return value, [_first(db, (linked, name)) for name in fields]

    def read_rows(self, rows: Sequence[bytes]) -> list[dict[bytes, bytes]]:
        if not rows:
            return []
        sql = "SELECT field, value FROM kv WHERE row = ?"
        with self._using() as db, _snapshot(db):
            return [dict(db.execute(sql, (row,))) for row in rows]

    def read_short_rows(self, rows: Sequence[bytes]) -> list[dict[bytes, bytes] | None]:
        if not rows:
            return []
        sql = "SELECT field, value FROM kv WHERE row = ? LIMIT ?"
        with self._using() as db, _snapshot(db):
            found = (dict(db.execute(sql, (row, SHORT_ROW_FIELDS + 1))) for row in rows)
            return short_rows(found, len(rows))

    def scan(self, row: bytes, cursor: bytes = b"", limit: int = SCAN_PAGE) -> Page:
        sql = "SELECT field, value FROM kv WHERE row = ? AND field >= ? ORDER BY field LIMIT ?"
        with self._using() as db:
            items = db.execute(sql, (row, cursor, limit)).fetchall()
        return Page(items, items[-1][0] + b"\0" if len(items) == limit else None)

    def scan_rows(self, prefix: bytes, cursor: bytes = b"", limit: int = SCAN_PAGE) -> RowPage:
        # each step skips to the next row by the primary key, whatever the rows hold
        sql = """
        WITH RECURSIVE next(row) AS (
            SELECT min(row) FROM kv WHERE row >= ?1
            UNION ALL
            SELECT (SELECT min(row) FROM kv WHERE row > next.row) FROM next
                WHERE substr(row, 1, ?2) = ?3
        ) SELECT row FROM next WHERE substr(row, 1, ?2) = ?3 LIMIT ?4
        """
        begin = max(prefix, cursor)
        with self._using() as db:
            rows = [found[0] for found in db.execute(sql, (begin, len(prefix), prefix, limit))]
        return RowPage(rows, rows[-1] + b"\0" if len(rows) == limit else None)

    def commit(self, commit: Commit) -> None:
        if commit.writes:
            self._require_file()
        if commit.durable:
            self._runtime.will_wait()
        with self._using() as db, _synced(db, commit.durable):
            if commit.durable:
                self._require_synced()
            db.execute("BEGIN IMMEDIATE" if commit.writes else "BEGIN")
            try:
                apply_commit(_SqliteView(db), commit)
                db.execute("COMMIT")
            except BaseException:
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise

    @contextmanager
    def everything(self) -> Iterator[Iterator[Record]]:
        try:
            db = _open(self._path, create=False)  # a transaction of its own; others go on
            try:
                db.execute("BEGIN")
                yield iter(db.execute("SELECT row, field, value FROM kv"))
            finally:
                db.close()
        except sqlite3.Error as error:
            raise _translate(error) from error

    def sync(self) -> None:
        """Write the log to disk: a commit with synchronous=FULL takes all earlier ones along."""
        self._runtime.will_wait()
        self._require_file()
        with self._using() as db, _synced(db, True):
            self._require_synced()
            try:
                db.execute("BEGIN IMMEDIATE")
                db.execute(_PUT, (b"Z", b"sync", b"1"))
                db.execute("COMMIT")
            finally:
                if db.in_transaction:
                    db.execute("ROLLBACK")

    def watch(self, listener: Listener) -> None:
        """SQLite sends no invalidations; callers fall back on short timeouts."""

    def poll_invalidations(self) -> None:
        """There are no invalidations."""

    def has_leases(self) -> bool:
        return False

    def now_ns(self) -> int:
        return self._runtime.now_ns()

    def tidy(self) -> None:
        """SQLite does so itself."""

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._db.close()


def _file_of(path: str) -> tuple[int, int] | None:
    """Which file is there; None where there is none. Raises: Unavailable."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Unavailable(f"sqlite: {error}") from error
    return found.st_dev, found.st_ino


def _open(path: str, create: bool) -> sqlite3.Connection:
    mode = "rwc" if create else "rw"
    if create and not os.path.exists(path):  # other users may not read names and modes
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    db = sqlite3.connect(
        f"file:{_quote(path)}?mode={mode}",
        uri=True,
        isolation_level=None,
        check_same_thread=False,
        cached_statements=64,
    )
    try:
        db.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
        owner = db.execute("PRAGMA application_id").fetchone()[0]
        tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if owner != _APPLICATION_ID and (tables or not create):
            raise ConfigError(f"{path} is not a SliceFS metadata file: choose another path")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
        if owner != _APPLICATION_ID:
            _begin_file(db)
    except BaseException:
        db.close()
        raise
    return db


def _begin_file(db: sqlite3.Connection) -> None:
    """Make an empty file ours, at once: a crash leaves no table without its owner's mark."""
    db.execute("BEGIN IMMEDIATE")
    db.execute(_SCHEMA)
    db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
    db.execute("COMMIT")


def _quote(path: str) -> str:
    return path.replace("%", "%25").replace("?", "%3f").replace("#", "%23")


def _of_rows(
    db: sqlite3.Connection, rows: Sequence[bytes], fields: Sequence[bytes]
) -> Iterator[tuple[bytes, Sequence[bytes | None]]]:
    """`fields` of each row, by one statement: one for each value takes ten times as long."""
    room = 1 << (len(rows) - 1).bit_length()  # few texts, so that they stay prepared
    rows = [*rows, *[rows[0]] * (room - len(rows))]
    values = ",".join(["(?)"] * room)
    column = "(SELECT value FROM kv WHERE row = r AND field = ?)"
    columns = ", ".join(["r", *[column] * len(fields)])
    sql = f"WITH wanted(r) AS (VALUES {values}) SELECT {columns} FROM wanted"
    return ((found[0], found[1:]) for found in db.execute(sql, (*rows, *fields)))


def _first(db: sqlite3.Connection, key: Key) -> bytes | None:
    found = db.execute(_GET, key).fetchone()
    return None if found is None else found[0]


@contextmanager
def _synced(db: sqlite3.Connection, durable: bool) -> Iterator[None]:
    """COMMIT returns when the log is on the disk, where it is to be `durable`."""
    if not durable:
        yield
        return
    db.execute("PRAGMA synchronous = FULL")
    try:
        yield
    finally:
        db.execute("PRAGMA synchronous = NORMAL")


@contextmanager
def _snapshot(db: sqlite3.Connection) -> Iterator[None]:
    """Several reads at one moment."""
    db.execute("BEGIN")
    try:
        yield
    finally:
        db.execute("COMMIT")


def _translate(error: sqlite3.Error) -> StoreError:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in _FULL:
        return StoreFull(f"sqlite: {error}")
    if code in _BUSY:
        return Unavailable(f"sqlite: {error}")
    return StoreError(f"sqlite: {error}")


def _conforms(store: SqliteStore) -> Store:
    return store

"""Tables that do not fit into memory: a temporary SQLite database, which goes when it is closed.

A check of a whole volume (`check`, and `fsck` with the objects) notes here what it has seen and
reads it back in order. SQLite keeps what fits into its cache in memory and the rest in a file
without a name (in SQLITE_TMPDIR, TMPDIR or /var/tmp), so a small volume costs no file at all.

Rows are gathered and inserted by the thousand, sorted, since a B-tree takes them in its own order
ten times as fast as at random. One thread.
"""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from typing import Any, Final, NamedTuple, TypeAlias

CACHE_BYTES: Final = 64 << 20  # what a million inodes take up; more of them are in the file
GATHERED_MAX: Final = 10_000  # rows that wait for their turn, about 2 MB
_AT_ONCE: Final = 200
ID_MAX: Final = (1 << 63) - 1  # an integer of SQLite is signed

Row: TypeAlias = tuple[Any, ...]
Value: TypeAlias = int | bytes | str | None


@lru_cache(maxsize=8)
def _empty(script: str) -> sqlite3.Connection:
    """A database with the tables of a script, to be copied; SQLite serialises the copies."""
    made = sqlite3.connect(":memory:", check_same_thread=False)
    made.executescript(script)
    return made


class Place(NamedTuple):
    """How far a check has come."""

    phase: str = ""  # none: it has not begun
    at: bytes = b""  # where in the phase it goes on


class SpillTable:
    """Tables by name; a row whose primary key is there already is dropped."""

    def __init__(self, script: str, cache_bytes: int = CACHE_BYTES) -> None:
        """`script` creates the tables."""
        self.place = Place()
        self._link = self._open(script)
        self._link.execute(f"PRAGMA cache_size = -{max(1, cache_bytes >> 10)}")
        self._link.execute("BEGIN")  # and here never a COMMIT: it is not read again after this
        self._gathered: dict[str, list[Row]] = {}
        self._count = 0

    def _open(self, script: str) -> sqlite3.Connection:
        link = sqlite3.connect("", isolation_level=None)
        _empty(script).backup(link)  # a fifth of the time that creating tables takes
        link.execute("PRAGMA journal_mode = OFF")
        return link

    def begin(self, identity: bytes) -> None:
        """A check of the volume in the state `identity` begins, or goes on at `place`."""

    def step(self, phase: str, at: bytes = b"") -> None:
        """All before `at` in `phase` is noted."""

    def add(self, table: str, *row: Value) -> None:
        """Put a row in, sooner or later; always before anything is asked."""
        self._gathered.setdefault(table, []).append(row)
        self._count += 1
        if self._count >= GATHERED_MAX:
            self._settle()

    def _settle(self) -> None:
        if not self._count:
            return
        for table, rows in self._gathered.items():
            rows.sort()
            marks = ",".join("?" * len(rows[0]))
            command = f"INSERT OR IGNORE INTO {table} VALUES({marks})"
            self._do(partial(self._link.executemany, command, rows))
        self._gathered = {}
        self._count = 0

    def rows(self, query: str, *values: Value) -> Iterator[Row]:
        """What a query finds, a row at a time. Raises: OSError where there is no room."""
        self._settle()
        cursor = self._do(lambda: self._link.execute(query, values))
        while batch := self._do(partial(cursor.fetchmany, _AT_ONCE)):
            yield from batch

    def one(self, query: str, *values: Value) -> Row | None:
        """The first row that a query finds. Raises: OSError where there is no room."""
        self._settle()
        found: Row | None = self._do(lambda: self._link.execute(query, values).fetchone())
        return found

    def run(self, command: str, *values: Value) -> None:
        """Change something at once. Raises: OSError where there is no room."""
        self._settle()
        self._do(lambda: self._link.execute(command, values))

    def _do(self, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL:
                text = "no room for temporary tables: let TMPDIR name another directory"
                raise OSError(errno.ENOSPC, text) from error
            raise OSError(errno.EIO, f"temporary tables: {error}") from error

    def close(self) -> None:
        """Let everything go; idempotent."""
        self._link.close()


class Groups:
    """Rows in ascending order of their first column, handed out by it in one pass."""

    def __init__(self, rows: Iterable[Row], stray: Callable[[Row], None] | None = None) -> None:
        """`stray` is called with each row that was not asked for."""
        self._rows = iter(rows)
        self._stray = stray
        self._head = next(self._rows, None)

    def of(self, key: int) -> list[Row]:
        """The rows of `key`; keys are asked for in ascending order."""
        head = self._head
        if head is None or head[0] > key:
            return []
        while head is not None and head[0] < key:
            if self._stray is not None:
                self._stray(head)
            head = next(self._rows, None)
        found: list[Row] = []
        while head is not None and head[0] == key:
            found.append(head)
            head = next(self._rows, None)
        self._head = head
        return found

    def end(self) -> None:
        """No more keys are asked for: what is left is stray."""
        self.of(ID_MAX)

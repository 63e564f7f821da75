"""Tables of a check in a file that the user names, so that a check that was killed can go on.

What is noted up to a step is committed with the step, every SAVE_EVERY_S: a killed process leaves
the last one. The file is written in SQLite's WAL mode without fsync: what a loss of power damages
is only notes, and the check then begins anew. One thread, and one process: the file is locked.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NamedTuple
from zlib import crc32

from fsmeta.check.spill_table import CACHE_BYTES, Place, SpillTable
from fsmeta.errors import ConfigError

SAVE_EVERY_S: Final = 5.0  # what is lost by a kill
_PLACE: Final = "CREATE TABLE place(number INTEGER PRIMARY KEY, identity, phase, at);"
_BESIDE: Final = ("", "-wal", "-shm")


class KeptAt(NamedTuple):
    """Where a check keeps its notes."""

    path: str
    clock: Callable[[], float]  # seconds that only grow


class KeptTable(SpillTable):
    """A `SpillTable` in a file."""

    def __init__(self, script: str, kept: KeptAt, cache_bytes: int = CACHE_BYTES) -> None:
        """Raises: ConfigError where the file is no such table, or another process has it."""
        self._path = kept.path
        self._clock = kept.clock
        self._identity = b""
        super().__init__(script, cache_bytes)
        self._saved = self._clock()

    def _open(self, script: str) -> sqlite3.Connection:
        made = not os.path.exists(self._path)
        try:
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError as error:
            raise ConfigError(f"--cursor {self._path}: {error.strerror}: name a file") from error
        link = sqlite3.connect(self._path, isolation_level=None, timeout=0)
        try:
            link.execute("PRAGMA locking_mode = EXCLUSIVE")
            link.execute("PRAGMA journal_mode = WAL")
            link.execute("PRAGMA synchronous = OFF")
            self._require_tables(link, f"{script};\n{_PLACE}")
        except sqlite3.Error as error:
            link.close()
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if made and code != sqlite3.SQLITE_BUSY:
                forget(self._path)
            if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
                text = f"--cursor {self._path}: {error}: name a file on a disk with room"
                raise ConfigError(text) from error
            if code == sqlite3.SQLITE_BUSY:
                text = f"--cursor {self._path}: another fsck uses it: wait, or name another file"
                raise ConfigError(text) from error
            raise _foreign(self._path) from error
        except BaseException:
            link.close()
            raise
        return link

    def _require_tables(self, link: sqlite3.Connection, script: str) -> None:
        version = crc32(script.encode()) >> 1 | 1
        (found,) = link.execute("PRAGMA user_version").fetchone()
        (tables,) = link.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
        if not tables:
            link.executescript(f"BEGIN; {script}; PRAGMA user_version = {version}; COMMIT")
        elif found != version:
            raise _foreign(self._path)

    def begin(self, identity: bytes) -> None:
        """Go on where an earlier check of the same volume in the same state was, or forget it."""
        self._identity = identity
        row = self.one("SELECT identity, phase, at FROM place")
        if row is not None and row[0] == identity:
            self.place = Place(row[1], row[2])
            return
        query = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite%'"
        for (table,) in list(self.rows(query)):
            self.run(f"DELETE FROM {table}")
        self.place = Place()
        self._save()

    def step(self, phase: str, at: bytes = b"") -> None:
        """All before `at` in `phase` is noted; what was before another phase is kept at once."""
        due = phase != self.place.phase or self._clock() - self._saved >= SAVE_EVERY_S
        self.place = Place(phase, at)
        if due:
            self._save()

    def _save(self) -> None:
        self.run("INSERT OR REPLACE INTO place VALUES(0, ?, ?, ?)", self._identity, *self.place)
        self.run("COMMIT")
        self.run("BEGIN")
        self._saved = self._clock()


def forget(path: str) -> None:
    """Remove the file of a check that is through."""
    for suffix in _BESIDE:
        with suppress(FileNotFoundError):
            os.unlink(path + suffix)


def _foreign(path: str) -> ConfigError:
    text = f"--cursor {path} is not of an fsck of this version: remove it, or name another file"
    return ConfigError(text)

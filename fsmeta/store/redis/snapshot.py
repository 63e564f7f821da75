"""Everything in a Redis database as it was at one moment, while other clients change it.

While the hash NOTES exists, `redis/redis_commit.lua` notes in it what each field held before its
first change. So what was true at the beginning is the note, or where there is none, what is there
now; docs/design/redis-and-backups has the argument. The hash expires unless its reader renews it.

Called by `RedisStore.everything`. Threading: one thread reads.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

from fsmeta.errors import ConfigError, StoreError, Unavailable
from fsmeta.store.contract import SCAN_PAGE, Record

NOTES: Final = b"\0"  # a table, so its changes are not reported
NOTES_EXPIRE_MS: Final = 30_000  # a page takes 50 ms; a reader that is silent for so long has died
_OWNER: Final = b""  # the field that names the reader; no note has this name
_ABSENT: Final = b"-"  # the note of a field that was not there; other notes begin with "="
_ROWS_AT_ONCE: Final = 128  # of at most SCAN_PAGE fields each
_LENGTH: Final = struct.Struct(">H")

Ask = Callable[[Sequence[tuple[bytes, ...]]], list[Any]]
"""Sends commands together, and returns their answers. Raises: Unavailable."""


@contextmanager
def everything(ask: Ask, prefix: bytes = b"") -> Iterator[Iterator[Record]]:
    """All records as they are now, of the rows whose names have `prefix` before them in Redis.

    Raises: Unavailable, ConfigError where another client reads.
    """
    reader = _SnapshotReader(ask, prefix)
    reader.begin()
    try:
        yield reader.records()
    finally:
        with suppress(StoreError):  # else it expires
            reader.end()


class _SnapshotReader:
    def __init__(self, ask: Ask, prefix: bytes) -> None:
        self._ask = ask
        self._prefix = prefix
        self._notes = prefix + NOTES
        self._token = os.urandom(16)

    def begin(self) -> None:
        """From now on changes are noted."""
        # One command, so that a lost answer leaves no notes that never expire, and its repeat finds
        # the notes to be this reader's.
        (owner,) = self._ask(
            [(b"EVAL", _BEGIN, b"1", self._notes, self._token, b"%d" % NOTES_EXPIRE_MS)]
        )
        if owner != self._token:
            raise ConfigError(
                "another dump of this volume is running: wait until it ends, or for "
                f"{NOTES_EXPIRE_MS // 1000} s if it was interrupted"
            )

    def end(self) -> None:
        """Changes need not be noted any more."""
        (owner,) = self._ask([(b"HGET", self._notes, _OWNER)])
        if owner == self._token:
            self._ask([(b"UNLINK", self._notes)])

    def _renew(self) -> int:
        """Go on; how many notes there are. Raises: Unavailable where it was given up for dead."""
        owner, _, count = self._ask(
            [
                (b"HGET", self._notes, _OWNER),
                (b"PEXPIRE", self._notes, b"%d" % NOTES_EXPIRE_MS),
                (b"HLEN", self._notes),
            ]
        )
        if owner != self._token:
            raise Unavailable("redis: reading everything took too long between two pages")
        return int(count) - 1

    def records(self) -> Iterator[Record]:
        """What was there at the beginning; parts of it twice."""
        skip = len(self._prefix)
        return ((row[skip:], field, value) for row, field, value in self._records())

    def _records(self) -> Iterator[Record]:
        # a prefix is `{NAME}`, in which nothing has to be escaped
        match = (b"MATCH", self._prefix + b"*") if self._prefix else ()
        cursor: bytes | None = None
        while cursor != b"0":
            ((cursor, keys),) = self._ask(
                [(b"SCAN", cursor or b"0", *match, b"COUNT", b"%d" % SCAN_PAGE, b"TYPE", b"hash")]
            )
            rows = [key for key in keys if key != self._notes]
            for begin in range(0, len(rows), _ROWS_AT_ONCE):
                yield from self._rows(rows[begin : begin + _ROWS_AT_ONCE])
        yield from self._changed()

    def _rows(self, rows: list[bytes]) -> Iterator[Record]:
        """All fields of these rows."""
        left = [(row, b"0") for row in rows]
        while left:
            count = b"%d" % SCAN_PAGE
            pages = self._ask([(b"HSCAN", row, at, b"COUNT", count) for row, at in left])
            found = [
                (row, flat[i], flat[i + 1])
                for (row, _), (_, flat) in zip(left, pages, strict=True)
                for i in range(0, len(flat), 2)
            ]
            left = [
                (row, following)
                for (row, _), (following, _) in zip(left, pages, strict=True)
                if following != b"0"
            ]
            yield from self._as_it_was(found)

    def _as_it_was(self, found: list[Record]) -> list[Record]:
        """Of what has just been read: what was there at the beginning."""
        if not self._renew():
            return found
        notes: list[bytes | None] = []
        for begin in range(0, len(found), SCAN_PAGE):
            names = [_note(row, field) for row, field, _ in found[begin : begin + SCAN_PAGE]]
            notes += self._ask([(b"HMGET", self._notes, *names)])[0]
        return [
            (row, field, value if note is None else note[1:])
            for (row, field, value), note in zip(found, notes, strict=True)
            if note != _ABSENT
        ]

    def _changed(self) -> Iterator[Record]:
        """Everything that was changed since: of rows that are gone nothing else tells."""
        cursor: bytes | None = None
        while cursor != b"0":
            ((cursor, flat),) = self._ask(
                [(b"HSCAN", self._notes, cursor or b"0", b"COUNT", b"%d" % SCAN_PAGE)]
            )
            self._renew()
            for i in range(0, len(flat), 2):
                name, note = flat[i], flat[i + 1]
                if name != _OWNER and note != _ABSENT:
                    length = _LENGTH.unpack_from(name)[0]
                    yield name[2 : 2 + length], name[2 + length :], note[1:]


# KEYS[1]: the notes; ARGV: token of the reader, how long they are kept. Their owner. Notes of an
# earlier version, whose reader died before they had an expiry, get one.
_BEGIN: Final = b"""
redis.call('HSETNX', KEYS[1], '', ARGV[1])
local owner = redis.call('HGET', KEYS[1], '')
if owner == ARGV[1] or redis.call('PTTL', KEYS[1]) == -1 then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
return owner
"""


def _note(row: bytes, field: bytes) -> bytes:
    """The name of a note, as `redis/redis_commit.lua` makes it."""
    return _LENGTH.pack(len(row)) + row + field

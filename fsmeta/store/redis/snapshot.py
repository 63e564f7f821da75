"""Everything in a Redis database as it was at one moment, while others change it.

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

NOTES: Final = b"\0"  # a table, so nobody is told of its changes
NOTES_EXPIRE_MS: Final = 30_000  # a page takes 50 ms; a reader that is silent for so long has died
_OWNER: Final = b""  # the field that names the reader; no note has this name
_ABSENT: Final = b"-"  # the note of a field that was not there; others begin with "="
_ROWS_AT_ONCE: Final = 128  # of at most SCAN_PAGE fields each
_LENGTH: Final = struct.Struct(">H")

Ask = Callable[[Sequence[tuple[bytes, ...]]], list[Any]]
"""Sends commands together, and returns their answers. Raises: Unavailable."""


@contextmanager
def everything(ask: Ask, prefix: bytes = b"") -> Iterator[Iterator[Record]]:
    """All records as they are now, of the rows whose names have `prefix` before them in Redis.

    Raises: Unavailable, ConfigError where somebody else reads.
    """
    reader = _Reader(ask, prefix)
    reader.begin()
    try:
        yield reader.records()
    finally:
        with suppress(StoreError):  # else it expires
            reader.end()


class _Reader:
    def __init__(self, ask: Ask, prefix: bytes) -> None:
        self._ask = ask
        self._prefix = prefix
        self._notes = prefix + NOTES
        self._token = os.urandom(16)

    def begin(self) -> None:
        """From now on changes are noted."""
        (mine,) = self._ask([(b"HSETNX", self._notes, _OWNER, self._token)])
        # who dies just here leaves a hash that does not expire; the next reader lets it
        self._ask(
            [(b"PEXPIRE", self._notes, b"%d" % NOTES_EXPIRE_MS)] if mine else [self._expire_stuck()]
        )
        if not mine:
            raise ConfigError(
                "somebody else is dumping this volume: wait until that is done, or for "
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

    def _expire_stuck(self) -> tuple[bytes, ...]:
        """Let the notes of a reader that died before it could say so expire."""
        return b"EVAL", _EXPIRE_STUCK, b"1", self._notes, b"%d" % NOTES_EXPIRE_MS


_EXPIRE_STUCK: Final = (
    b"if redis.call('PTTL', KEYS[1]) == -1 then redis.call('PEXPIRE', KEYS[1], ARGV[1]) end"
)


def _note(row: bytes, field: bytes) -> bytes:
    """The name of a note, as `redis/redis_commit.lua` makes it."""
    return _LENGTH.pack(len(row)) + row + field

"""`Txn`: what a verb reads and writes in one attempt.

A verb is a function of a `Txn`. Each of its reads is remembered, to be checked by the commit, and
its writes are buffered; `txn/retry` makes the `Txn`, commits it, and has the verb run on another
one where that fails.

Threading: belongs to one call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Protocol

from fsmeta.errors import Conflict
from fsmeta.schema.inode_rows import InodeRow, fields_of, read_inodes
from fsmeta.store.contract import Key, Reads
from fsmeta.store.writes import (
    ADD,
    APPEND,
    BESIDE,
    DELETE,
    MERGE,
    PUT,
    Add,
    Append,
    Delete,
    DeleteRow,
    Merge,
    Parts,
    Put,
    Shift,
    Write,
    decimal,
)
from fsmeta.txn.cached_fields import Mark, Missing
from fsmeta.txn.contended_dirs import ContendedDirs

_new: Final = tuple.__new__  # makes a write in half the time of its constructor


class Memory(Protocol):
    """What a verb's reads need of a `RowCache`."""

    busy: ContendedDirs

    def get(self, row: bytes, field: bytes, need_vouched: bool) -> bytes | Missing | None:
        """See `RowCache`, as the others."""

    def is_leased(self, row: bytes) -> bool: ...
    def mark(self) -> Mark: ...
    def fill(
        self, mark: Mark, row: bytes, fields: Mapping[bytes, bytes | None], leased: bool
    ) -> None: ...


class Txn:
    """One attempt of one verb. Reads don't see its own writes; see `txn/batch` for many."""

    __slots__ = (
        "_cache", "_store", "_vouched_only",
        "cached", "durable", "edition", "empties", "fence", "first", "glances", "reads", "requests",
        "tails", "writes",
    )  # fmt: skip

    def __init__(self, store: Reads, cache: Memory, vouched_only: bool, edition: bytes) -> None:
        self.edition = edition  # from before the verb has looked at the settings
        self._store = store
        self._cache = cache
        self._vouched_only = vouched_only
        self.reads: dict[Key, bytes | None] = {}
        self.glances: set[Key] | None = (
            None  # of the reads, those that `read_unvalidated` alone has made
        )
        self.tails: set[Key] | None = None  # of the reads, those of `compare_tail`
        self.empties: list[bytes] = []
        self.writes: list[Write] = []
        self.requests = 0  # times the store was asked
        self.cached = False  # some read came from what we remember
        self.fence: bytes | None = None  # the session to commit in, where the verb cares
        self.durable = False  # the commit survives a power loss before it is answered
        self.first = True  # nothing that this verb supposed has turned out wrong

    @property
    def ops(self) -> int:
        """Checks and writes so far."""
        return len(self.reads) + len(self.writes)

    def is_snapshot(self) -> bool:
        """Whether everything read so far was true at one moment."""
        if self.cached:
            return self._vouched_only and self.requests == 0
        return self.requests <= 1 and not self.empties

    def _recall(self, key: Key) -> bytes | Missing | None:
        """What this attempt has read at `key`, or else what the cache knows, which it then uses."""
        if key in self.reads:
            self._check_whole(key)
            return self.reads[key]
        value = self._cache.get(key[0], key[1], self._vouched_only)
        if not isinstance(value, Missing):
            self.cached = True
            self.reads[key] = value
        return value

    def _check_whole(self, key: Key) -> None:
        """Have the commit check all of a value, and hold it, whatever was asked for before."""
        if self.glances:
            self.glances.discard(key)
        if self.tails:
            self.tails.discard(key)

    def get(self, row: bytes, field: bytes) -> bytes | None:
        key = (row, field)
        value = self._recall(key)
        if isinstance(value, Missing):
            self._fetch([key])
            return self.reads[key]
        return value

    def read_unvalidated(self, row: bytes, field: bytes) -> bytes | None:
        """`get` of a value whose change means that counters are shifted, or set, to which the verb
        adds: the store need not watch both.
        """
        key = (row, field)
        if self.glances is None:
            self.glances = set()
        if key in self.reads:
            return self.reads[key]
        value = self.get(row, field)
        self.glances.add(key)
        return value

    def get_with(self, key: Key, witness: Key) -> tuple[bytes | None, bytes | None]:
        """The value of `key`, and that of `witness` unless `key` is remembered.

        For a value whose absence means nothing if the witness is absent, too.
        """
        value = self._recall(key)
        if isinstance(value, Missing):
            self._fetch([key, witness])
            return self.reads[key], self.reads[witness]
        return value, b"remembered"

    def get_many(
        self, keys: Sequence[Key], along: Sequence[Key] = (), vacant: Key | None = None
    ) -> list[bytes | None]:
        """The values of `keys`; one request for all that are not remembered.

        If a request is needed, it brings `along`, too, for later verbs, and what is cached of the
        same rows without a lease. None is needed for `vacant` alone: that is assumed to be absent
        at first, and the commit proves it.
        """
        if self.glances:
            self.glances.difference_update(keys)
        if self.tails:
            self.tails.difference_update(keys)
        reads, remembered, vouched_only = self.reads, self._cache.get, self._vouched_only
        unread: list[Key] = []
        wanted: list[Key] = []
        for key in keys:
            if key in reads:
                continue
            unread.append(key)
            value = remembered(key[0], key[1], vouched_only)
            if isinstance(value, Missing):
                wanted.append(key)
            else:
                self.cached = True
                reads[key] = value
        if wanted == [vacant] and self.first:
            self.cached = True
            self.reads[wanted[0]] = None
        elif wanted:
            if len(wanted) < len(unread) and not self._vouched_only:
                rows = {row for row, _ in wanted if not self._cache.is_leased(row)}
                wanted = [key for key in unread if key[0] in rows or key in wanted]
            self._fetch([*wanted, *along])
        return [reads[key] for key in keys]

    def _fetch(self, keys: list[Key]) -> None:
        """Ask the store for `keys`; for a view, also for what it has used from memory.

        So that a view's reads are of one request, which proves them without a commit.
        Raises: Conflict where memory was wrong.
        """
        recalled: dict[Key, bytes | None] = {}
        if self.cached and self._vouched_only and not self.requests:
            recalled = dict(self.reads)
            keys = [*recalled, *keys]
            self.cached = False
        mark = self._cache.mark()
        busy = self._cache.busy.among(keys)
        self.requests += 1
        rows: dict[bytes, dict[bytes, bytes | None]] = {}
        for key, value in zip(keys, self._store.read(keys, busy), strict=True):
            self.reads[key] = value
            rows.setdefault(key[0], {})[key[1]] = value
        leased = self._store.has_leases()
        for row, fields in rows.items():
            self._cache.fill(mark, row, fields, leased and row not in busy)
        if any(self.reads[key] != value for key, value in recalled.items()):
            raise Conflict("what was remembered has changed")

    def get_linked(
        self, row: bytes, field: bytes, skip: int, prefix: bytes, fields: Sequence[bytes]
    ) -> tuple[bytes | None, list[bytes | None]]:
        """A value that names another row, and `fields` of that row: `Store.read_linked`."""
        value = self._recall((row, field))
        if not isinstance(value, Missing):
            if value is None:
                return None, []
            linked = prefix + value[skip:]
            return value, self.get_many([(linked, name) for name in fields])
        mark = self._cache.mark()
        busy = self._cache.busy.has(row)
        self.requests += 1
        value, found = self._store.read_linked(row, field, skip, prefix, fields, busy)
        self.reads[(row, field)] = value
        self._cache.fill(mark, row, {field: value}, self._store.has_leases() and not busy)
        if value is not None:
            linked = prefix + value[skip:]
            known = dict(zip(fields, found, strict=True))
            self.reads.update({(linked, name): each for name, each in known.items()})
            # the store can lease only rows that the request names beforehand
            self._cache.fill(mark, linked, known, leased=False)
        return value, found

    def get_row(self, row: bytes) -> dict[bytes, bytes]:
        """All fields of a small row, from the store, *not* checked by the commit: see `expect`."""
        return self.get_rows([row])[0]

    def get_rows(self, rows: Sequence[bytes]) -> list[dict[bytes, bytes]]:
        """`get_row` of several rows in one request."""
        self.requests += 1
        return self._store.read_rows(rows)

    def get_short_rows(self, rows: Sequence[bytes]) -> list[dict[bytes, bytes] | None]:
        """`get_rows` of rows that may be long: `Reads.read_short_rows`."""
        self.requests += 1
        return self._store.read_short_rows(rows)

    def get_inodes(self, rows: Sequence[bytes]) -> list[InodeRow]:
        """`get_rows` of inodes' rows, however long they are."""
        self.requests += 1
        return read_inodes(self._store, rows)

    def fields_of(self, row: bytes) -> Iterator[tuple[bytes, bytes]]:
        """The fields of an inode's row page by page, some perhaps twice; not checked either."""
        self.requests += 2  # they are of several moments
        return fields_of(self._store, row)

    def expect(self, row: bytes, field: bytes, value: bytes | None) -> None:
        """Let the commit check a value that `get_row` brought."""
        self._check_whole((row, field))
        self.reads[(row, field)] = value

    def is_cached(self, row: bytes, field: bytes) -> bool:
        """Whether this can be read without asking the store."""
        return not isinstance(self._recall((row, field)), Missing)

    def assume(self, row: bytes, field: bytes, value: bytes | None) -> None:
        """Take `value` for what is there, unless that is remembered; the commit proves it."""
        if isinstance(self._recall((row, field)), Missing):
            self.cached = True
            self.reads[(row, field)] = value

    def compare_tail(self, row: bytes, field: bytes) -> None:
        """Let the commit check of what was read there the length and the end: `Commit.tails`.

        The last thing that a verb does with it: another read has the whole of it checked.
        """
        if self.tails is None:
            self.tails = set()
        self.tails.add((row, field))

    def drop_check(self, row: bytes, field: bytes) -> None:
        """Let the commit not check what was read there: the verb would do the same otherwise."""
        self.reads.pop((row, field), None)

    def expect_same(self, row: bytes, field: bytes, value: bytes | None) -> None:
        """`expect` of what has been read before. Raises: Conflict where it was another value."""
        self._check_whole((row, field))
        if self.reads.setdefault((row, field), value) != value:
            raise Conflict("it changed between two reads")

    def put(self, row: bytes, field: bytes, value: bytes) -> None:
        self.writes.append(_new(Put, (PUT, row, field, value)))

    def delete(self, row: bytes, field: bytes) -> None:
        self.writes.append(_new(Delete, (DELETE, row, field)))

    def delete_row(self, row: bytes) -> None:
        self.writes.append(DeleteRow(row))

    def add(self, row: bytes, field: bytes, delta: int, limit: int = 0, tag: str = "") -> None:
        """Move a decimal counter; past `limit` the commit fails with the errno named `tag`."""
        if delta:
            items = (ADD, row, field, decimal(delta), decimal(limit), tag, decimal(-delta))
            self.writes.append(_new(Add, items))

    def charge(self, row: bytes, field: bytes, delta: int) -> None:
        """`add` within the limit beside the counter, if there is one; past it: EDQUOT."""
        items = (ADD, row, field, decimal(delta), BESIDE, "EDQUOT", decimal(-delta))
        self.writes.append(_new(Add, items))

    def shift(self, row: bytes, field: bytes, source: bytes, add: bool) -> None:
        """Add what the counter `source` holds, as `charge` does; or take it away."""
        sign = b"+" if add else b"-"
        self.writes.append(Shift(row, field, source, sign))

    def append(self, row: bytes, field: bytes, suffix: bytes) -> None:
        """Add `suffix` to a value, which may be absent."""
        self.writes.append(_new(Append, (APPEND, row, field, suffix)))

    def merge(self, row: bytes, field: bytes, parts: Parts) -> None:
        """Change parts of a record that is not read: `Merge`."""
        self.writes.append(_new(Merge, (MERGE, row, field, *parts)))

    def require_empty(self, row: bytes) -> None:
        """The commit fails unless `row` has no field."""
        self.empties.append(row)

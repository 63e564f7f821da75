"""The contract between the verbs and a metadata engine: rows of fields, and one kind of commit.

A store is a map `(row, field) -> value`, all bytes, values never empty. Reads go to the store as
they are asked; writes travel only inside a `Commit`, which the store applies entirely or not at
all. There is no POSIX in here and none in any engine.

A commit holds
- a fence: the row of the session that commits. The row must hold FENCE_FIELD, and its worker field
  remembers the last sequence applied, so that a commit sent twice is applied once. FENCE_FIELD
  holds the edition of the settings that the session must follow; another one than the commit's is
  `Outdated`, unless the commit is a repeat. A session is one client's: an engine may refuse to
  commit in the name of one that another client has used;
- checks: values (or absences) the verb relied on; any difference is a `Conflict`;
- glances: those of the checks that an engine need not hold to the end of its transaction: a commit
  that changes such a value also shifts, or sets, a counter that this commit adds to;
- tails: those of the checks for which it is enough that a value has the same length and the same
  end. Such a value grows only by what is appended to it, together with another value that the
  commit checks, or is exchanged for one that means the same;
- empties: rows that must hold no field, else `NotEmpty` (checks come first);
- writes: see `store/writes`. They apply in order, but a field that Merge, Add or Shift changes
  may be touched by no other kind of write of the same commit (Add and Shift are one kind), nor its
  row be deleted: engines apply these at any point. They need no read beforehand, so a thousand
  clients can create files in one directory without ever conflicting.

Rows whose names are one byte are tables of the whole volume: every client changes them, so no
client gets invalidations of them or caches what it read there. Those in SUMS hold counters
that Add moves, and their limits; an engine may keep a counter in parts, so that clients do not
queue for it. No name there ends in a zero byte and one below 64.

Threading: every method may be called from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from fsmeta.store.rollback import RollbackDetector
from fsmeta.store.writes import Write
from fsmeta.types import ROOT_CALLER, Caller

FENCE_FIELD: Final = b"a"
SCAN_PAGE: Final = 1000  # fields a page: ~100 kB, a few ms of any engine
SHORT_ROW_FIELDS: Final = 128  # of a row that is read with others: all but files above 7 GiB
SHORT_ROWS_BYTES: Final = 4 << 20  # of one such request, but for its last row: some ms of Redis
# Checks and writes of a step, where what is to be done is done in steps. A step that is given up at
# COMMIT_OPS_ENOUGH has room for one more thing.
COMMIT_OPS_MAX: Final = 4096
COMMIT_OPS_ENOUGH: Final = COMMIT_OPS_MAX // 2
# Of any commit, which blocks Redis for about 0.3 s then. Only what counts in thousands of
# directories above it comes near; it is refused beyond.
COMMIT_OPS_LIMIT: Final = 1 << 15
TAIL_FROM: Final = 128  # bytes of a value from which on its end is compared
TAIL_BYTES: Final = 64  # of that end: two records of slices
SUMS: Final = frozenset({b"U", b"Q"})  # schema.USAGE, schema.ACCOUNTS

EDITION: Final = b"1"  # of the settings that a volume begins with


def is_table(row: bytes) -> bool:
    """Whether `row` belongs to the whole volume and is never tracked."""
    return len(row) == 1


Key: TypeAlias = tuple[bytes, bytes]


def has_tail(found: bytes | None, expected: bytes | None) -> bool:
    """Whether `found` is what a check of the tail `expected` lets through."""
    if found is None or expected is None or len(expected) < TAIL_FROM:
        return found == expected
    return len(found) == len(expected) and found[-TAIL_BYTES:] == expected[-TAIL_BYTES:]


class Call(NamedTuple):
    """The verb behind a commit, and what it was run with besides its transaction."""

    verb: Callable[..., object]
    caller: Caller = ROOT_CALLER
    now_ns: int = 0
    args: tuple[Any, ...] = ()


class Commit(NamedTuple):
    """One atomic change. A commit without writes only validates its reads."""

    fence: bytes | None  # row of the session; None only while there is no session yet
    worker: bytes  # field of the fence row that remembers `sequence`
    sequence: int  # grows by one with each new commit of this worker
    checks: Sequence[tuple[bytes, bytes, bytes | None]]
    empties: Sequence[bytes]
    writes: Sequence[Write]
    edition: bytes = EDITION  # of the settings that it was made under
    glances: Collection[Key] = ()  # keys of `checks`
    call: Call | None = None  # for an engine that holds commits back
    # rows to leave untracked; the answer has each Merge's result in them
    busy: Collection[bytes] = ()
    durable: bool = False  # once it is answered it survives a power loss, as after `sync`
    tails: Collection[Key] = ()  # keys of `checks`, and perhaps of others

    def proven(self) -> Sequence[tuple[bytes, bytes, bytes | None]]:
        """The checks that say all of a value, once they have held."""
        tails = self.tails
        return [each for each in self.checks if each[:2] not in tails] if tails else self.checks


class Applied(NamedTuple):
    """What an engine says of a commit that was applied, if anything."""

    held: bool = False  # held back: this client sees what it leads to, the store does not know yet
    merged: Sequence[bytes] = ()  # what each Merge has made, in order, where rows are `busy`


class Page(NamedTuple):
    """Some fields of a row, and where the next page begins; no cursor means the end.

    Only the last page may be without fields: a first page that has none is an empty row.
    """

    items: list[tuple[bytes, bytes]]
    cursor: bytes | None


class RowPage(NamedTuple):
    """Some rows of the store, and where the next page begins; no cursor means the end.

    Any page may be without rows: looking for the next one takes as long as the store is large.
    """

    rows: list[bytes]
    cursor: bytes | None


Record: TypeAlias = tuple[bytes, bytes, bytes]
"""(row, field, value)."""

Listener: TypeAlias = Callable[[Sequence[bytes] | None], object]
"""Called with rows that other clients changed; None means "anything may have changed"."""


class Reads(Protocol):
    """What a verb reads from, as far as it knows."""

    def read(self, keys: Sequence[Key], busy: Collection[bytes] = ()) -> list[bytes | None]:
        """The values of `keys`, in order; None where there is none. No keys are no request.

        They are of one moment, unless they are of more than 16 rows. Those in `busy` need not be
        watched.
        """

    def read_linked(
        self,
        row: bytes,
        field: bytes,
        skip: int,
        prefix: bytes,
        fields: Sequence[bytes],
        busy: bool = False,
    ) -> tuple[bytes | None, list[bytes | None]]:
        """A value that names another row, and fields of that row, at one moment.

        The other row is `prefix + value[skip:]`. Its list is empty where there is no value. A row
        that is `busy` need not be watched.
        """

    def read_rows(self, rows: Sequence[bytes]) -> list[dict[bytes, bytes]]:
        """All fields of each row, for rows known to be small; an absent row is empty.

        No rows are no request.
        """

    def read_short_rows(self, rows: Sequence[bytes]) -> list[dict[bytes, bytes] | None]:
        """`read_rows` of rows that may be long: None where one has more than SHORT_ROW_FIELDS, or
        where those before it have SHORT_ROWS_BYTES; `scan` reads such a row.
        """

    def scan(self, row: bytes, cursor: bytes = b"", limit: int = SCAN_PAGE) -> Page:
        """A page of about `limit` fields of `row`.

        A field present throughout is returned at least once, perhaps twice.
        """

    def has_leases(self) -> bool:
        """Whether other clients' changes are reported at once, so that reads may be cached."""


class Store(Reads, Protocol):
    """A metadata engine. Reads raise Unavailable; `commit` also raises what it says."""

    name: str  # "redis", "sqlite", … for messages
    history: RollbackDetector  # whether it may go back to an older state

    @property
    def round_trips(self) -> int:
        """Requests that waited for the store so far."""

    def read_many(
        self, rows: Sequence[bytes], fields: Sequence[bytes]
    ) -> list[Sequence[bytes | None]]:
        """The values of `fields` in each of many rows, whose names are of one length.

        Each row's are of a moment of its own.
        """

    def scan_rows(self, prefix: bytes, cursor: bytes = b"", limit: int = SCAN_PAGE) -> RowPage:
        """A page of the rows whose names begin with `prefix`; as `scan` about repeats."""

    def commit(self, commit: Commit) -> Applied | None:
        """Apply `commit`, or answer again that it was applied.

        The rows it names are watched from then on, unless it is held back or they are `busy`.
        Raises: Conflict, NotEmpty, Fenced, Outdated, Rewound, LimitExceeded, StoreFull,
        Unavailable, Ambiguous.
        """

    def everything(self) -> AbstractContextManager[Iterator[Record]]:
        """All that is stored, as it was at one moment after the call, in no order.

        A record may come twice. Clients go on reading and writing. Raises: Unavailable, also in the
        middle where it can't go on; ConfigError where the engine can do this for one at a time.
        """

    def sync(self) -> None:
        """Return when every commit that was answered survives a power loss, as far as it can."""

    def watch(self, listener: Listener) -> None:
        """Call `listener` with rows that other clients change after this client has read them."""

    def poll_invalidations(self) -> None:
        """Pass the invalidations that have arrived to the listener; before an answer from cache."""

    def now_ns(self) -> int:
        """What time it is for the store, in nanoseconds since the epoch: one clock for all clients,
        where the store has one. Raises: Unavailable."""

    def tidy(self) -> None:
        """What an engine wants done now and then, by one client for all; does not wait for it."""

    def close(self) -> None:
        """Let go of connections and threads; idempotent."""


def short_rows(found: Iterator[dict[bytes, bytes]], count: int) -> list[dict[bytes, bytes] | None]:
    """What `read_short_rows` answers, of the next `count` rows that an engine brings."""
    left = SHORT_ROWS_BYTES
    answer: list[dict[bytes, bytes] | None] = []
    for _ in range(count):
        fields = next(found) if left > 0 else None
        if fields is not None and len(fields) > SHORT_ROW_FIELDS:
            fields = None
        left -= sum(map(len, fields.values())) if fields else 0
        answer.append(fields)
    return answer

"""The contract between the verbs and a metadata engine: rows of fields, and one kind of commit.

A store is a map `(row, field) -> value`, all bytes, values never empty. Reads go to the store as
they are asked; writes travel only inside a `Commit`, which the store applies entirely or not at
all. There is no POSIX in here and none in any engine.

A commit holds
- a fence: the row of the session that commits. The row must hold FENCE_FIELD, and its worker field
  remembers the last sequence applied, so that a commit sent twice is applied once;
- checks: values (or absences) the verb relied on; any difference is a `Conflict`;
- empties: rows that must hold no field, else `NotEmpty` (checks come first);
- writes: see PUT and its like. They apply in order, but a field that MERGE or ADD changes may be
  touched by no other kind of write of the same commit, nor its row be deleted: engines take these
  when it suits them. MERGE and ADD need no read beforehand, which is what lets a thousand clients
  create files in one directory without ever conflicting.

Rows whose names are one byte are tables of the whole volume: every client changes them, so no
client is told of their changes and none remembers what it read there. Those in SUMS hold counters
that ADD moves; an engine may keep each in parts, so that clients do not queue for it. Their names
have no zero byte.

Threading: every method may be called from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

FENCE_FIELD: Final = b"a"
SCAN_PAGE: Final = 1000  # fields a page: ~100 kB, a few ms of any engine
COMMIT_OPS_MAX: Final = 4096  # checks and writes together; a commit blocks Redis while it runs
SUMS: Final = frozenset({b"U"})  # schema.USAGE

# What a write does; a write is the tuple given here, in the shape that engines send and apply.
PUT: Final = 0  # (PUT, row, field, value)
DELETE: Final = 1  # (DELETE, row, field)
DELETE_ROW: Final = 2  # (DELETE_ROW, row)
ADD: Final = 3  # (ADD, row, field, delta, limit, tag, -delta): decimal text; limit b"0" is none
APPEND: Final = 4  # (APPEND, row, field, suffix): an absent value counts as empty
# (MERGE, row, field, at, part, …): change parts of a record that must exist, else Conflict. Bytes
# overwrite what is at offset `at`; an int is added to the big-endian 32-bit word there. A commit
# merges into one field only once.
MERGE: Final = 5


def is_table(row: bytes) -> bool:
    """Whether `row` belongs to the whole volume and is never tracked."""
    return len(row) == 1


Key: TypeAlias = tuple[bytes, bytes]
Parts: TypeAlias = tuple[int | bytes, ...]
Write: TypeAlias = tuple[Any, ...]


class Commit(NamedTuple):
    """One atomic change. A commit without writes only validates its reads."""

    fence: bytes | None  # row of the session; None only while there is no session yet
    worker: bytes  # field of the fence row that remembers `sequence`
    sequence: int  # grows by one with each new commit of this worker
    checks: Sequence[tuple[bytes, bytes, bytes | None]]
    empties: Sequence[bytes]
    writes: Sequence[Write]


class Page(NamedTuple):
    """Some fields of a row, and where the next page begins; no cursor means the end."""

    items: list[tuple[bytes, bytes]]
    cursor: bytes | None


class RowPage(NamedTuple):
    """Some rows of the store, and where the next page begins; no cursor means the end."""

    rows: list[bytes]
    cursor: bytes | None


Listener: TypeAlias = Callable[[Sequence[bytes] | None], None]
"""Told which rows others changed; None means "anything may have changed"."""


class Store(Protocol):
    """A metadata engine. Reads raise Unavailable; `commit` also raises what it says."""

    name: str  # "redis", "sqlite", … for messages

    @property
    def round_trips(self) -> int:
        """Requests that waited for the store so far."""

    def read(self, keys: Sequence[Key]) -> list[bytes | None]:
        """The values of `keys`, in order; None where there is none. No keys are no request.

        They are of one moment, unless they are of more than 16 rows.
        """

    def read_many(
        self, rows: Sequence[bytes], fields: Sequence[bytes]
    ) -> list[Sequence[bytes | None]]:
        """The values of `fields` in each of many rows, each row at its own moment."""

    def read_linked(
        self, row: bytes, field: bytes, skip: int, prefix: bytes, fields: Sequence[bytes]
    ) -> tuple[bytes | None, list[bytes | None]]:
        """A value that names another row, and fields of that row, at one moment.

        The other row is `prefix + value[skip:]`. Its list is empty where there is no value.
        """

    def read_rows(self, rows: Sequence[bytes]) -> list[dict[bytes, bytes]]:
        """All fields of each row, for rows known to be small; an absent row is empty.

        No rows are no request.
        """

    def scan(self, row: bytes, cursor: bytes = b"", limit: int = SCAN_PAGE) -> Page:
        """A page of about `limit` fields of `row`.

        A field present throughout is returned at least once, perhaps twice.
        """

    def scan_rows(self, prefix: bytes, cursor: bytes = b"", limit: int = SCAN_PAGE) -> RowPage:
        """A page of the rows whose names begin with `prefix`; as `scan` about repeats."""

    def commit(self, commit: Commit) -> None:
        """Apply `commit`, or answer again what it answered the first time.

        Raises: Conflict, NotEmpty, Fenced, LimitExceeded, StoreFull, Unavailable, Ambiguous.
        """

    def sync(self) -> None:
        """Return when every commit that was answered survives a power loss, as far as it can."""

    def watch(self, listener: Listener) -> None:
        """Tell `listener` about rows that others change after this client has read them."""

    def vouches(self) -> bool:
        """Whether `listener` is told at once, so that what was read may be kept."""

    def close(self) -> None:
        """Let go of connections and threads; idempotent."""

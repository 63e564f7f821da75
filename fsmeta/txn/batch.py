"""Several verbs that are committed as one: each runs as usual, and sees what those before wrote.

`writeback/replay` makes one `BatchTxn` for an attempt and a `step` for each verb: a `Txn` that
reads through this. When a verb has returned, `take` adds its step to the commit: what it has read
from the store is checked, what it found of earlier steps is not, and several writes to one field
become one. A step for which that is impossible is `CannotBatch`: then nothing of the step is taken.

Threading: belongs to one call, as the `Txn` that it fills.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from fsmeta.errors import Corrupt
from fsmeta.store.contract import SCAN_PAGE, Key, Page, Store, is_table
from fsmeta.store.writes import (
    Add,
    Append,
    CannotCompose,
    Delete,
    DeleteRow,
    Merge,
    Put,
    Shift,
    Write,
    compose,
    effect,
)
from fsmeta.txn.cached_fields import MISSING, Mark, Missing
from fsmeta.txn.row_cache import RowCache
from fsmeta.txn.txn import Txn

OPS_MAX: Final = 1024  # checks and writes; a third of them in 129 rows take Redis 2 ms
ROWS_MAX: Final = 144  # a segment's files; Redis 7.0 goes through all of them with each read


class CannotBatch(Exception):
    """A verb is to be committed by itself, or at least not with those before it."""


class BatchTxn:
    """What the steps so far lead to, and a store and a memory for the next one that show it."""

    def __init__(self, txn: Txn, store: Store, cache: RowCache) -> None:
        """`txn`: what is to be committed in the end; `store`, `cache`: what it reads from."""
        self._txn = txn
        self._store = store
        self._cache = cache
        self.busy = cache.busy
        self._base: dict[Key, bytes | None] = {}  # what the store has
        self._writes: dict[Key, Write] = {}  # what the steps so far do to each field
        self._begun: set[bytes] = set()  # rows that have nothing but what `_writes` puts there
        self._cleared: dict[bytes, None] = {}  # those of them that the store still has
        self._rows: set[bytes] = set()  # all that is written
        self._looked: set[Key] = set()  # checks that some step has not only glanced at
        self._whole: set[Key] = set()  # those of which the tail is not enough for some step

    def step(self) -> Txn:
        """For the next verb."""
        txn = Txn(self, self, vouched_only=False, edition=self._txn.edition)
        txn.first = self._txn.first
        return txn

    # --- what a step reads -----------------------------------------------------------------------

    def _known(self, key: Key) -> bytes | Missing | None:
        """What the steps so far leave at `key`; MISSING where that depends on the store."""
        write = self._writes.get(key)
        if isinstance(write, Put):
            return write.value
        if isinstance(write, Delete):
            return None
        return None if key[0] in self._begun else MISSING

    def _shown(self, key: Key) -> bytes | None:
        """What a step finds at `key`; the store has been asked where it had to be."""
        known = self._known(key)
        return self._after(key) if isinstance(known, Missing) else known

    def _after(self, key: Key) -> bytes | None:
        """What the store has at `key`, with what the steps so far change in it."""
        value, write = self._base[key], self._writes.get(key)
        if write is None or (value is None and isinstance(write, Merge)):
            return value
        try:
            return effect(write, value)
        except Corrupt as error:
            if isinstance(write, Merge):
                raise CannotBatch("what it counts was never so few") from error
            raise

    def get(self, row: bytes, field: bytes, need_vouched: bool) -> bytes | Missing | None:
        """See `Memory`."""
        key = (row, field)
        known = self._known(key)
        if not isinstance(known, Missing):
            return known
        if key not in self._base:
            value = self._cache.get(row, field, need_vouched)
            if isinstance(value, Missing):
                return MISSING
            self._base[key] = value
        return self._after(key)

    def is_leased(self, row: bytes) -> bool:
        """See `Memory`."""
        return self._cache.is_leased(row)

    def mark(self) -> Mark:
        """See `Memory`."""
        return self._cache.mark()

    def fill(
        self, mark: Mark, row: bytes, fields: Mapping[bytes, bytes | None], leased: bool
    ) -> None:
        """See `Memory`: what the store has is remembered already, and the rest is no memory."""

    def has_leases(self) -> bool:
        """See `Reads`."""
        return self._store.has_leases()

    def read(self, keys: Sequence[Key], busy: Collection[bytes] = ()) -> list[bytes | None]:
        """See `Reads`. What a step has relied on is not asked for again: the commit proves it."""
        wanted = [key for key in keys if self._is_open(key)]
        mark = self._cache.mark()
        rows: dict[bytes, dict[bytes, bytes | None]] = {}
        for key, value in zip(wanted, self._store.read(wanted, busy), strict=True):
            self._base[key] = value
            rows.setdefault(key[0], {})[key[1]] = value
        leased = self._store.has_leases()
        for row, fields in rows.items():
            self._cache.fill(mark, row, fields, leased and row not in busy)
        return [self._shown(key) for key in keys]

    def _is_open(self, key: Key) -> bool:
        """Whether the store is to say what is at `key`."""
        return isinstance(self._known(key), Missing) and key not in self._txn.reads

    def read_linked(
        self,
        row: bytes,
        field: bytes,
        skip: int,
        prefix: bytes,
        fields: Sequence[bytes],
        busy: bool = False,
    ) -> tuple[bytes | None, list[bytes | None]]:
        """See `Reads`."""
        mark = self._cache.mark()
        value, found = self._store.read_linked(row, field, skip, prefix, fields, busy)
        self._base[(row, field)] = value
        self._cache.fill(mark, row, {field: value}, self._store.has_leases() and not busy)
        if value is None:
            return None, []
        linked = prefix + value[skip:]
        known = dict(zip(fields, found, strict=True))
        self._cache.fill(mark, linked, known, leased=False)
        keys = [(linked, name) for name in fields]
        for key, each in zip(keys, found, strict=True):
            if self._is_open(key):
                self._base[key] = each
        return value, [self._shown(key) for key in keys]

    def read_rows(self, rows: Sequence[bytes]) -> list[dict[bytes, bytes]]:
        """See `Reads`. Raises: Unfit where a step has written there."""
        if not self._rows.isdisjoint(rows):
            raise CannotBatch("it reads rows that others of the same commit write")
        return self._store.read_rows(rows)

    def read_short_rows(self, rows: Sequence[bytes]) -> list[dict[bytes, bytes] | None]:
        """See `Reads`. Raises: as `read_rows`."""
        if not self._rows.isdisjoint(rows):
            raise CannotBatch("it reads rows that others of the same commit write")
        return self._store.read_short_rows(rows)

    def scan(self, row: bytes, cursor: bytes = b"", limit: int = SCAN_PAGE) -> Page:
        """See `Reads`. Raises: as `read_rows`."""
        if row in self._rows:
            raise CannotBatch("it reads a row that others of the same commit write")
        return self._store.scan(row, cursor, limit)

    # --- what a step did -------------------------------------------------------------------------

    def take(self, step: Txn) -> None:
        """Let the commit do what a step's verb has done. Raises: Unfit; then nothing is taken."""
        checks = self._require_fit(step)
        txn = self._txn
        txn.cached = True  # what was read is of many moments
        for key, value in checks:
            self._base[key] = txn.reads[key] = value
            self._note_unvalidated(key, step)
            self._note_tail(key, step)
        for row in step.empties:
            txn.empties.append(row)
            self._begun.add(row)
        for write in step.writes:
            self._rows.add(write.row)
            self._fold(write)

    def _note_unvalidated(self, key: Key, step: Txn) -> None:
        """A check is but a glance where all steps have only glanced at it."""
        if not step.glances or key not in step.glances:
            self._looked.add(key)
            if self._txn.glances:
                self._txn.glances.discard(key)
        elif key not in self._looked:
            self._txn.glances = self._txn.glances or set()
            self._txn.glances.add(key)

    def _note_tail(self, key: Key, step: Txn) -> None:
        """The end of a value is enough where it is for all steps."""
        if step.tails and key in step.tails and key not in self._whole:
            self._txn.tails = self._txn.tails or set()
            self._txn.tails.add(key)
        else:
            self._whole.add(key)
            if self._txn.tails:
                self._txn.tails.discard(key)

    def _require_fit(self, step: Txn) -> list[tuple[Key, bytes | None]]:
        """What the store has to have at what a step has read of it. Raises: Unfit."""
        if step.fence is not None:
            raise CannotBatch("it is committed in another session's name")
        more = len(step.reads) + len(step.writes)
        rows = {write.row for write in step.writes} - self._rows
        if self._size() + more > OPS_MAX or len(self._rows) + len(rows) > ROWS_MAX:
            raise CannotBatch("the commit is large enough")
        if not self._rows.isdisjoint(step.empties):
            raise CannotBatch("a row is to be empty in which names have come or gone")
        checks: list[tuple[Key, bytes | None]] = []
        for key, value in step.reads.items():
            known = self._known(key)
            if isinstance(known, Missing):
                if not self._is_changed(key):
                    if self._txn.reads.get(key, value) != value:
                        raise CannotBatch("it has read something else than those before it")
                    checks.append((key, value))
                    continue
                if key not in self._base:
                    raise CannotBatch(
                        "it supposes something of what others of the same commit change"
                    )
                checks.append((key, self._base[key]))
                known = self._after(key)
            if known != value:
                raise CannotBatch("it expects something else than those before it leave")
        for write in step.writes:
            self._require_apart(write)
        return checks

    def _is_changed(self, key: Key) -> bool:
        """Whether a step has changed what the store has at `key`, whatever that is."""
        return key in self._writes

    def _size(self) -> int:
        """Checks and writes so far."""
        return len(self._txn.reads) + len(self._writes) + len(self._cleared)

    def _before(self, key: Key) -> Write | None:
        """The write that says what the steps so far do to a field."""
        if key not in self._writes and key[0] in self._begun:
            return Delete(*key)
        return self._writes.get(key)

    def _require_apart(self, write: Write) -> None:
        """Raises: CannotBatch where no write does what this one and those before it do."""
        if isinstance(write, Shift):
            raise CannotBatch(
                "what it moves depends on counters that those before it may have moved"
            )
        if isinstance(write, DeleteRow):
            return
        before = self._before((write.row, write.field))
        if before is not None:
            try:
                compose(before, write)
            except CannotCompose as error:
                raise CannotBatch(f"it writes to {write.field!r}: {error}") from error

    def _fold(self, write: Write) -> None:
        if isinstance(write, DeleteRow):
            self._clear(write.row)
            return
        key = (write.row, write.field)
        before = self._before(key)
        self._writes[key] = write if before is None else compose(before, write)

    def _clear(self, row: bytes) -> None:
        """A row goes, with what the steps before have written to it."""
        assert not is_table(row), "a table is never deleted"
        for key in [key for key in self._writes if key[0] == row]:
            del self._writes[key]
        self._begun.add(row)
        self._cleared[row] = None

    def finish(self) -> None:
        """Write down what all steps together do."""
        writes, folded = self._txn.writes, self._writes.values()
        writes += [write for write in folded if isinstance(write, Merge)]
        writes += [write for write in folded if isinstance(write, Add)]
        writes += [DeleteRow(row) for row in self._cleared]
        for write in folded:
            if isinstance(write, Put) or (
                isinstance(write, Delete) and write.row not in self._begun
            ):
                writes.append(write)
        writes += [write for write in folded if isinstance(write, Append)]

"""Several verbs that are committed as one: each is run as ever, and sees what those before wrote.

`writeback/replay` makes one `BatchTxn` for an attempt and a `step` for each verb: a `Txn` that
reads through this. When a verb has returned, `take` adds its step to the commit: what it has read
from the store is checked, what it found of the steps before is not, and of what several write to
one field one write is left. What that can't be done with is `CannotBatch`: then nothing of the step
is taken.

Threading: belongs to one call, as the `Txn` that it fills.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from fsmeta.store.apply import add_decimal, merge
from fsmeta.store.contract import (
    ADD,
    APPEND,
    DELETE,
    DELETE_ROW,
    MERGE,
    PUT,
    SCAN_PAGE,
    SHIFT,
    Key,
    Page,
    Parts,
    Store,
    Write,
    is_table,
)
from fsmeta.txn.row_cache import MISSING, Mark, Missing, RowCache
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
        self._values: dict[Key, bytes | None] = {}  # what it is to have, whatever it has
        self._tails: dict[Key, bytes] = {}  # what is appended to what it has
        self._merges: dict[Key, Parts] = {}
        self._sums: dict[Key, Write] = {}
        self._begun: set[bytes] = set()  # rows that have nothing but `_values`
        self._cleared: dict[bytes, None] = {}  # those of them that the store still has
        self._rows: set[bytes] = set()  # all that is written
        self._looked: set[Key] = set()  # checks that some step has not only glanced at

    def step(self) -> Txn:
        """For the next verb."""
        txn = Txn(self, self, vouched_only=False, edition=self._txn.edition)
        txn.first = self._txn.first
        return txn

    # --- what a step reads -----------------------------------------------------------------------

    def _known(self, key: Key) -> bytes | Missing | None:
        """What the steps so far leave at `key`; MISSING where that depends on the store."""
        if key in self._values:
            return self._values[key]
        return None if key[0] in self._begun else MISSING

    def _shown(self, key: Key) -> bytes | None:
        """What a step finds at `key`; the store has been asked where it had to be."""
        known = self._known(key)
        return self._after(key) if isinstance(known, Missing) else known

    def _after(self, key: Key) -> bytes | None:
        """What the store has at `key`, with what the steps so far change in it."""
        value = self._base[key]
        if key in self._tails:
            value = (value or b"") + self._tails[key]
        if key in self._sums:
            value = add_decimal(*key, value, int(self._sums[key][3]))
        if key in self._merges and value is not None:
            value = _merged(value, self._merges[key])
        return value

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

    def is_vouched(self, row: bytes) -> bool:
        """See `Memory`."""
        return self._cache.is_vouched(row)

    def mark(self) -> Mark:
        """See `Memory`."""
        return self._cache.mark()

    def fill(
        self, mark: Mark, row: bytes, fields: Mapping[bytes, bytes | None], vouched: bool
    ) -> None:
        """See `Memory`: what the store has is remembered already, and the rest is no memory."""

    def vouches(self) -> bool:
        """See `Reads`."""
        return self._store.vouches()

    def read(self, keys: Sequence[Key], busy: Collection[bytes] = ()) -> list[bytes | None]:
        """See `Reads`. What a step has relied on is not asked for again: the commit proves it."""
        wanted = [key for key in keys if self._is_open(key)]
        mark = self._cache.mark()
        rows: dict[bytes, dict[bytes, bytes | None]] = {}
        for key, value in zip(wanted, self._store.read(wanted, busy), strict=True):
            self._base[key] = value
            rows.setdefault(key[0], {})[key[1]] = value
        vouched = self._store.vouches()
        for row, fields in rows.items():
            self._cache.fill(mark, row, fields, vouched and row not in busy)
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
        self._cache.fill(mark, row, {field: value}, self._store.vouches() and not busy)
        if value is None:
            return None, []
        linked = prefix + value[skip:]
        known = dict(zip(fields, found, strict=True))
        self._cache.fill(mark, linked, known, vouched=False)
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
            self._note_glance(key, step)
        for row in step.empties:
            txn.empties.append(row)
            self._begun.add(row)
        for write in step.writes:
            self._rows.add(write[1])
            self._fold(write)

    def _note_glance(self, key: Key, step: Txn) -> None:
        """A check is but a glance where all steps have only glanced at it."""
        if not step.glances or key not in step.glances:
            self._looked.add(key)
            if self._txn.glances:
                self._txn.glances.discard(key)
        elif key not in self._looked:
            self._txn.glances = self._txn.glances or set()
            self._txn.glances.add(key)

    def _require_fit(self, step: Txn) -> list[tuple[Key, bytes | None]]:
        """What the store has to have at what a step has read of it. Raises: Unfit."""
        if step.fence is not None:
            raise CannotBatch("it is committed in another session's name")
        more = len(step.reads) + len(step.writes)
        rows = {write[1] for write in step.writes} - self._rows
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
            if write[0] == MERGE:
                self._require_mergeable((write[1], write[2]), write[3:])
        return checks

    def _is_changed(self, key: Key) -> bool:
        """Whether a step has changed what the store has at `key`, whatever that is."""
        return key in self._tails or key in self._sums or key in self._merges

    def _size(self) -> int:
        """Checks and writes so far."""
        written = len(self._values) + len(self._tails) + len(self._merges) + len(self._sums)
        return len(self._txn.reads) + written + len(self._cleared)

    def _require_apart(self, write: Write) -> None:
        """Raises: Unfit where a field would be changed in two ways that engines keep apart."""
        op, row = write[:2]
        key = (row, write[2] if len(write) > 2 else b"")
        if op == SHIFT:
            raise CannotBatch(
                "what it moves depends on counters that those before it may have moved"
            )
        if op == ADD:
            fits = isinstance(self._known(key), Missing)
            fits = fits and key not in self._tails and key not in self._merges
        elif op == MERGE:
            fits = key not in self._tails and key not in self._sums
        elif op == APPEND:
            fits = key not in self._merges and key not in self._sums
        else:
            fits = key not in self._sums
        if not fits:
            raise CannotBatch(f"it writes to {key!r} in another way than those before it")

    def _require_mergeable(self, key: Key, parts: Parts) -> None:
        """Raises: Unfit where the store is to say whether a record takes a change."""
        known = self._known(key)
        if isinstance(known, Missing):
            composed(self._merges.get(key, ()), parts)
        elif known is None:
            raise CannotBatch("those before it have taken away what it changes")
        else:
            _merged(known, parts)

    def _fold(self, write: Write) -> None:
        op, row = write[:2]
        if op == DELETE_ROW:
            self._clear(row)
            return
        key = (row, write[2])
        if op in (PUT, DELETE):
            self._settle(key, write[3] if op == PUT else None)
            return
        known = self._known(key)
        if op == ADD:
            before = int(self._sums[key][3]) if key in self._sums else 0
            delta = before + int(write[3])
            self._sums[key] = (ADD, *key, b"%d" % delta, write[4], write[5], b"%d" % -delta)
        elif op == APPEND and isinstance(known, Missing):
            self._tails[key] = self._tails.get(key, b"") + write[3]
        elif op == APPEND:
            self._values[key] = (known or b"") + write[3]
        elif isinstance(known, Missing):
            self._merges[key] = composed(self._merges.get(key, ()), write[3:])
        else:
            assert known is not None, "it was found fit"
            self._values[key] = merge(known, write[3:])

    def _settle(self, key: Key, value: bytes | None) -> None:
        """From here on `key` holds this, whatever the store has."""
        self._tails.pop(key, None)
        self._merges.pop(key, None)
        self._values[key] = value

    def _clear(self, row: bytes) -> None:
        """A row goes, with what the steps before have written to it."""
        assert not is_table(row), "a table is never deleted"
        for changes in (self._values, self._tails, self._merges):
            for key in [key for key in changes if key[0] == row]:
                del changes[key]
        self._begun.add(row)
        self._cleared[row] = None

    def finish(self) -> None:
        """Write down what all steps together do."""
        writes = self._txn.writes
        writes += [(MERGE, *key, *parts) for key, parts in self._merges.items()]
        writes += self._sums.values()
        writes += [(DELETE_ROW, row) for row in self._cleared]
        for (row, field), value in self._values.items():
            if value is not None:
                writes.append((PUT, row, field, value))
            elif row not in self._begun:
                writes.append((DELETE, row, field))
        writes += [(APPEND, *key, tail) for key, tail in self._tails.items()]


def _merged(record: bytes, parts: Parts) -> bytes:
    """Raises: Unfit where a word would leave its range: what was remembered is outdated."""
    try:
        return merge(record, parts)
    except struct.error as error:
        raise CannotBatch("what it counts was never so few") from error


def composed(first: Parts, second: Parts) -> Parts:
    """The parts of a MERGE that does what two do, one after the other. Raises: Unfit."""
    parts = dict(zip(first[::2], first[1::2], strict=True))
    for at, part in zip(second[::2], second[1::2], strict=True):
        assert isinstance(at, int)
        size = 4 if isinstance(part, int) else len(part)
        for begin, old in list(parts.items()):
            assert isinstance(begin, int)
            end = begin + (4 if isinstance(old, int) else len(old))
            if at + size <= begin or end <= at:
                continue
            if isinstance(part, int) and isinstance(old, int) and at == begin:
                part += old
            elif isinstance(part, bytes) and isinstance(old, bytes):
                head, tail = old[: max(0, at - begin)], old[max(0, at + size - begin) :]
                part = head + part + tail
                at, size = min(at, begin), len(part)
            else:
                raise CannotBatch("a word is counted and overwritten")
            del parts[begin]
        parts[at] = part
    return tuple(each for pair in parts.items() for each in pair)

"""`AppliedCommits`: what a commit of this client leaves in its `RowCache` once it is applied.

A commit tells of the rows that it found empty, of the values that it relied on, and of what it has
written. What another request of this client has brought meanwhile may be newer or older than that:
a field that both brought is dropped.

Owned by `RowCache`. Threading: `settle` takes the cache's lock, by any thread.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final, TypeAlias

from fsmeta.errors import Corrupt
from fsmeta.runtime import Lock
from fsmeta.schema.keys import INODE_PREFIX
from fsmeta.store.writes import Append, Delete, DeleteRow, Merge, Put, Write, effect, row_of
from fsmeta.txn.cached_fields import BIG_BYTES, WATCHED, Fields, Mark, Unwatched
from fsmeta.txn.contended_dirs import ContendedDirs
from fsmeta.txn.recent_changes import Rows
from fsmeta.txn.row_states import ROW_FIELDS_MAX, RowStates

Check: TypeAlias = tuple[bytes, bytes, bytes | None]
_NO_ROWS: Final[Rows] = {}


class AppliedCommits:
    """See the module."""

    def __init__(self, lock: Lock, states: RowStates, busy: ContendedDirs) -> None:
        self._lock = lock
        self._states = states
        self._busy = busy

    def settle(
        self,
        mark: Mark,
        empties: Sequence[bytes],
        writes: Sequence[Write],
        leased: bool,
        checks: Sequence[Check] = (),
        unwatched: Unwatched = WATCHED,
    ) -> list[bytes]:
        """The commit that began at `mark` applied: rows that were empty, what it wrote and what it
        relied on. All these rows are watched from then on, but for those in `unwatched`: they are
        treated as changed by other clients, and those that were leased meanwhile are returned.
        """
        states = self._states
        with self._lock:
            rows, records, known = states.rows, states.records, states.known
            alone = states.own.count == mark.own
            busy = unwatched.rows
            before = known.big_bytes
            if leased and not states.leased.issuperset([check[0] for check in checks]):
                self._prove(mark, checks, busy)
            for row in empties:
                if row in rows or row in records or row in states.complete or row in states.scanned:
                    states.discard(row)
                if alone or not states.own.hit(mark.own, row, None):
                    states.begin(row, leased)
                    states.complete.add(row)
                    states.empty_once.add(row)
            for write in writes:
                row = write.row
                if len(row) == 1:
                    continue
                fields = rows.get(row) if row not in records else known.get(row)
                promise = leased and row not in busy
                if fields is None or (promise and row not in states.leased):
                    states.discard(row)
                    fields = states.begin(row, promise)
                if not alone and self._overtaken(mark, write):
                    states.drop_field(row, fields, write.field)
                elif isinstance(write, Put) and len(fields) < ROW_FIELDS_MAX:
                    fields[write.field] = value = write.value
                    if len(value) > BIG_BYTES:
                        known.big_bytes += len(value)
                else:
                    self._follow(fields, write)
            is_big = known.big_bytes - before > BIG_BYTES
            if known.big_bytes > before:
                states.discard_all(known.too_big())
            if self._busy.has_any():
                self._learn(mark, checks, writes, unwatched)
            if is_big:  # what is noted is not to keep the values
                states.own.add((), {write.row: None for write in writes})
            else:
                states.own.add(writes, _NO_ROWS)
            if states.others.count != mark.others:
                for row in {*map(row_of, writes), *empties}:
                    if states.others.hit(mark.others, row):
                        states.downgrade(row)
            if not busy:
                return []
            ended = [row for row in busy if row in states.leased]
            for row in busy:
                states.others.add(row)
                states.downgrade(row)
            return ended

    def _learn(
        self, mark: Mark, checks: Sequence[Check], writes: Sequence[Write], unwatched: Unwatched
    ) -> None:
        """What a commit has left of directories, as far as its answer says so."""
        merges = [(write.row, write.field) for write in writes if isinstance(write, Merge)]
        made = dict(zip(merges, unwatched.merged, strict=True)) if unwatched.merged else {}
        for row in {write.row for write in writes if write.row[:1] == INODE_PREFIX}:
            fields = {field: record for (of, field), record in made.items() if of == row}
            plain = all(isinstance(write, Merge) for write in writes if write.row == row)
            if not fields or not plain or self._states.own.hit(mark.own, row, None):
                self._busy.forget_row(row)  # another of our own may have come after it
                continue
            proven = {field: value for of, field, value in checks if of == row}
            self._busy.learn(row, unwatched.begun, {**proven, **fields})

    def _prove(self, mark: Mark, checks: Sequence[Check], busy: Collection[bytes]) -> None:
        """What a commit found to be true; rows that are leased already are left as they are."""
        proven: dict[bytes, Fields] = {}
        for row, field, value in checks:
            if row not in self._states.leased and row not in busy:
                proven.setdefault(row, {})[field] = value
        for row, fields in proven.items():
            self._states.store(mark, row, fields, leased=True)

    def _overtaken(self, mark: Mark, write: Write) -> bool:
        """Whether another commit of ours has written the same since `mark`."""
        if isinstance(write, DeleteRow):
            return True
        return self._states.own.hit(mark.own, write.row, write.field)

    def _follow(self, fields: Fields, write: Write) -> None:
        """Let one applied write show."""
        states, row = self._states, write.row
        if isinstance(write, Delete) and row in states.empty_once:
            fields.pop(write.field, None)
        elif isinstance(write, Delete):
            fields[write.field] = None
        elif isinstance(write, Merge):
            before = fields.get(write.field)
            if before is not None:
                try:
                    fields[write.field] = effect(write, before)
                except Corrupt:  # a word below zero: what we remembered was long outdated
                    fields.pop(write.field)
                    states.mark_incomplete(row)
        elif isinstance(write, Append):
            if write.field in fields or row in states.complete:
                fields[write.field] = effect(write, fields.get(write.field))
                states.known.big_bytes += len(write.suffix)
        else:  # DELETE_ROW; PUT into a row that has grown too large
            states.discard(row)

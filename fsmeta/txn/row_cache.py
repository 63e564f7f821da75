"""What one client remembers of the store, so that a verb's only round trip is its commit.

Reads that only inform a commit may use anything in here: the commit checks them. Reads that are
answered without a commit may use a row only while it is *vouched*: the store has promised to tell
us when others change it (client tracking), and has not.

What comes back from the store may be overtaken, by the news that others have changed it or by a
commit of our own. So whoever is about to read or commit takes a `mark`, and what has changed since
that mark is not stored.

A row that is known to have been empty once, or that was scanned to its end undisturbed, is
*complete*: what is not remembered of it is absent. So no commit needs to ask whether a name is free
in a directory that was made or listed here. Who is answered without a commit hears of an absence
that nobody has asked for only if the row was *empty* once, and nobody else has changed it since:
where several clients work, one may tell another of a new name faster than the store tells us.

What news make doubtful is not all forgotten: what rarely changes (`_lasting`) is not vouched for
any more, but may still inform a commit: of many clients in one directory none asks for its mode.

Threading: what `get` finds it finds without a lock (a few look-ups, each atomic); that something is
absent from a complete row, and everything else, takes `_lock`.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import Final, NamedTuple, TypeAlias, cast

from fsmeta.runtime import Runtime
from fsmeta.schema.keys import ATTR_FIELD, DIR_PREFIX, INODE_PREFIX
from fsmeta.store.apply import merge
from fsmeta.store.contract import APPEND, DELETE, DELETE_ROW, MERGE, PUT, Write, is_table
from fsmeta.txn.contended_dirs import ContendedDirs
from fsmeta.txn.recent_changes import Invalidations, LocalWrites, Rows

ROWS_MAX: Final = 100_000  # about 60 MB with two small records a row
ROW_FIELDS_MAX: Final = 20_000  # of one row, say a directory's names: about 4 MB
FIELDS_MAX: Final = 1_000_000  # of all rows, and an eighth more: 150 MB of short names
BYTES_MAX: Final = 128 << 20  # of values of more than BIG_BYTES, and an eighth more
BIG_BYTES: Final = 512  # xattrs have 64 KiB, long lists of slices more; ROWS_MAX counts small ones
_FIELDS_NOTED: Final = 64  # of a read; of a larger one only the row, or a listing stayed in memory

Check: TypeAlias = tuple[bytes, bytes, bytes | None]
_NO_ROWS: Final[Rows] = {}
_Mutable: TypeAlias = dict[bytes, bytes | None]


def _lasting(row: bytes, fields: _Mutable) -> _Mutable:
    """Those of `fields` that are probably still true when others have changed `row`: of a directory
    all names but one, and then it is `fields` itself; of an inode mode and owner."""
    if row[:1] == DIR_PREFIX:
        return fields
    if row[:1] == INODE_PREFIX and fields.get(ATTR_FIELD):
        return {ATTR_FIELD: fields[ATTR_FIELD]}
    return {}


def _big_bytes(fields: Mapping[bytes, bytes | None]) -> int:
    """How many bytes the big values have."""
    return sum([len(value) for value in fields.values() if value and len(value) > BIG_BYTES])


class Missing:
    """The type of MISSING: not known, as opposed to None, known to be absent."""


MISSING: Final = Missing()


class Mark(NamedTuple):
    """A moment, as the number of changes by others and by ourselves up to it."""

    others: int
    own: int


class Unwatched(NamedTuple):
    """The rows of a commit that it does not want to hear of: busy ones."""

    rows: Collection[bytes] = ()
    begun: float = 0.0  # when it was sent, or before
    merged: Sequence[bytes] = ()  # what each of its MERGEs has made, if it was told


WATCHED: Final = Unwatched()


class RowCache:
    """A bounded map row → field → value, with the promise of the store beside it."""

    def __init__(
        self,
        runtime: Runtime,
        rows_max: int = ROWS_MAX,
        fields_max: int = FIELDS_MAX,
        bytes_max: int = BYTES_MAX,
    ) -> None:
        self._rows_max, self._fields_max, self._bytes_max = rows_max, fields_max, bytes_max
        self._big_bytes = 0  # of big values, since they were counted; written under _lock
        self._stored = 0  # fields, since they were counted; written under _lock
        self.busy = ContendedDirs(runtime.monotonic)
        self._lock = runtime.lock()
        self._rows: dict[bytes, dict[bytes, bytes | None]] = {}  # written under _lock
        self._vouched: set[bytes] = set()  # written under _lock
        self._complete: set[bytes] = set()  # rows of which we know every field; under _lock
        self._ours: set[bytes] = set()  # those of them that were empty once; under _lock
        self._scanned: dict[bytes, bytes] = {}  # rows known up to this cursor; under _lock
        self._others = Invalidations()  # written under _lock
        self._own = LocalWrites()  # written under _lock

    def get(self, row: bytes, field: bytes, need_vouched: bool) -> bytes | Missing | None:
        """The value, None where there is none, MISSING where that is not known."""
        if need_vouched and row not in self._vouched:
            return MISSING
        fields = self._rows.get(row)
        if fields is None:
            return MISSING
        value = fields.get(field, MISSING)
        if value is MISSING:
            whole = self._ours if need_vouched else self._complete
            if row in whole:
                with self._lock:  # it may have become so since
                    if row in whole:
                        return self._rows[row].get(field)
        return value

    def vouched(self, row: bytes) -> Mapping[bytes, bytes | None] | None:
        """What is remembered of a row that the store vouches for; None where it does not."""
        return self._rows.get(row) if row in self._vouched else None

    def values(self, row: bytes, begin: int, count: int) -> list[bytes | None]:
        """Some of what is remembered of a row that the store vouches for, behind `begin` others."""
        with self._lock:
            fields = self._rows.get(row) if row in self._vouched else None
            return [] if fields is None else list(islice(fields.values(), begin, begin + count))

    def complete(self, row: bytes) -> dict[bytes, bytes] | None:
        """Every field of a row that the store vouches for; None where we don't know every one."""
        with self._lock:
            if row not in self._complete or row not in self._vouched:
                return None
            fields = self._rows[row].copy()
        if None in fields.values():
            return {name: value for name, value in fields.items() if value is not None}
        return cast("dict[bytes, bytes]", fields)

    def has_any(self, rows: Iterable[bytes]) -> bool:
        """Whether anything is remembered of any of `rows`."""
        return not self._rows.keys().isdisjoint(rows)

    def is_vouched(self, row: bytes) -> bool:
        """Whether the store has promised to tell us when others change `row`."""
        return row in self._vouched

    def are_vouched(self, rows: Iterable[bytes]) -> bool:
        """Whether `is_vouched` says yes to all of `rows`."""
        return self._vouched.issuperset(rows)

    def mark(self) -> Mark:
        """The moment before a request, for `fill` and `settle`."""
        return Mark(self._others.count, self._own.count)

    def fill(
        self, mark: Mark, row: bytes, fields: Mapping[bytes, bytes | None], vouched: bool
    ) -> None:
        """Remember what a read begun at `mark` found."""
        with self._lock:
            self._store(mark, row, fields, vouched)
            self._own.add((), {row: None if _big_bytes(fields) else fields})

    def fill_page(
        self,
        mark: Mark,
        row: bytes,
        cursor: bytes,
        fields: Mapping[bytes, bytes | None],
        following: bytes | None,
        vouched: bool,
    ) -> None:
        """`fill` with the page of a scan from `cursor` to `following`; the last one, which has
        none following, makes the row complete."""
        assert not is_table(row)
        with self._lock:
            if not cursor:
                if not vouched:
                    self._discard(row)  # news would not have told what is there no more
                self._store(mark, row, {}, vouched)
                self._scanned[row] = cursor
            alone = self._own.count == mark.own or not self._own.hit(mark.own, row, None)
            self._store(mark, row, fields, vouched)
            self._own.add((), {row: fields if len(fields) <= _FIELDS_NOTED else None})
            if self._scanned.get(row) != cursor:
                return
            del self._scanned[row]
            if not alone:
                return  # what is not on the page may have been changed since, who knows how
            if following is None:
                self._complete.add(row)
            else:
                self._scanned[row] = following

    def fill_rows(
        self, mark: Mark, rows: Mapping[bytes, dict[bytes, bytes | None]], vouched: bool
    ) -> None:
        """`fill` for many rows of one read; the inner dicts become the cache's."""
        with self._lock:
            quiet = self._others.count == mark.others and self._own.count == mark.own
            known = self._rows
            for row, fields in rows.items():
                if quiet and vouched and row not in known:
                    known[row] = fields
                    self._vouched.add(row)
                    self._big_bytes += _big_bytes(fields)
                else:
                    self._store(mark, row, fields, vouched)
            self._shed()
            self._own.add_everything()
            if len(known) > self._rows_max:
                self._evict()

    def drop(self, rows: Iterable[bytes]) -> None:
        """A commit has shown that we know `rows` wrongly, or it may be so."""
        with self._lock:
            for row in rows:
                self._others.add(row)
                self._discard(row)
                self.busy.unlearn(row)

    def hear(self, rows: Sequence[bytes] | None) -> Sequence[bytes] | None:
        """Others have changed `rows` (None: perhaps any): nothing in them is vouched for any more.

        Returns them, with those for which that is so because they are not watched from now on.
        """
        if rows is None:
            self.forget()
            return None
        further: list[bytes] = []
        with self._lock:
            for row in rows:
                self._others.add(row)
                self._distrust(row)
                if self.busy.heard(row):
                    inode = INODE_PREFIX + row[1:]
                    self._others.add(inode)
                    self._distrust(inode)
                    further.append(inode)
        return [*rows, *further] if further else rows

    def distrust(self, rows: Sequence[bytes] | None) -> None:
        """`hear`, but that no directory becomes busy: who asks in vain has all of it watched."""
        if rows is None:
            self.forget()
            return
        with self._lock:
            for row in rows:
                self._others.add(row)
                self._distrust(row)

    def forget(self) -> None:
        """Anything may have changed."""
        with self._lock:
            self._others.add_everything()
            self.busy.clear()
            self._rows.clear()
            self._vouched.clear()
            self._complete.clear()
            self._ours.clear()
            self._scanned.clear()

    def settle(
        self,
        mark: Mark,
        empties: Sequence[bytes],
        writes: Sequence[Write],
        vouched: bool,
        checks: Sequence[Check] = (),
        unwatched: Unwatched = WATCHED,
    ) -> list[bytes]:
        """The commit that began at `mark` applied: rows that were empty, what it wrote and what it
        relied on. All that is watched from then on, but for what is `unwatched`: that is as if
        others had changed it, and what of it was vouched for meanwhile is returned.
        """
        with self._lock:
            rows = self._rows
            alone = self._own.count == mark.own
            busy = unwatched.rows
            before = self._big_bytes
            if vouched and not self._vouched.issuperset([check[0] for check in checks]):
                self._prove(mark, checks, busy)
            for row in empties:
                self._discard(row)
                if alone or not self._own.hit(mark.own, row, None):
                    self._begin(row, vouched)
                    self._complete.add(row)
                    self._ours.add(row)
            for write in writes:
                row = write[1]
                if len(row) == 1:
                    continue
                fields = rows.get(row)
                promise = vouched and row not in busy
                if fields is None or (promise and row not in self._vouched):
                    self._discard(row)
                    fields = self._begin(row, promise)
                if not alone and self._overtaken(mark, write):
                    self._unlearn(row, fields, write[2] if len(write) > 2 else b"")
                elif write[0] == PUT and len(fields) < ROW_FIELDS_MAX:
                    fields[write[2]] = write[3]
                    if len(write[3]) > BIG_BYTES:
                        self._big_bytes += len(write[3])
                else:
                    self._follow(fields, write)
            is_big = self._big_bytes - before > BIG_BYTES
            self._shed()
            if self.busy.has_any():
                self._learn(mark, checks, writes, unwatched)
            if is_big:  # what is noted is not to keep the values
                self._own.add((), {write[1]: None for write in writes})
            else:
                self._own.add(writes, _NO_ROWS)
            if self._others.count != mark.others:
                for row in {write[1] for write in writes}.union(empties):
                    if self._others.hit(mark.others, row):
                        self._distrust(row)
            ended = [row for row in busy if row in self._vouched]
            for row in busy:
                self._others.add(row)
                self._distrust(row)
            return ended

    def _learn(
        self, mark: Mark, checks: Sequence[Check], writes: Sequence[Write], unwatched: Unwatched
    ) -> None:
        """What a commit has left of directories, as far as it was told."""
        merges = [write[1:3] for write in writes if write[0] == MERGE]
        made = dict(zip(merges, unwatched.merged, strict=True)) if unwatched.merged else {}
        for row in {write[1] for write in writes if write[1][:1] == INODE_PREFIX}:
            fields = {field: record for (of, field), record in made.items() if of == row}
            plain = all(write[0] == MERGE for write in writes if write[1] == row)
            if not fields or not plain or self._own.hit(mark.own, row, None):
                self.busy.unlearn(row)  # another of our own may have come after it
                continue
            proven = {field: value for of, field, value in checks if of == row}
            self.busy.learn(row, unwatched.begun, {**proven, **fields})

    def _prove(self, mark: Mark, checks: Sequence[Check], busy: Collection[bytes]) -> None:
        """What a commit found to be true; of rows that are vouched for already it says nothing."""
        proven: dict[bytes, _Mutable] = {}
        for row, field, value in checks:
            if row not in self._vouched and row not in busy:
                proven.setdefault(row, {})[field] = value
        for row, fields in proven.items():
            self._store(mark, row, fields, vouched=True)

    def _overtaken(self, mark: Mark, write: Write) -> bool:
        """Whether another commit of ours has written the same since `mark`."""
        if write[0] == DELETE_ROW:
            return True
        return self._own.hit(mark.own, write[1], write[2])

    def _begin(self, row: bytes, vouched: bool) -> dict[bytes, bytes | None]:
        """A row that we know nothing of but what we have just written."""
        fields: dict[bytes, bytes | None] = {}
        self._rows[row] = fields
        if vouched:
            self._vouched.add(row)
        if len(self._rows) > self._rows_max:
            self._evict()
        return fields

    def _follow(self, fields: dict[bytes, bytes | None], write: Write) -> None:
        """Let one applied write show."""
        op, row = write[:2]
        if op == DELETE and row in self._ours:
            fields.pop(write[2], None)
        elif op == DELETE:
            fields[write[2]] = None
        elif op == MERGE:
            before = fields.get(write[2])
            if before is not None:
                try:
                    fields[write[2]] = merge(before, write[3:])
                except struct.error:  # a word below zero: what we remembered was long outdated
                    fields.pop(write[2])
                    self._lapse(row)
        elif op == APPEND:
            if write[2] in fields or row in self._complete:
                fields[write[2]] = (fields.get(write[2]) or b"") + write[3]
                self._big_bytes += len(write[3])
        else:  # DELETE_ROW; PUT into a row that has grown too large
            self._discard(row)

    def _unlearn(self, row: bytes, fields: dict[bytes, bytes | None], field: bytes) -> None:
        """A field that two requests of ours brought at once: which came last is not known."""
        if field:
            fields.pop(field, None)
            self._lapse(row)
        else:
            self._discard(row)

    def _distrust(self, row: bytes) -> None:
        """Keep what a commit may still be built on."""
        fields = self._rows.get(row)
        lasting = _lasting(row, fields) if fields else None
        if not lasting:
            self._discard(row)
            return
        self._vouched.discard(row)
        self._lapse(row)
        self._rows[row] = lasting

    def _discard(self, row: bytes) -> None:
        self._rows.pop(row, None)
        self._vouched.discard(row)
        self._lapse(row)

    def _lapse(self, row: bytes) -> None:
        """We may no longer know every field."""
        self._complete.discard(row)
        self._ours.discard(row)
        self._scanned.pop(row, None)

    def _store(
        self, mark: Mark, row: bytes, fields: Mapping[bytes, bytes | None], vouched: bool
    ) -> None:
        if is_table(row):
            return
        if self._others.count != mark.others and self._others.hit(mark.others, row):
            self._distrust(row)
            fields, vouched = _lasting(row, dict(fields)), False
            if not fields:
                return
        old = self._rows.get(row)
        if old is None or (vouched and row not in self._vouched):
            # what was known before the store's promise may be stale; only `fields` is vouched for
            self._discard(row)
            old = self._begin(row, vouched)
        elif len(old) > ROW_FIELDS_MAX:
            old.clear()
            self._lapse(row)
        if self._own.count == mark.own:
            old.update(fields)
        else:
            self._update_unless_overtaken(old, mark, row, fields)
        self._big_bytes += _big_bytes(fields)
        self._shed()
        self._stored += len(fields)
        if self._stored > self._fields_max // 8:
            self._count()

    def _update_unless_overtaken(
        self,
        old: dict[bytes, bytes | None],
        mark: Mark,
        row: bytes,
        fields: Mapping[bytes, bytes | None],
    ) -> None:
        for field, value in fields.items():
            if self._own.hit(mark.own, row, field):
                self._unlearn(row, old, field)
            else:
                old[field] = value

    def _evict(self) -> None:
        """Forget the oldest eighth; insertion order is near enough to age."""
        for row in list(self._rows)[: self._rows_max // 8 + 1]:
            self._discard(row)

    def _shed(self) -> None:
        """Forget the oldest rows with big values where there may be too many bytes of those."""
        if self._big_bytes <= self._bytes_max // 8:
            return
        self._big_bytes = 0
        sizes = {row: size for row, fields in self._rows.items() if (size := _big_bytes(fields))}
        excess = sum(sizes.values()) - self._bytes_max
        for row, size in sizes.items():
            if excess <= 0:
                return
            self._discard(row)
            excess -= size

    def _count(self) -> None:
        """Forget the oldest rows where they have too many fields together."""
        self._stored = 0
        excess = sum(map(len, self._rows.values())) - self._fields_max
        for row in list(self._rows) if excess > 0 else ():
            excess -= len(self._rows[row])
            self._discard(row)
            if excess <= 0:
                return

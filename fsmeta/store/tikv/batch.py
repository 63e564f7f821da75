"""What one TiKV transaction reads and changes: the pure half of `tikv/group_commit`.

A `Plan` says what must be read for a group of commits. An `Image` holds what was read, checks the
commits one after the other as if each were alone, and says what is to be written and locked.
Counters are in parts (`tikv/escrow_counters`): a commit that moves one reads its base and one part;
if it then needs all parts, they are read and the commits are checked again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from fsmeta.errors import LimitExceeded, StoreError
from fsmeta.store.apply import add_to, apply_commit
from fsmeta.store.contract import FENCE_FIELD, Commit, Key
from fsmeta.store.tikv.escrow_counters import Sides, bare, claim_of, moved, moved_exactly, total
from fsmeta.store.tikv.keys import is_counter, is_sum, part_of
from fsmeta.store.writes import (
    BESIDE,
    Add,
    Append,
    Delete,
    DeleteRow,
    Merge,
    Put,
    Shift,
    Write,
    add_decimal,
    limit_field,
)

_UNLIMITED_ROW: Final = b"U"  # schema.USAGE: its limits are settings, which commits bring along
_READ_FIRST: Final = Add | Append | Merge | Shift  # writes that need the value before


class PartsWanted(Exception):
    """Some counters have to be read with all their parts before the commits can be checked."""

    def __init__(self, counters: Collection[Key]) -> None:
        super().__init__(counters)
        self.counters = counters


class Plan:
    """What has to be read before a group of commits can be checked."""

    def __init__(
        self,
        commits: Sequence[Commit],
        part: int,
        blind: frozenset[Key],
        tight: Collection[Key] = (),
    ) -> None:
        """`blind` are records of workers that are known to be older than what commits now; `tight`
        are counters that will likely be wanted with all parts.
        """
        self.commits = commits
        self.part = part
        self.blind = blind
        self.tight = tight
        self.counters: set[Key] = set()  # wanted with all parts
        self.whole: set[bytes] = set()  # rows that are deleted
        self.empties: dict[bytes, int] = {}  # how many fields tell whether a row is empty
        self.keys: set[Key] = set()
        for commit in commits:
            self._note(commit)
        for row in self.empties:
            gone = sum(
                1
                for commit in commits
                for w in commit.writes
                if isinstance(w, Delete) and w.row == row
            )
            self.empties[row] = gone + 1
        self.empties = {row: n for row, n in self.empties.items() if row not in self.whole}

    def _note(self, commit: Commit) -> None:
        if commit.fence is not None:
            self.keys.add((commit.fence, FENCE_FIELD))
            record = (commit.fence, commit.worker)
            if record not in self.blind:
                self.keys.add(record)
        for row, field, _ in commit.checks:
            (self.counters if is_counter(row, field) else self.keys).add((row, field))
        for row in commit.empties:
            self.empties.setdefault(row, 1)
        for write in commit.writes:
            if isinstance(write, DeleteRow):
                self.whole.add(write.row)
            elif is_sum(write.row):
                self._note_sum(write)
            elif isinstance(write, _READ_FIRST):
                self.keys.add((write.row, write.field))
                self._note_limit(write)

    def _note_limit(self, write: Write) -> None:
        """What an addition is measured against, and what a SHIFT takes along."""
        row, field = write.row, write.field
        if isinstance(write, Shift):
            self.keys.add((row, write.source))
        if isinstance(write, Shift) or (isinstance(write, Add) and write.limit == BESIDE):
            self.keys.add((row, limit_field(field)))

    def _note_sum(self, write: Write) -> None:
        """A write in a row whose counters lie in parts."""
        row, field = write.row, write.field
        if isinstance(write, Add | Shift):
            self.keys |= {(row, field), (row, part_of(field, self.part))}
            if row != _UNLIMITED_ROW:
                self.keys.add((row, limit_field(field)))
            if isinstance(write, Shift):
                self.counters.add((row, write.source))
            if (row, field) in self.tight:
                self.counters.add((row, field))
        elif is_counter(row, field):
            assert isinstance(write, Put | Delete), f"a counter is no record: {write}"
            self.counters.add((row, field))
        else:  # a limit
            self.counters.add((row, field.removesuffix(BESIDE)))


class Image:
    """What was read, and a `View` of it for one commit after the other."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._found: dict[Key, bytes | None] = dict.fromkeys(plan.keys)
        self._found.update(dict.fromkeys(plan.blind))
        self._fields: dict[bytes, list[bytes]] = {}  # of rows that are deleted or to be empty
        self._parts: dict[Key, list[bytes]] = {}  # of counters that are known whole
        self._exact: set[Key] = set()  # counters that had to be
        self._claimed: dict[Key, bytes] = {}  # counters that were looked at, and their claims
        self._changes: dict[Key, bytes | None] = {}  # by the commits that have passed
        self._own: dict[Key, bytes | None] = {}  # by the one that is being checked
        self._first: Key | None = None
        self._checked: set[Key] = set()

    # --- what was read ---------------------------------------------------------------------------

    def learn(self, values: Mapping[Key, bytes]) -> None:
        """Values of the plan's keys; what is not among them is not there."""
        self._found.update(values)

    def learn_fields(self, row: bytes, fields: list[bytes]) -> None:
        """The fields of a row, or the first of them."""
        self._fields[row] = fields

    def learn_counter(self, counter: Key, stored: Mapping[bytes, bytes]) -> None:
        """All that is stored of a counter, by field."""
        row, field = counter
        self._found.setdefault(counter, None)
        self._found.update(((row, name), value) for name, value in stored.items())
        self._parts[counter] = [name for name in stored if name != field]

    def fields(self, row: bytes) -> list[bytes]:
        """What `learn_fields` was given."""
        return self._fields[row]

    # --- View ------------------------------------------------------------------------------------

    def get(self, row: bytes, field: bytes) -> bytes | None:
        if is_counter(row, field):
            return self._total((row, field))
        return self._stored(row, field)

    def _stored(self, row: bytes, field: bytes) -> bytes | None:
        """What will be at a key itself, be it part of a counter."""
        key = row, field
        for changes in (self._own, self._changes):
            if key in changes:
                return changes[key]
        return self._found.get(key) if is_sum(row) else self._found[key]

    def put(self, row: bytes, field: bytes, value: bytes) -> None:
        assert value, f"empty value at {row!r} {field!r}"
        self._take_parts_back(row, field)
        self._own[row, field] = value

    def delete(self, row: bytes, field: bytes) -> None:
        self._take_parts_back(row, field)
        self._own[row, field] = None

    def delete_row(self, row: bytes) -> None:
        for field in self._present(row):
            self._own[row, field] = None

    def is_empty(self, row: bytes) -> bool:
        return not self._present(row)

    def _present(self, row: bytes) -> set[bytes]:
        fields = set(self._fields[row])
        for changes in (self._changes, self._own):
            for (changed, field), value in changes.items():
                if changed == row and value is None:
                    fields.discard(field)
                elif changed == row:
                    fields.add(field)
        return fields

    # --- counters --------------------------------------------------------------------------------

    def _whole(self, counter: Key) -> dict[bytes, bytes]:
        """All that will be stored of a counter. Raises: PartsWanted."""
        if counter not in self._parts:
            raise PartsWanted([counter])
        row, field = counter
        names = {field, part_of(field, self._plan.part), *self._parts[counter]}
        values = ((name, self._stored(row, name)) for name in names)
        present = {name: value for name, value in values if value is not None}
        if field in present:
            present[field] = self._unclaimed(row, field, present[field])
        return present

    def _unclaimed(self, row: bytes, field: bytes, base: bytes) -> bytes:
        """A base without its claim, which is noted."""
        name = claim_of(base)
        if not name:
            return base
        self._claimed[row, field] = name
        return bare(base)

    def _total(self, counter: Key) -> bytes | None:
        return total(counter[1], self._whole(counter))

    def _take_parts_back(self, row: bytes, field: bytes) -> None:
        """A counter is about to be set, or its limit: its base is to say it all."""
        if not is_sum(row):
            return
        counter = row, field.removesuffix(BESIDE)
        stored = self._whole(counter)
        value = total(counter[1], stored)
        if value is None:
            self._checked.add(counter)  # a commit that makes it just now conflicts at its base
            return
        self._own.update(((row, name), None) for name in stored)
        self._own[counter] = value

    def _add(self, counter: Key, delta: int, limit: bytes, tag: str) -> None:
        """`apply.Adder`. Raises: LimitExceeded, Corrupt, PartsWanted."""
        row, field = counter
        if not is_sum(row):
            add_to(self, counter, delta, limit, tag)
            return
        part = part_of(field, self._plan.part)
        beside = self._number(row, limit_field(field)) if row != _UNLIMITED_ROW else None
        kept = None if limit == b"0" else beside if limit == BESIDE else int(limit)
        sides = Sides(self._number(row, field) or 0, self._number(row, part))
        after = moved(sides, delta, kept, beside if kept is None else kept)
        stays = after is not None and after.base == sides.base and sides.own is not None
        if after is None:
            after = self._move_exactly(counter, delta, kept)
        if after is None:
            raise LimitExceeded(tag)
        if not stays:
            self._own[counter] = b"%d" % after.base
        if after.own is not None:
            self._own[row, part] = b"%d" % after.own

    def _move_exactly(self, counter: Key, delta: int, limit: int | None) -> Sides | None:
        """Both sides after all parts have been taken back; None where there is no room."""
        self._exact.add(counter)
        row, field = counter
        stored = self._whole(counter)
        value = int(add_decimal(row, field, total(field, stored), 0))
        after = moved_exactly(value, delta, limit)
        if after is not None:
            self._own.update(((row, name), None) for name in stored)
        return after

    def _number(self, row: bytes, field: bytes) -> int | None:
        """Raises: Corrupt."""
        value = self._stored(row, field)
        if value is None:
            return None
        try:
            return int(value)
        except ValueError:  # a claim, or nonsense
            return int(add_decimal(row, field, self._unclaimed(row, field, value), 0))

    def tight(self) -> set[Key]:
        """Counters that had to be known with all parts, to see whether there is room."""
        return self._exact

    def claims(self) -> Collection[bytes]:
        """Claims to the counters that were looked at."""
        return self._claimed.values()

    def contended(self) -> list[Key]:
        """Counters known with all parts that other clients may move: these have room ahead."""
        return [counter for counter, parts in self._parts.items() if parts]

    # --- checking --------------------------------------------------------------------------------

    def judge(self) -> list[StoreError | None]:
        """Apply the plan's commits in order; why each is refused, or None.

        Raises: PartsWanted; `learn_counter` then lets it begin anew.
        """
        self._changes.clear()
        self._checked.clear()
        self._first = None
        return [self._judge(commit) for commit in self._plan.commits]

    def _judge(self, commit: Commit) -> StoreError | None:
        self._own = {}
        try:
            apply_commit(self, commit, self._add)
        except StoreError as error:
            return error
        finally:
            own, self._own = self._own, {}
        if own:
            self._changes.update(own)
            held = {(row, field) for row, field, _ in commit.checks}
            self._checked |= held.difference(commit.glances)
            self._checked.update((w.row, w.source) for w in commit.writes if isinstance(w, Shift))
            self._note_fence(commit)
            self._note_first(commit)
        return None

    def _note_fence(self, commit: Commit) -> None:
        """Conflict with a commit that ends the session: at the worker's record, or, before there is
        one, at the fence."""
        if commit.fence is None:
            return
        record = (commit.fence, commit.worker)
        if record not in self._plan.blind and self._found[record] is None:
            self._checked.add((commit.fence, FENCE_FIELD))

    def _note_first(self, commit: Commit) -> None:
        if self._first is None:
            merged = ((w.row, w.field) for w in commit.writes if isinstance(w, Merge))
            put = ((w.row, w.field) for w in commit.writes if isinstance(w, Put))
            self._first = next(merged, None) or next(put, None)

    # --- what comes of it ------------------------------------------------------------------------

    def first(self) -> Key | None:
        """The key that should be committed first; None where any will do.

        The others may still be locked for a moment afterwards. So it is the one that the next
        commit will most likely want: a directory's times.
        """
        return self._first if self._first in self._changes else None

    def changes(self) -> dict[Key, bytes | None]:
        """What to write; None is to delete. Claims that were found are lifted along."""
        if not self._changes or not self._claimed:
            return dict(self._changes)
        lifted = {
            key: bare(base) for key in self._claimed if (base := self._found[key]) is not None
        }
        return {**lifted, **self._changes}

    def locks(self) -> Iterable[Key]:
        """What was only checked: locked, so that no commit changes it at the same time."""
        written = self.changes()
        for row, field in self._checked:
            names = [field, *self._parts.get((row, field), ())]
            yield from ((row, name) for name in names if (row, name) not in written)

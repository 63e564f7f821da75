"""What one TiKV transaction knows and changes: the pure half of `tikv_commit`.

A `Plan` says what must be read for a group of commits; an `Image` holds what was read, judges the
commits one after the other as if each were alone, and says what is to be written and locked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from fsmeta.apply import apply_commit
from fsmeta.errors import StoreError
from fsmeta.store import (
    ADD,
    APPEND,
    DELETE,
    DELETE_ROW,
    FENCE_FIELD,
    MERGE,
    PUT,
    Commit,
    Key,
    Write,
)
from fsmeta.tikv_keys import folded, is_sum, part_of

_READ_FIRST: Final = (ADD, APPEND, MERGE)  # writes that need the value before


class Plan:
    """What a group of commits has to know before it can be judged."""

    def __init__(self, commits: Sequence[Commit], part: int, blind: frozenset[Key]) -> None:
        """`blind` are records of workers that are known to be older than what commits now."""
        self.blind = blind
        self.sums: set[bytes] = set()  # rows in SUMS whose parts are all needed
        self.whole: set[bytes] = set()  # rows that are deleted
        self.empties: dict[bytes, int] = {}  # how many fields tell whether a row is empty
        self.keys: set[Key] = set()
        for commit in commits:
            self._note_sums(commit)
        self.commits = [self._spread(commit, part) for commit in commits]
        for commit in self.commits:
            self._note(commit)
        for row in self.empties:
            gone = sum(
                1 for commit in commits for w in commit.writes if w[0] == DELETE and w[1] == row
            )
            self.empties[row] = gone + 1
        self.empties = {row: n for row, n in self.empties.items() if row not in self.whole}

    def _note_sums(self, commit: Commit) -> None:
        touched = {row for row, _, _ in commit.checks}.union(commit.empties)
        touched |= {w[1] for w in commit.writes if w[0] != ADD or int(w[4])}
        self.sums |= {row for row in touched if is_sum(row)}

    def _spread(self, commit: Commit, part: int) -> Commit:
        """The same, with what it adds to sums going to one of their parts where that will do."""
        if not any(is_sum(write[1]) for write in commit.writes):
            return commit
        writes: list[Write] = [
            (ADD, w[1], part_of(w[2], part), *w[3:])
            if w[0] == ADD and is_sum(w[1]) and w[1] not in self.sums
            else w
            for w in commit.writes
        ]
        return commit._replace(writes=writes)

    def _note(self, commit: Commit) -> None:
        if commit.fence is not None:
            self.keys.add((commit.fence, FENCE_FIELD))
            record = (commit.fence, commit.worker)
            if record not in self.blind:
                self.keys.add(record)
        self.keys |= {(row, field) for row, field, _ in commit.checks if row not in self.sums}
        for row in commit.empties:
            self.empties.setdefault(row, 1)
        for write in commit.writes:
            if write[0] == DELETE_ROW:
                self.whole.add(write[1])
            elif write[0] in _READ_FIRST and write[1] not in self.sums:
                self.keys.add((write[1], write[2]))
        self.whole -= self.sums


class Image:
    """What was read, and a `View` of it for one commit after the other."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._found: dict[Key, bytes | None] = dict.fromkeys(plan.keys)
        self._found.update(dict.fromkeys(plan.blind))
        self._fields: dict[bytes, list[bytes]] = {}  # of rows that are deleted or to be empty
        self._sums: dict[bytes, Mapping[bytes, bytes]] = {}  # as stored, in parts
        self._changes: dict[Key, bytes | None] = {}  # by the commits that have passed
        self._own: dict[Key, bytes | None] = {}  # by the one that is being judged
        self._first: Key | None = None
        self._checked: set[Key] = set()

    # --- what was read ---------------------------------------------------------------------------

    def learn(self, values: Mapping[Key, bytes]) -> None:
        """Values of the plan's keys; what is not among them is not there."""
        self._found.update(values)

    def learn_fields(self, row: bytes, fields: list[bytes]) -> None:
        """The fields of a row, or the first of them."""
        self._fields[row] = fields

    def learn_sum(self, row: bytes, fields: Mapping[bytes, bytes]) -> None:
        """All of a row in SUMS, as stored."""
        self._sums[row] = fields
        self._fields[row] = list(folded(fields))

    def fields(self, row: bytes) -> list[bytes]:
        """What `learn_fields` was told."""
        return self._fields[row]

    # --- View ------------------------------------------------------------------------------------

    def get(self, row: bytes, field: bytes) -> bytes | None:
        key = row, field
        for changes in (self._own, self._changes):
            if key in changes:
                return changes[key]
        if row in self._sums:
            return folded(self._sums[row]).get(field)
        return self._found[key]

    def put(self, row: bytes, field: bytes, value: bytes) -> None:
        assert value, f"empty value at {row!r} {field!r}"
        self._own[row, field] = value

    def delete(self, row: bytes, field: bytes) -> None:
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

    # --- judging ---------------------------------------------------------------------------------

    def judge(self) -> list[StoreError | None]:
        """Apply the plan's commits in order; why each is refused, or None."""
        return [self._judge(commit) for commit in self._plan.commits]

    def _judge(self, commit: Commit) -> StoreError | None:
        self._own = {}
        try:
            apply_commit(self, commit)
        except StoreError as error:
            return error
        finally:
            own, self._own = self._own, {}
        if own:
            self._changes.update(own)
            self._checked.update((row, field) for row, field, _ in commit.checks)
            self._note_fence(commit)
            self._note_first(commit)
        return None

    def _note_fence(self, commit: Commit) -> None:
        """Meet whoever ends the session: at the worker's record, or, before there is one, at it."""
        if commit.fence is None:
            return
        record = (commit.fence, commit.worker)
        if record not in self._plan.blind and self._found[record] is None:
            self._checked.add((commit.fence, FENCE_FIELD))

    def _note_first(self, commit: Commit) -> None:
        if self._first is None:
            merged = (w[1:3] for w in commit.writes if w[0] == MERGE)
            put = (w[1:3] for w in commit.writes if w[0] == PUT)
            self._first = next(merged, None) or next(put, None)

    # --- what comes of it ------------------------------------------------------------------------

    def first(self) -> Key | None:
        """The key that should be committed first; None where any will do.

        The others may still be locked for a moment afterwards. So it is the one that the next
        commit will most likely want: a directory's times.
        """
        return self._first if self._first in self._changes else None

    def changes(self) -> dict[Key, bytes | None]:
        """What to write; None is to delete."""
        changes: dict[Key, bytes | None] = {}
        for (row, field), value in self._changes.items():
            if row in self._sums:
                changes.update(self._unfolded(row, field, value))
            else:
                changes[row, field] = value
        return changes

    def _unfolded(self, row: bytes, field: bytes, value: bytes | None) -> dict[Key, bytes | None]:
        """A sum that was set: its first part says it all, the others go."""
        stored = self._sums[row]
        parts = {(row, name): None for name in stored if name.partition(b"\0")[0] == field}
        return {**parts, (row, field): value}

    def locks(self) -> Iterable[Key]:
        """What was only checked: locked, so that no commit changes it at the same time."""
        written = self.changes()
        for row, field in self._checked:
            if row in self._sums:
                for name in (field, *self._sums[row]):
                    if (row, name) not in written and name.partition(b"\0")[0] == field:
                        yield row, name
            elif (row, field) not in written:
                yield row, field

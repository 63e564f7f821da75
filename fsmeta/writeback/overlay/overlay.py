"""The overlay: the effects of held commits, shown on top of a store that does not have them yet.

`StagedStore` owns one. Each field that a held commit writes has the value here that it will have in
the store, merges and appends carried out; counters that are added to have the sum of what is still
to come. When the store has a commit, `lift` removes what no later one has written.

A row is *whole* while the commit that makes it is held back: the store has nothing of it. Tables of
the volume have no overlay, but for their sums: other clients' deletions there do not concern it.

Threading: none; the owner's lock is held around every call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypeAlias

from fsmeta.store.contract import Key, is_table
from fsmeta.store.writes import Add, Append, Delete, Merge, Put, Shift, Write, effect
from fsmeta.txn.cached_fields import MISSING, Missing

Known: TypeAlias = bytes | Missing | None
Over: TypeAlias = tuple[int, bytes | None]
"""A value that is laid over the store, and the sequence of the commit that wrote it; 0: of none."""

_NOTHING: Final[Over] = (0, None)


def exchanged(records: bytes, old: bytes, new: bytes) -> bytes:
    """`records` with `new` in place of `old`, which is as long."""
    assert len(old) == len(new), (old, new)
    each = [records[at : at + len(old)] for at in range(0, len(records), len(old))]
    return b"".join([new if record == old else record for record in each])


class Laid:
    """What one held commit has laid over the store."""

    __slots__ = ("keys", "sums", "whole")

    def __init__(self) -> None:
        self.keys: list[Key] = []
        self.sums: list[tuple[Key, int]] = []
        self.whole: list[bytes] = []


class Overlay:
    """Values by row and field, each with the sequence of the commit that wrote it last."""

    def __init__(self) -> None:
        self._rows: dict[bytes, dict[bytes, Over]] = {}
        self._whole: set[bytes] = set()
        self._sums: dict[Key, int] = {}
        self._publishing: dict[int, Laid] = {}  # the store may have these, too
        self.lifts = 0  # times something was let go of

    def __bool__(self) -> bool:
        return bool(self._rows or self._sums)

    def get(self, key: Key) -> Known:
        """The value at `key`, None where it will be absent, MISSING where the store decides."""
        fields = self._rows.get(key[0])
        found = None if fields is None else fields.get(key[1])
        if found is not None:
            return found[1]
        return None if key[0] in self._whole else MISSING

    def over(self, keys: Iterable[Key]) -> list[Over | None]:
        """What is laid over each of `keys`; None where the store decides."""
        rows, whole = self._rows, self._whole
        found: list[Over | None] = []
        for row, field in keys:
            fields = rows.get(row)
            over = None if fields is None else fields.get(field)
            found.append(_NOTHING if over is None and row in whole else over)
        return found

    def row(self, row: bytes) -> dict[bytes, bytes | None]:
        """All that is laid over a row."""
        return {field: value for field, (_, value) in self._rows.get(row, {}).items()}

    def rows(self) -> list[bytes]:
        """The rows over which anything is laid."""
        return list(self._rows)

    def writer(self, key: Key) -> int:
        """The sequence of the entry that wrote `key` last; 0 where there is none."""
        return self._rows.get(key[0], {}).get(key[1], (0, None))[0]

    def touches(self, row: bytes) -> bool:
        """Whether anything is laid over a row."""
        return row in self._rows

    def is_whole(self, row: bytes) -> bool:
        """Whether the store has nothing of a row."""
        return row in self._whole

    def sum(self, key: Key) -> int:
        """What is still to be added to a counter."""
        return self._sums.get(key, 0)

    def published_soon(self, key: Key) -> list[int]:
        """Of what is still to be added to a counter, what the store may have added already."""
        sums = (laid.sums for laid in self._publishing.values())
        return [delta for each in sums for counter, delta in each if counter == key]

    def publishing(self, sequence: int, laid: Laid) -> None:
        """The store may have the commit `sequence` from now on."""
        self._publishing[sequence] = laid

    def published_none(self) -> None:
        """Nothing is being published: what was and is laid still, the store does not have."""
        self._publishing.clear()

    def lay(
        self,
        sequence: int,
        writes: Sequence[Write],
        fresh: Iterable[bytes],
        base: Mapping[Key, bytes | None],
        shifts: Sequence[tuple[Key, int]] = (),
    ) -> Laid:
        """Lay a commit over the store, whose values of what is changed in part are in `base`.

        `fresh`: rows that the store does not have. `shifts`: by what each SHIFT moves a counter, as
        far as is known; the store says so when it has the commit.
        Raises: Conflict; then nothing was laid.
        """
        laid = Laid()
        laid.sums += [(key, delta) for key, delta in shifts if delta]
        values: dict[Key, bytes | None] = {}
        for write in writes:
            row = write.row
            if isinstance(write, Shift):
                continue
            if isinstance(write, Add):
                laid.sums.append(((row, write.field), write.delta))
            elif not is_table(row):
                key = (row, write.field)
                values[key] = (
                    write.value if isinstance(write, Put) else self._after(write, key, values, base)
                )
        laid.keys = list(values)
        laid.whole = list(fresh)
        self._whole.update(laid.whole)
        for (row, field), value in values.items():
            self._rows.setdefault(row, {})[field] = (sequence, value)
        for key, delta in laid.sums:
            self._add(key, delta)
        return laid

    def _add(self, key: Key, delta: int) -> None:
        total = self._sums.pop(key, 0) + delta
        if total:
            self._sums[key] = total

    def _after(
        self,
        write: Write,
        key: Key,
        values: Mapping[Key, bytes | None],
        base: Mapping[Key, bytes | None],
    ) -> bytes | None:
        """The value at `key` once `write`, which is no PUT, is applied."""
        if isinstance(write, Delete):
            return None
        before = values[key] if key in values else self.get(key)
        if isinstance(before, Missing):
            before = base[key]
        assert isinstance(write, Append | Merge), f"{write!r} can't be held back"
        return effect(write, before)

    def follow(self, writes: Sequence[Write]) -> list[bytes]:
        """Others of this mount have merged into the store; the rows here that show it, too."""
        rows: list[bytes] = []
        for write in writes:
            if not isinstance(write, Merge):
                continue
            fields = self._rows.get(write.row, {})
            sequence, value = fields.get(write.field, (0, None))
            if value is not None:
                fields[write.field] = (sequence, effect(write, value))
                rows.append(write.row)
        return rows

    def exchange(self, key: Key, old: bytes, new: bytes) -> None:
        """In the records at `key`, `new` takes the place of `old`, which is as long."""
        sequence, value = self._rows.get(key[0], {}).get(key[1], (0, None))
        if value is not None:
            self._rows[key[0]][key[1]] = sequence, exchanged(value, old, new)

    def lift(self, sequence: int, laid: Laid) -> set[bytes]:
        """The store has the commit `sequence`; the rows over which nothing is laid any more."""
        self.lifts += 1
        self._publishing.pop(sequence, None)
        self._whole.difference_update(laid.whole)
        for key, delta in laid.sums:
            self._add(key, -delta)
        free: set[bytes] = set()
        for row, field in laid.keys:
            fields = self._rows[row]
            if fields[field][0] == sequence:
                del fields[field]
            if not fields:
                del self._rows[row]
                free.add(row)
        return free

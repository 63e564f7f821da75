"""What a commit may write, and what that means: the only interpreters of a write in Python.

`Txn` makes writes, engines apply them, and the row cache, the overlay of write-back and batches
foresee what they lead to. `effect` says what a field holds after a write, `compose` which write
does what two do. `redis/redis_commit.lua` does the same in the server: tests/fsmeta/store/
test_writes.py shows that they agree.

Each write is a tuple in the shape that goes to the script, `op` first. So writes of different kinds
are never equal, and packing them costs nothing. Where many are made (`Txn`), `tuple.__new__` makes
them of all items, which spares a frame each.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import lru_cache
from operator import itemgetter
from typing import Final, NamedTuple, TypeAlias

from fsmeta.errors import Conflict, Corrupt

# The first item of each write, as the script knows it.
PUT: Final = 0
DELETE: Final = 1
DELETE_ROW: Final = 2
ADD: Final = 3
APPEND: Final = 4
MERGE: Final = 5
SHIFT: Final = 6

BESIDE: Final = b"<"  # as a limit: the one beside the counter, if there is any; see `limit_field`
NO_LIMIT: Final = b"0"

Parts: TypeAlias = tuple[int | bytes, ...]
"""`at, part, …`: bytes overwrite what is at offset `at`; an int is added to the big-endian 32-bit
word there."""

_U32 = struct.Struct(">I")
_new = tuple.__new__


@lru_cache(1024)  # verbs add the same few numbers
def decimal(number: int) -> bytes:
    """`number` as counters, and what is added to them, have it."""
    return b"%d" % number


class CannotCompose(Exception):
    """No single write does what two do, or engines may take them in another order."""


class _Put(NamedTuple):
    op: int
    row: bytes
    field: bytes
    value: bytes


class Put(_Put):
    """Set a field."""

    __slots__ = ()

    def __new__(cls, row: bytes, field: bytes, value: bytes) -> Put:
        return _new(cls, (PUT, row, field, value))


class _Delete(NamedTuple):
    op: int
    row: bytes
    field: bytes


class Delete(_Delete):
    """Remove a field, which may be absent."""

    __slots__ = ()

    def __new__(cls, row: bytes, field: bytes) -> Delete:
        return _new(cls, (DELETE, row, field))


class _DeleteRow(NamedTuple):
    op: int
    row: bytes


class DeleteRow(_DeleteRow):
    """Remove all fields of a row; its own `field` is empty."""

    __slots__ = ()
    field: Final = b""

    def __new__(cls, row: bytes) -> DeleteRow:
        return _new(cls, (DELETE_ROW, row))


class _Add(NamedTuple):
    op: int
    row: bytes
    field: bytes
    delta_text: bytes
    limit: bytes
    tag: str
    back_text: bytes


class Add(_Add):
    """Move a decimal counter by `delta`.

    Where that is above 0 and the counter then exceeds `limit`, the commit fails with the errno
    named `tag`.
    """

    __slots__ = ()

    def __new__(
        cls, row: bytes, field: bytes, delta: int, limit: bytes = NO_LIMIT, tag: str = ""
    ) -> Add:
        return _new(cls, (ADD, row, field, decimal(delta), limit, tag, decimal(-delta)))

    @property
    def delta(self) -> int:
        """By how much the counter moves."""
        return int(self.delta_text)


class _Append(NamedTuple):
    op: int
    row: bytes
    field: bytes
    suffix: bytes


class Append(_Append):
    """Add `suffix` to a value; an absent value counts as empty."""

    __slots__ = ()

    def __new__(cls, row: bytes, field: bytes, suffix: bytes) -> Append:
        return _new(cls, (APPEND, row, field, suffix))


class _Merge(NamedTuple):
    op: int
    row: bytes
    field: bytes


class Merge(_Merge):
    """Change parts of a record that must exist, else Conflict.

    A commit merges into one field only once. The parts are the items from the fourth on.
    """

    __slots__ = ()

    def __new__(cls, row: bytes, field: bytes, parts: Parts) -> Merge:
        return _new(cls, (MERGE, row, field, *parts))

    @property
    def parts(self) -> Parts:
        """What is changed in the record."""
        return self[3:]

    def __repr__(self) -> str:
        return f"Merge(row={self.row!r}, field={self.field!r}, parts={self.parts!r})"


class _Shift(NamedTuple):
    op: int
    row: bytes
    field: bytes
    source: bytes
    sign: bytes
    limit: bytes
    tag: str


class Shift(_Shift):
    """Add what the counter `source` of the same row holds (sign b"+"), or take it away (b"-").

    No Add or Shift of the commit changes `source`.
    """

    __slots__ = ()

    def __new__(
        cls,
        row: bytes,
        field: bytes,
        source: bytes,
        sign: bytes,
        limit: bytes = BESIDE,
        tag: str = "EDQUOT",
    ) -> Shift:
        return _new(cls, (SHIFT, row, field, source, sign, limit, tag))

    def delta(self, amount: int) -> int:
        """By how much the counter moves where `source` holds `amount`."""
        return -amount if self.sign == b"-" else amount


Write: TypeAlias = Put | Delete | DeleteRow | Add | Append | Merge | Shift

row_of: Final[Callable[[Write], bytes]] = itemgetter(1)
"""`write.row`, for map()."""


def limit_field(counter: bytes) -> bytes:
    """Where the limit of a counter is, in its row, for writes that say BESIDE."""
    return counter + BESIDE


def with_row(write: Write, row: bytes) -> Write:
    """The same write to another row."""
    op, _, *rest = write
    return _new(type(write), (op, row, *rest))


def effect(write: Write, before: bytes | None, amount: int = 0) -> bytes | None:
    """What a field holds after `write`, where it held `before`; limits are the engine's.

    `amount`: what the counter holds that a Shift names.
    Raises: Conflict where a Merge finds no record; Corrupt where `before` does not take the change.
    """
    if isinstance(write, Put):
        return write.value
    if isinstance(write, Delete | DeleteRow):
        return None
    if isinstance(write, Append):
        return (before or b"") + write.suffix
    if isinstance(write, Merge):
        if before is None:
            raise Conflict(f"{write.row!r} {write.field!r} is gone")
        try:
            return merge(before, write.parts)
        except (struct.error, ValueError) as error:
            raise Corrupt(write.row, write.field, f"{len(before)} bytes: {error}") from error
    delta = write.delta if isinstance(write, Add) else write.delta(amount)
    return add_decimal(write.row, write.field, before, delta)


def add_decimal(row: bytes, field: bytes, value: bytes | None, delta: int) -> bytes:
    """The decimal counter `value` moved by `delta`.

    Raises: Corrupt.
    """
    try:
        return b"%d" % (int(value or b"0") + delta)
    except ValueError as error:
        raise Corrupt(row, field, f"counter {value!r}") from error


def merge(record: bytes, parts: Parts) -> bytes:
    """`record` with `parts` changed. Raises: struct.error, ValueError where they do not fit."""
    changed = record
    for index in range(0, len(parts), 2):
        at, part = parts[index], parts[index + 1]
        assert isinstance(at, int)
        if isinstance(part, int):
            part = _U32.pack(_U32.unpack_from(changed, at)[0] + part)
        elif at + len(part) > len(record):
            raise ValueError(f"too short to change {len(part)} at {at}")
        changed = changed[:at] + part + changed[at + len(part) :]
    return changed


def compose(first: Write, second: Write) -> Write:
    """The write that does what two writes to one field do, one after the other.

    Where `first` would be refused, this need not be. Raises: CannotCompose.
    """
    row, field = second.row, second.field
    if isinstance(first, DeleteRow | Shift) or isinstance(second, DeleteRow | Shift):
        raise CannotCompose("it concerns more than one field")
    if isinstance(first, Add) or isinstance(second, Add):
        if isinstance(first, Add) and isinstance(second, Add):
            return Add(row, field, first.delta + second.delta, second.limit, second.tag)
        raise CannotCompose("a counter is moved, and changed in another way")
    if isinstance(second, Put | Delete):
        return second
    if isinstance(first, Put | Delete):
        return _settled(first, second)
    if isinstance(first, Append) and isinstance(second, Append):
        return Append(row, field, first.suffix + second.suffix)
    if isinstance(first, Merge) and isinstance(second, Merge):
        return Merge(row, field, _joined(first.parts, second.parts))
    raise CannotCompose("a record is appended to, and changed in parts")


def _settled(first: Put | Delete, second: Append | Merge) -> Put:
    """`second` after a write that says what the field holds. Raises: CannotCompose."""
    try:
        value = effect(second, effect(first, None))
    except Conflict as error:
        raise CannotCompose("what it changes was taken away") from error
    except Corrupt as error:
        raise CannotCompose("what it counts was never so few") from error
    assert value is not None, "only Delete leaves nothing"
    return Put(second.row, second.field, value)


def _joined(first: Parts, second: Parts) -> Parts:
    """The parts of a Merge that does what two do, one after the other. Raises: CannotCompose."""
    parts: dict[int, int | bytes] = {}
    both = first + second
    for at, part in zip(both[::2], both[1::2], strict=True):
        assert isinstance(at, int)
        size = 4 if isinstance(part, int) else len(part)
        for begin, old in list(parts.items()):
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
                raise CannotCompose("a word is counted and overwritten")
            del parts[begin]
        parts[at] = part
    return tuple(each for pair in parts.items() for each in pair)

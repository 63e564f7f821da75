"""What a commit means, once, for every engine that can get and put inside a transaction.

`store_mem`, `store_sqlite` and `store_tikv` call `apply_commit`; on Redis the same steps are
`commit.lua`. The caller provides atomicity: it discards all puts when this raises.
"""

from __future__ import annotations

import struct
from typing import Protocol

from fsmeta.errors import Conflict, Corrupt, Fenced, LimitExceeded, NotEmpty
from fsmeta.store import FENCE_FIELD, Commit, Op, Part, Set

_U32 = struct.Struct(">I")
_U64 = struct.Struct(">Q")


class View(Protocol):
    """A store inside one of its own transactions."""

    def get(self, row: bytes, field: bytes) -> bytes | None: ...
    def put(self, row: bytes, field: bytes, value: bytes) -> None: ...
    def delete(self, row: bytes, field: bytes) -> None: ...
    def delete_row(self, row: bytes) -> None: ...
    def is_empty(self, row: bytes) -> bool: ...


def apply_commit(view: View, commit: Commit) -> None:
    """Validate and apply `commit`; a repeat of an applied one does nothing.

    Raises: Conflict, NotEmpty, Fenced, LimitExceeded, Corrupt.
    """
    if commit.fence is not None and _already_applied(view, commit, commit.fence):
        return
    for row, field, expected in commit.checks:
        if view.get(row, field) != expected:
            raise Conflict(f"{row!r} {field!r} has changed")
    for row in commit.empties:
        if not view.is_empty(row):
            raise NotEmpty(f"{row!r} is not empty")
    for write in commit.writes:
        _apply_write(view, write)
    if commit.fence is not None and commit.writes:
        view.put(commit.fence, commit.worker, _U64.pack(commit.sequence))


def _already_applied(view: View, commit: Commit, fence: bytes) -> bool:
    if view.get(fence, FENCE_FIELD) is None:
        raise Fenced(f"session {fence[1:].hex()} has ended")
    last = view.get(fence, commit.worker)
    if last is None or not commit.writes:
        return False
    seen = _U64.unpack(last)[0]
    assert seen <= commit.sequence, "a worker's sequence went back"
    return bool(seen == commit.sequence)


def _apply_write(view: View, write: tuple[object, ...]) -> None:
    match write:
        case (Op.PUT, bytes(row), bytes(field), bytes(value)):
            view.put(row, field, value)
        case (Op.DELETE, bytes(row), bytes(field)):
            view.delete(row, field)
        case (Op.DELETE_ROW, bytes(row)):
            view.delete_row(row)
        case (Op.ADD, bytes(row), bytes(field), int(delta), int(limit), str(tag)):
            value = add_decimal(row, field, view.get(row, field), delta)
            if limit and delta > 0 and int(value) > limit:
                raise LimitExceeded(tag)
            view.put(row, field, value)
        case (Op.APPEND, bytes(row), bytes(field), bytes(suffix)):
            view.put(row, field, (view.get(row, field) or b"") + suffix)
        case (Op.MERGE, bytes(row), bytes(field), tuple(parts)):
            record = view.get(row, field)
            if record is None:
                raise Conflict(f"{row!r} {field!r} is gone")
            view.put(row, field, merge(record, parts))
        case _:
            raise AssertionError(f"unknown write {write!r}")


def add_decimal(row: bytes, field: bytes, value: bytes | None, delta: int) -> bytes:
    """The decimal counter `value` moved by `delta`.

    Raises: Corrupt.
    """
    try:
        return b"%d" % (int(value or b"0") + delta)
    except ValueError as error:
        raise Corrupt(row, field, f"counter {value!r}") from error


def merge(record: bytes, parts: tuple[Part, ...]) -> bytes:
    """`record` with the parts of a MERGE changed."""
    changed = bytearray(record)
    for part in parts:
        if isinstance(part, Set):
            changed[part.at : part.at + len(part.value)] = part.value
        else:
            word = _U32.unpack_from(record, part.at)[0] + part.delta
            _U32.pack_into(changed, part.at, word)
    assert len(changed) == len(record)
    return bytes(changed)

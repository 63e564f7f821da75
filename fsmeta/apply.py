"""What a commit means, once, for every engine that can get and put inside a transaction.

`store_mem`, `store_sqlite` and `tikv_image` call `apply_commit`; on Redis the same steps are
`redis_commit.lua`, which takes MERGE and ADD before the other writes: see `_assert_apart`. The
caller provides atomicity: it discards all puts when this raises.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Protocol

from fsmeta.errors import Conflict, Corrupt, Fenced, LimitExceeded, NotEmpty
from fsmeta.store import (
    ADD,
    APPEND,
    DELETE,
    DELETE_ROW,
    FENCE_FIELD,
    MERGE,
    PUT,
    Commit,
    Parts,
    Write,
)

_U32 = struct.Struct(">I")
_U64 = struct.Struct(">Q")
_WORDS = range(1 << 32)


class View(Protocol):
    """A store inside one of its own transactions."""

    def get(self, row: bytes, field: bytes) -> bytes | None: ...
    def put(self, row: bytes, field: bytes, value: bytes) -> None: ...
    def delete(self, row: bytes, field: bytes) -> None: ...
    def delete_row(self, row: bytes) -> None: ...
    def is_empty(self, row: bytes) -> bool: ...


def apply_commit(view: View, commit: Commit) -> None:
    """Validate and apply `commit`; a repeat of an applied one, however late, does nothing.

    Raises: Conflict, NotEmpty, Fenced, LimitExceeded, Corrupt.
    """
    _assert_apart(commit.writes)
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
    # a worker sends the next only when it knows this one's fate, so an older sequence is a
    # duplicate that was delayed on its way: nobody waits for its answer any more
    return bool(_U64.unpack(last)[0] >= commit.sequence)


def _assert_apart(writes: Sequence[Write]) -> None:
    """A field that MERGE or ADD changes is changed in no other way: on it engines would differ."""
    merged = [write[1:3] for write in writes if write[0] == MERGE]
    added = {write[1:3] for write in writes if write[0] == ADD}
    written = {write[1:3] for write in writes if write[0] in (PUT, DELETE, APPEND)}
    deleted = {write[1] for write in writes if write[0] == DELETE_ROW}
    moved = added.union(merged)
    assert len(merged) + len(added) == len(moved), f"merged twice, or merged and added: {writes}"
    assert moved.isdisjoint(written), f"merged or added, and written: {writes}"
    assert deleted.isdisjoint(row for row, _ in moved), f"merged or added, and deleted: {writes}"


def _apply_write(view: View, write: Write) -> None:
    op, row = write[:2]
    if op == PUT:
        view.put(row, write[2], write[3])
    elif op == DELETE:
        view.delete(row, write[2])
    elif op == DELETE_ROW:
        view.delete_row(row)
    elif op == ADD:
        _, _, field, delta, limit, tag, _ = write
        value = add_decimal(row, field, view.get(row, field), int(delta))
        if int(limit) and int(delta) > 0 and int(value) > int(limit):
            raise LimitExceeded(tag)
        view.put(row, field, value)
    elif op == APPEND:
        view.put(row, write[2], (view.get(row, write[2]) or b"") + write[3])
    elif op == MERGE:
        record = view.get(row, write[2])
        if record is None:
            raise Conflict(f"{row!r} {write[2]!r} is gone")
        _require_fit(row, write[2], record, write[3:])
        view.put(row, write[2], merge(record, write[3:]))
    else:
        raise AssertionError(f"unknown write {write!r}")


def _require_fit(row: bytes, field: bytes, record: bytes, parts: Parts) -> None:
    """Raises: Corrupt where `record` is too short for `parts`, or a word would leave 32 bits."""
    for at, part in zip(parts[::2], parts[1::2], strict=True):
        assert isinstance(at, int)
        size = _U32.size if isinstance(part, int) else len(part)
        if at + size > len(record):
            raise Corrupt(row, field, f"{len(record)} bytes: too short to change {size} at {at}")
        if isinstance(part, int) and _U32.unpack_from(record, at)[0] + part not in _WORDS:
            raise Corrupt(row, field, f"the word at {at} can't move by {part}")


def add_decimal(row: bytes, field: bytes, value: bytes | None, delta: int) -> bytes:
    """The decimal counter `value` moved by `delta`.

    Raises: Corrupt.
    """
    try:
        return b"%d" % (int(value or b"0") + delta)
    except ValueError as error:
        raise Corrupt(row, field, f"counter {value!r}") from error


def merge(record: bytes, parts: Parts) -> bytes:
    """`record` with the parts of a MERGE changed."""
    changed = record
    for index in range(0, len(parts), 2):
        at, part = parts[index], parts[index + 1]
        assert isinstance(at, int)
        if isinstance(part, int):
            part = _U32.pack(_U32.unpack_from(record, at)[0] + part)
        changed = changed[:at] + part + changed[at + len(part) :]
    assert len(changed) == len(record)
    return changed

"""What a commit means, once, for every engine that can get and put inside a transaction.

`store/mem`, `store/sqlite` and `tikv/batch` call `apply_commit`; on Redis the same steps are
`redis/redis_commit.lua`, which takes MERGE, ADD and SHIFT before the other writes: see
`_assert_apart`. The caller provides atomicity: it discards all puts when this raises.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeAlias

from fsmeta.errors import Conflict, Corrupt, Fenced, LimitExceeded, NotEmpty, Outdated
from fsmeta.store.contract import (
    ADD,
    APPEND,
    BESIDE,
    DELETE,
    DELETE_ROW,
    FENCE_FIELD,
    MERGE,
    PUT,
    SHIFT,
    Commit,
    Key,
    Parts,
    Write,
    limit_field,
)

_U32 = struct.Struct(">I")
_U64 = struct.Struct(">Q")
_WORDS = range(1 << 32)


class FieldView(Protocol):
    """A store inside one of its own transactions."""

    def get(self, row: bytes, field: bytes) -> bytes | None: ...
    def put(self, row: bytes, field: bytes, value: bytes) -> None: ...
    def delete(self, row: bytes, field: bytes) -> None: ...
    def delete_row(self, row: bytes) -> None: ...
    def is_empty(self, row: bytes) -> bool: ...


Adder: TypeAlias = Callable[[Key, int, bytes, str], None]
"""Moves a counter by so much, within a limit as ADD has it; the tag is of its LimitExceeded."""


def apply_commit(view: FieldView, commit: Commit, add: Adder | None = None) -> None:
    """Validate and apply `commit`; a repeat of an applied one, however late, does nothing.

    `add` is for an engine whose counters are more than a field each.
    Raises: Conflict, NotEmpty, Fenced, Outdated, LimitExceeded, Corrupt.
    """
    if commit.fence is not None and _already_applied(view, commit, commit.fence):
        return
    for row, field, expected in commit.checks:
        if view.get(row, field) != expected:
            raise Conflict(f"{row!r} {field!r} has changed")
    for row in commit.empties:
        if not view.is_empty(row):
            raise NotEmpty(f"{row!r} is not empty")
    _assert_apart(commit.writes)  # not before: what was built on old values may make no sense
    add = add or partial(add_to, view)
    for write in commit.writes:
        _apply_write(view, write, add)
    if commit.fence is not None and commit.writes:
        view.put(commit.fence, commit.worker, _U64.pack(commit.sequence))


def _already_applied(view: FieldView, commit: Commit, fence: bytes) -> bool:
    edition = view.get(fence, FENCE_FIELD)
    if edition is None:
        raise Fenced(f"session {fence[1:].hex()} has ended")
    last = view.get(fence, commit.worker) if commit.writes else None
    # a worker sends the next only when it knows this one's fate, so an older sequence is a
    # duplicate that was delayed on its way: nobody waits for its answer any more
    if last is not None and _U64.unpack(last)[0] >= commit.sequence:
        return True
    if edition != commit.edition:
        raise Outdated(f"the settings have edition {edition!r}, the commit {commit.edition!r}")
    return False


def _assert_apart(writes: Sequence[Write]) -> None:
    """A field that MERGE or ADD changes is changed in no other way: on it engines would differ.

    SHIFT is an ADD here.
    """
    merged = [write[1:3] for write in writes if write[0] == MERGE]
    added = {write[1:3] for write in writes if write[0] in (ADD, SHIFT)}
    sources = {(write[1], write[3]) for write in writes if write[0] == SHIFT}
    written = {write[1:3] for write in writes if write[0] in (PUT, DELETE, APPEND)}
    deleted = {write[1] for write in writes if write[0] == DELETE_ROW}
    moved = added.union(merged)
    assert len(merged) + len(added) == len(moved), f"merged twice, or merged and added: {writes}"
    assert moved.isdisjoint(written), f"merged or added, and written: {writes}"
    assert sources.isdisjoint(moved | written), f"shifted from, and changed: {writes}"
    assert deleted.isdisjoint(row for row, _ in moved), f"merged or added, and deleted: {writes}"


def _apply_write(view: FieldView, write: Write, add: Adder) -> None:
    op, row = write[:2]
    if op == PUT:
        view.put(row, write[2], write[3])
    elif op == DELETE:
        view.delete(row, write[2])
    elif op == DELETE_ROW:
        view.delete_row(row)
    elif op == ADD:
        _, _, field, delta, limit, tag, _ = write
        add((row, field), int(delta), limit, tag)
    elif op == SHIFT:
        _, _, field, source, sign, limit, tag = write
        amount = int(add_decimal(row, source, view.get(row, source), 0))
        add((row, field), -amount if sign == b"-" else amount, limit, tag)
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


def add_to(view: FieldView, key: Key, delta: int, limit: bytes, tag: str) -> None:
    """Move a counter that is one field. Raises: LimitExceeded, Corrupt."""
    row, field = key
    value = add_decimal(row, field, view.get(row, field), delta)
    if delta > 0 and limit != b"0":
        beside = view.get(row, limit_field(field)) if limit == BESIDE else limit
        if beside is not None and int(value) > int(add_decimal(row, field, beside, 0)):
            raise LimitExceeded(tag)
    view.put(row, field, value)


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

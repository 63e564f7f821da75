"""The meaning of a commit, for every engine that can get and put inside a transaction.

`store/mem`, `store/sqlite` and `tikv/batch` call `apply_commit`; on Redis the same steps are
`redis/redis_commit.lua`, which takes Merge, Add and Shift before the other writes: see
`_assert_apart`. The caller provides atomicity: it discards all puts when this raises.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeAlias

from fsmeta.errors import Conflict, Fenced, LimitExceeded, NotEmpty, Outdated
from fsmeta.store.contract import FENCE_FIELD, Commit, Key, has_tail
from fsmeta.store.writes import (
    BESIDE,
    NO_LIMIT,
    Add,
    Append,
    Delete,
    DeleteRow,
    Merge,
    Put,
    Shift,
    Write,
    add_decimal,
    effect,
    limit_field,
)

_U64 = struct.Struct(">Q")


class FieldView(Protocol):
    """A store inside one of its own transactions."""

    def get(self, row: bytes, field: bytes) -> bytes | None: ...
    def put(self, row: bytes, field: bytes, value: bytes) -> None: ...
    def delete(self, row: bytes, field: bytes) -> None: ...
    def delete_row(self, row: bytes) -> None: ...
    def is_empty(self, row: bytes) -> bool: ...


Adder: TypeAlias = Callable[[Key, int, bytes, str], None]
"""Moves a counter by so much, within a limit as Add has it; the tag is of its LimitExceeded."""


def apply_commit(view: FieldView, commit: Commit, add: Adder | None = None) -> None:
    """Validate and apply `commit`; a repeat of an applied one, however late, does nothing.

    `add` is for an engine whose counters are more than a field each.
    Raises: Conflict, NotEmpty, Fenced, Outdated, LimitExceeded, Corrupt.
    """
    if commit.fence is not None and _already_applied(view, commit, commit.fence):
        return
    for row, field, expected in commit.checks:
        found = view.get(row, field)
        if found != expected and not ((row, field) in commit.tails and has_tail(found, expected)):
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
    # duplicate that was delayed on its way: its answer is not awaited any more
    if last is not None and _U64.unpack(last)[0] >= commit.sequence:
        return True
    if edition != commit.edition:
        raise Outdated(f"the settings have edition {edition!r}, the commit {commit.edition!r}")
    return False


def _assert_apart(writes: Sequence[Write]) -> None:
    """A field that Merge or Add changes is changed in no other way: on it engines would differ.

    Shift is an Add here.
    """
    merged = [(each.row, each.field) for each in writes if isinstance(each, Merge)]
    added = {(each.row, each.field) for each in writes if isinstance(each, Add | Shift)}
    sources = {(each.row, each.source) for each in writes if isinstance(each, Shift)}
    written = {(each.row, each.field) for each in writes if isinstance(each, Put | Delete | Append)}
    deleted = {each.row for each in writes if isinstance(each, DeleteRow)}
    moved = added.union(merged)
    assert len(merged) + len(added) == len(moved), f"merged twice, or merged and added: {writes}"
    assert moved.isdisjoint(written), f"merged or added, and written: {writes}"
    assert sources.isdisjoint(moved | written), f"shifted from, and changed: {writes}"
    assert deleted.isdisjoint(row for row, _ in moved), f"merged or added, and deleted: {writes}"


def _apply_write(view: FieldView, write: Write, add: Adder) -> None:
    row, field = write.row, write.field
    if isinstance(write, Put):
        view.put(row, field, write.value)
    elif isinstance(write, Delete):
        view.delete(row, field)
    elif isinstance(write, DeleteRow):
        view.delete_row(row)
    elif isinstance(write, Add):
        add((row, field), write.delta, write.limit, write.tag)
    elif isinstance(write, Shift):
        amount = int(add_decimal(row, write.source, view.get(row, write.source), 0))
        add((row, field), write.delta(amount), write.limit, write.tag)
    else:
        value = effect(write, view.get(row, field))
        assert value is not None, f"only a deletion leaves nothing: {write}"
        view.put(row, field, value)


def add_to(view: FieldView, key: Key, delta: int, limit: bytes, tag: str) -> None:
    """Move a counter that is one field. Raises: LimitExceeded, Corrupt."""
    row, field = key
    value = add_decimal(row, field, view.get(row, field), delta)
    if delta > 0 and limit != NO_LIMIT:
        beside = view.get(row, limit_field(field)) if limit == BESIDE else limit
        if beside is not None and int(value) > int(add_decimal(row, field, beside, 0)):
            raise LimitExceeded(tag)
    view.put(row, field, value)

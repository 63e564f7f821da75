"""Whole rows of inodes, however long they are: never more of one in a request than a page.

A row can hold a chunk for each 64 MiB of a file, and in volumes of earlier versions any number of
extended attributes. Short rows, which nearly all are, come many in one request.

Called by verbs, and by what reads the whole volume. Threading: any thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from fsmeta.schema.xattrs import XATTRS_MAX, cost, is_xattr
from fsmeta.store.contract import Reads

PAGE_FIELDS: Final = 100  # of one request; a value has 64 KiB at most, so 6.5 MiB


class InodeRow(NamedTuple):
    """The fields of an inode's row."""

    fields: dict[bytes, bytes]
    # what those attributes cost that are left out, because the others reach XATTRS_MAX
    left_out: int = 0


def fields_of(store: Reads, row: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The fields of a row of any length, some perhaps twice. Raises: Unavailable."""
    cursor: bytes | None = b""
    while cursor is not None:
        page = store.scan(row, cursor, PAGE_FIELDS)
        yield from page.items
        cursor = page.cursor


def read_inodes(store: Reads, rows: Sequence[bytes]) -> list[InodeRow]:
    """The rows, each of a moment of its own; a long one is of several. Raises: Unavailable."""
    found = store.read_short_rows(rows)
    return [
        _read_long(store, row) if fields is None else InodeRow(fields)
        for row, fields in zip(rows, found, strict=True)
    ]


def _read_long(store: Reads, row: bytes) -> InodeRow:
    fields: dict[bytes, bytes] = {}
    left_out: set[bytes] = set()
    total = beyond = 0
    for field, value in fields_of(store, row):
        if field in fields or field in left_out:
            continue
        if is_xattr(field):
            price = cost(field, value)
            if total + price > XATTRS_MAX:
                left_out.add(field)
                beyond += price
                continue
            total += price
        fields[field] = value
    return InodeRow(fields, beyond)

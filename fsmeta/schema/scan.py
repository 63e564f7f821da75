"""All chunks of a volume, or those of some files, a page at a time: what gc and scrub read.

The volume may be in use: a file that is there throughout is given at least once, perhaps twice.
Memory is that of one page. The caller's thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from fsmeta.errors import Corrupt
from fsmeta.schema import keys, slices
from fsmeta.schema.inode_rows import read_inodes
from fsmeta.store.contract import Store
from fsmeta.types import Ino, Slice, SliceId

_ROWS_AT_ONCE: Final = 200


class Walked(NamedTuple):
    """One inode: its chunks with slices that have bytes in the store, or why they can't be read."""

    ino: Ino
    chunks: Mapping[int, list[Slice]]
    error: Corrupt | None = None
    records: Mapping[int, int] = {}  # how many each of these chunks has, holes included


class WalkPage(NamedTuple):
    """Some inodes, and where the next page begins; no cursor means the end."""

    inodes: list[Walked]
    cursor: bytes | None


def pages(store: Store, cursor: bytes = b"") -> Iterator[WalkPage]:
    """Every inode behind `cursor`. Raises: Unavailable."""
    following: bytes | None = cursor
    while following is not None:
        page = store.scan_rows(keys.INODE_PREFIX, following)
        rows = [row for row in page.rows if len(row) == 9]
        inodes: list[Walked] = []
        for begin in range(0, len(rows), _ROWS_AT_ONCE):
            inodes += of_rows(store, rows[begin : begin + _ROWS_AT_ONCE])
        following = page.cursor
        yield WalkPage(inodes, following)


def of_rows(store: Store, rows: list[bytes]) -> Iterator[Walked]:
    """The inodes in these rows; those that are gone have no chunks."""
    for row, found in zip(rows, read_inodes(store, rows), strict=True):
        yield _walked(Ino(keys.id_of(row)), found.fields)


def _walked(ino: Ino, fields: Mapping[bytes, bytes]) -> Walked:
    chunks: dict[int, list[Slice]] = {}
    records: dict[int, int] = {}
    try:
        for field, value in fields.items():
            if field[:1] == b"c" and len(field) == 5:
                index = keys.id_of(field)
                listed = slices.unpack_slices(ino, index, value)
                records[index] = len(listed)
                chunks[index] = [each for each in listed if each.stored]
    except Corrupt as error:
        return Walked(ino, {}, error)
    return Walked(ino, chunks, None, records)


def fields_of(store: Store, row: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The fields of a row of any length, some perhaps twice. Raises: Unavailable."""
    cursor: bytes | None = b""
    while cursor is not None:
        page = store.scan(row, cursor)
        yield from page.items
        cursor = page.cursor


def dead(store: Store) -> Iterator[tuple[SliceId, int]]:
    """Slices that wait for deletion, with their sizes. Raises: Corrupt, Unavailable."""
    for field, value in fields_of(store, keys.DEAD_SLICES):
        yield from slices.unpack_dead(field, value)

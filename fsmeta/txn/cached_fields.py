"""What `RowCache` has in its rows and passes around: fields, moments, rows that go unwatched.

Called by `RowCache`, under its lock or for what no other thread has.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from fsmeta.schema.keys import ATTR_FIELD, DIR_PREFIX, INODE_PREFIX, VOLATILE_FIELD

BIG_BYTES: Final = 512  # xattrs have 64 KiB, long lists of slices more; ROWS_MAX counts small ones

Fields: TypeAlias = dict[bytes, bytes | None]


class Missing:
    """The type of MISSING: not known, as opposed to None, known to be absent."""


MISSING: Final = Missing()


class Mark(NamedTuple):
    """A moment, as the number of other clients' and own changes up to it."""

    others: int
    own: int


class Unwatched(NamedTuple):
    """The rows of a commit that are left untracked: busy ones."""

    rows: Collection[bytes] = ()
    begun: float = 0.0  # when it was sent, or before
    merged: Sequence[bytes] = ()  # what each of its MERGEs has made, if the answer says so


WATCHED: Final = Unwatched()


def lasting(row: bytes, fields: Fields) -> Fields:
    """Those of `fields` that are probably still true after a change of `row`: of a directory
    all names but one, and then it is `fields` itself; of an inode mode and owner."""
    if row[:1] == DIR_PREFIX:
        return fields
    if row[:1] == INODE_PREFIX and fields.get(ATTR_FIELD):
        return {ATTR_FIELD: fields[ATTR_FIELD]}
    return {}


def big_bytes(fields: Mapping[bytes, bytes | None]) -> int:
    """How many bytes the big values have."""
    return sum([len(value) for value in fields.values() if value and len(value) > BIG_BYTES])


def attr_record(fields: Mapping[bytes, bytes | None] | None) -> bytes | None:
    """`a` and `v` of an inode, one behind the other: b"" where there is no such inode, None where
    that is not known."""
    if fields is None or ATTR_FIELD not in fields or VOLATILE_FIELD not in fields:
        return None
    return (fields[ATTR_FIELD] or b"") + (fields[VOLATILE_FIELD] or b"")

"""Rows of clients that write back: up to which sequence each has published its held commits.

    row          field        value
    j<journal8>  p<domain8>   8 bytes: the last sequence of this journal that is published there
                 h            msgpack map: the holder of the journal, see `JournalHolder`

The domain is the inode of a directory, or 0. A row goes when its journal is empty and ends, so one
with a holder says that there is a journal somewhere, perhaps with another holder by now.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from fsmeta.errors import Corrupt
from fsmeta.schema import keys
from fsmeta.schema.keys import pack_u64

JOURNAL_PREFIX: Final = b"j"
HOLDER_FIELD: Final = b"h"
_MARK: Final = b"p"


class JournalHolder(NamedTuple):
    """The client that publishes from a journal, or was the last to."""

    session: int
    host: str
    place: str  # the directory it is in, on that host


def journal_row(journal: int) -> bytes:
    """The row of marks of a journal."""
    return JOURNAL_PREFIX + pack_u64(journal)


def mark_field(domain: int) -> bytes:
    """Up to where a journal is published in a domain."""
    return _MARK + pack_u64(domain)


def is_mark(field: bytes) -> bool:
    """Whether a field is one of `mark_field`."""
    return field[:1] == _MARK


def pack_holder(holder: JournalHolder) -> bytes:
    """The value of HOLDER_FIELD."""
    return keys.pack_map(holder._asdict())


def unpack_holder(row: bytes, value: bytes) -> JournalHolder:
    """Raises: Corrupt."""
    found = keys.unpack_map(row, HOLDER_FIELD, value)
    session, host, place = (found.get(name) for name in JournalHolder._fields)
    if type(session) is not int or not isinstance(host, str) or not isinstance(place, str):
        raise Corrupt(row, HOLDER_FIELD, f"not a journal's holder: {found!r}")
    return JournalHolder(session, host, place)

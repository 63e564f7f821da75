"""`Entries`: what the names of a listing lead to, as it goes from the store to the kernel.

A listing with attributes is mostly passed on: no code on the way looks at the record of an inode
with nothing particular to it. So `Entries` has the stored records in a row, one for each name, and
an `EntryOut` only for names whose answer is more than that. The transport packs both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from fsmeta.schema.inode import JOINED_BYTES, NO_RECORD, unpack_record
from fsmeta.types import Attr, Dentry


class EntryOut(NamedTuple):
    """What a name leads to, and how many seconds the kernel may cache it.

    A lookup that finds nothing raises ENOENT, or answers an Entry without `attr` where the absence
    itself may be cached for `entry_ttl`.
    """

    attr: Attr | None
    entry_ttl: float
    attr_ttl: float


class Entries(NamedTuple):
    """What names in a directory lead to; each that is told counts as a lookup."""

    records: bytes  # plain ones of `schema/inode`, or NO_RECORD: see `odd`
    entry_ttl: float  # how long the kernel may cache the names of `records`
    attr_ttl: float
    odd: Mapping[int, EntryOut]  # by position; a name without record and entry is told as a name

    @classmethod
    def none(cls, count: int) -> Entries:
        """For `count` names, of which nothing but themselves is told."""
        return cls(NO_RECORD * count, 0.0, 0.0, {})

    @classmethod
    def of(cls, entries: Sequence[EntryOut | None]) -> Entries:
        """From what each name leads to."""
        odd = {at: entry for at, entry in enumerate(entries) if entry is not None}
        return cls(NO_RECORD * len(entries), 0.0, 0.0, odd)

    def doubtful(self) -> Entries:
        """The same, but that the kernel has to look up each name before it uses it."""
        odd = {at: entry._replace(entry_ttl=0.0) for at, entry in self.odd.items()}
        return self._replace(entry_ttl=0.0, odd=odd)

    def each(self, names: Iterable[Dentry]) -> list[EntryOut | None]:
        """What each of the names leads to; None where only the name is told."""
        found: list[EntryOut | None] = []
        for at, (_, ino, _) in enumerate(names):
            record = self.records[at * JOINED_BYTES : (at + 1) * JOINED_BYTES]
            if record == NO_RECORD:
                found.append(self.odd.get(at))
            else:
                attr = unpack_record(ino, record)
                found.append(EntryOut(attr, self.entry_ttl, self.attr_ttl))
        return found

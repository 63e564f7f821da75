"""`KnownRows`: the rows that `RowCache` remembers, in as little memory as they allow.

Listings bring the attributes of thousands of inodes, and few are looked at again one by one. So the
two records of an inode may be kept in one piece, as they are passed on, and are taken apart when a
field of the row is asked for. A row is in one of the two tables, never in both.

Owned by `RowCache`. Threading: its lock is held, but for `fields` and `records` being looked into.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice

from fsmeta.schema.inode import split
from fsmeta.txn.cached_fields import Fields, big_bytes


class KnownRows:
    """Rows with their fields, or an inode's records in one piece."""

    def __init__(self, rows_max: int, fields_max: int, bytes_max: int) -> None:
        self._rows_max, self._fields_max, self._bytes_max = rows_max, fields_max, bytes_max
        self.fields: dict[bytes, Fields] = {}
        self.records: dict[bytes, bytes] = {}  # plain ones of `schema/inode`
        self.big_bytes = 0  # of big values, since they were counted
        self._stored = 0  # fields, since they were counted

    def get(self, row: bytes) -> Fields | None:
        """What is known of a row; records are taken apart."""
        record = self.records.pop(row, None)
        if record is not None:
            self.fields[row] = split(record)
        return self.fields.get(row)

    def pop(self, row: bytes) -> None:
        """Know nothing of a row."""
        self.fields.pop(row, None)
        self.records.pop(row, None)

    def clear(self) -> None:
        """Know nothing."""
        self.fields.clear()
        self.records.clear()

    def note(self, fields: Mapping[bytes, bytes | None]) -> bool:
        """Fields that are stored count for the limits; whether one may be reached."""
        self.big_bytes += big_bytes(fields)
        self._stored += len(fields)
        return self.big_bytes > self._bytes_max // 8 or self._stored > self._fields_max // 8

    def oldest(self) -> list[bytes]:
        """Rows to be forgotten where there are too many, until an eighth is free.

        The order in which they came is near enough to age. The row with fields that came last is
        none of them: a commit may be about to say more of it.
        """
        total = len(self.fields) + len(self.records)
        count = total - self._rows_max * 7 // 8
        share = len(self.fields) * count // total  # rounded down
        return [*islice(self.fields, share), *islice(self.records, count - share)]

    def too_big(self) -> Iterator[bytes]:
        """The oldest rows with big values, where there may be too many bytes of those."""
        if self.big_bytes <= self._bytes_max // 8:
            return
        self.big_bytes = 0
        sizes = {row: size for row, fields in self.fields.items() if (size := big_bytes(fields))}
        excess = sum(sizes.values()) - self._bytes_max
        for row, size in sizes.items():
            if excess <= 0:
                return
            yield row
            excess -= size

    def too_many(self) -> Iterator[bytes]:
        """The oldest rows, where they have too many fields together; looked at now and then."""
        if self._stored <= self._fields_max // 8:
            return
        self._stored = 0
        excess = sum(map(len, self.fields.values())) + 2 * len(self.records) - self._fields_max
        counts = {row: len(fields) for row, fields in self.fields.items()} if excess > 0 else {}
        for row, count in counts.items():
            if excess <= 0:
                return
            yield row
            excess -= count

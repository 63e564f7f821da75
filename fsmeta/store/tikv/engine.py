"""The TiKV engine: a field is a key, a commit an optimistic transaction, a read a snapshot.

Works on a cluster that other programs use, too: everything is under the prefix that the URL names.
TiKV does not report changes, so callers fall back on short timeouts, as on SQLite.

What the contract leaves to the verbs: no key says "this row is empty" or "this row and all that
comes into it is deleted". A verb that makes names in a directory checks a record of its inode, and
a verb that removes the directory deletes that record, so the two conflict there.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from fsmeta.errors import ConfigError, StoreError, Unavailable
from fsmeta.runtime import Runtime
from fsmeta.store.contract import (
    SCAN_PAGE,
    SHORT_ROW_FIELDS,
    Commit,
    Key,
    Listener,
    Page,
    Record,
    RowPage,
    Store,
    short_rows,
)
from fsmeta.store.rollback import STEADY
from fsmeta.store.tikv.client import SCAN_MAX, Snapshot, TikvClient
from fsmeta.store.tikv.escrow_counters import FIELDS_MAX, folded, load, total
from fsmeta.store.tikv.gc import DUMP_MAX_S, collect
from fsmeta.store.tikv.group_commit import Committer
from fsmeta.store.tikv.keys import KeySpace, is_counter, is_sum

log = logging.getLogger(__name__)

URL_HELP: Final = "write tikv://PD:PORT[,PD:PORT…]/PREFIX"
_PREFIX: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_PLACE: Final = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}")
_FEW: Final = 16  # keys asked for beyond what is wanted, where rows may be larger than they were


def parse_url(url: str) -> tuple[list[str], str]:
    """The placement drivers and the prefix that `url` names. Raises: ConfigError."""
    rest = url.partition("://")[2]
    place, _, prefix = rest.partition("/")
    if "?" in rest or "@" in rest:
        raise ConfigError(
            f"metadata URL {url.partition('?')[0].rpartition('@')[2]!r}: TiKV is reached without"
            f" password or TLS: {URL_HELP}"
        )
    drivers = place.split(",")
    for driver in drivers:
        if not _PLACE.fullmatch(driver) or int(driver.rpartition(":")[2]) > 65535:
            raise ConfigError(f"metadata URL {url!r}: {driver!r} is no HOST:PORT: {URL_HELP}")
    if not _PREFIX.fullmatch(prefix):
        raise ConfigError(
            f"metadata URL {url!r}: the prefix {prefix!r} of the volume's keys: use 1 to 64 of"
            f" A-Z, a-z, 0-9, '.', '_' and '-': {URL_HELP}"
        )
    return drivers, prefix


class TikvStore:
    """One client's connection to a volume in a TiKV cluster."""

    name = "tikv"
    history = STEADY

    def __init__(self, url: str, runtime: Runtime, collects: bool = False) -> None:
        """`collects`: whether `tidy` has old values dropped.

        Raises: ConfigError where the URL is wrong or nothing answers there.
        """
        drivers, prefix = parse_url(url)
        self._space = KeySpace(prefix)
        self._link = TikvClient(drivers, runtime)
        self._clock = runtime.monotonic
        self._collects = collects
        self._committer = Committer(self._link, self._space, runtime)

    @property
    def round_trips(self) -> int:
        return self._link.round_trips

    def read(self, keys: Sequence[Key], busy: Collection[bytes] = ()) -> list[bytes | None]:
        del busy  # nothing is watched
        if not keys:
            return []
        return self._link.read(lambda: self._read(keys))

    async def _read(self, keys: Sequence[Key]) -> list[bytes | None]:
        return await self._values(await self._link.snapshot(), keys)

    async def _values(self, snapshot: Snapshot, keys: Sequence[Key]) -> list[bytes | None]:
        """The values of `keys` at one moment."""
        counters = {key for key in keys if is_counter(*key)}
        where = {key: self._space.key(*key) for key in keys if key not in counters}
        found, sums = await asyncio.gather(
            self._link.get(snapshot, list(where.values())),
            load(self._link, self._space, snapshot, counters),
        )
        return [
            total(key[1], sums[key]) if key in counters else found.get(where[key]) for key in keys
        ]

    def read_many(
        self, rows: Sequence[bytes], fields: Sequence[bytes]
    ) -> list[Sequence[bytes | None]]:
        values = self.read([(row, field) for row in rows for field in fields])
        width = len(fields)
        return [values[at : at + width] for at in range(0, len(values), width)]

    def read_linked(
        self,
        row: bytes,
        field: bytes,
        skip: int,
        prefix: bytes,
        fields: Sequence[bytes],
        busy: bool = False,
    ) -> tuple[bytes | None, list[bytes | None]]:
        del busy
        return self._link.read(lambda: self._read_linked(row, field, skip, prefix, fields))

    async def _read_linked(
        self, row: bytes, field: bytes, skip: int, prefix: bytes, fields: Sequence[bytes]
    ) -> tuple[bytes | None, list[bytes | None]]:
        snapshot = await self._link.snapshot()
        value = (await self._values(snapshot, [(row, field)]))[0]
        if value is None:
            return None, []
        linked = prefix + value[skip:]
        return value, await self._values(snapshot, [(linked, name) for name in fields])

    def read_rows(self, rows: Sequence[bytes]) -> list[dict[bytes, bytes]]:
        if not rows:
            return []
        found = self._link.read(lambda: self._read_rows(rows))
        return [found[row] for row in rows]

    def read_short_rows(self, rows: Sequence[bytes]) -> list[dict[bytes, bytes] | None]:
        if not rows:
            return []
        found = self._link.read(lambda: self._read_rows(rows, SHORT_ROW_FIELDS))
        return short_rows((found[row] for row in rows), len(rows))

    async def _read_rows(
        self, rows: Sequence[bytes], most: int | None = None
    ) -> dict[bytes, dict[bytes, bytes]]:
        """One walk from the first row to the last. It skips what is between them where that is
        much, and what is behind the first fields of a row that has more than `most`.
        """
        snapshot = await self._link.snapshot()
        found: dict[bytes, dict[bytes, bytes]] = {row: {} for row in rows}
        begins = sorted(self._space.begin(row) for row in found)
        end = self._space.end(self._space.row_of(begins[-1]))
        at, cursor = 0, begins[0]
        while at < len(begins):
            limit = min(SCAN_MAX, 4 * (len(begins) - at) + _FEW)
            pairs = await self._link.scan(snapshot, cursor, end, limit)
            for key, value in pairs:
                row = self._space.row_of(key)
                if row in found:
                    found[row][key[len(self._space.begin(row)) :]] = value
            if len(pairs) < limit:
                break
            cursor = pairs[-1][0] + b"\0"
            row = self._space.row_of(pairs[-1][0])
            if most is not None and len(found.get(row, ())) > most:
                cursor = self._space.end(row)
            while at < len(begins) and self._space.end(self._space.row_of(begins[at])) <= cursor:
                at += 1
            if at < len(begins):
                cursor = max(cursor, begins[at])
        return {row: _folded(row, found[row]) if is_sum(row) else found[row] for row in rows}

    def scan(self, row: bytes, cursor: bytes = b"", limit: int = SCAN_PAGE) -> Page:
        return self._link.read(lambda: self._scan(row, cursor, min(limit, SCAN_MAX)))

    async def _scan(self, row: bytes, cursor: bytes, limit: int) -> Page:
        snapshot = await self._link.snapshot()
        if is_sum(row):  # the last counter may go on behind the page
            limit = max(limit, FIELDS_MAX + 1)
        begin, end = self._space.begin(row), self._space.end(row)
        pairs = await self._link.scan(snapshot, begin + cursor, end, limit)
        items = [(key[len(begin) :], value) for key, value in pairs]
        if is_sum(row):
            items = list(_folded(row, dict(items)).items())
            return Page(items[:-1], items[-1][0]) if len(pairs) == limit else Page(items, None)
        return Page(items, items[-1][0] + b"\0" if len(items) == limit else None)

    def scan_rows(self, prefix: bytes, cursor: bytes = b"", limit: int = SCAN_PAGE) -> RowPage:
        return self._link.read(lambda: self._scan_rows(prefix, cursor, min(limit, SCAN_MAX)))

    async def _scan_rows(self, prefix: bytes, cursor: bytes, limit: int) -> RowPage:
        """Rows are sorted by length, then name: the prefix is looked for among those of each."""
        snapshot = await self._link.snapshot()
        space = self._space
        position = cursor or space.seek(len(prefix), prefix)
        while True:
            keys = await self._link.scan_keys(snapshot, position, space.end_of_all(), SCAN_PAGE)
            rows: list[bytes] = []
            for row in dict.fromkeys(space.row_of(key) for key in keys):
                if row.startswith(prefix) and len(rows) < limit:
                    rows.append(row)
                    position = space.end(row)
                else:
                    break
            if rows:
                return RowPage(rows, position)
            if not keys:
                return RowPage([], None)
            row = space.row_of(keys[0])  # the prefix is not here: at its place among longer rows?
            position = space.seek(len(row) + (row > prefix), prefix)

    @contextmanager
    def everything(self) -> Iterator[Iterator[Record]]:
        yield folded(self._stored(self._link.read(self._link.snapshot)))

    def _stored(self, snapshot: Snapshot) -> Iterator[Record]:
        """All of one moment, page by page, with counters in parts."""
        give_up = self._clock() + DUMP_MAX_S
        space, cursor = self._space, self._space.space
        while True:
            if self._clock() > give_up:
                raise Unavailable("tikv: values of the moment it began are no longer kept")
            begin = cursor
            pairs = self._link.read(
                lambda begin=begin: self._link.scan(  # type: ignore[misc]
                    snapshot, begin, space.end_of_all(), SCAN_MAX
                )
            )
            for key, value in pairs:
                row = space.row_of(key)
                yield row, key[len(space.begin(row)) :], value
            if len(pairs) < SCAN_MAX:
                return
            cursor = pairs[-1][0] + b"\0"

    def commit(self, commit: Commit) -> None:
        self._link.call(self._committer.commit(commit))

    def sync(self) -> None:
        """TiKV answers when most replicas have a commit on disk."""

    def watch(self, listener: Listener) -> None:
        """TiKV sends no invalidations; callers fall back on short timeouts."""

    def poll_invalidations(self) -> None:
        """There are no invalidations."""

    def has_leases(self) -> bool:
        return False

    def now_ns(self) -> int:
        """The placement driver's: timestamps are milliseconds and a counter of 18 bits."""
        moment: int = self._link.read(self._link.now)
        return (moment >> 18) * 1_000_000

    def tidy(self) -> None:
        """Have old values dropped, where that is up to us."""
        if self._collects:
            self._link.start(self._tidy)

    async def _tidy(self) -> None:
        try:
            await collect(self._link)
        except StoreError as error:
            log.info("old values in TiKV are kept for now: %s", error)

    def close(self) -> None:
        self._link.close()


def _folded(row: bytes, stored: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """What is stored of a row in SUMS, in order, with one field for each counter."""
    records = ((row, field, stored[field]) for field in sorted(stored))
    return {field: value for _, field, value in folded(records)}


def _conforms(store: TikvStore) -> Store:
    return store

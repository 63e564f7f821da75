"""What a transaction reads before it is judged: all that its plan asks for, in parallel requests.

Used by `tikv/group_commit`. Counters that prove to be nearly full are remembered: of these the next
plan asks for all parts at once.

Threading: loop thread only.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Collection
from typing import Final

from fsmeta.errors import StoreError
from fsmeta.store.contract import Key
from fsmeta.store.tikv.batch import Image, PartsWanted, Plan
from fsmeta.store.tikv.client import SCAN_MAX, Snapshot, TikvClient
from fsmeta.store.tikv.escrow_counters import load
from fsmeta.store.tikv.keys import KeySpace

ROW_FIELDS_MAX: Final = 4096  # deleted at once; of a row with more the front is deleted first
TIGHT_MAX: Final = 1024  # counters remembered as nearly full; forgetting one costs a request


class RowTooLong(Exception):
    """A row that is to be deleted has more fields than one transaction takes."""

    def __init__(self, row: bytes, fields: list[bytes]) -> None:
        super().__init__(row)
        self.row = row
        self.fields = fields


class PlanReads:
    """Reads of one volume, from a snapshot or a transaction."""

    def __init__(self, link: TikvClient, space: KeySpace) -> None:
        self._link = link
        self._space = space
        # counters that are nearly full, so that all their parts are wanted; the latest last
        self.tight: OrderedDict[Key, None] = OrderedDict()

    async def judge(self, reader: Snapshot, plan: Plan) -> tuple[Image, list[StoreError | None]]:
        """Read what the plan asks for, and what proves to be wanted besides. Raises: RowTooLong."""
        image = await self._load(reader, plan)
        while True:
            try:
                refused = image.judge()
                break
            except PartsWanted as wanted:
                await self._load_counters(reader, image, wanted.counters)
        for counter in plan.counters:
            self.tight.pop(counter, None)
        self.tight.update(dict.fromkeys(image.tight()))
        while len(self.tight) > TIGHT_MAX:
            self.tight.popitem(last=False)
        return image, refused

    async def _load(self, reader: Snapshot, plan: Plan) -> Image:
        """Read what the plan asks for. Raises: RowTooLong."""
        image = Image(plan)
        space = self._space
        where = {space.key(row, field): (row, field) for row, field in plan.keys}
        work = [self._load_counters(reader, image, plan.counters)] if plan.counters else []
        work += [self._load_fields(reader, image, row, ROW_FIELDS_MAX + 1) for row in plan.whole]
        work += [self._load_fields(reader, image, row, n) for row, n in plan.empties.items()]
        if where:
            work.append(self._load_values(reader, image, where))
        await asyncio.gather(*work)
        for row in plan.whole:
            fields = image.fields(row)
            if len(fields) > ROW_FIELDS_MAX:
                raise RowTooLong(row, fields)
        return image

    async def _load_values(self, reader: Snapshot, image: Image, where: dict[bytes, Key]) -> None:
        found = await self._link.get(reader, list(where))
        image.learn({where[key]: value for key, value in found.items()})

    async def _load_counters(
        self, reader: Snapshot, image: Image, counters: Collection[Key]
    ) -> None:
        found = await load(self._link, self._space, reader, counters)
        for counter, stored in found.items():
            image.learn_counter(counter, stored)

    async def _load_fields(self, reader: Snapshot, image: Image, row: bytes, at_most: int) -> None:
        image.learn_fields(row, await self.fields(reader, row, at_most))

    async def fields(
        self, reader: Snapshot, row: bytes, at_most: int, first: bytes = b""
    ) -> list[bytes]:
        """The fields of a row from `first` on, no more than `at_most`."""
        begin, end = self._space.begin(row), self._space.end(row)
        fields: list[bytes] = []
        cursor = begin + first
        while len(fields) < at_most:
            limit = min(SCAN_MAX, at_most - len(fields))
            keys = await self._link.scan_keys(reader, cursor, end, limit)
            fields += [key[len(begin) :] for key in keys]
            if len(keys) < limit:
                break
            cursor = keys[-1] + b"\0"
        return fields

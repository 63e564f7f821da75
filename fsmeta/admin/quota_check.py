"""`slicefs quota check`: count what is under each limit, and compare; streaming.

One pass over all inodes keeps a sum for each node that has a limit, the places of the directories
seen last, and one bit for each inode, since a scan may show it twice. The volume may be in use: a
counter that moved during the pass is not compared. `fsck` compares counters without a limit.

Threading: functions only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple

from fsmeta.admin import quota_admin
from fsmeta.admin.quota_admin import Quota
from fsmeta.meta.meta import Meta
from fsmeta.rules import quota
from fsmeta.schema import inode, keys
from fsmeta.schema.snapshot_inos import is_snapshot_ino
from fsmeta.types import NO_PARENT, ROOT_CALLER, ROOT_INO, Attr, Ino, SpaceUsage

DIRS_MAX: Final = 100_000  # directories whose limited nodes are remembered; about 30 MB
_PAGE_BITS: Final = 13  # ids to a page: 1 KiB
_FIELDS: Final = (*keys.ATTR_FIELDS, keys.HOME_FIELD)


class Judged(NamedTuple):
    """A quota, and what was counted; None where its counter moved meanwhile."""

    quota: Quota
    counted: SpaceUsage | None

    @property
    def is_wrong(self) -> bool:
        """Whether the counter says something else than there is."""
        return self.counted is not None and self.counted != self.quota.used


def find_differences(meta: Meta, progress: Callable[[int], None] | None = None) -> list[Judged]:
    """Count below every limit. Raises: ESTALE, Corrupt where the tree itself is broken."""
    before = {each.node: each for each in quota_admin.list_quotas(meta)}
    counter = _NodeSums(meta, set(before))
    for seen in counter.walk():
        if progress is not None:
            progress(seen)
    judged = []
    nodes = list(before)
    for begin in range(0, len(nodes), 200):
        part = nodes[begin : begin + 200]
        for after in meta.transactor.view(partial(quota_admin.quotas_of, nodes=part)):
            still = after.used == before[after.node].used
            counted = counter.sums.get(after.node, SpaceUsage(0, 0))
            judged.append(Judged(after, counted if still else None))
    return judged


class _Bits:
    """A set of ids, a bit each where they are dense, as ids of inodes are."""

    def __init__(self) -> None:
        self._pages: dict[int, bytearray] = {}

    def add(self, number: int) -> bool:
        """Whether it was not there yet."""
        page = self._pages.setdefault(number >> _PAGE_BITS, bytearray(1 << _PAGE_BITS - 3))
        at, bit = number >> 3 & (1 << _PAGE_BITS - 3) - 1, 1 << (number & 7)
        new = not page[at] & bit
        page[at] |= bit
        return new


class _NodeSums:
    """Sums by limited node."""

    def __init__(self, meta: Meta, limited: set[bytes]) -> None:
        self._meta = meta
        self._limited = limited
        self._above: dict[Ino, tuple[bytes, ...]] = {ROOT_INO: ()}
        self._seen = _Bits()
        self.sums: dict[bytes, SpaceUsage] = {}

    def walk(self) -> Iterator[int]:
        """How many inodes have been seen so far."""
        seen = 0
        for rows in quota_admin.inode_rows(self._meta):
            found = self._meta.transactor.view(partial(_read, meta=self._meta, rows=rows))
            for row, (a, v, home) in zip(rows, found, strict=True):
                if a is not None and v is not None and self._seen.add(keys.id_of(row)):
                    attr = inode.unpack_inode(Ino(keys.id_of(row)), a, v)
                    self._add(attr, Ino(keys.id_of(home)) if home else NO_PARENT)
            seen += len(rows)
            yield seen

    def _add(self, attr: Attr, home: Ino) -> None:
        if not attr.nlink or is_snapshot_ino(attr.ino):
            return
        nodes = [n for n in quota.owners(attr.uid, attr.gid) if n in self._limited]
        place = attr.parent or home
        if place != NO_PARENT:
            nodes += self._limited_above(place)
        for node in nodes:
            space, inodes = self.sums.get(node, (0, 0))
            self.sums[node] = SpaceUsage(space + attr.space, inodes + 1)

    def _limited_above(self, directory: Ino) -> tuple[bytes, ...]:
        way: list[Ino] = []
        seen: set[Ino] = set()
        while directory not in self._above:
            if directory in seen:
                raise keys.corrupt(directory, keys.ATTR_FIELD, "directories form a loop")
            seen.add(directory)
            way.append(directory)
            directory = self._meta.getattr(ROOT_CALLER, directory).parent or ROOT_INO
        nodes = self._above[directory]
        if len(self._above) > DIRS_MAX:
            self._above = {ROOT_INO: ()}
        for each in reversed(way):
            own = quota.dir_node(each)
            nodes = (own, *nodes) if own in self._limited else nodes
            self._above[each] = nodes
        return nodes


def _read(_txn: object, meta: Meta, rows: Sequence[bytes]) -> list[Sequence[bytes | None]]:
    return meta.store.read_many(rows, _FIELDS)

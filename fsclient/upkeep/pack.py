"""Packing small files that no client has packed, for `gc --pack`: docs/design/packing.

Their writers have died, or do not pack. A writer that is in doubt offers its slice once more and
must not find it deleted; the floors tell whether there is one, as they tell `gc`: below all of them
no client commits a slice any more. Files that share their bytes with clones or snapshots stay:
packed, each would need bytes of its own.

Memory is that of `WINDOW` files and one block; the volume may be in use. One thread, and those of
the packer's pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from fsclient.background import tidy_queue
from fsclient.background.packer import Packer
from fsclient.upkeep.gc import settled_floor
from fsmeta.meta.meta import Meta
from fsmeta.ops.data.packing import MEMBERS_MAX, Small
from fsmeta.schema import scan
from fsmeta.schema.scan import Walked
from fsmeta.schema.snapshot_inos import is_snapshot_ino

WINDOW: Final = 10_000  # files that are sorted before they are packed, 300 bytes each: some engines
# walk in no order, and files that were made together are read together


class Gathered(NamedTuple):
    """What became of small files."""

    packed_files: int = 0
    segments_made: int = 0
    recent_files: int = 0  # that a client may still commit once more
    shared_files: int = 0  # with clones or snapshots
    held_by: str = ""  # the session that makes so many recent


class PackWalk:
    """Packs small files as a walk over inodes comes to them."""

    def __init__(self, meta: Meta, by: Packer, block_bytes: int) -> None:
        """Raises: StoreError."""
        self._meta = meta
        self._by = by
        self._block_bytes = block_bytes
        self._floor, self._held_by = settled_floor(meta)
        self._found: list[Small] = []
        self._recent = self._shared = 0

    def look(self, inodes: Iterable[Walked]) -> None:
        """Take note of those that are small and not packed."""
        for each in inodes:
            listed = each.chunks.get(0, ())
            if len(listed) != 1 or each.records[0] != 1 or is_snapshot_ino(each.ino):
                continue
            if self._by.is_single(listed[0]):
                if listed[0].id < self._floor:
                    self._found.append(Small(each.ino, listed[0]))
                else:
                    self._recent += 1

    def is_full(self) -> bool:
        """Whether it is time to `pack`."""
        return len(self._found) >= WINDOW

    def pack(self) -> None:
        """Pack what was noted. Raises: StoreError, OSError."""
        found, self._found = sorted(self._found), []
        alone: list[Small] = []
        for begin in range(0, len(found), MEMBERS_MAX):
            batch = found[begin : begin + MEMBERS_MAX]
            alone += self._meta.packing.unshared(batch)
        self._shared += len(found) - len(alone)
        for group in _groups(alone, self._block_bytes):
            self._by.pack_these(group)

    def gathered(self) -> Gathered:
        """What was done so far."""
        held_by = self._held_by if self._recent else ""
        return Gathered(self._by.packed, self._by.segments, self._recent, self._shared, held_by)


def pages(meta: Meta, work: PackWalk, cursor: bytes = b"") -> Iterator[tuple[int, bytes | None]]:
    """Walk from `cursor` on and pack; how many inodes each page had, and where to go on.

    No place to go on from where something that was noted is not packed yet. Raises: StoreError,
    OSError.
    """
    for page in scan.pages(meta.store, cursor):
        work.look(page.inodes)
        done = page.cursor is None or work.is_full()
        if done:
            work.pack()
        yield len(page.inodes), page.cursor if done else None


def _groups(files: Sequence[Small], block_bytes: int) -> Iterator[list[Small]]:
    """Files that fill a block each time; fewer than are worth it are left out."""
    group: list[Small] = []
    room = block_bytes
    for file in files:
        if file.piece.length > room or len(group) == MEMBERS_MAX:
            yield group
            group, room = [], block_bytes
        group.append(file)
        room -= file.piece.length
    if len(group) >= tidy_queue.MEMBERS_MIN:
        yield group

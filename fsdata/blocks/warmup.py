"""Blocks brought into the caches on a user's request, looked for there, and removed.

`fsclient/control/warmup_server` calls it, with the blocks that a file shows. A block that is wanted
on a disk is fetched once, verified, and is there when the call returns: nothing is dropped because
a queue is full, as it is for readers. Blocks on their way take no more than a share of the memory
cap; a caller that finds none left waits for a time, and then has to call again. So does a caller
that wants a block on its way: many small files are in one.

Threading: any method from any thread. `_cond` is held for a few additions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

from fsdata.blocks.blocks import BlockStore
from fsdata.blocks.read_plan import Access, BlockRead
from fsdata.disk_cache.cache import Copy, DiskCache, Fill
from fsdata.format.block_v1 import check_object
from fsdata.format.object_keys import object_key
from fsdata.resources.block_cache import BlockCache
from fsdata.resources.memory_budget import MemoryBudget
from fsmeta.errors import ObjectDamaged, StoreError
from fsmeta.runtime import Runtime
from fsmeta.types import SliceId

SHARE: Final = 8  # of the memory cap; read-ahead of programs has as much, and twice that alone
WAIT_S: Final = 1.0  # for memory: a thread that serves is taken for so long


class WarmupRequest(NamedTuple):
    """A block of a slice of `size` bytes."""

    slice_id: SliceId
    size: int
    block: int
    blocks: BlockStore | None = None  # that has it; None: the volume's


class Where(NamedTuple):
    """Where a block is kept."""

    memory: bool
    copy: Copy | None


class Warming:
    """The caches of one mount."""

    def __init__(
        self,
        runtime: Runtime,
        blocks: BlockStore,
        memory: BlockCache,
        disks: DiskCache | None,
        budget: MemoryBudget,
    ) -> None:
        self._clock = runtime.monotonic
        self._blocks = blocks
        self._memory = memory
        self._disks = disks
        self._budget = budget
        self._max = budget.gauges().limit // SHARE
        self._cond = runtime.condition()
        self._flying = 0  # bytes; guarded by _cond, as all below
        self._keys: set[str] = set()  # of blocks on their way
        self._made = self._made_bytes = self._failed = 0

    def numbers(self) -> dict[str, float]:
        """What `.stats` says of it."""
        with self._cond:
            return {
                "warmup_blocks_total": self._made,
                "warmup_bytes_total": self._made_bytes,
                "warmup_failures_total": self._failed,
                "warmup_now_bytes": self._flying,
            }

    def where(self, wanted: WarmupRequest) -> Where:
        """Where a block is now; nothing is fetched, and nothing counts as used."""
        copy = self._disks.copy_of(self._key(wanted)) if self._disks else None
        return Where(self._memory.has((wanted.slice_id, wanted.block)), copy)

    def to_disk(self, wanted: WarmupRequest) -> Fill:
        """Have a block on its cache disk. Raises: ObjectMissing, ObjectDamaged, Unavailable."""
        disks = self._disks
        if disks is None:
            return Fill.NO_DISK
        key, length = self._key(wanted), self._length(wanted)

        def check(data: bytes) -> None:
            found = check_object(data)
            if found != length:
                raise ObjectDamaged(f"block of {found} bytes instead of {length}")

        def bring() -> Fill:
            try:
                return disks.bring(key, length, check)
            except ObjectDamaged:  # perhaps on the way
                return disks.bring(key, length, check)

        blocks = self._store(wanted)
        return self._fetch_once(key, length, lambda: blocks.counted(key, bring))

    def to_memory(self, wanted: WarmupRequest) -> Fill:
        """Have a block in the memory cache. Raises: as `to_disk`."""
        key, length = (wanted.slice_id, wanted.block), self._length(wanted)
        if self._memory.has(key):
            return Fill.THERE

        def bring() -> Fill:
            self._store(wanted).fetch(BlockRead(key, length, 0, length, Access.WARM))
            return Fill.MADE if self._memory.has(key) else Fill.NO_ROOM

        return self._fetch_once(self._key(wanted), length, bring)

    def evict(self, wanted: WarmupRequest) -> int:
        """Remove every copy of a block; how many bytes were on disks and in memory."""
        key = (wanted.slice_id, wanted.block)
        had = self._length(wanted) if self._memory.has(key) else 0
        self._memory.drop(key)
        return had + (self._disks.evict(self._key(wanted)) if self._disks else 0)

    def _length(self, wanted: WarmupRequest) -> int:
        return self._store(wanted).length_of(wanted.size, wanted.block)

    def _store(self, wanted: WarmupRequest) -> BlockStore:
        return wanted.blocks or self._blocks

    def _key(self, wanted: WarmupRequest) -> str:
        return object_key(wanted.slice_id, wanted.block, self._length(wanted))

    def _fetch_once(self, key: str, length: int, bring: Callable[[], Fill]) -> Fill:
        """Bring a block of `length` bytes when it is its turn, and count it."""
        with self._turn(key, length) as has_turn:
            if not has_turn:
                return Fill.BUSY
            try:
                fill = bring()
            except (OSError, StoreError):
                with self._cond:
                    self._failed += 1
                raise
            with self._cond:
                if fill is Fill.MADE:
                    self._made += 1
                    self._made_bytes += length
                elif fill in (Fill.NO_ROOM, Fill.NO_DISK):
                    self._failed += 1
            return fill

    @contextmanager
    def _turn(self, key: str, length: int) -> Iterator[bool]:
        """No other thread brings the block, and there is memory for it; False after WAIT_S."""
        deadline = self._clock() + WAIT_S

        def must_wait() -> bool:
            no_room = self._flying and self._flying + length > self._max
            return bool(no_room) or key in self._keys

        with self._cond:
            while must_wait() and (left := deadline - self._clock()) > 0:
                self._cond.wait(left)
            has_turn = not must_wait()
            if has_turn:
                self._flying += length
                self._keys.add(key)
        try:
            yield has_turn
        finally:
            if has_turn:
                with self._cond:
                    self._flying -= length
                    self._keys.discard(key)
                    self._cond.notify_all()

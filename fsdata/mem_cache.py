"""Blocks in memory: an LRU of decoded blocks, bounded by the `Budget`.

`BlockStore` puts and gets. The cache owns the buffers it is given: nobody changes them any more,
readers get views. Full-size buffers of dropped blocks are kept as spares for the next block:
faulting in fresh pages costs more than copying into old ones. A bytearray can't be resized while a
view of it lives, and that is how a buffer proves that nobody reads it before it is used again.

Threading: one lock. Lock order: cache, then budget.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple, TypeAlias

from fsdata.budget import Budget
from fsmeta.runtime import Runtime
from fsmeta.types import BLOCK_BYTES_MAX, SliceId

Block: TypeAlias = bytes | bytearray | memoryview
BlockKey: TypeAlias = tuple[SliceId, int]

SPARES_MAX = 4  # buffers kept for reuse: one for each block that is filled or fetched at a time
SPARES_SHARE = 16  # and no more than 1/16 of the budget


class CacheStats(NamedTuple):
    """Counters since the start, and what is here now."""

    hits: int
    misses: int
    bytes: int
    blocks: int


class MemCache:
    """Least recently used blocks go first. The room for spares is charged from the start."""

    def __init__(
        self, runtime: Runtime, budget: Budget, block_bytes: int = BLOCK_BYTES_MAX
    ) -> None:
        self._budget = budget
        self._block_bytes = block_bytes
        self._lock = runtime.lock()
        self._blocks: OrderedDict[BlockKey, Block] = OrderedDict()  # guarded by _lock, as all below
        self._spares: list[bytearray] = []
        self._bytes = self._hits = self._misses = 0
        self._spares_max = min(SPARES_MAX, budget.gauges().limit // (SPARES_SHARE * block_bytes))
        budget.charge(self._spares_max * block_bytes)
        budget.on_shrink(self.shrink)

    def stats(self) -> CacheStats:
        """How well it does, and what it holds."""
        with self._lock:
            return CacheStats(self._hits, self._misses, self._bytes, len(self._blocks))

    def get(self, key: BlockKey, begin: int, end: int) -> memoryview | None:
        """Bytes `begin..end` of a block, if it is here."""
        with self._lock:
            block = self._blocks.get(key)
            if block is None:
                self._misses += 1
                return None
            self._hits += 1
            self._blocks.move_to_end(key)
            # Under the lock: from here on the view keeps the buffer from being used again.
            return memoryview(block)[begin:end]

    def has(self, key: BlockKey) -> bool:
        """Whether a block is here; counts nothing."""
        with self._lock:
            return key in self._blocks

    def put(self, key: BlockKey, block: Block, reserved: bool = False) -> None:
        """Take over a block, if there is room.

        `reserved`: its bytes are a write buffer's in the budget until now, so there is.
        """
        size = len(block)
        if reserved:
            self._budget.retire(size)
        elif not self._budget.charge(size):
            self.shrink(size)
            if not self._budget.charge(size):
                return
        with self._lock:
            old = self._blocks.pop(key, None)
            self._blocks[key] = block
            self._bytes += size
            if old is not None:
                self._dropped(len(old))

    def drop(self, key: BlockKey) -> None:
        """Forget a block."""
        with self._lock:
            block = self._blocks.pop(key, None)
            if block is not None:
                self._dropped(len(block))

    def shrink(self, want: int) -> None:
        """Drop the oldest blocks until `want` bytes are free or no block is left."""
        with self._lock:
            freed = 0
            while self._blocks and freed < want:
                _, block = self._blocks.popitem(last=False)
                freed += len(block)
                self._keep_spare(block)
            if freed:
                self._dropped(freed)

    def _dropped(self, size: int) -> None:
        """Account for `size` bytes that left. The caller holds the lock."""
        self._bytes -= size
        self._budget.uncharge(size)

    def _keep_spare(self, block: Block) -> None:
        """Keep the buffer of a dropped block if it is a full one. The caller holds the lock."""
        if not isinstance(block, bytearray) or len(block) != self._block_bytes:
            return
        if len(self._spares) < self._spares_max and _unshared(block):
            self._spares.append(block)

    def take_spare(self) -> bytearray | None:
        """A buffer of a full block with arbitrary bytes in it, the caller's from now on."""
        with self._lock:
            return self._spares.pop() if self._spares else None


def _unshared(buffer: bytearray) -> bool:
    """Whether no view of `buffer` lives. The buffer is not empty, and no one else may know it."""
    try:
        buffer.append(buffer.pop())
    except BufferError:
        return False
    return True

"""Blocks in memory: an LRU of decoded blocks, bounded by the `Budget`.

`BlockStore` puts and gets. What has been written, or read to its end, the kernel's page cache has
as well: such blocks are *behind*, few are kept, and their buffers, still warm, serve the next ones.

The cache owns the buffers it is given: nobody changes them any more, readers get views. Full-size
buffers of blocks that left are kept as spares for the next block: faulting in fresh pages costs
more than copying into old ones. A bytearray can't be resized while a view of it lives, and that is
how a spare proves that nobody reads it before it is used again.

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
BEHIND_BYTES_MAX = 32 << 20  # blocks behind: a few full ones for each of a few streams


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
        self._behind: OrderedDict[BlockKey, Block] = OrderedDict()  # no key is in both
        self._behind_bytes = 0
        self._spares: list[bytearray] = []  # the last is the warmest; views of them may live
        self._bytes = self._hits = self._misses = 0
        self._spares_max = min(SPARES_MAX, budget.gauges().limit // (SPARES_SHARE * block_bytes))
        budget.charge(self._spares_max * block_bytes)
        budget.on_shrink(self.shrink)

    def stats(self) -> CacheStats:
        """How well it does, and what it holds."""
        with self._lock:
            count = len(self._blocks) + len(self._behind)
            return CacheStats(self._hits, self._misses, self._bytes, count)

    def get(self, key: BlockKey, begin: int, end: int) -> memoryview | None:
        """Bytes `begin..end` of a block, if it is here."""
        with self._lock:
            block = self._blocks.get(key)
            if block is not None:
                self._blocks.move_to_end(key)
            else:
                block = self._behind.get(key)
                if block is None:
                    self._misses += 1
                    return None
            self._hits += 1
            # Under the lock: from here on the view keeps the buffer from being used again.
            return memoryview(block)[begin:end]

    def has(self, key: BlockKey) -> bool:
        """Whether a block is here; counts nothing."""
        with self._lock:
            return key in self._blocks or key in self._behind

    def put(self, key: BlockKey, block: Block) -> None:
        """Take over a block that was fetched, if there is room."""
        size = len(block)
        if not self._budget.charge(size):
            self.shrink(size)
            if not self._budget.charge(size):
                self.pass_by(block)
                return
        with self._lock:
            self._remove(key)
            self._blocks[key] = block
            self._bytes += size

    def put_behind(self, key: BlockKey, block: Block) -> None:
        """Take over a block that was written: a write buffer's bytes in the budget until now."""
        self._budget.retire(len(block))
        with self._lock:
            self._remove(key)
            self._bytes += len(block)
            self._push_behind(key, block)

    def pass_by(self, block: Block) -> None:
        """Take over a block that is not to be cached: its buffer is a spare once no view lives."""
        with self._lock:
            self._keep_spare(block)

    def leave_behind(self, key: BlockKey) -> None:
        """A sequential reader has passed the block: it is among the first to go."""
        with self._lock:
            block = self._blocks.pop(key, None)
            if block is not None:
                self._push_behind(key, block)

    def _push_behind(self, key: BlockKey, block: Block) -> None:
        """The caller holds the lock; the block is in neither map."""
        self._behind[key] = block
        self._behind_bytes += len(block)
        while self._behind_bytes > BEHIND_BYTES_MAX:
            self._dropped(self._pop_behind())

    def _pop_behind(self) -> int:
        """Let go of the oldest block behind; its size. The caller holds the lock."""
        _, block = self._behind.popitem(last=False)
        self._behind_bytes -= len(block)
        self._keep_spare(block)
        return len(block)

    def drop(self, key: BlockKey) -> None:
        """Forget a block."""
        with self._lock:
            self._remove(key)

    def _remove(self, key: BlockKey) -> None:
        """The caller holds the lock."""
        block = self._blocks.pop(key, None)
        if block is None:
            block = self._behind.pop(key, None)
            if block is None:
                return
            self._behind_bytes -= len(block)
        self._dropped(len(block))

    def shrink(self, want: int) -> None:
        """Drop the oldest blocks until `want` bytes are free or no block is left."""
        with self._lock:
            freed = 0
            while self._behind and freed < want:
                freed += self._pop_behind()
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
        """Keep the buffer of a block that left if it is a full one. The caller holds the lock."""
        if not isinstance(block, bytearray) or len(block) != self._block_bytes:
            return
        # One that is still read comes to use last, and goes first where there are too many.
        self._spares.insert(len(self._spares) if _unshared(block) else 0, block)
        if len(self._spares) > self._spares_max:
            del self._spares[0]

    def take_spare(self) -> bytearray | None:
        """A buffer of a full block with arbitrary bytes in it, the caller's from now on."""
        with self._lock:
            for index in reversed(range(len(self._spares))):
                if _unshared(self._spares[index]):
                    return self._spares.pop(index)
            return None


def _unshared(buffer: bytearray) -> bool:
    """Whether no view of `buffer` lives. The buffer is not empty, and no one else may know it."""
    try:
        buffer.append(buffer.pop())
    except BufferError:
        return False
    return True

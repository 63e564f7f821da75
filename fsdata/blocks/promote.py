"""`--prefetch N`: blocks of which ranges are read are fetched whole, in the background.

`BlockStore` reports the blocks of which a range had to be fetched, after the reader has it. Up to N
blocks at a time are then fetched to where later reads find ranges of them: to their cache disk, or
to memory where no disk keeps them and memory is free. Nothing else is evicted for them, readers do
not wait for them, and while the store says "slow down" none is begun.

Threading: any method from any thread. `_lock` is a leaf.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Final

from fsdata.blocks.blocks import BlockStore
from fsdata.blocks.read_plan import Access, BlockRead
from fsdata.resources.block_cache import BlockKey
from fsdata.resources.memory_budget import MemoryBudget
from fsdata.resources.worker_pool import WorkerPool
from fsmeta.errors import StoreError
from fsmeta.runtime import Runtime

PREFETCH_MAX: Final = 64  # at a time: beyond it a far store is as fast as its link
WAITING_MAX: Final = 8  # blocks that wait for each thread; more at random is too much
SETTLED_S: Final = 60.0  # for which a block that is there is not looked at again
SETTLED_MAX: Final = 4096  # such blocks: 200 bytes each
CALM_S: Final = 10.0  # without a complaint of the store, before a block is asked for again


class WholeBlocks:
    """Fetches blocks that random readers have touched."""

    def __init__(
        self,
        runtime: Runtime,
        budget: MemoryBudget,
        threads: int,
        throttled: Callable[[], int],
    ) -> None:
        """`throttled()`: how often the store has said that it is asked too much."""
        self._budget = budget
        self._pool = WorkerPool(runtime, "whole", threads)
        self._most = WAITING_MAX * threads
        self._clock = runtime.monotonic
        self._throttled = throttled
        self._lock = runtime.lock()
        self._asked: set[BlockKey] = set()  # guarded by _lock, as all below
        self._settled: OrderedDict[BlockKey, float] = OrderedDict()  # which are there, until when
        self._complaints = throttled()
        self._calm_s = 0.0  # when the store has been calm for long enough
        self._closed = False
        self._made = self._skipped = 0

    def ask(self, blocks: BlockStore, read: BlockRead) -> None:
        """A reader had a range of a block fetched."""
        key = read.key
        with self._lock:
            if key in self._asked or self._settled.get(key, 0.0) > self._clock():
                return
            if self._closed or len(self._asked) >= self._most:
                self._skipped += 1
                return
            self._asked.add(key)
        whole = BlockRead(key, read.length, 0, read.length, Access.PROMOTE)
        self._pool.submit(partial(self._run, blocks, whole))

    def _run(self, blocks: BlockStore, whole: BlockRead) -> None:
        """The job. A failure is not reported: a reader of the block will meet it."""
        made = False
        try:
            made = self._is_calm() and self._bring(blocks, whole)
        except (OSError, StoreError):
            pass
        finally:
            with self._lock:
                self._asked.remove(whole.key)
                self._made += made
                self._skipped += not made

    def _is_calm(self) -> bool:
        """Whether to ask the store for what no reader waits for."""
        complaints, now = self._throttled(), self._clock()
        with self._lock:
            if complaints != self._complaints:
                self._complaints, self._calm_s = complaints, now + CALM_S
            return not self._closed and now >= self._calm_s

    def _bring(self, blocks: BlockStore, whole: BlockRead) -> bool:
        """Whether it was fetched. Raises: what the store does."""
        keep, length = blocks.lacks(whole), whole.length
        if keep is None:
            self._settle(whole.key)
            return False
        if keep and not self._budget.has_room(2 * length):  # once on its way, once in the cache
            return False
        if not self._budget.hold(length):
            return False
        try:
            blocks.fetch(whole)
        finally:
            self._budget.unhold(length)
        return True

    def _settle(self, key: BlockKey) -> None:
        """Ranges of a block are read from a copy: it need not be looked for each time."""
        with self._lock:
            self._settled[key] = self._clock() + SETTLED_S
            self._settled.move_to_end(key)
            if len(self._settled) > SETTLED_MAX:
                self._settled.popitem(last=False)

    def numbers(self) -> dict[str, float]:
        """What `.stats` says of it."""
        with self._lock:
            return {
                "prefetched_blocks_total": self._made,
                "prefetch_skipped_total": self._skipped,
            }

    def close(self) -> None:
        """End the threads; what waits is not fetched."""
        with self._lock:
            self._closed = True
        self._pool.close()

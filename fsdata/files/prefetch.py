"""Read-ahead: a `Prefetcher` fetches what the windows of readers ask for.

All windows together are bounded by the budget's share for read-ahead. A failed fetch is forgotten
here: the read that needs the block will meet the error itself.

Threading: may be used from any thread.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fsdata.blocks.blocks import BlockStore
from fsdata.files.readahead import Ticket
from fsdata.format.geometry import block_length
from fsdata.resources.memory_budget import MemoryBudget
from fsdata.resources.worker_pool import WorkerPool
from fsmeta.errors import StoreError
from fsmeta.types import SliceId


class Prefetcher:
    """Fetches blocks into the memory cache, and parts of them into the disk cache."""

    def __init__(self, pool: WorkerPool, budget: MemoryBudget, blocks: BlockStore) -> None:
        self._pool = pool
        self._budget = budget
        self._blocks = blocks

    def submit(
        self,
        slice_id: SliceId,
        size: int,
        block: int,
        ticket: Ticket,
        end: int,
        part: tuple[int, int] | None = None,
    ) -> bool:
        """Ask for a block of a slice of `size` bytes, unless the reader is past `end` by then.

        `part`: only so much of it is wanted. False where there is no room for it.
        """
        length = block_length(size, block, self._blocks.block_bytes)
        if part is not None:
            length = part[1] - part[0]
        if not self._budget.hold(length):
            return False
        wanted = partial(ticket.wants, end)
        fetch = partial(self._blocks.fetch, slice_id, size, block, wanted)
        if part is not None:
            fetch = partial(self._blocks.fetch_part, slice_id, size, block, part, wanted)
        self._pool.submit(partial(self._run, fetch, length))
        return True

    def _run(self, fetch: Callable[[], None], length: int) -> None:
        """The job: fetch, unless nobody wants it any more."""
        try:
            fetch()
        except (OSError, StoreError):
            pass  # the read that wants it will fetch it again and say what is wrong
        finally:
            self._budget.unhold(length)

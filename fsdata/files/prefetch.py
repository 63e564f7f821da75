"""Read-ahead: a `Prefetcher` fetches what the windows of readers ask for.

All windows together are bounded by the budget's share for read-ahead. A failed fetch is forgotten
here: the read that needs the block will meet the error itself.

Threading: may be used from any thread.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fsdata.blocks.blocks import BlockStore
from fsdata.blocks.read_plan import Access, BlockRead
from fsdata.files.readahead import Ticket
from fsdata.resources.memory_budget import MemoryBudget
from fsdata.resources.worker_pool import WorkerPool
from fsmeta.errors import StoreError


class Prefetcher:
    """Fetches blocks into the memory cache, and parts of them into the disk cache."""

    def __init__(self, pool: WorkerPool, budget: MemoryBudget, blocks: BlockStore) -> None:
        self._pool = pool
        self._budget = budget
        self._blocks = blocks

    def submit(self, read: BlockRead, ticket: Ticket, end: int) -> bool:
        """Ask for what a read is for, unless the reader is past `end` of the file by then.

        False where there is no room for it.
        """
        length = read.length if read.access is Access.AHEAD else read.end - read.begin
        if not self._budget.hold(length):
            return False
        fetch = partial(self._blocks.fetch, read, partial(ticket.wants, end))
        self._pool.submit(partial(self._run, fetch, length))
        return True

    def _run(self, fetch: Callable[[], None], length: int) -> None:
        """The job: fetch, unless no reader wants it any more."""
        try:
            fetch()
        except (OSError, StoreError):
            pass  # the read that wants it will fetch it again and say what is wrong
        finally:
            self._budget.unhold(length)

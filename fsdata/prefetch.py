"""Read-ahead: one `Window` per open file finds sequential reading, one `Prefetcher` fetches blocks.

`FileReader` asks its window what to fetch and hands blocks to the prefetcher. Everything is
bounded: the window by WINDOW_BYTES_MAX, all windows together by the budget's share for read-ahead.
A failed fetch is forgotten here: the read that needs the block will meet the error itself.

Threading: a Window belongs to its FileReader's lock; a Prefetcher may be used from any thread.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fsdata.blocks import BlockStore
from fsdata.budget import Budget
from fsdata.geometry import block_length
from fsdata.pool import WorkerPool
from fsmeta.errors import StoreError
from fsmeta.types import BLOCK_BYTES_MAX, SliceId

WINDOW_BYTES_MIN = 4 << 20  # the first step ahead: a block
WINDOW_BYTES_MAX = 16 << 20  # four blocks: hides 30 ms of latency at 500 MB/s
RUN_MIN = 2  # one read proves nothing; read-ahead begins with the second in sequence
REORDER_BYTES = 1 << 20  # the kernel's own read-ahead sends neighbours out of order


class Ticket:
    """Says whether the read-ahead that was asked for is still wanted.

    Threading: written under the reader's lock, read without it.
    """

    __slots__ = ("live", "passed")

    def __init__(self, passed: int) -> None:
        self.live = True
        self.passed = passed  # where in the file the reader has come to

    def wants(self, end: int) -> bool:
        """Whether what ends at `end` of the file is still ahead of the reader."""
        return self.live and self.passed < end


class Window:
    """How far one handle reads ahead."""

    __slots__ = ("_next", "_run", "_until", "_width", "ticket")

    def __init__(self) -> None:
        self._next = 0  # where a sequential reader reads next; most begin at the start
        self._run = 0  # reads in sequence
        self._until = 0  # asked for up to here
        self._width = 0
        self.ticket = Ticket(0)

    def note(self, offset: int, size: int) -> bool:
        """Take notice of a read; whether it continues the ones before."""
        if self._next - REORDER_BYTES <= offset <= self._next + REORDER_BYTES:
            self._next = max(self._next, offset + size)
            self._run += 1
            self.ticket.passed = self._next
            return True
        self._next = offset + size
        self._run = 1
        self._until = self._width = 0
        self.ticket.live = False
        return False

    def advance(self, length: int) -> tuple[int, int] | None:
        """The range of a file of `length` bytes to fetch now, or None; the window doubles.

        Ranges are of whole blocks, if the slices are; the block being read is not part of them.
        """
        if self._run < RUN_MIN or self._until - self._next > self._width // 2:
            return None
        begin = max(self._until, _block_up(self._next))
        if begin >= length:
            return None
        self._width = min(WINDOW_BYTES_MAX, 2 * self._width or WINDOW_BYTES_MIN)
        self._until = min(length, _block_up(self._next + self._width))
        if not self.ticket.live:
            self.ticket = Ticket(self._next)
        return (begin, self._until) if begin < self._until else None


def _block_up(offset: int) -> int:
    return -(-offset // BLOCK_BYTES_MAX) * BLOCK_BYTES_MAX


class Prefetcher:
    """Fetches whole blocks into the memory cache on a few threads."""

    def __init__(self, pool: WorkerPool, budget: Budget, blocks: BlockStore) -> None:
        self._pool = pool
        self._budget = budget
        self._blocks = blocks

    def submit(self, slice_id: SliceId, size: int, block: int, ticket: Ticket, end: int) -> bool:
        """Ask for a block of a slice of `size` bytes, unless the reader is past `end` by then.

        False where there is no room for it.
        """
        length = block_length(size, block, self._blocks.block_bytes)
        if not self._budget.hold(length):
            return False
        wanted = partial(ticket.wants, end)
        self._pool.submit(partial(self._run, slice_id, size, block, length, wanted))
        return True

    def _run(
        self, slice_id: SliceId, size: int, block: int, length: int, wanted: Callable[[], bool]
    ) -> None:
        """The job: fetch, unless nobody wants it any more."""
        try:
            self._blocks.fetch(slice_id, size, block, wanted)
        except (OSError, StoreError):
            pass  # the read that wants it will fetch it again and say what is wrong
        finally:
            self._budget.unhold(length)

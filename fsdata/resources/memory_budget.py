"""One hard cap on the memory of file data: write buffers, cached blocks and read-ahead together.

`FileWriter` reserves before it copies, `BlockCache` charges what it keeps, `Prefetcher` holds what
it is about to fetch. Writers come first: where room is short cached blocks are dropped, then dirty
data is pushed out, then the writer waits. Read-ahead and the cache never wait: they do without.
A block that a read asked for is not counted until it is cached; the transport's threads bound it.

Threading: one lock, held for a few additions; `shrink` and `push` are called without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from fsmeta.errors import Unavailable
from fsmeta.runtime import Runtime
from fsmeta.types import BLOCK_BYTES_MAX

BUFFER_BYTES = 300 << 20  # the default of `--buffer-size`, as users of JuiceFS know it
BUFFER_BYTES_MIN = 4 * BLOCK_BYTES_MAX  # one block each to fill, upload, cache and fetch
WAIT_S_MAX = 120.0  # a writer that found no room for so long reports it instead of hanging
SHRINK_SHARE = 64  # blocks are dropped 1/64 of the budget at a time: most writes find room at once
AHEAD_SHARE = 4  # read-ahead takes at most 1/4: what it fetches needs room in the cache next


class Gauges(NamedTuple):
    """Bytes in use."""

    limit: int
    writing: int
    cached: int
    ahead: int


def _shrink_nothing(_: int) -> None:
    """There is no cache yet."""


def _nothing() -> None:
    """There is nothing to push, or to check."""


class MemoryBudget:
    """How many bytes each use of memory may take."""

    def __init__(self, runtime: Runtime, limit: int = BUFFER_BYTES) -> None:
        assert limit >= BUFFER_BYTES_MIN, limit
        self._clock = runtime.monotonic
        self._limit = limit
        self._cond = runtime.condition()
        self._writing = 0  # guarded by _cond, as are all below
        self._cached = 0
        self._ahead = 0
        self._waiters = 0
        self._changes = 0  # times a waiter's chances may have become better
        self._shrink: Callable[[int], None] = _shrink_nothing
        self._push: Callable[[], None] = _nothing

    def on_shrink(self, shrink: Callable[[int], None]) -> None:
        """`shrink(n)` drops about n cached bytes and uncharges them."""
        self._shrink = shrink

    def on_push(self, push: Callable[[], None]) -> None:
        """`push()` starts uploading what writers hold back, if no upload is under way."""
        self._push = push

    def gauges(self) -> Gauges:
        """How much each use takes now."""
        with self._cond:
            return Gauges(self._limit, self._writing, self._cached, self._ahead)

    def _fits(self, size: int) -> bool:
        return self._writing + self._cached + self._ahead + size <= self._limit

    def reserve(self, size: int, check: Callable[[], None] = _nothing) -> None:
        """Take `size` bytes for a write buffer; waits while there is no room.

        `check` is called before each wait and may raise to give up.
        Raises: Unavailable after WAIT_S_MAX; what `check` raises.
        """
        with self._cond:
            if self._fits(size):
                self._writing += size
                return
            self._waiters += 1
        try:
            self._reserve_slowly(size, check)
        finally:
            with self._cond:
                self._waiters -= 1

    def _reserve_slowly(self, size: int, check: Callable[[], None]) -> None:
        """Drop cached blocks, then push writers, then wait, until `size` bytes are free."""
        deadline = self._clock() + WAIT_S_MAX
        while True:
            with self._cond:
                seen = self._changes
            self._shrink(max(size, self._limit // SHRINK_SHARE))
            with self._cond:
                if self._fits(size):
                    self._writing += size
                    return
            self._push()
            check()
            with self._cond:
                left = deadline - self._clock()
                if left <= 0:
                    raise Unavailable("no write buffer became free: the object store is too slow")
                if self._changes == seen:
                    self._cond.wait(left)

    def poke(self) -> None:
        """Let writers that wait look again: an upload failed and will free nothing."""
        with self._cond:
            self._changed()

    def release(self, size: int) -> None:
        """Give back what `reserve` took."""
        with self._cond:
            self._writing -= size
            assert self._writing >= 0, "released more than was reserved"
            self._changed()

    def retire(self, size: int) -> None:
        """Bytes of a write buffer are the cache's from now on."""
        with self._cond:
            self._writing -= size
            assert self._writing >= 0, "retired more than was reserved"
            self._cached += size
            self._changed()

    def charge(self, size: int) -> bool:
        """Count `size` bytes as cached; False where there is no room or a writer waits for it."""
        with self._cond:
            if self._waiters or not self._fits(size):
                return False
            self._cached += size
            return True

    def keep(self, size: int) -> bool:
        """As `charge`, and older cached bytes make room."""
        if self.charge(size):
            return True
        self._shrink(size)
        return self.charge(size)

    def has_room(self, size: int) -> bool:
        """Whether `size` bytes are free now, and no thread waits for them."""
        with self._cond:
            return not self._waiters and self._fits(size)

    def uncharge(self, size: int) -> None:
        """Give back what `charge` or `retire` counted."""
        with self._cond:
            self._cached -= size
            assert self._cached >= 0, "uncharged more than was cached"
            self._changed()

    def hold(self, size: int) -> bool:
        """Count `size` bytes as being read ahead; False where there is no room."""
        with self._cond:
            if self._waiters or (self._ahead + size) * AHEAD_SHARE > self._limit:
                return False
            if self._writing + self._ahead + size > self._limit:
                return False
            missing = self._writing + self._cached + self._ahead + size - self._limit
        if missing > 0:
            self._shrink(missing)
        with self._cond:
            if self._waiters or not self._fits(size):
                return False
            self._ahead += size
            return True

    def unhold(self, size: int) -> None:
        """Give back what `hold` counted."""
        with self._cond:
            self._ahead -= size
            assert self._ahead >= 0, "unheld more than was held"
            self._changed()

    def _changed(self) -> None:
        """Wake writers that wait for room. The caller holds the lock."""
        self._changes += 1
        if self._waiters:
            self._cond.notify_all()

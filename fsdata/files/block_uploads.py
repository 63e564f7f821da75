"""Uploads of one file's blocks, and the first failure that no call has reported yet.

`FileWriter` hands over blocks that are READY. A block that the store refuses is READY again and is
uploaded by the next flush; why it was refused is kept, and the next `check` raises it once.

Threading: any method from any thread. `cond` is the writer's: it guards the states of blocks and
all fields here, is notified when an upload ends, and is not held while the store works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from fsdata.files.write_buffer import BlockState, PendingBlock
from fsdata.files.write_services import WriteServices
from fsmeta.errors import StoreError, Unavailable
from fsmeta.runtime import Condition


class BlockUploads:
    """Stores blocks of one file."""

    def __init__(self, side: WriteServices, cond: Condition) -> None:
        self._runtime, self._blocks, self._budget, self._pool = side[:4]
        self._cond = cond
        self.error: Exception | None = None  # guarded by cond
        self.dropped = False  # guarded by cond; what is pending is discarded

    def submit(self, blocks: Iterable[PendingBlock], then: Callable[[], None]) -> None:
        """Have blocks uploaded by the pool, those that are not queued already.

        The upload thread calls `then` after each. It is not kept here: a writer that has ended is
        freed at once, for it is part of no ring.
        """
        for block in blocks:
            if block.state is BlockState.READY and not block.queued:
                block.queued = True
                self._pool.submit(partial(self._upload_job, block, then), block.fill)

    def _upload_job(self, block: PendingBlock, then: Callable[[], None]) -> None:
        """What an upload thread does: a block, and then what it has completed."""
        self.upload(block)
        then()

    def upload(self, block: PendingBlock) -> None:
        """Store one block, if no other thread has begun to."""
        with self._cond:
            if block.state is not BlockState.READY or self.dropped:
                return
            block.state = BlockState.BUSY
            # While this view lives the cache can't use the buffer again: `peek` may still want it.
            guard = memoryview(block.data)
        error: Exception | None = StoreError("an upload ended without a word")
        try:
            self._blocks.put_block(block.owner.id, block.index, block.data, reserved=True)
            error = None
        except (OSError, StoreError) as caught:
            error = caught
        finally:
            self._settle(block, error)
            guard.release()

    def _settle(self, block: PendingBlock, error: Exception | None) -> None:
        """An upload has ended."""
        with self._cond:
            if error is None:
                block.stored()
            else:
                block.state, block.queued, block.error = BlockState.READY, False, error
                if not self.dropped:
                    self.error = self.error or error
            self._cond.notify_all()
            lost = block.fill if error is not None and self.dropped else 0
        if lost:
            self._budget.release(lost)
        elif error is not None:
            self._budget.poke()

    def await_idle(self, blocks: Sequence[PendingBlock], deadline: float | None) -> None:
        """Wait until no thread uploads any of `blocks`. Raises: Unavailable."""
        with self._cond:
            while any(block.state is BlockState.BUSY for block in blocks):
                left = None if deadline is None else deadline - self._runtime.monotonic()
                if left is not None and left <= 0:
                    raise Unavailable("flush: uploads take too long")
                self._cond.wait(left)

    def await_sent(self, blocks: Sequence[PendingBlock]) -> None:
        """Wait until each of `blocks` is stored or was refused."""
        with self._cond:
            while not self.dropped and any(block.is_sent for block in blocks):
                self._cond.wait()

    def keep(self, error: Exception) -> None:
        """Remember a failure for the next `check`."""
        with self._cond:
            self.error = self.error or error

    def check(self) -> None:
        """Raise what was kept, once."""
        if self.error is None:
            return
        with self._cond:
            error, self.error = self.error, None
        if error is not None:
            raise error

    def drop(self) -> None:
        """What is pending is discarded, and so are failures. The caller holds the lock."""
        self.dropped = True
        self.error = None
        self._cond.notify_all()

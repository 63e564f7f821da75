"""Ids of inodes and slices, which a client takes from the store in batches.

Called by `Meta`. Threading: any thread; `_lock` is held while the next batch is fetched.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from fsmeta.ops.sessions import ids
from fsmeta.runtime import Runtime
from fsmeta.txn.retry import Transactor

INO_BATCH: Final = 1024  # ids a client takes at once; what a crash wastes of 2^64
SLICE_BATCH: Final = 1024


class IdAllocator:
    """Hands out ids of one kind; asks the store for the next batch when it runs out."""

    def __init__(self, run: Transactor, runtime: Runtime, field: bytes, batch: int) -> None:
        self._run = run
        self._runtime = runtime
        self._field = field
        self._batch = batch
        self._lock = runtime.lock()
        self._next = 0  # guarded by _lock, as all below
        self._end = 0
        self._idle = True  # nothing was taken since `let_go_if_idle`

    def take(self) -> int:
        """The next id. Raises: StoreError."""
        with self._lock:
            if self._next == self._end:  # the lock stays held: other callers need the batch, too
                self._next = self._take_batch()
                self._end = self._next + self._batch
            self._next += 1
            self._idle = False
            return self._next - 1

    def following(self) -> int | None:
        """The id that `take` would give without asking the store."""
        with self._lock:
            return self._next if self._next < self._end else None

    def let_go_if_idle(self) -> None:
        """Give up what is left of a batch of which nothing was taken since the last call."""
        with self._lock:
            if self._idle:
                self._next = self._end
            self._idle = True

    def let_go(self) -> None:
        """Give up what is left of the batch."""
        with self._lock:
            self._next = self._end

    def _take_batch(self) -> int:
        """The first of a batch; another one where the store may have gone back meanwhile."""
        store_epoch = self._store_epoch()
        while True:
            chance = self._runtime.random_bits(ids.LEAP_BITS)
            verb = partial(
                ids.take_batch,
                field=self._field,
                batch=self._batch,
                store_epoch=store_epoch,
                chance=chance,
            )
            first = self._run.run(verb)
            before, store_epoch = store_epoch, self._store_epoch()
            if store_epoch == before:
                return first

    def _store_epoch(self) -> bytes:
        return self._run.view(lambda _txn: self._run.store.history.store_epoch())

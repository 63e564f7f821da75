"""Commits of one file's slices: in order of creation, one commit at a time.

`FileWriter` calls it with slices that are stored. A commit that a limit refuses is made of what
fits (`cut_slice`). Slices that are committed and not synced are remembered for fsync(2).

Threading: `order` serialises flushes and commits and is held across store I/O; it guards
`unsynced`. `cond` is the writer's, guards the pending slices, and is taken under `order`.
"""

from __future__ import annotations

from typing import Final

from fsdata.files.cut_slice import Cutter, is_full
from fsdata.files.pending_slices import PendingSlices
from fsdata.files.upload_pool import Dirty
from fsdata.files.write_buffer import PendingSlice
from fsdata.files.write_services import WriteServices
from fsmeta.runtime import Condition
from fsmeta.types import CHUNK_BYTES, Ino, SliceId

PENDING_MAX: Final = 256  # uncommitted slices of a file; the next write flushes them itself
COMMIT_BYTES: Final = CHUNK_BYTES // 2  # complete slices worth a commit before anyone asks
COMMIT_RECORDS: Final = PENDING_MAX // 4  # or so many of them
FITTING_TRIES: Final = 4  # to commit what fits, while other clients take room, too
UNSYNCED_MAX: Final = 4096  # slices remembered for fsync; more are synced when they are committed

assert COMMIT_RECORDS < PENDING_MAX, "else random writers always wait for their own flush"


class OrderedCommits:
    """Gives the slices of one file to the metadata."""

    def __init__(
        self, side: WriteServices, ino: Ino, cond: Condition, slices: PendingSlices
    ) -> None:
        self._blocks, self._budget, self._pool, self._sink = side[1:5]
        self._ino = ino
        self._cond = cond
        self._slices = slices
        self._cutter = Cutter(side, cond, slices)
        self.order = side.runtime.lock()
        self.unsynced: list[tuple[SliceId, int]] = []  # id and size; guarded by order

    def complete(self, limit: int) -> list[PendingSlice]:
        """The first slices, at most `limit`, that are sealed and stored."""
        with self._cond:
            return self._slices.complete(limit)

    def is_worth_it(self) -> bool:
        """Whether so much is complete that a commit in the background is worth a round trip."""
        ready = self.complete(COMMIT_RECORDS)
        return len(ready) == COMMIT_RECORDS or sum(p.length for p in ready) >= COMMIT_BYTES

    def commit(self, file: Dirty, batch: list[PendingSlice], durable: bool) -> None:
        """Give slices to the metadata and forget them; if a limit refuses them, those that fit.

        The upload pool forgets `file`, which they are of, when nothing is pending. The caller holds
        `order`. Raises: OSError, StoreError; what is not committed stays pending.
        """
        try:
            self._commit_whole(file, batch, durable)
        except OSError as error:
            if not is_full(error) or not batch or not self._commit_fitting(file, batch, durable):
                raise

    def commit_stored(self, file: Dirty, durable: bool) -> None:
        """The store is full: commit the blocks that it has of the first slice, if any.

        The caller holds `order`. Raises: as `commit`.
        """
        if self._cutter.cut_unstored():
            self.commit(file, self.complete(1), durable)

    def _commit_fitting(self, file: Dirty, batch: list[PendingSlice], durable: bool) -> bool:
        """Commit what fits of slices that a limit has refused: whether that is all of them.

        The caller holds `order`.
        """
        last = batch[-1].id
        for _ in range(FITTING_TRIES):
            room = self._sink.fitting(self._ino, [piece.offer() for piece in batch])
            try:
                fits = self._cutter.cut_copied(batch, room)
                self._commit_whole(file, fits, durable)
                break
            except OSError as error:  # another client was quicker
                if not is_full(error):
                    raise
            with self._cond:
                batch = self._slices.complete_to(last)
        return last not in self._slices.by_id

    def _commit_whole(self, file: Dirty, batch: list[PendingSlice], durable: bool) -> None:
        """Give slices to the metadata and forget them. The caller holds `order`."""
        slices = [(piece.id, piece.length) for piece in batch]
        durable = durable or len(self.unsynced) >= UNSYNCED_MAX
        if durable:
            self._blocks.sync(self.unsynced + slices)
            self.unsynced = []
        if not batch:
            return
        records = [piece.offer() for piece in batch]
        length = max([piece.file_end for piece in batch])
        mtime_ns = max([piece.mtime_ns for piece in batch])
        self._sink.commit(self._ino, records, length, mtime_ns)
        if not durable:
            self.unsynced += slices
        with self._cond:
            held = self._slices.committed(batch)
            if not self._slices.all:
                self._pool.forget(file)
        self._budget.release(held)

"""Writing a file: bytes gather in slices, blocks go to the store, then records to the metadata.

One `FileWriter` per inode that is written, whatever number of handles. A contiguous burst in a
chunk is one slice; its full blocks are uploaded while the rest is still coming. `flush` stores what
is left and commits the slices in order of creation: blocks first, metadata last, always. A
streamed file is committed in the background as its slices complete, so what is pending is bounded.

An append (O_APPEND) has a place for readers here, at the end that we know of; the commit gives it
the place it keeps, behind what others have appended meanwhile.

What a limit or a full store refuses stays pending; what fits of it is committed (`cutting`).
Failures of background work are kept and raised once, by the next write or flush; the data stays
and every flush tries again, until `discard`.

Threading: any method from any thread. `_order` serialises flushes and commits and is the only lock
held across store I/O; `_cond` guards the rest and is not. Lock order: `_order`, `_cond`, then the
upload pool's, the cache's and the budget's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import inf

from fsdata.files.cut_slice import Cutter, is_full, unstored
from fsdata.files.upload_pool import AGE_FACTOR, Dirty
from fsdata.files.write_buffer import BlockState, Buffer, PendingBlock, PendingSlice
from fsdata.files.write_services import WriteServices
from fsdata.format.geometry import chunk_ranges
from fsmeta.errors import StoreError, Unavailable
from fsmeta.types import BLOCK_BYTES_MAX, CHUNK_BYTES, FILE_SIZE_MAX, Ino, Slice, SliceId

OPEN_MAX = 16  # unsealed slices of a file: as many streams into it stay whole
PENDING_MAX = 256  # uncommitted slices of a file; the next write flushes them itself
FIND_MAX = OPEN_MAX  # slices looked at for one that a write fits in: the open ones are the latest
COMMIT_BYTES = CHUNK_BYTES // 2  # complete slices worth a commit before anyone asks
COMMIT_RECORDS = PENDING_MAX // 4  # or so many of them
PIECE_BYTES = BLOCK_BYTES_MAX  # the budget is asked for no more at a time: it holds four of these
SLICE_BYTES = 1200  # of memory for a slice, its only block and their places, whatever is in it
FITTING_TRIES = 4  # to commit what fits, while other clients take room, too
UNSYNCED_MAX = 4096  # slices remembered for fsync; more are synced when they are committed

assert COMMIT_RECORDS < PENDING_MAX, "else random writers always wait for their own flush"


class FileWriter:
    """Pending writes of one inode. How long the committed file is, it does not know."""

    def __init__(self, side: WriteServices, ino: Ino) -> None:
        self._runtime, self._blocks, self._budget, self._pool, self._sink = side
        self._ino = ino
        self._order = side.runtime.lock()
        self._unsynced: list[tuple[SliceId, int]] = []  # guarded by _order
        self._cond = side.runtime.condition()
        self._pending: list[PendingSlice] = []  # in order of creation; guarded by _cond, as below
        self._end = 0  # where in the file the last of them ends
        self._by_id: dict[SliceId, PendingSlice] = {}
        self._cutter = Cutter(side, self._cond, self._pending, self._by_id)
        self._open = 0  # slices of _pending that are not sealed
        self._ids: list[SliceId] = []  # fetched and unused
        self._error: Exception | None = None
        self._since = 0.0  # when the oldest pending data came, as far as the flusher cares
        self._touched = 0.0
        self._dropped = False
        self._append_from = FILE_SIZE_MAX  # where the pending appends begin
        self._moved_to: int | None = None  # the size of a file that others have appended to
        self.misplaced = False  # pending appends are not where readers would look for them

    # -- what the file looks like from here

    @property
    def end(self) -> int:
        """Where in the file that ends which is not committed; 0 where all is.

        With the length of what is committed, taken later, it makes the file's length.
        """
        return self._end

    @property
    def dirty(self) -> bool:
        """Whether anything is not committed yet, or a failure not reported."""
        return bool(self._pending) or self._error is not None

    @property
    def unsynced(self) -> Sequence[tuple[SliceId, int]]:
        """Slices (id, size) that are committed and not synced; all of them where nothing waits."""
        return self._unsynced

    @property
    def pending_bytes(self) -> int:
        """How many bytes of slices are not committed."""
        with self._cond:
            return sum([piece.left for piece in self._pending])

    def pending(self, chunk: int) -> list[Slice]:
        """Slices of a chunk that are not committed, in order; they come after the committed ones.

        Take them before the committed ones, or a commit in between hides them from you.
        """
        if not self._pending:
            return []
        with self._cond:
            return [piece.record() for piece in self._pending if piece.chunk == chunk]

    def pending_chunks(self) -> set[int]:
        """Chunks of which `pending` says something."""
        with self._cond:
            return {piece.chunk for piece in self._pending}

    def peek(self, slice_id: SliceId, off: int, length: int) -> list[Buffer] | None:
        """Bytes of a pending slice, within one block; None if they are in the store by now."""
        if slice_id not in self._by_id:
            return None
        with self._cond:
            piece = self._by_id.get(slice_id)
            view = None if piece is None else piece.view(off, length)
        return None if view is None else [view]

    # -- write

    def write(self, offset: int, data: memoryview) -> None:
        """Take a copy of `data` for `offset`; waits where the memory budget is used up.

        Raises: what background work met since the last call; Unavailable.
        """
        self._check()
        # what overlaps an append waits until that has its place
        if len(self._pending) >= PENDING_MAX or offset + len(data) > self._append_from:
            self.flush()
        self._write(offset, data, False)

    def append(self, offset: int, data: memoryview) -> int:
        """As `write`, to the end of the file, where the commit finds it; where that seems to be.

        `offset` is where the caller believes the end to be.
        """
        self._check()
        if len(self._pending) >= PENDING_MAX:
            self.flush()
        offset = max(offset, self._end)
        self._write(offset, data, True)
        return offset

    def _write(self, offset: int, data: memoryview, append: bool) -> None:
        for chunk, pos, size in chunk_ranges(offset, len(data)):
            at = chunk * CHUNK_BYTES + pos - offset
            for step in range(0, size, PIECE_BYTES):
                piece = data[at + step : at + min(size, step + PIECE_BYTES)]
                self._write_piece(chunk, pos + step, piece, append)

    def _write_piece(self, chunk: int, pos: int, data: memoryview, append: bool) -> None:
        """`write` within one chunk, of what the budget can give at once."""
        self._budget.reserve(len(data), self._check)
        unused = len(data)
        try:
            while True:
                with self._cond:
                    assert not self._dropped, "written after discard"
                    piece = self._find(chunk, pos, pos + len(data), append)
                    if piece is not None or self._ids:
                        blocks, grown = self._place(piece, chunk, pos, data, append)
                        unused -= grown
                        break
                slice_id = self._new_slice_id()  # may wait: not under the lock
                with self._cond:
                    self._ids.append(slice_id)
        finally:
            if unused:
                self._budget.release(unused)
        self._submit(blocks)

    def _new_slice_id(self) -> SliceId:
        """An id, and memory for the slice itself: tiny writes hold little else."""
        slice_id = self._sink.new_slice_id()
        self._budget.reserve(SLICE_BYTES, self._check)
        return slice_id

    def _find(self, chunk: int, begin: int, end: int, append: bool) -> PendingSlice | None:
        """The slice that can take a write, given that nothing newer may be hidden by it."""
        for piece in self._pending[: -FIND_MAX - 1 : -1]:
            if piece.chunk != chunk:
                continue
            if piece.append is append and piece.accepts(begin):
                return piece
            if piece.pos < end and begin < piece.end:
                return None
        return None

    def _place(
        self, piece: PendingSlice | None, chunk: int, pos: int, data: memoryview, append: bool
    ) -> tuple[list[PendingBlock], int]:
        """Copy `data` into `piece` or a new one; blocks to upload, and bytes the buffers grew."""
        self._touched = self._runtime.monotonic()
        blocks: list[PendingBlock] = []
        if piece is None:
            blocks = self._seal_oldest()
            piece = PendingSlice(self._ids.pop(), chunk, pos, self._blocks.block_bytes, append)
            piece.held = SLICE_BYTES
            if not self._pending:
                self._since = self._touched
                self._pool.watch(self)
            self._pending.append(piece)
            self._by_id[piece.id] = piece
            self._open += 1
            if append:
                self._append_from = min(self._append_from, piece.file_end)
        before = piece.length
        blocks += piece.write(pos, data, self._blocks.take_spare)
        piece.mtime_ns = self._runtime.now_ns()
        self._end = max(self._end, piece.file_end)
        if piece.end == CHUNK_BYTES:
            blocks += self._seal(piece)
        return blocks, piece.length - before

    def _seal(self, piece: PendingSlice) -> list[PendingBlock]:
        """No more into this slice. The caller holds the lock."""
        if piece.sealed:
            return []
        self._open -= 1
        return piece.seal()

    def _seal_oldest(self) -> list[PendingBlock]:
        """Make room for one more open slice. The caller holds the lock."""
        if self._open < OPEN_MAX:
            return []
        return self._seal(next(piece for piece in self._pending if not piece.sealed))

    # -- upload

    def _submit(self, blocks: list[PendingBlock]) -> None:
        """Have blocks uploaded by the pool, those that are not queued already."""
        for block in blocks:
            if block.state is BlockState.READY and not block.queued:
                block.queued = True
                self._pool.submit(partial(self._upload_job, block), block.fill)

    def _upload_job(self, block: PendingBlock) -> None:
        """What an upload thread does: a block, and then what it has completed."""
        self._upload(block)
        self._commit_complete()

    def _upload(self, block: PendingBlock) -> None:
        """Store one block, if nobody else has begun to."""
        with self._cond:
            if block.state is not BlockState.READY or self._dropped:
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
                if not self._dropped:
                    self._keep(error)
            self._cond.notify_all()
            lost = block.fill if error is not None and self._dropped else 0
        if lost:
            self._budget.release(lost)
        elif error is not None:
            self._budget.poke()

    def _keep(self, error: Exception) -> None:
        """Remember a failure for the next call. The caller holds the lock."""
        self._error = self._error or error

    def _check(self) -> None:
        """Raise what was kept, once."""
        if self._error is None:
            return
        with self._cond:
            error, self._error = self._error, None
        if error is not None:
            raise error

    # -- flush and commit

    def flush(self, deadline: float | None = None, durable: bool = False) -> None:
        """Store and commit everything written before this call.

        `deadline` in monotonic seconds; `durable`: also survive a loss of power (fsync(2)).
        Raises: what failed now or in the background since the last call; Unavailable when the
        deadline passes. What was not stored stays pending.
        """
        failed = None
        if self._pending or (durable and self._unsynced):
            left = -1.0 if deadline is None else max(0.0, deadline - self._runtime.monotonic())
            if not self._order.acquire(timeout=left):
                raise Unavailable("flush: another flush of the file takes too long")
            try:
                failed = self._flush(deadline, durable)
            finally:
                self._order.release()
        self._check()
        if failed is not None:
            raise failed  # somebody else has been told of it, and this caller is, too

    def _flush(self, deadline: float | None, durable: bool) -> Exception | None:
        """`flush`, with `_order` held; why a block could not be stored, if one could not."""
        with self._cond:
            for piece in self._pending:
                self._seal(piece)
            count = len(self._pending)
            left = unstored(self._pending)
            self._since = self._runtime.monotonic()
        self._submit(left[1:])  # a single block is uploaded right here, without waking a thread
        for block in left:
            self._upload(block)
        if any(block.state is BlockState.BUSY for block in left):
            self._await(left, deadline)
        self._commit(self._complete(count), durable)
        failed = next((b.error for b in left if b.state is not BlockState.STORED and b.error), None)
        if is_full(failed) and self._cutter.cut_unstored():
            self._commit(self._complete(1), durable)
        return failed

    def _await(self, blocks: list[PendingBlock], deadline: float | None) -> None:
        """Wait until no thread uploads any of `blocks`."""
        with self._cond:
            while any(block.state is BlockState.BUSY for block in blocks):
                left = None if deadline is None else deadline - self._runtime.monotonic()
                if left is not None and left <= 0:
                    raise Unavailable("flush: uploads take too long")
                self._cond.wait(left)

    def _complete(self, limit: int) -> list[PendingSlice]:
        """The first slices, at most `limit`, that are sealed and stored."""
        with self._cond:
            count = 0
            for piece in self._pending[:limit]:
                if not piece.sealed or piece.unstored:
                    break
                count += 1
            return self._pending[:count]

    def _commit(self, batch: list[PendingSlice], durable: bool) -> None:
        """Give slices to the metadata and forget them; if a limit refuses them, those that fit.

        The caller holds `_order`. Raises: OSError, StoreError; what is not committed stays pending.
        """
        try:
            self._commit_whole(batch, durable)
        except OSError as error:
            if not is_full(error) or not batch or not self._commit_fitting(batch, durable):
                raise

    def _commit_fitting(self, batch: list[PendingSlice], durable: bool) -> bool:
        """Commit what fits of slices that a limit has refused: whether that is all of them.

        The caller holds `_order`.
        """
        last = batch[-1].id
        for _ in range(FITTING_TRIES):
            room = self._sink.fitting(self._ino, [piece.offer() for piece in batch])
            try:
                self._commit_whole(self._cutter.cut_copied(batch, room), durable)
                break
            except OSError as error:  # another client was quicker
                if not is_full(error):
                    raise
            batch = self._complete_to(last)
        return last not in self._by_id

    def _complete_to(self, last: SliceId) -> list[PendingSlice]:
        """The slices as far as that one, all of which are sealed and stored."""
        ready = self._complete(len(self._pending))
        return ready[: 1 + [piece.id for piece in ready].index(last)] if last in self._by_id else []

    def _commit_whole(self, batch: list[PendingSlice], durable: bool) -> None:
        """Give slices to the metadata and forget them. The caller holds `_order`."""
        slices = [(piece.id, piece.length) for piece in batch]
        durable = durable or len(self._unsynced) >= UNSYNCED_MAX
        if durable:
            self._blocks.sync(self._unsynced + slices)
            self._unsynced = []
        if not batch:
            return
        records = [piece.offer() for piece in batch]
        length = max([piece.file_end for piece in batch])
        mtime_ns = max([piece.mtime_ns for piece in batch])
        self._sink.commit(self._ino, records, length, mtime_ns)
        if not durable:
            self._unsynced += slices
        with self._cond:
            del self._pending[: len(batch)]
            held = sum(
                [self._by_id.pop(piece.id).held for piece in batch if piece.id in self._by_id]
            )
            if not self._pending:
                self._pool.forget(self)
            if self._append_from < FILE_SIZE_MAX:
                self._appends_left()
            if not self.misplaced:
                self._end = max([piece.file_end for piece in self._pending], default=0)
        self._budget.release(held)

    def _appends_left(self) -> None:
        """Appends have been committed, perhaps all. The caller holds the lock."""
        left = [piece for piece in self._pending if piece.append]
        self._append_from = min([piece.file_begin for piece in left], default=FILE_SIZE_MAX)
        self.misplaced = bool(left) and (self.misplaced or self._moved_to is not None)
        if self._moved_to is not None:
            others = [piece.file_end for piece in self._pending if not piece.append]
            self._end = max([self._moved_to, *others]) + sum([piece.left for piece in left])
            self._moved_to = None

    def relocated(self, size: int) -> None:
        """Appends of this commit went elsewhere than `append` said; the file has `size` bytes."""
        self._moved_to = size

    def _commit_complete(self) -> None:
        """Commit in the background what is complete, if it is worth a round trip."""
        while self._worth_committing() and self._order.acquire(blocking=False):
            try:
                self._commit(self._complete(PENDING_MAX), durable=False)
            except (OSError, StoreError) as error:
                with self._cond:
                    self._keep(error)
                return
            finally:
                self._order.release()

    def _worth_committing(self) -> bool:
        ready = self._complete(COMMIT_RECORDS)
        return len(ready) == COMMIT_RECORDS or sum(p.length for p in ready) >= COMMIT_BYTES

    # -- what the pool and the budget ask for

    def due(self) -> float:
        """See `Dirty`."""
        if not self._pending:
            return inf
        idle_s = self._pool.idle_s
        return min(self._touched + idle_s, self._since + AGE_FACTOR * idle_s)

    def flush_idle(self, wait: bool = False) -> None:
        """See `Dirty`. A flush that is under way makes this one needless."""
        if not self._order.acquire(blocking=wait):
            return
        try:
            self._flush(None, durable=False)
        except (OSError, StoreError) as error:
            with self._cond:
                self._keep(error)
        finally:
            self._order.release()

    def push(self) -> None:
        """See `Dirty`."""
        with self._cond:
            blocks = [block for piece in self._pending for block in self._seal(piece)]
        self._submit(blocks)

    def discard(self) -> None:
        """Forget everything that is not committed, failures too; objects left over are gc's."""
        with self._cond:
            self._dropped = True
            held = sum(
                block.fill
                for piece in self._pending
                for block in piece.blocks
                if block.state in (BlockState.OPEN, BlockState.READY)
            )
            held += sum(piece.held for piece in self._pending) + SLICE_BYTES * len(self._ids)
            unused = [*self._by_id, *self._ids]
            self._pending.clear()
            self._end = 0
            self._by_id.clear()
            self._ids.clear()
            self._error = None
            self._pool.forget(self)
            self._cond.notify_all()
        self._budget.release(held)
        if unused:
            self._sink.give_up_slices(unused)


def _conforms(writer: FileWriter) -> Dirty:
    return writer

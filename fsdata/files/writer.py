"""Writing a file: bytes gather in slices, blocks go to the store, then records to the metadata.

One `FileWriter` per inode that is written, for any number of handles. A contiguous burst in a
chunk is one slice; its full blocks are uploaded while the rest is still coming. `flush` stores what
is left and commits the slices in order of creation: blocks first, metadata last, always. A
streamed file is committed in the background as its slices complete, so what is pending is bounded.

An append (O_APPEND) has a place for readers here, at the end that this client knows; the commit
gives it its final place, behind what other clients have appended meanwhile.

What a limit or a full store refuses stays pending; what fits of it is committed (`cut_slice`).
Failures of background work are kept and raised once, by the next write or flush; the data stays
and every flush tries again, until `discard`.

Threading: any method from any thread. `OrderedCommits.order` serialises flushes and commits and is
the only lock held across store I/O; `_cond` guards the rest and is not. Lock order: `order`,
`_cond`, then the upload pool's, the cache's and the budget's.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from fsdata.files.block_uploads import BlockUploads
from fsdata.files.cut_slice import is_full, unstored
from fsdata.files.ordered_commits import PENDING_MAX, OrderedCommits
from fsdata.files.pending_slices import PendingSlices
from fsdata.files.upload_pool import AGE_FACTOR, Dirty
from fsdata.files.write_buffer import BlockState, Buffer, PendingBlock, PendingSlice
from fsdata.files.write_services import WriteServices
from fsdata.format.geometry import chunk_ranges
from fsmeta.errors import StoreError, Unavailable
from fsmeta.types import BLOCK_BYTES_MAX, CHUNK_BYTES, Ino, Slice, SliceId

PIECE_BYTES = BLOCK_BYTES_MAX  # the budget is asked for no more at a time: it holds four of these
SLICE_BYTES = 1200  # of memory for a slice, its only block and their places, whatever is in it


class FileWriter:
    """Pending writes of one inode. How long the committed file is, it does not know."""

    def __init__(self, side: WriteServices, ino: Ino) -> None:
        self._runtime, self._blocks, self._budget, self._pool, self._sink, self._outlives = side
        self._ino = ino
        self._cond = side.runtime.condition()
        self.slices = PendingSlices()  # guarded by _cond, as all below
        self._uploads = BlockUploads(side, self._cond)
        self._commits = OrderedCommits(side, ino, self._cond, self.slices)
        self._ids: list[SliceId] = []  # fetched and unused
        self._since = 0.0  # when the oldest pending data came, as far as the flusher cares
        self._touched = 0.0

    # -- what the file looks like from here

    @property
    def end(self) -> int:
        """Where in the file that ends which is not committed; 0 where all is.

        With the length of what is committed, taken later, it makes the file's length.
        """
        return self.slices.end

    @property
    def dirty(self) -> bool:
        """Whether anything is not committed yet, or a failure not reported."""
        return bool(self.slices.all) or self._uploads.error is not None

    @property
    def unsynced(self) -> Sequence[tuple[SliceId, int]]:
        """Slices (id, size) that are committed and not synced; all of them where nothing waits."""
        return self._commits.unsynced

    @property
    def pending_bytes(self) -> int:
        """How many bytes of slices are not committed."""
        with self._cond:
            return sum([piece.left for piece in self.slices.all])

    def pending(self, chunk: int) -> list[Slice]:
        """Slices of a chunk that are not committed, in order; they come after the committed ones.

        Take them before the committed ones, or a commit in between hides them from you.
        """
        if not self.slices.all:
            return []
        with self._cond:
            return [piece.record() for piece in self.slices.all if piece.chunk == chunk]

    def pending_chunks(self) -> set[int]:
        """Chunks of which `pending` says something."""
        with self._cond:
            return {piece.chunk for piece in self.slices.all}

    def peek(self, slice_id: SliceId, off: int, length: int) -> list[Buffer] | None:
        """Bytes of a pending slice, within one block; None if they are in the store by now."""
        if slice_id not in self.slices.by_id:
            return None
        with self._cond:
            piece = self.slices.by_id.get(slice_id)
            view = None if piece is None else piece.view(off, length)
        return None if view is None else [view]

    # -- write

    def write(self, offset: int, data: memoryview) -> None:
        """Take a copy of `data` for `offset`; waits where the memory budget is used up.

        Raises: what background work met since the last call; Unavailable.
        """
        self._uploads.check()
        # what overlaps an append waits until that has its place
        if len(self.slices.all) >= PENDING_MAX or offset + len(data) > self.slices.append_from:
            self.flush()
        self._write(offset, data, False)

    def append(self, offset: int, data: memoryview) -> int:
        """As `write`, to the end of the file, where the commit finds it; where that seems to be.

        `offset` is where the caller expects the end.
        """
        self._uploads.check()
        if len(self.slices.all) >= PENDING_MAX:
            self.flush()
        offset = max(offset, self.slices.end)
        self._write(offset, data, True)
        return offset

    def _write(self, offset: int, data: memoryview, append: bool) -> None:
        for chunk, pos, size in chunk_ranges(offset, len(data)):
            at = chunk * CHUNK_BYTES + pos - offset
            for step in range(0, size, PIECE_BYTES):
                piece = data[at + step : at + min(size, step + PIECE_BYTES)]
                self._write_piece(chunk, pos + step, piece, append)

    def _write_piece(self, chunk: int, pos: int, data: memoryview, append: bool) -> None:
        """`write` within one chunk, of what the budget can give at once.

        Memory for the slice is asked for while none is held: threads that hold the last of it
        would wait for each other.
        """
        if not self._ids and not self.slices.all:
            self._add_slice_id()
        while True:
            self._budget.reserve(len(data), self._uploads.check)
            unused = len(data)
            try:
                with self._cond:
                    assert not self._uploads.dropped, "written after discard"
                    piece = self.slices.find(chunk, pos, pos + len(data), append)
                    if piece is not None or self._ids:
                        blocks, grown = self._place(piece, chunk, pos, data, append)
                        unused -= grown
                        break
            finally:
                if unused:
                    self._budget.release(unused)
            self._add_slice_id()
        if blocks:
            self._uploads.submit(blocks, self._commit_complete)
            if self._pool.file_bytes_max is not None:
                self._await_sent(self._pool.file_bytes_max)

    def _add_slice_id(self) -> None:
        """Fetch an id. It may wait: not under the lock."""
        slice_id = self._new_slice_id()
        with self._cond:
            self._ids.append(slice_id)

    def _await_sent(self, most: int) -> None:
        """Wait until at most `most` bytes of the file are on their way to the store."""
        with self._cond:
            sent = [b for piece in self.slices.all for b in piece.blocks if b.is_sent]
        beyond = sum(block.fill for block in sent) - most
        oldest = []
        for block in sent:
            if beyond <= 0:
                break
            oldest.append(block)
            beyond -= block.fill
        if oldest:
            self._uploads.await_sent(oldest)

    def _new_slice_id(self) -> SliceId:
        """An id, and memory for the slice itself: tiny writes hold little else."""
        slice_id = self._sink.new_slice_id()
        self._budget.reserve(SLICE_BYTES, self._uploads.check)
        return slice_id

    def _place(
        self, piece: PendingSlice | None, chunk: int, pos: int, data: memoryview, append: bool
    ) -> tuple[list[PendingBlock], int]:
        """Copy `data` into `piece` or a new one; blocks to upload, and bytes the buffers grew."""
        self._touched = self._runtime.monotonic()
        slices = self.slices
        blocks: list[PendingBlock] = []
        if piece is None:
            blocks = slices.seal_oldest()
            piece = PendingSlice(self._ids.pop(), chunk, pos, self._blocks.block_bytes, append)
            piece.held = SLICE_BYTES
            if not slices.all:
                self._since = self._touched
                self._pool.watch(self)
            slices.add(piece)
        before = piece.length
        blocks += piece.write(pos, data, self._blocks.take_spare)
        piece.mtime_ns = self._runtime.now_ns()
        if self._outlives is not None:
            at = chunk * CHUNK_BYTES + pos
            self._outlives(self._ino, piece.id, at, append, piece.mtime_ns, data)
        slices.end = max(slices.end, piece.file_end)
        if piece.end == CHUNK_BYTES:
            blocks += slices.seal(piece)
        return blocks, piece.length - before

    # -- flush and commit

    def flush(self, deadline: float | None = None, durable: bool = False) -> None:
        """Store and commit everything written before this call.

        `deadline` in monotonic seconds; `durable`: also survive a loss of power (fsync(2)).
        Raises: what failed now or in the background since the last call; Unavailable when the
        deadline passes. What was not stored stays pending.
        """
        failed = None
        order = self._commits.order
        if self.slices.all or (durable and self._commits.unsynced):
            left = -1.0 if deadline is None else max(0.0, deadline - self._runtime.monotonic())
            if not order.acquire(timeout=left):
                raise Unavailable("flush: another flush of the file takes too long")
            try:
                failed = self._flush(deadline, durable)
            finally:
                order.release()
        self._uploads.check()
        if failed is not None:
            raise failed  # another caller got the error, and this one does, too

    def _flush(self, deadline: float | None, durable: bool) -> Exception | None:
        """`flush`, with the order of commits held; why a block could not be stored, if so."""
        with self._cond:
            self.slices.seal_all()
            count = len(self.slices.all)
            left = unstored(self.slices.all)
            self._since = self._runtime.monotonic()
        # a single block is uploaded right here, without waking a thread
        self._uploads.submit(left[1:], self._commit_complete)
        for block in left:
            self._uploads.upload(block)
        if any(block.state is BlockState.BUSY for block in left):
            self._uploads.await_idle(left, deadline)
        self._commits.commit(self, self._commits.complete(count), durable)
        failed = next((b.error for b in left if b.state is not BlockState.STORED and b.error), None)
        if is_full(failed):
            self._commits.commit_stored(self, durable)
        return failed

    def _commit_complete(self) -> None:
        """Commit in the background what is complete, if it is worth a round trip."""
        commits = self._commits
        while commits.is_worth_it() and commits.order.acquire(blocking=False):
            try:
                commits.commit(self, commits.complete(PENDING_MAX), durable=False)
            except (OSError, StoreError) as error:
                self._uploads.keep(error)
                return
            finally:
                commits.order.release()

    # -- what the pool and the budget ask for

    def due(self) -> float:
        """See `Dirty`."""
        if not self.slices.all:
            return inf
        idle_s = self._pool.idle_s
        return min(self._touched + idle_s, self._since + AGE_FACTOR * idle_s)

    def flush_idle(self, wait: bool = False) -> None:
        """See `Dirty`. A flush that is under way makes this one needless."""
        if not self._commits.order.acquire(blocking=wait):
            return
        try:
            self._flush(None, durable=False)
        except (OSError, StoreError) as error:
            self._uploads.keep(error)
        finally:
            self._commits.order.release()

    def push(self) -> None:
        """See `Dirty`."""
        with self._cond:
            blocks = self.slices.seal_all()
        self._uploads.submit(blocks, self._commit_complete)

    def discard(self) -> None:
        """Forget everything that is not committed, failures too; objects left over are gc's."""
        with self._cond:
            held = sum(
                block.fill
                for piece in self.slices.all
                for block in piece.blocks
                if block.state in (BlockState.OPEN, BlockState.READY)
            )
            held += sum(piece.held for piece in self.slices.all) + SLICE_BYTES * len(self._ids)
            unused = [*self.slices.by_id, *self._ids]
            self.slices.clear()
            self._ids.clear()
            self._uploads.drop()
            self._pool.forget(self)
        self._budget.release(held)
        if unused:
            self._sink.give_up_slices(unused)


def _conforms(writer: FileWriter) -> Dirty:
    return writer

"""Packing small files after they were written, in the background: docs/design/packing.

The client that committed a small file packs it, some seconds later, with those it committed around
it: their bytes go into one block, the segment, and one commit exchanges the records of all that are
unchanged since. What they listed before goes through a deletion round, which waits for its readers.
`TidyQueue` has the files that wait, and what is left of a segment of which most is gone.

It packs only slices whose commit this client knows to be applied: no client offers them again.

Threading: called by the worker of `Background`; a pool of threads reads, because small files are
read one request each.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from fsclient.background import tidy_queue
from fsclient.background.tidy_queue import TidyQueue
from fsclient.files.data_services import DataServices
from fsclient.files.handles.open_files import OpenFiles
from fsdata.blocks.read_plan import Access, reads_of
from fsdata.resources.worker_pool import WorkerPool
from fsmeta.errors import ObjectDamaged, ObjectMissing, StoreError
from fsmeta.meta.meta import Meta
from fsmeta.ops.data.packing import MEMBERS_MAX, PackedSlices, Small, part
from fsmeta.runtime import Runtime
from fsmeta.types import Ino, SliceId

log = logging.getLogger(__name__)

PACK_BELOW: Final = 512 << 10  # eight or more in a block: so many requests fewer to read them
PACKED_STORAGES: Final = ("s3",)  # where a request takes as long as reading a block
QUIET_S: Final = 2.0  # a file that was just written may be written again, or be gone
LINGER_S: Final = 20.0  # how long files wait for more, to fill a block
LEAVE_S: Final = 5.0  # of leaving a volume, for files that have waited so far


class Packer:
    """Packs files that are small."""

    def __init__(
        self,
        meta: Meta,
        data: DataServices,
        files: OpenFiles,
        runtime: Runtime,
        pool: WorkerPool,
        queue: TidyQueue,
        unreadable: Callable[[Ino, Exception], None],
    ) -> None:
        """`queue` knows which files are small; `unreadable` is told by threads of the pool."""
        self._meta = meta
        self._data = data
        self._blocks = data.blocks
        self._files = files
        self._runtime = runtime
        self._pool = pool
        self._unreadable = unreadable
        self._queue = queue
        self.is_single = queue.is_single
        self._goes_on = False  # there may be enough for another segment
        self.packed = 0  # files
        self.segments = 0

    def waiting(self) -> bool:
        """Whether to go on at once. The caller holds the condition's lock."""
        return self._goes_on

    def turn(self) -> None:
        """Pack a segment, if there are files enough or some have waited for long."""
        if self._queue.files:
            self._pack(self._take(self._runtime.monotonic()))

    def finish(self, deadline: float) -> None:
        """Pack all that waits, until `deadline`."""
        while self._queue.files and self._runtime.monotonic() < deadline:
            if not self._pack(self._take(self._runtime.monotonic() + LINGER_S)):
                return

    def pack_these(self, files: Sequence[Small]) -> None:
        """Make these one segment now, but for those that were changed; for a caller that searched
        for them.

        They fit into a block. Raises: StoreError, OSError.
        """
        self._pack_now(files)

    def _take(self, now: float) -> list[Small]:
        """Files that fill a block, or the last ones, where no more will come; none: not yet."""
        waiting = self._queue.files
        with self._queue.cond:
            taken: list[Small] = []
            room = self._blocks.block_bytes
            full = False
            for ino, each in waiting.items():
                full = each.piece.length > room or len(taken) == MEMBERS_MAX
                if full or each.since > now - QUIET_S:
                    break
                taken.append(Small(ino, each.piece))
                room -= each.piece.length
            self._goes_on = full
            if not full and taken and waiting[taken[0].ino].since > now - LINGER_S:
                return []
            for small in taken:
                del waiting[small.ino]
        return taken if len(taken) >= tidy_queue.MEMBERS_MIN else []

    def _pack(self, files: Sequence[Small]) -> bool:
        """Make these one segment; False where it can't be now, and they wait once more.

        Raises: StoreError, and then they do, too; OSError.
        """
        done = False
        try:
            done = not files or self._pack_now(files)
        except OSError:
            done = True  # a store that takes no such block will not take it later
            raise
        finally:
            if not done:
                self._queue.again(files)
                with self._queue.cond:
                    self._goes_on = False
        return done

    def _pack_now(self, files: Sequence[Small]) -> bool:
        """As `_pack`."""
        size = sum(each.piece.length for each in files)
        budget = self._data.budget
        if not budget.keep(size):
            return False  # writers need the memory
        try:
            block = bytearray(size)
            generation = self._data.epoch.begin()  # what is listed now is not deleted until `end`
            try:
                found = self._gather(files, memoryview(block))
            finally:
                self._data.epoch.end(generation)
            return len(found) < tidy_queue.MEMBERS_MIN or self._store(found, block)
        finally:
            budget.uncharge(size)

    def _gather(self, files: Sequence[Small], block: memoryview) -> list[tuple[Small, int]]:
        """Fill `block` with what files still list; those that could be read, and their offsets."""
        found: list[tuple[Small, int]] = []
        jobs: list[Callable[[], None]] = []
        off = 0
        for file in self._meta.packing.unchanged(files):
            into = block[off : off + file.piece.length]
            jobs.append(partial(self._read, file, off, into, found))
            off += file.piece.length
        self._pool.run_all(jobs)
        return sorted(found, key=lambda each: each[1])

    def _read(
        self, file: Small, off: int, into: memoryview, found: list[tuple[Small, int]]
    ) -> None:
        """What a thread of the pool does. Raises: Unavailable, OSError."""
        piece, at = file.piece, 0
        try:
            for read in reads_of(
                piece, piece.off, piece.length, Access.RANDOM, self._blocks.block_bytes
            ):
                end = at + read.end - read.begin
                into[at:end] = self._blocks.read(read)
                at = end
        except (ObjectMissing, ObjectDamaged) as error:
            self._unreadable(file.ino, error)
        else:
            found.append((file, off))

    def _store(self, found: Sequence[tuple[Small, int]], block: bytearray) -> bool:
        """Store the segment `block`, and show those files in it; False where that must wait."""
        size = max(off + file.piece.length for file, off in found)
        segment = self._meta.new_slice_id()
        try:
            self._put(segment, memoryview(block)[:size])
        except (OSError, StoreError):
            self._meta.give_up_slices((segment,))
            raise
        # where this raises, gc has what is left: a commit without an answer may yet be applied
        members = [PackedSlices(file, part(segment, size, off, file.piece)) for file, off in found]
        try:
            inos = self._exchange(segment, members)
        finally:
            self._meta.give_up_slices((segment,))
        if not inos:
            self._blocks.delete([(segment, size)])
            return inos is not None
        self.packed += len(inos)
        self.segments += 1
        for ino in inos:
            opened = self._files.get(ino)
            if opened is not None:
                opened.forget_chunks()
        return True

    def _put(self, segment: SliceId, block: memoryview) -> None:
        """Store it, as safely as fsync(2) has stored what is in it."""
        try:
            self._blocks.put_block(segment, 0, block, rewritten=True)
            self._blocks.sync([(segment, len(block))])
        except (OSError, StoreError):
            try:
                self._blocks.delete([(segment, len(block))])
            except (OSError, StoreError):
                pass  # gc will: nothing refers to it
            raise

    def _exchange(self, segment: SliceId, members: Sequence[PackedSlices]) -> list[Ino] | None:
        """Those that are in the segment now; None where a change of one is held back."""
        try:
            return self._meta.packing.pack(segment, members)
        except OSError as error:
            if error.errno == errno.EBUSY:
                return None
            raise


def pass_over(ino: Ino, error: Exception) -> None:
    """A later read of the file reports the error."""
    log.debug("inode %d is not packed: %s", ino, error)

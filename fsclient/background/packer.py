"""Packing small files behind the backs of those who wrote them: docs/design/packing.

The client that committed a small file packs it, some seconds later, with those it committed around
it: their bytes go into one block, the segment, and one commit exchanges the records of all that
nobody has changed meanwhile. What they listed before goes through a deletion round, which waits for
its readers. `again` takes in what is left of a segment of which most is gone.

Only slices are packed whose commit this client knows to have worked: nobody will offer them again.

Threading: `committed` and `again` from any thread, the rest from the worker of `Background`; a pool
of threads reads, because small files are read one request each.
"""

from __future__ import annotations

import errno
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final, NamedTuple

from fsclient.files.data_services import DataServices
from fsclient.files.open_files import OpenFiles
from fsdata.format.geometry import block_ranges
from fsdata.resources.worker_pool import WorkerPool
from fsmeta.errors import ObjectDamaged, ObjectMissing, StoreError
from fsmeta.meta.meta import Meta
from fsmeta.ops.data.packing import MEMBERS_MAX, PackedSlices, Small, part
from fsmeta.runtime import Condition, Runtime
from fsmeta.types import Ino, Slice, SliceId, SliceKind

log = logging.getLogger(__name__)

PACK_BELOW: Final = 512 << 10  # eight or more in a block: so many requests fewer to read them
PACKED_STORAGES: Final = ("s3",)  # where a request takes as long as reading a block
QUIET_S: Final = 2.0  # a file that was just written may be written again, or be gone
LINGER_S: Final = 20.0  # how long files wait for company that fills a block
MEMBERS_MIN: Final = 4  # fewer save too few requests for what packing costs
QUEUE_MAX: Final = 50_000  # files that wait, 300 bytes each; the oldest are left as they are
LEAVE_S: Final = 5.0  # of leaving a volume, for files that have waited so far


class _Waiting(NamedTuple):
    piece: Slice
    since: float


class Packer:
    """Knows which files are small, and packs them."""

    def __init__(
        self,
        meta: Meta,
        data: DataServices,
        files: OpenFiles,
        runtime: Runtime,
        pool: WorkerPool,
        changed: Condition,
        below: int,
    ) -> None:
        """Files of at most `below` bytes are small; 0: none is."""
        self._meta = meta
        self._data = data
        self._blocks = data.blocks
        self._files = files
        self._runtime = runtime
        self._pool = pool
        self._below = min(below, data.blocks.block_bytes // MEMBERS_MIN)
        self._cond = changed
        self._queue: OrderedDict[Ino, _Waiting] = OrderedDict()  # guarded by _cond; oldest first
        self._goes_on = False  # there may be enough for another segment
        self.packed = 0  # files
        self.segments = 0
        self.on_unreadable: Callable[[Ino, Exception], None] = (
            _pass_over  # told by threads of the pool
        )

    def committed(self, ino: Ino, piece: Slice) -> None:
        """A chunk that was the first of a file has got this slice, and no other in that commit."""
        if self.is_single(piece):
            self._enter(ino, piece)

    def is_single(self, piece: Slice) -> bool:
        """Whether this slice of a first chunk makes a file a small one that is not packed."""
        single = piece.kind is SliceKind.BLOCKS  # else it has come packed
        return single and piece.pos == 0 and 0 < piece.length <= self._below

    def again(self, files: Iterable[Small]) -> None:
        """What is left of a segment."""
        if self._below:
            for each in files:
                self._enter(each.ino, each.piece)

    def _enter(self, ino: Ino, piece: Slice) -> None:
        with self._cond:
            self._queue[ino] = _Waiting(piece, self._runtime.monotonic())
            self._queue.move_to_end(ino)
            if len(self._queue) > QUEUE_MAX:
                self._queue.popitem(last=False)

    def waiting(self) -> bool:
        """Whether to go on at once. The caller holds the condition's lock."""
        return self._goes_on

    def turn(self) -> None:
        """Pack a segment, if there are files enough or some have waited for long."""
        if self._queue:
            self._pack(self._take(self._runtime.monotonic()))

    def finish(self, deadline: float) -> None:
        """Pack all that waits, until `deadline`."""
        while self._queue and self._runtime.monotonic() < deadline:
            if not self._pack(self._take(self._runtime.monotonic() + LINGER_S)):
                return

    def pack_these(self, files: Sequence[Small]) -> None:
        """Make these one segment now, but for those that were changed; for who has looked for them.

        They fit into a block. Raises: StoreError, OSError.
        """
        self._pack_now(files)

    def _take(self, now: float) -> list[Small]:
        """Files that fill a block, or the last ones that nobody will join; none: not yet."""
        with self._cond:
            taken: list[Small] = []
            room = self._blocks.block_bytes
            full = False
            for ino, each in self._queue.items():
                full = each.piece.length > room or len(taken) == MEMBERS_MAX
                if full or each.since > now - QUIET_S:
                    break
                taken.append(Small(ino, each.piece))
                room -= each.piece.length
            self._goes_on = full
            if not full and taken and self._queue[taken[0].ino].since > now - LINGER_S:
                return []
            for small in taken:
                del self._queue[small.ino]
        return taken if len(taken) >= MEMBERS_MIN else []

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
                self.again(files)
                with self._cond:
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
            return len(found) < MEMBERS_MIN or self._store(found, block)
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
            for block, begin, end, _ in block_ranges(
                piece, piece.off, piece.length, self._blocks.block_bytes
            ):
                into[at : at + end - begin] = self._blocks.read(
                    piece.id, piece.size, block, begin, end
                )
                at += end - begin
        except (ObjectMissing, ObjectDamaged) as error:
            self.on_unreadable(file.ino, error)
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


def _pass_over(ino: Ino, error: Exception) -> None:
    """Who reads the file will say so."""
    log.debug("inode %d is not packed: %s", ino, error)

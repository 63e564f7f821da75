"""An object store before an object store: objects are acknowledged when a local disk has them.

`put` writes to a segment of the journal and returns; threads upload what is there, the oldest
first, and repeat it until the store takes it. Reads of what is not uploaded come from the segment.
Where the disk can't take an object (full, failing, over its size for too long) it is put into the
store itself, as without write-back.

Small objects are uploaded many at a time, large ones as few as `streams` says: what is in flight is
bounded in bytes. With a `Coalescer` small ones wait for each other, and it stores many as one
object: then they stay on the disk until the publisher calls `release`.

Threading: any method from any thread; the lock, which is that of `StagedUploads`, is not held while
disk or store work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from fsdata.objects.contract import Buffer, ObjectInfo, ObjectStore, Range, fill
from fsdata.staging.coalesce import Coalescer
from fsdata.staging.data_segments import SPARE_BYTES_MAX, DataSegments, SegmentSpot
from fsdata.staging.uploads import StagedUploads
from fsmeta.errors import ObjectDamaged, Unavailable
from fsmeta.runtime import Runtime

STAGING_BYTES: Final = 10 << 30  # the default of `--staging-size`
STAGING_BYTES_MIN: Final = 64 << 20  # an object of the largest size, or a few that fly
ROOM_S_MAX: Final = 120.0  # for room on the staging disk, as long as a writer waits for memory
_READ_PAUSES_S: Final = (0.01, 0.1, 1.0, 2.0)  # of a reader, where the disk fails for a moment


def do_nothing(_key: str, _error: OSError) -> None:
    """Nothing is refused."""


class StagedObjects:
    """Objects in `inner`, or on the way there."""

    def __init__(
        self,
        runtime: Runtime,
        inner: ObjectStore,
        data: DataSegments,
        limit: int = STAGING_BYTES,
        streams: int = 4,
        stored: Callable[[], object] = bool,
        unreadable: Callable[[str, OSError], object] = do_nothing,
    ) -> None:
        """`stored` is told when something has left the disk; `unreadable` of each object that the
        disk has, and fails to read: it may do so later, or never."""
        self._runtime = runtime
        self._inner = inner
        self._data = data
        self._limit = limit
        data.spare_bytes = min(SPARE_BYTES_MAX, limit // 4)
        self._uploads = StagedUploads(runtime, inner, data, streams, stored, unreadable)
        self._cond = self._uploads.cond
        self._staged = self._uploads.staged  # guarded by _cond, as _lost and _jobs
        self._lost = self._uploads.lost
        self._jobs = self._uploads.jobs
        self._disk = self._uploads.disk
        self._stored = stored
        self._direct: set[str] = set()  # not guarded: each key is of one thread
        self.through = 0  # objects that were put into the store at once
        self.sync_waits = False  # sync means: in the store

    def pack_with(self, coalescer: Coalescer, room: int) -> None:
        """Small objects go together, at most `room` bytes at a time; from `begin_packing` on."""
        self._uploads.pack_with(coalescer, room)

    def begin_packing(self) -> None:
        """The coalescer knows of everything that was taken up."""
        with self._cond:
            self._jobs.begin()

    def flush_now(self) -> None:
        """A caller waits for the store: small objects do not wait for each other."""
        if self._jobs.small:
            with self._cond:
                self._jobs.flush_now()

    # --- what the publisher asks -----------------------------------------------------------------

    def spot(self, key: str) -> SegmentSpot | None:
        """Where an object is on the disk; None where the store has it."""
        staged = self._staged.get(key)
        return None if staged is None else staged.spot

    def is_stored(self, key: str) -> bool:
        """Whether the store has an object that was put, perhaps packed, or never will."""
        staged = self._staged.get(key)
        return staged is None or staged.packed

    def release(self, keys: Iterable[str]) -> None:
        """These were packed, and are not read by these names any more."""
        with self._cond:
            found = [self._staged.pop(key) for key in keys if key in self._staged]
            self._cond.notify_all()
        for each in found:
            self._data.release(each.spot.segment)

    def unpack(self, key: str) -> None:
        """What it was packed into is not there any more: it is to be stored once more."""
        with self._cond:
            staged = self._staged.get(key)
            if staged is not None:
                staged.packed = False
                self._jobs.add(key)

    def is_lost(self, key: str) -> bool:
        """Whether an object was damaged on the disk, and is in the store neither."""
        return key in self._lost

    def forget_lost(self, keys: Iterable[str]) -> None:
        """These are not needed any more."""
        with self._cond:
            self._lost.difference_update(keys)

    def left(self) -> tuple[int, int]:
        """Objects that are not uploaded, and their bytes."""
        with self._cond:
            sizes = [each.spot.length for each in self._staged.values() if not each.packed]
            return len(sizes), sum(sizes)

    def used(self) -> int:
        """Bytes of the disk that segments and log take."""
        return self._data.used()

    def take_up(self, key: str, spot: SegmentSpot) -> bool:
        """Go on with an earlier process's object; False where it is gone.

        Raises: Unavailable; OSError where the disk fails to read it.
        """
        if key in self._staged:
            return True
        try:
            self._data.read(spot)
        except ObjectDamaged:
            return self._inner.head(key) is not None
        with self._cond:
            self._data.adopt(spot)
            self._uploads.enter(key, spot)
        return True

    def await_empty(self, deadline: float) -> bool:
        """Wait until everything is uploaded; False where `deadline` passes first."""
        with self._cond:
            while self._staged:
                left = deadline - self._runtime.monotonic()
                if left <= 0:
                    return False
                self._cond.wait(left)
            return True

    # --- objects ---------------------------------------------------------------------------------

    def let_through(self, key: str) -> None:
        """The next `put` of this object is not acknowledged before the store has it.

        For what no entry of the journal will name: after a crash it would not be found.
        """
        self._direct.add(key)

    def put(self, key: str, pieces: Sequence[Buffer]) -> None:
        if key in self._direct:
            self._direct.discard(key)
            self._put_through(key, pieces, forced=0)
            return
        size = sum(map(len, pieces))
        if not self._await_room(size):
            self._put_through(key, pieces)
            return
        try:
            spot = self._data.put(pieces)
        except OSError as error:
            self._complain(error)
            self._put_through(key, pieces)
            return
        self._disk.works()
        with self._cond:
            old = self._staged.pop(key, None)
            if old is not None:  # the same bytes once more, after a failure above us
                old.dropped = False
                self._staged[key] = old
            else:
                self._uploads.enter(key, spot)
        if old is not None:
            self._data.release(spot.segment)

    def _complain(self, error: OSError) -> None:
        self._disk.failed(error, "writing through to the store")

    def _put_through(self, key: str, pieces: Sequence[Buffer], forced: int = 1) -> None:
        self._inner.put(key, pieces)
        self._inner.sync((key,))
        self.through += forced

    def _await_room(self, size: int) -> bool:
        """Wait for room on the disk; False where there will not be any. Raises: Unavailable."""
        deadline = self._runtime.monotonic() + ROOM_S_MAX
        while self._data.used() + size > self._limit:
            self._uploads.coalescer.make_room()
            self._data.clear()
            with self._cond:
                if not self._staged:
                    return self._data.used() + size <= self._limit
                left = deadline - self._runtime.monotonic()
                if left <= 0 or self._jobs.closed:
                    raise Unavailable("the staging disk is full: the object store is too slow")
                self._cond.wait(min(left, 1.0))  # segments go a moment after their objects
        return True

    def _pinned(self, key: str) -> SegmentSpot | None:
        """Where an object is on the disk, for a read that ends with `release`."""
        with self._cond:
            staged = self._staged.get(key)
            if staged is None:
                return None
            self._data.pin(staged.spot)
            return staged.spot

    def _read(self, key: str, begin: int, end: int | None) -> bytes | None:
        """Bytes of an object that is on the disk; None where the store is to be asked."""
        for pause in (*_READ_PAUSES_S, None):
            spot = self._pinned(key)
            if spot is None:
                return None
            try:
                return self._data.read_range(spot, begin, spot.length if end is None else end)
            except FileNotFoundError:
                return None  # an earlier process has uploaded all that was in the file
            except OSError as error:
                self._complain(error)
            finally:
                self._data.release(spot.segment)
            if pause is not None:
                self._runtime.sleep(pause)
        return None

    def get(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
        data = self._read(key, begin, end) if self._staged else None
        return self._inner.get(key, begin, end) if data is None else data

    def get_ranges(self, key: str, ranges: Sequence[Range]) -> list[bytes]:
        if key not in self._staged:
            return self._inner.get_ranges(key, ranges)
        return [self.get(key, begin, end) for begin, end in ranges]

    def get_into(self, key: str, pieces: Sequence[memoryview]) -> int:
        data = self._read(key, 0, sum(map(len, pieces))) if self._staged else None
        return self._inner.get_into(key, pieces) if data is None else fill(pieces, data)

    def delete(self, *keys: str) -> None:
        stored = [key for key in keys if self._unstage(key)]
        if stored:
            self._inner.delete(*stored)

    def _unstage(self, key: str) -> bool:
        """Let go of a staged object; whether there may be one in the store."""
        with self._cond:
            staged = self._staged.get(key)
            if staged is not None:
                staged.dropped = True
                if staged.busy:
                    return False  # the thread that uploads it removes it
                self._jobs.discard(key)
                del self._staged[key]
        if staged is not None:
            self._data.release(staged.spot.segment)
            self._stored()
        return True

    def head(self, key: str) -> ObjectInfo | None:
        if (spot := self.spot(key)) is None:
            return self._inner.head(key)
        return ObjectInfo(key, spot.length, self._runtime.now_ns())

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        """Of the store: what is on the way belongs to nothing yet."""
        return self._inner.list(prefix, after)

    def sync(self, keys: Iterable[str]) -> None:
        if not self.sync_waits and self._sync_disk():
            return  # what is not on the disk any more was synced before it left
        wanted = list(keys)
        self.flush_now()
        with self._cond:
            while not all(map(self.is_stored, wanted)):
                if self._jobs.closed:
                    raise Unavailable("the client leaves before the store has it")
                self._cond.wait()
        self._inner.sync(wanted)

    def _sync_disk(self) -> bool:
        try:
            self._data.sync()
        except OSError as error:
            self._complain(error)
            return False
        return True

    def end_uploads(self) -> None:
        """What is not uploaded stays on the disk: no upload begins, none is offered again."""
        with self._cond:
            self._jobs.end()
            self._cond.notify_all()

    def close(self) -> None:
        """End the threads, too."""
        self.end_uploads()  # so none is added
        self._jobs.join()
        self._inner.close()


_CONFORMS: Callable[..., ObjectStore] = StagedObjects

"""An object store before an object store: objects are acknowledged when a local disk has them.

`put` writes to a segment of the journal and returns; threads upload what is there, the oldest
first, and repeat it until the store takes it. Reads of what is not uploaded come from the segment.
Where the disk can't take an object (full, failing, over its size for too long) it is put into the
store itself, as without write-back.

Small objects are uploaded many at a time, large ones as few as `streams` says: what is in flight is
bounded in bytes. With a `Coalescer` small ones wait for each other, and it stores many as one
object: then they stay on the disk until whoever published them says `release`.

Threading: any method from any thread; the lock, which is that of `_cond` and of `_jobs`, is not
held while disk or store work.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Final

from fsdata.objects.contract import Buffer, ObjectInfo, ObjectStore, Range, fill
from fsdata.staging.coalesce import Coalescer, NoCoalescing, SmallObjects
from fsdata.staging.data_segments import SPARE_BYTES_MAX, DataSegments, Spot, Staged
from fsdata.staging.upload_scheduler import UploadScheduler
from fsmeta.errors import ObjectDamaged, StoreError, Unavailable
from fsmeta.runtime import Runtime
from fsmeta.types import BLOCK_BYTES_MAX

log = logging.getLogger(__name__)

STAGING_BYTES: Final = 10 << 30  # the default of `--staging-size`
STAGING_BYTES_MIN: Final = 64 << 20  # an object of the largest size, or a few that fly
ROOM_S_MAX: Final = 120.0  # for room on the staging disk, as long as a writer waits for memory
_READ_PAUSES_S: Final = (0.01, 0.1, 1.0, 2.0)  # of a reader, where the disk fails for a moment
UNREAD_S_MAX: Final = 30.0  # of a disk that fails to read an object: then `on_unreadable` is told


class StagedObjects:
    """Objects in `inner`, or on the way there."""

    def __init__(
        self,
        runtime: Runtime,
        inner: ObjectStore,
        data: DataSegments,
        limit: int = STAGING_BYTES,
        streams: int = 4,
    ) -> None:
        self._runtime = runtime
        self._inner = inner
        self._data = data
        self._limit = limit
        data.spare_bytes = min(SPARE_BYTES_MAX, limit // 4)
        lock = runtime.lock()
        self._cond = runtime.condition(lock)
        self._staged: OrderedDict[str, Staged] = OrderedDict()  # guarded by _cond, as all below
        flight_max = streams * BLOCK_BYTES_MAX
        self._jobs = UploadScheduler(runtime, lock, self._staged, flight_max, self._work)
        self._company: Coalescer = NoCoalescing()
        self._direct: set[str] = set()  # not guarded: each key is of one thread
        self._lost: set[str] = set()  # damaged on the disk before they were uploaded
        self._away = False  # the store does not take something: said once
        self._disk_failed = False
        self.through = 0  # objects that were put into the store at once
        self.on_stored: Callable[[], object] = bool
        # told of an object that the disk has, and fails to read: it may do so later, or never
        self.on_unreadable: Callable[[str, OSError], object] = _nothing
        self.sync_waits = False  # sync means: in the store

    def pack_with(self, company: Coalescer, room: int) -> None:
        """Small objects go together, at most `room` bytes at a time; from `begin_packing` on."""
        self._company = company
        self._jobs.small = SmallObjects(self._runtime.monotonic, company.weigh, room, wait=True)

    def begin_packing(self) -> None:
        """Who packs knows of everything that was taken up."""
        with self._cond:
            self._jobs.begin()

    def hurry(self) -> None:
        """Somebody waits for the store: what is here does not wait for company."""
        if self._jobs.small:
            with self._cond:
                self._jobs.hurry()

    # --- what the publisher asks -----------------------------------------------------------------

    def spot(self, key: str) -> Spot | None:
        """Where an object is on the disk; None where the store has it."""
        staged = self._staged.get(key)
        return None if staged is None else staged.spot

    def is_stored(self, key: str) -> bool:
        """Whether the store has an object that was put, perhaps packed, or never will."""
        staged = self._staged.get(key)
        return staged is None or staged.packed

    def release(self, keys: Iterable[str]) -> None:
        """These were packed, and nobody reads them by these names any more."""
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
        """Nobody needs these any more."""
        with self._cond:
            self._lost.difference_update(keys)

    def left(self) -> tuple[int, int]:
        """Objects that are not uploaded, and their bytes."""
        with self._cond:
            sizes = [each.spot.length for each in self._staged.values() if not each.packed]
            return len(sizes), sum(sizes)

    def used(self) -> int:
        """Bytes of the disk that segments take."""
        return self._data.used()

    def take_up(self, key: str, spot: Spot) -> bool:
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
            self._enter(key, spot)
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

        For what no entry of the journal will name: after a crash nobody would know of it.
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
        self._disk_failed = False
        with self._cond:
            old = self._staged.pop(key, None)
            if old is not None:  # the same bytes once more, after a failure above us
                old.dropped = False
                self._staged[key] = old
            else:
                self._enter(key, spot)
        if old is not None:
            self._data.release(spot.segment)

    def _complain(self, error: OSError) -> None:
        if not self._disk_failed:
            self._disk_failed = True
            log.warning("staging disk: %s; writing through to the store", error)

    def _enter(self, key: str, spot: Spot) -> None:
        """An object is on the disk. The caller holds the lock."""
        self._staged[key] = Staged(spot)
        self._jobs.add(key)

    def _put_through(self, key: str, pieces: Sequence[Buffer], forced: int = 1) -> None:
        self._inner.put(key, pieces)
        self._inner.sync((key,))
        self.through += forced

    def _await_room(self, size: int) -> bool:
        """Wait for room on the disk; False where there will not be any. Raises: Unavailable."""
        deadline = self._runtime.monotonic() + ROOM_S_MAX
        while self._data.used() + size > self._limit:
            self._company.make_room()
            self._data.clear()
            with self._cond:
                if not self._staged:
                    return self._data.used() + size <= self._limit
                left = deadline - self._runtime.monotonic()
                if left <= 0 or self._jobs.closed:
                    raise Unavailable("the staging disk is full: the object store is too slow")
                self._cond.wait(min(left, 1.0))  # segments go a moment after their objects
        return True

    def _pinned(self, key: str) -> Spot | None:
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
                    return False  # whoever uploads it removes it
                self._jobs.discard(key)
                del self._staged[key]
        if staged is not None:
            self._data.release(staged.spot.segment)
            self.on_stored()
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
        self.hurry()
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

    # --- uploading -------------------------------------------------------------------------------

    def _work(self) -> None:
        while (job := self._jobs.next()) is not None:
            if isinstance(job, str):
                self._upload(job)
            else:
                self._pack(job)

    def _upload(self, key: str) -> None:
        staged = self._staged[key]
        error: Exception | None = None
        lost = unread = False
        try:
            data = self._data.read(staged.spot)
        except ObjectDamaged as damage:
            lost, error = self._look_for(key, damage)
        except OSError as failure:
            unread, error = True, failure
        else:
            error = self._store(key, data)
        again = self._settle(key, staged, error, lost)
        if not again:
            self._data.release(staged.spot.segment)
            if staged.dropped:
                self._remove(key)
            self.on_stored()
        if unread and isinstance(error, OSError):
            self._unread(key, staged, error)
        else:
            self._went(error)

    def _store(self, key: str, data: bytes) -> Exception | None:
        """Have the store take an object; why it did not."""
        try:
            self._inner.put(key, (data,))
            self._inner.sync((key,))  # the segment that could be read after a loss of power goes
        except (OSError, StoreError) as error:
            return error
        return None

    def _unread(self, key: str, staged: Staged, error: OSError) -> None:
        """The disk failed to read an object, which is offered again: that may pass."""
        now = self._runtime.monotonic()
        staged.unread_since = staged.unread_since or now
        if now - staged.unread_since >= UNREAD_S_MAX:
            self.on_unreadable(key, error)
        elif not self._disk_failed:
            self._disk_failed = True
            log.warning("staging disk: %s; uploads of what is on it wait", error)

    def _settle(self, key: str, staged: Staged, error: Exception | None, lost: bool) -> bool:
        """An upload has ended; whether the object is to be offered again."""
        with self._cond:
            again = error is not None and not staged.dropped
            self._jobs.landed(key, again, error is None)
            if not again:
                if lost and not staged.dropped:
                    self._lost.add(key)  # first: `is_stored` and `is_lost` take no lock
                del self._staged[key]
            self._cond.notify_all()
            return again

    def _pack(self, group: dict[str, float]) -> None:
        """Store small objects as one; those that are not in it wait once more, or go alone."""
        packed: Collection[str] = ()
        error: Exception | None = None
        try:
            packed = self._company.pack(list(group))
        except (OSError, StoreError) as failure:
            error = failure
        for spot in self._settle_group(group, packed, error):
            self._data.release(spot.segment)
        self.on_stored()
        self._went(error)

    def _settle_group(
        self, group: dict[str, float], packed: Collection[str], error: Exception | None
    ) -> Iterable[Spot]:
        """As `_settle`, of small objects together; where those were that nobody wants any more."""
        gone = []
        with self._cond:
            ended = [self._staged[key] for key in group]
            for key, staged in zip(reversed(group), reversed(ended), strict=True):
                if staged.dropped:
                    gone.append(self._staged.pop(key).spot)
                elif key in packed:
                    staged.packed = True
                else:
                    self._jobs.wait_again(key, group[key] if error is None else None)
            self._jobs.landed_together(ended, error is None)
            self._cond.notify_all()
        return gone

    def _went(self, error: Exception | None) -> None:
        """Whether the store takes objects."""
        with self._cond:
            was_away = self._away
            self._away = error is not None or (was_away and self._jobs.has_refused)
            is_new = self._away and not was_away and not self._jobs.closed
        if is_new:
            log.warning("uploads wait for the object store: %s", error)
        elif was_away and not self._away:
            log.info("the object store takes uploads again")

    def _look_for(self, key: str, damage: ObjectDamaged) -> tuple[bool, Exception | None]:
        """Whether a damaged object is lost, because no earlier process has uploaded it."""
        try:
            lost = self._inner.head(key) is None
        except (OSError, StoreError) as error:
            return False, error
        if lost:
            log.error("object %s is lost: %s", key, damage)
        return lost, None

    def _remove(self, key: str) -> None:
        try:
            self._inner.delete(key)
        except (OSError, StoreError) as error:
            log.info("object %s is left over: %s", key, error)


def _nothing(_key: str, _error: OSError) -> None:
    """Nobody refuses anything."""


_CONFORMS: Callable[..., ObjectStore] = StagedObjects

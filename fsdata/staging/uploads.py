"""`StagedUploads`: the objects that are on the staging disk, and how they get into the store.

Threads take what `UploadScheduler` says is next: an object alone, or small ones as one. An object
leaves the disk when the store has it, when it is deleted, or when it is found damaged and so is
lost. What the store refuses, or the disk fails to read, is offered again.

Owned by `StagedObjects`, which shares the table and its lock. Threading: the lock, which is that of
`cond` and of `jobs`, is not held while disk or store work.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from typing import Final

from fsdata.objects.contract import ObjectStore
from fsdata.staging.coalesce import Coalescer, NoCoalescing, SmallObjects
from fsdata.staging.data_segments import DataSegments, SegmentSpot, Staged
from fsdata.staging.upload_scheduler import UploadScheduler
from fsmeta.errors import ObjectDamaged, StoreError
from fsmeta.runtime import Runtime
from fsmeta.types import BLOCK_BYTES_MAX

log = logging.getLogger(__name__)

UNREAD_S_MAX: Final = 30.0  # of a disk that fails to read an object: then `unreadable` is told


class DiskWarning:
    """A staging disk that fails: a warning says so once, until the disk works again."""

    def __init__(self) -> None:
        self._has_failed = False

    def failed(self, error: OSError, effect: str) -> None:
        """An access to the disk ended with `error`; `effect` is what that means."""
        if not self._has_failed:
            self._has_failed = True
            log.warning("staging disk: %s; %s", error, effect)

    def works(self) -> None:
        """The disk has taken an object."""
        self._has_failed = False


class StagedUploads:
    """Objects on the disk, on their way to `inner`."""

    def __init__(
        self,
        runtime: Runtime,
        inner: ObjectStore,
        data: DataSegments,
        streams: int,
        stored: Callable[[], object],
        unreadable: Callable[[str, OSError], object],
    ) -> None:
        """`stored` and `unreadable`: as `StagedObjects` has them."""
        self._runtime = runtime
        self._inner = inner
        self._data = data
        self._stored = stored
        self._unreadable = unreadable
        lock = runtime.lock()
        self.cond = runtime.condition(lock)
        self.staged: OrderedDict[str, Staged] = OrderedDict()  # guarded by cond, as all below
        self.lost: set[str] = set()  # damaged on the disk before they were uploaded
        flight_max = streams * BLOCK_BYTES_MAX
        self.jobs = UploadScheduler(runtime, lock, self.staged, flight_max, self._work)
        self.coalescer: Coalescer = NoCoalescing()
        self.disk = DiskWarning()
        self._away = False  # the store does not take something: said once

    def pack_with(self, coalescer: Coalescer, room: int) -> None:
        """Small objects go together, at most `room` bytes at a time, once packing has begun."""
        self.coalescer = coalescer
        clock = self._runtime.monotonic
        self.jobs.small = SmallObjects(clock, coalescer.size_of, room, wait=True)

    def enter(self, key: str, spot: SegmentSpot) -> None:
        """An object is on the disk. The caller holds the lock."""
        self.staged[key] = Staged(spot)
        self.jobs.add(key)

    def _work(self) -> None:
        while (job := self.jobs.next()) is not None:
            if isinstance(job, str):
                self._upload(job)
            else:
                self._pack(job)

    def _upload(self, key: str) -> None:
        staged = self.staged[key]
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
            self._stored()
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
            self._unreadable(key, error)
        else:
            self.disk.failed(error, "uploads of what is on it wait")

    def _settle(self, key: str, staged: Staged, error: Exception | None, lost: bool) -> bool:
        """An upload has ended; whether the object is to be offered again."""
        with self.cond:
            again = error is not None and not staged.dropped
            self.jobs.landed(key, again, error is None)
            if not again:
                if lost and not staged.dropped:
                    self.lost.add(key)  # first: `is_stored` and `is_lost` take no lock
                del self.staged[key]
            self.cond.notify_all()
            return again

    def _pack(self, group: dict[str, float]) -> None:
        """Store small objects as one; those that are not in it wait once more, or go alone."""
        packed: Collection[str] = ()
        error: Exception | None = None
        try:
            packed = self.coalescer.pack(list(group))
        except (OSError, StoreError) as failure:
            error = failure
        for spot in self._settle_group(group, packed, error):
            self._data.release(spot.segment)
        self._stored()
        self._went(error)

    def _settle_group(
        self, group: dict[str, float], packed: Collection[str], error: Exception | None
    ) -> Iterable[SegmentSpot]:
        """As `_settle`, of small objects together; the places of those that are not wanted."""
        gone = []
        with self.cond:
            ended = [self.staged[key] for key in group]
            for key, staged in zip(reversed(group), reversed(ended), strict=True):
                if staged.dropped:
                    gone.append(self.staged.pop(key).spot)
                elif key in packed:
                    staged.packed = True
                else:
                    self.jobs.wait_again(key, group[key] if error is None else None)
            self.jobs.landed_together(ended, error is None)
            self.cond.notify_all()
        return gone

    def _went(self, error: Exception | None) -> None:
        """Whether the store takes objects."""
        with self.cond:
            was_away = self._away
            self._away = error is not None or (was_away and self.jobs.has_refused)
            is_new = self._away and not was_away and not self.jobs.closed
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

"""Objects on their way to the store: segment files of a journal, written one after the other.

An object is at an offset of a segment and nothing in the segment says so: the writer remembers the
place, and the log has it for after a crash. A segment is removed when none of its objects is wanted
any more. Objects are uploaded oldest first, so room comes back in the same order.

Some segments are kept to be written over, as databases do with their logs: the kernel needs ten
times as long for bytes whose pages and blocks are new (docs/design/write-back-speed). What is left
in such a file is never taken for an object, as each is known by its place and CRC.

Threading: any method from any thread. One lock for the places, none while the disk works.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Sequence
from typing import Final, NamedTuple

from fsdata.objects.contract import Buffer
from fsdata.resources.crc import crc32c
from fsdata.staging.disk import StagingDisk
from fsmeta.errors import ObjectDamaged
from fsmeta.runtime import Runtime
from fsmeta.types import BLOCK_BYTES_MAX

log = logging.getLogger(__name__)

PREFIX: Final = "data-"
SEGMENT_BYTES: Final = 64 << 20  # what one object that is not uploaded keeps on the disk at most
SPARE_BYTES_MAX: Final = 1 << 30  # of segments to be written over


class SegmentSpot(NamedTuple):
    """Where an object is."""

    segment: int
    offset: int
    length: int
    crc: int


class _Segment:
    __slots__ = ("dirty", "doubtful", "failed", "length", "live", "room")

    def __init__(self, room: int = 0) -> None:
        self.length = 0
        self.room = room  # what its file has on the disk, from before
        self.live = 0  # objects in it, and reads of it
        self.dirty = False  # there is something that is not synced
        self.failed = False  # a write has failed: it is not known how much of its file there is
        self.doubtful = False  # a sync has failed: the next may succeed, and lost data stay lost

    @property
    def size(self) -> int:
        """Bytes that it takes of the disk."""
        return max(self.length, self.room)


class Staged:
    """An object that is on the disk, because the store does not have it yet or not by that name."""

    __slots__ = ("busy", "dropped", "packed", "refused", "spot", "unread_since", "weight")

    def __init__(self, spot: SegmentSpot) -> None:
        self.spot = spot
        self.weight = min(spot.length, BLOCK_BYTES_MAX)  # checksums of a full block not counted
        self.busy = False
        self.dropped = False  # deleted meanwhile: what is uploaded is to be removed again
        self.packed = False  # in the store, as a part of another object
        self.refused = False  # the store did not take it, at least once
        self.unread_since = 0.0  # when the disk failed to read it first; 0.0: it did not


class DataSegments:
    """The segments of one journal."""

    def __init__(self, runtime: Runtime, disk: StagingDisk) -> None:
        self._disk = disk
        self._lock = runtime.lock()
        self._syncing = runtime.lock()
        self._segments: dict[int, _Segment] = {}  # guarded by _lock, as below
        self._active = 0  # 0: none
        self._used = 0  # bytes of all segments, spare ones too
        self._spares: list[tuple[int, int]] = []  # segments to be written over, and their sizes
        self.spare_bytes = 0  # how much of that there may be
        self.log_bytes = 0  # of the log beside the segments; set by the log's writer
        found = [int(name[len(PREFIX) :], 16) for name in disk.names() if name.startswith(PREFIX)]
        self._found = found  # from before: it is not known yet what is wanted of them
        self._next = max(found, default=0) + 1

    def used(self) -> int:
        """Bytes of all segments, and of the log."""
        return self._used + self.log_bytes

    def _spare(self) -> int:
        return sum(size for _, size in self._spares)

    def _reach(self, segment: _Segment, length: int) -> None:
        """A segment is so long, at least. The caller holds the lock."""
        before = segment.size
        segment.length = max(segment.length, length)
        self._used += segment.size - before

    def put(self, pieces: Sequence[Buffer]) -> SegmentSpot:
        """Write an object. Raises: OSError; then there is nothing of it."""
        size = sum(map(len, pieces))
        with self._lock:
            segment = self._segments.get(self._active)
            if segment is None or segment.length + size > SEGMENT_BYTES:
                self._retire(self._active)
                segment = self._begin()
            number, offset = self._active, segment.length
            self._reach(segment, offset + size)
            segment.live += 1
        crc = 0
        for piece in pieces:
            crc = crc32c(piece, crc)
        try:
            self._disk.write(_name(number), offset, pieces)
        except BaseException:
            self._abandon(number)
            raise
        with self._lock:
            segment.dirty = True  # not before: a sync meanwhile does not cover this
        return SegmentSpot(number, offset, size, crc)

    def _begin(self) -> _Segment:
        """The next segment, in a new file or over an old one. The caller holds the lock."""
        self._active, self._next = self._next, self._next + 1
        segment = self._segments[self._active] = _Segment()
        if self._spares:
            old, size = self._spares.pop()  # the last one: the kernel has most of it in memory
            self._used -= size
            try:
                self._disk.rename(_name(old), _name(self._active))
                segment.room = size
                self._used += size
            except OSError as error:
                log.debug("%s can't be used again: %s", _name(old), error)
        return segment

    def _abandon(self, number: int) -> None:
        """A write failed: what is written next goes to another file, and none over this one."""
        with self._lock:
            self._segments[number].failed = True
            if self._active == number:
                self._active = 0
        self.release(number)

    def adopt(self, spot: SegmentSpot) -> None:
        """An object that an earlier process has put."""
        with self._lock:
            segment = self._segments.setdefault(spot.segment, _Segment())
            segment.live += 1
            self._reach(segment, spot.offset + spot.length)
            segment.dirty = spot.segment in self._found  # what that process synced is unknown

    def sweep(self) -> None:
        """All that is wanted is adopted: remove segments from before of which nothing is."""
        with self._lock:
            found, self._found = self._found, []
            for number in found:
                self._segments.setdefault(number, _Segment())
                self._retire(number)

    def read(self, spot: SegmentSpot) -> bytes:
        """A whole object, which is what was put.

        Raises: ObjectDamaged where it is lost; OSError where it may be read later.
        """
        try:
            data = self._disk.read(_name(spot.segment), spot.offset, spot.length)
        except FileNotFoundError as error:
            raise ObjectDamaged(f"{_name(spot.segment)} is not there") from error
        if len(data) != spot.length or crc32c(data) != spot.crc:
            raise ObjectDamaged(f"staged at {spot.offset} of {_name(spot.segment)}: other bytes")
        return data

    def read_range(self, spot: SegmentSpot, begin: int, end: int) -> bytes:
        """Bytes `begin..end` of an object. Raises: OSError."""
        end = min(end, spot.length)
        return self._disk.read(_name(spot.segment), spot.offset + begin, max(0, end - begin))

    def pin(self, spot: SegmentSpot) -> None:
        """Keep a segment while it is read."""
        with self._lock:
            self._segments[spot.segment].live += 1

    def release(self, number: int) -> None:
        """An object of a segment is not wanted any more, or not read."""
        with self._lock:
            self._segments[number].live -= 1
            if number != self._active:
                self._retire(number)

    def _retire(self, number: int) -> None:
        """Remove or keep a segment that is neither written nor wanted. The caller holds the lock.

        One from before stays until `sweep`: what was adopted may be uploaded before the rest of it
        is.
        """
        segment = self._segments.get(number)
        if segment is not None and not segment.live and number not in self._found:
            del self._segments[number]
            size = segment.size
            fits = SEGMENT_BYTES // 2 < size <= self.spare_bytes - self._spare()
            if fits and not segment.failed:
                self._spares.append((number, size))
            else:
                self._used -= size
                self._remove(number)

    def _remove(self, number: int) -> None:
        try:
            self._disk.remove(_name(number))
        except OSError as error:  # of a disk that went away; the next `sweep` there has it
            log.debug("%s is left over: %s", _name(number), error)

    def clear(self) -> None:
        """Remove spare segments, and the one that is written to if nothing in it is wanted."""
        with self._lock:
            number, self._active = self._active, 0
            self._retire(number)
            for spare, size in self._spares:
                self._used -= size
                self._remove(spare)
            self._spares.clear()

    def sync(self) -> None:
        """Make what was put survive a loss of power; one fsync does for many.

        Raises: OSError; then until all that was in a file that it failed for is released.
        """
        with self._syncing:
            with self._lock:
                dirty = [number for number, each in self._segments.items() if each.dirty]
                for number in dirty:
                    self._segments[number].dirty = False
                    self._segments[number].live += 1
            for number in dirty:
                try:
                    self._disk.sync(_name(number))
                except OSError as error:
                    log.debug("%s was not synced: %s", _name(number), error)
                    self._doubt(number)
                finally:
                    self.release(number)
            with self._lock:
                doubtful = [number for number, each in self._segments.items() if each.doubtful]
            if doubtful:
                raise OSError(errno.EIO, f"{_name(doubtful[0])} could not be synced")

    def _doubt(self, number: int) -> None:
        """A sync failed: nothing more goes to that file, and it is not written over."""
        with self._lock:
            segment = self._segments[number]
            segment.doubtful = segment.failed = True
            if self._active == number:
                self._active = 0


def _name(number: int) -> str:
    return f"{PREFIX}{number:08x}"

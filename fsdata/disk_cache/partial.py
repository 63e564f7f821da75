"""Parts of objects: what is here of a range, and one fetch of what is not.

`DiskCache` calls it. Of a range that is here in part, on the disk or waiting to be written, only
what is missing is fetched, once; a reader that wants the same meanwhile waits for that.

Threading: any method from any thread. `Fetches._lock` is a leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from fsdata.disk_cache.directory.format import Extents
from fsdata.disk_cache.write_queue import CopyTarget, QueuedBytes
from fsdata.objects.contract import Range
from fsmeta.errors import StoreError
from fsmeta.runtime import Event, Runtime

_Key: TypeAlias = tuple[str, tuple[Range, ...]]


class Near(NamedTuple):
    """What is here of a range: `front` from its begin on, `back` to its end."""

    front: list[bytes]
    back: list[bytes]
    begin: int  # what is missing
    end: int


def gather(place: CopyTarget, waiting: Sequence[QueuedBytes], begin: int, end: int) -> Near:
    """What is here of `begin..end` of an object: on its disk, or among those waiting for it."""
    extents = place.member.extents(place.name, place.shard)
    front: list[bytes] = []
    back: list[bytes] = []
    while begin < end and (piece := _from(place, waiting, extents, begin, end)):
        front.append(piece)
        begin += len(piece)
    while begin < end and (piece := _up_to(place, waiting, extents, begin, end)):
        back.insert(0, piece)
        end -= len(piece)
    return Near(front, back, begin, end)


def _from(
    place: CopyTarget, waiting: Sequence[QueuedBytes], extents: Extents, begin: int, end: int
) -> bytes | None:
    """Bytes from `begin` on."""
    for part in waiting:
        if part.begin <= begin < part.end:
            return part.data[begin - part.begin : end - part.begin]
    for first, last in extents:
        if first <= begin < last:
            return place.member.read(place.name, place.shard, begin, min(last, end))
    return None


def _up_to(
    place: CopyTarget, waiting: Sequence[QueuedBytes], extents: Extents, begin: int, end: int
) -> bytes | None:
    """Bytes that end at `end`."""
    for part in waiting:
        if part.begin < end <= part.end:
            return part.data[max(0, begin - part.begin) : end - part.begin]
    for first, last in extents:
        if first < end <= last:
            return place.member.read(place.name, place.shard, max(begin, first), end)
    return None


class _Flight:
    """A range being fetched, which other threads may wait for."""

    __slots__ = ("data", "error", "landed")

    def __init__(self, landed: Event) -> None:
        self.landed = landed
        self.data: list[bytes] | None = None
        self.error: OSError | StoreError | None = None


class Fetches:
    """Ranges that are being fetched."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._lock = runtime.lock()
        self._flights: dict[_Key, _Flight] = {}  # guarded by _lock

    def count(self) -> int:
        """How many are under way."""
        with self._lock:
            return len(self._flights)

    def fetch(
        self, name: str, ranges: tuple[Range, ...], ask: Callable[[], list[bytes]]
    ) -> list[bytes]:
        """What `ask` brings for ranges, or another thread's call of it. Raises: what it does."""
        wanted = (name, ranges)
        with self._lock:
            flight = self._flights.get(wanted)
            mine = flight is None
            if flight is None:
                flight = self._flights[wanted] = _Flight(self._runtime.event())
        if not mine:
            return _join(flight)
        try:
            flight.data = ask()
            return flight.data
        except (OSError, StoreError) as error:
            flight.error = error
            raise
        finally:
            with self._lock:
                del self._flights[wanted]
            flight.landed.set()


def _join(flight: _Flight) -> list[bytes]:
    """What another thread's fetch brings."""
    flight.landed.wait()
    if flight.error is not None:
        raise flight.error
    assert flight.data is not None, "the fetching thread ended without a word"
    return flight.data

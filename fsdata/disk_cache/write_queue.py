"""Copies that are to be written: bounded, part of the memory budget, and revocable.

`DiskCache` offers what it has fetched; threads of the disks write it. Where there is no place the
copy is not made and that is counted: readers never wait. Parts of objects are found here until they
are on the disk. Nothing here has been verified: a reader that finds wrong bytes calls `void`, which
removes them, from the disk as well.

Threading: any method from any thread. `_lock` is a leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

from fsdata.disk_cache.directory.disk import Disk
from fsdata.disk_cache.directory.fetch_claims import NO_CLAIM, FetchClaim
from fsdata.disk_cache.directory.member import CacheDir
from fsdata.objects.contract import Buffer
from fsdata.resources.memory_budget import MemoryBudget
from fsmeta.runtime import Event, Runtime

QUEUE_BYTES_MAX: Final = 64 << 20  # waiting to be written: sixteen blocks, what bursts bring
QUEUE_SHARE: Final = 4  # and no more than a quarter of the memory cap
WRITE_S_MAX: Final = 30.0  # a copy that takes longer is on a disk that hangs


class CopyTarget(NamedTuple):
    """Where copies of an object are."""

    member: CacheDir
    name: str
    shard: int


class QueuedBytes(NamedTuple):
    """Bytes of an object from `begin` on."""

    begin: int
    data: bytes

    @property
    def end(self) -> int:
        """Where in the object they end."""
        return self.begin + len(self.data)


class _Offer:
    """A copy to be written: a part, or a whole object."""

    __slots__ = ("added", "ended", "part", "size", "valid")

    def __init__(self, size: int, part: QueuedBytes | None, ended: Event | None = None) -> None:
        self.size = size
        self.part = part
        self.valid = True  # set to False under the queue's lock, read without
        self.ended = ended  # made once a thread waits; guarded by the queue's lock
        self.added = False  # known when it has ended

    def is_valid(self) -> bool:
        return self.valid


def _add_if_valid(
    place: CopyTarget, offer: _Offer, add: Callable[[Disk], bool], disk: Disk
) -> bool:
    """The job of a disk's writer."""
    added = offer.is_valid() and add(disk)
    if added and not offer.is_valid():  # it turned out wrong meanwhile
        disk.drop(place.name, place.shard)
        return False
    return added


def _add_whole(place: CopyTarget, pieces: Sequence[Buffer], disk: Disk) -> bool:
    return disk.add_whole(place.name, place.shard, pieces)


class QueueNumbers(NamedTuple):
    """Bytes waiting and written; copies not made."""

    queued: int
    written: int
    drops: int


class CopyQueue:
    """What has been offered and is not written."""

    def __init__(self, runtime: Runtime, budget: MemoryBudget) -> None:
        self._runtime = runtime
        self._budget = budget
        self._max = min(QUEUE_BYTES_MAX, budget.gauges().limit // QUEUE_SHARE)
        self._lock = runtime.lock()
        self._offers: dict[str, list[_Offer]] = {}  # guarded by _lock, as all below
        self._queued = self._written = self._drops = 0
        self._exempt = 0  # of what is queued: `write_whole`

    def numbers(self) -> QueueNumbers:
        """How it goes."""
        with self._lock:
            return QueueNumbers(self._queued, self._written, self._drops)

    def offer_whole(
        self,
        place: CopyTarget,
        pieces: Sequence[Buffer],
        claim: FetchClaim = NO_CLAIM,
    ) -> None:
        """Have an object written, and `claim` given up when it is, or will not be.

        The pieces stay as they are while there are views of them.
        """
        offer = _Offer(sum(map(len, pieces)), None)
        add = partial(_add_whole, place, pieces)
        self._offer(place, offer, add, claim)

    def offer_part(self, place: CopyTarget, part: QueuedBytes) -> None:
        """Have a part of an object written."""
        offer = _Offer(len(part.data), part)
        self._offer(
            place,
            offer,
            lambda disk: disk.add_range(place.name, place.shard, part.begin, part.data),
            NO_CLAIM,
        )

    def _offer(
        self,
        place: CopyTarget,
        offer: _Offer,
        add: Callable[[Disk], bool],
        claim: FetchClaim,
    ) -> None:
        if not offer.size or not self._take_place(place, offer):
            claim.give_up()
            return

        def leave(added: bool) -> None:
            self._budget.uncharge(offer.size)
            self._gone(place.name, offer, added)
            claim.give_up()

        place.member.submit(partial(_add_if_valid, place, offer, add), leave)

    def write_whole(self, place: CopyTarget, data: Buffer, then: Callable[[], None]) -> bool:
        """Have an object written, and wait for it; whether it is on the disk now.

        It takes no place: the caller has counted the memory, and gives it back in `then`.
        """
        ended = self._runtime.event()
        offer = _Offer(len(data), None, ended)
        with self._lock:
            self._queued += offer.size
            self._exempt += offer.size
            self._offers.setdefault(place.name, []).append(offer)

        def leave(added: bool) -> None:
            with self._lock:
                self._exempt -= offer.size
            then()
            self._gone(place.name, offer, added)

        add = partial(_add_whole, place, (data,))
        place.member.submit(partial(_add_if_valid, place, offer, add), leave)
        ended.wait(WRITE_S_MAX)
        return offer.added

    def _take_place(self, place: CopyTarget, offer: _Offer) -> bool:
        """Whether there is a place for one more."""
        with self._lock:
            queued = self._queued - self._exempt + offer.size
            if not place.member.health.writable() or queued > self._max:
                self._drops += 1
                return False
            self._queued += offer.size
            self._offers.setdefault(place.name, []).append(offer)
        if not self._budget.keep(offer.size):
            self._gone(place.name, offer, added=False)
            return False
        return True

    def _gone(self, name: str, offer: _Offer, added: bool) -> None:
        with self._lock:
            self._queued -= offer.size
            offer.added = added
            if added:
                self._written += offer.size
            else:
                self._drops += 1
            left = [each for each in self._offers.get(name, ()) if each is not offer]
            if left:
                self._offers[name] = left
            else:
                self._offers.pop(name, None)
        if offer.ended is not None:
            offer.ended.set()

    def void(self, name: str) -> bool:
        """What waits of an object is not to be written; whether anything does."""
        with self._lock:
            return bool(self._void(name))

    def _void(self, name: str) -> list[_Offer]:
        """The caller holds the lock."""
        offers = self._offers.pop(name, [])
        for offer in offers:
            offer.valid = False
        return offers

    def quell(self, name: str) -> None:
        """As `void`, and no thread writes any of it when this returns.

        Else a copy that is made after this could be taken for the one that is not wanted.
        """
        with self._lock:
            offers = self._void(name)
            for offer in offers:
                offer.ended = offer.ended or self._runtime.event()
        for offer in offers:
            assert offer.ended is not None, "just made"
            offer.ended.wait(WRITE_S_MAX)

    def parts(self, name: str) -> list[QueuedBytes]:
        """The parts of an object that wait."""
        with self._lock:
            return [each.part for each in self._offers.get(name, ()) if each.part is not None]

"""The disk cache: an `ObjectStore` in front of an `ObjectStore`, with copies on local disks.

`BlockStore` reads through it, verifies every byte by the object's own checksums, and calls
`suspect` where they were wrong: the copy is dropped and the store itself is asked, until `settle`.
The disks' own threads make copies of objects that `cache_dirs.BLOCKS` names, which never change, as
they are fetched. Whatever happens to the disks is a miss for the reader.

Threading: any method from any thread. `_lock` is a leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from functools import partial
from typing import Final, NamedTuple, TypeVar

from fsdata.disk_cache.cache_dirs import CacheDirs, named
from fsdata.disk_cache.directory.disk import Disk
from fsdata.disk_cache.directory.format import RANGES_BASE
from fsdata.disk_cache.directory.member import AVERAGE_OF
from fsdata.disk_cache.partial import Fetches, Near, gather
from fsdata.disk_cache.write_queue import CopyQueue, CopyTarget, QueuedBytes
from fsdata.objects.contract import Buffer, ObjectInfo, ObjectStore, Range
from fsdata.resources.memory_budget import MemoryBudget
from fsmeta.runtime import Runtime

WRITERS: Final = 2  # threads of each disk: one makes the file while the other's is being written

T = TypeVar("T")


class Fill(IntEnum):
    """What became of a wish to have a copy."""

    THERE = 0  # it was there
    MADE = 1
    BUSY = 2  # no memory for it just now
    NO_ROOM = 3  # the disk is full, or read-only
    NO_DISK = 4  # none that is well


class Copy(NamedTuple):
    """A copy of an object, or of parts of it."""

    disk: int  # its number
    whole: bool
    bytes: int


class CachePolicy(NamedTuple):
    """What is kept."""

    writes: bool = False  # what this client uploads, too
    partial_only: bool = False  # no whole blocks of full size: only small objects and ranges


class StoreTimer:
    """How long the store takes these days."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.average_s = 0.0  # of a request; threads may miss each other's

    def run(self, ask: Callable[[], T]) -> T:
        """Ask the store."""
        begun = self._runtime.monotonic()
        answer = ask()
        took_s = self._runtime.monotonic() - begun
        self.average_s += (took_s - self.average_s) / (AVERAGE_OF if self.average_s else 1)
        return answer


class DiskCache:
    """Copies on disks, before the store `objects`."""

    def __init__(
        self,
        runtime: Runtime,
        objects: ObjectStore,
        disks: Sequence[Disk],
        budget: MemoryBudget,
        policy: CachePolicy | None = None,
        writers: int = WRITERS,
    ) -> None:
        self._runtime = runtime
        self._objects = objects
        self._budget = budget
        self._policy = policy or CachePolicy()
        self._timer = StoreTimer(runtime)
        self._fetches = Fetches(runtime)
        self._queue = CopyQueue(runtime, budget)
        self._lock = runtime.lock()
        self._hits = self._misses = self._hit_bytes = self._bad = 0  # guarded by _lock
        self._suspects: dict[str, tuple[int, bool]] = {}  # guarded by _lock: how often, and why
        dirs = CacheDirs(runtime, disks, writers, lambda: self._timer.average_s, self._suspects)
        self.members = dirs.members
        self._dirs = dirs
        self._place = dirs.place
        self.target = dirs.target

    def start(self) -> None:
        """Look after the disks."""
        for member in self.members:
            member.start()

    # --- the object store ------------------------------------------------------------------------

    def get(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
        place = self._place(key)
        if place is None:
            return self._objects.get(key, begin, end)
        member, name, shard = place
        data = member.read(name, shard, begin, end)
        if data is not None:
            self._count_hit(len(data))
            return data
        if end is not None:
            return self._completed(key, place, (self._near(place, begin, end),))[0]
        if begin:
            self._count_misses()
            return self._timer.run(partial(self._objects.get, key, begin))
        look = partial(member.read, name, shard, begin, end)
        return self._claimed(place, look, partial(self._objects.get, key), _alone)

    def get_ranges(self, key: str, ranges: Sequence[Range]) -> list[bytes]:
        place = self._place(key)
        if place is None:
            return self._objects.get_ranges(key, ranges)
        member, name, shard = place
        nears: list[Near] = []
        for begin, end in ranges:
            data = member.read(name, shard, begin, end)
            nears.append(self._near(place, begin, end) if data is None else Near([data], [], 0, 0))
        return self._completed(key, place, nears)

    def _near(self, place: CopyTarget, begin: int, end: int) -> Near:
        return gather(place, self._queue.parts(place.name), begin, end)

    def _completed(self, key: str, place: CopyTarget, nears: Sequence[Near]) -> list[bytes]:
        """Ranges of which something is here, with what is not: that is fetched at once."""
        missing = tuple((near.begin, near.end) for near in nears if near.begin < near.end)
        brought: list[bytes] = []
        if missing:
            self._count_misses(len(missing))
            ask = partial(self._ask, key, place, missing)
            brought = self._fetches.fetch(place.name, missing, ask)
        rest, out = iter(brought), []
        for near in nears:
            if near.begin < near.end:
                out.append(b"".join((*near.front, next(rest), *near.back)))
            else:
                out.append(b"".join((*near.front, *near.back)))
                self._count_hit(len(out[-1]))
        return out

    def _ask(self, key: str, place: CopyTarget, missing: Sequence[Range]) -> list[bytes]:
        """Ranges from the store, of which copies will be written."""
        if len(missing) == 1:
            brought = [self._timer.run(partial(self._objects.get, key, *missing[0]))]
        else:
            brought = self._timer.run(partial(self._objects.get_ranges, key, missing))
        for (begin, _), data in zip(missing, brought, strict=True):
            self._queue.offer_part(place, QueuedBytes(begin, data))
        return brought

    def get_into(self, key: str, pieces: Sequence[memoryview]) -> int:
        """As in the contract; the caller does not change what it got while it has views of it."""
        place = self._place(key)
        if place is None:
            return self._objects.get_into(key, pieces)
        look = partial(place.member.read_into, place.name, place.shard, pieces)
        got = look()
        if got is not None:
            self._count_hit(got)
            return got

        def ask() -> int:
            return self._objects.get_into(key, pieces)

        if not self._policy.partial_only:
            return self._claimed(place, look, ask, lambda got: _front(pieces, got))
        self._count_misses()
        return self._timer.run(ask)

    def _claimed(
        self,
        place: CopyTarget,
        look: Callable[[], T | None],
        ask: Callable[[], T],
        copied: Callable[[T], Sequence[Buffer]],
    ) -> T:
        """A whole object that is not here: by another process, or else from the store.

        `look` looks once more, and `copied` says what is written of what `ask` has brought.
        """
        found, claim = place.member.claim(place.name, place.shard, look)
        if found is not None:
            self._count_hit(sum(map(len, copied(found))))
            return found
        self._count_misses()
        try:
            found = self._timer.run(ask)
        except BaseException:
            claim.give_up()
            raise
        self._queue.offer_whole(place, copied(found), claim)
        return found

    def _count_hit(self, size: int) -> None:
        with self._lock:
            self._hits += 1
            self._hit_bytes += size

    def _count_misses(self, count: int = 1) -> None:
        with self._lock:
            self._misses += count

    def put(self, key: str, pieces: Sequence[Buffer]) -> None:
        self._objects.put(key, pieces)
        self.drop(key)  # an older copy is of bytes that were never part of a file
        place = self._place(key) if self._policy.writes else None
        if place is not None:
            self._queue.offer_whole(place, (b"".join(pieces),))  # the buffers are the caller's

    def delete(self, *keys: str) -> None:
        self._objects.delete(*keys)
        for key in keys:
            self.drop(key)

    def head(self, key: str) -> ObjectInfo | None:
        return self._objects.head(key)

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        return self._objects.list(prefix, after)

    def sync(self, keys: Iterable[str]) -> None:
        self._objects.sync(keys)

    def close(self) -> None:
        for member in self.members:
            member.close()
        self._objects.close()

    # --- what BlockStore says --------------------------------------------------------------------

    def drop(self, key: str) -> bool:
        """Forget the copy of an object; whether there was one on a disk."""
        place = self._place(key)
        if place is None:
            return False
        self._queue.void(place.name)
        return place.member.drop(place.name, place.shard)

    def suspect(self, key: str) -> None:
        """Bytes of an object were wrong: from now until `settle` they come from the store."""
        had = self.drop(key)
        with self._lock:
            count, before = self._suspects.get(key, (0, False))
            self._suspects[key] = count + 1, had or before

    def settle(self, key: str, right: bool) -> None:
        """The store had the object right, and then a copy that was there is to blame; or not."""
        with self._lock:
            count, had = self._suspects.pop(key)
            if count > 1:
                self._suspects[key] = count - 1, had
            blamed = right and had
            self._bad += blamed
        place = self._place(key) if blamed else None
        if place is not None:
            place.member.health.failed(f"wrong bytes of {key}")

    def keeps(self, key: str) -> bool:
        """Whether a range of an object that is fetched now will be found later."""
        place = self._place(key)
        return place is not None and place.member.is_keeping()

    def lacks(self, key: str, size: int) -> bool | None:
        """Whether a whole object that is fetched now finds room; None: it is here."""
        place = self._place(key)
        if place is None:
            return False
        if place.member.holding(place.name, place.shard).whole:
            return None
        return not self._policy.partial_only and place.member.has_room(size + RANGES_BASE)

    def read(self, key: str, begin: int, end: int) -> bytes | None:
        """Bytes of an object that are known to be on a disk, and in the kernel's memory."""
        place = self._place(key)
        data = None if place is None else place.member.read(*place[1:], begin, end, quick=True)
        if data is not None:
            self._count_hit(len(data))
        return data

    def is_near(self, key: str) -> bool:
        """Whether all of an object is on a disk, and in the kernel's memory."""
        place = self._place(key)
        return place is not None and place.member.is_near(place.name, place.shard)

    def has(self, key: str, at: int) -> bool:
        """Whether byte `at` of an object is on a disk."""
        place = self._place(key)
        if place is None:
            return False
        return bool(place.member.read(place.name, place.shard, at, at + 1))

    # --- warming ---------------------------------------------------------------------------------

    def copy_of(self, key: str) -> Copy | None:
        """Where an object would be read from."""
        place = self._place(key)
        if place is None:
            return None
        held = place.member.holding(place.name, place.shard)
        return Copy(self.members.index(place.member), *held) if held.bytes else None

    def bring(self, key: str, size: int, check: Callable[[bytes], None]) -> Fill:
        """Have an object on its disk when this returns, whatever the policy.

        `size` is what it takes of the memory cap meanwhile, and `check` raises where it is wrong.
        Raises: what the store and `check` do.
        """
        place = self._place(key)
        if place is None:
            return Fill.NO_DISK
        member, name, shard = place
        if member.holding(name, shard, use=True).whole:
            return Fill.THERE
        if not member.make_room(size):
            return Fill.NO_ROOM if member.is_usable() else Fill.NO_DISK
        if not self._budget.hold(size):
            return Fill.BUSY
        try:
            data = self._timer.run(partial(self._objects.get, key))
            check(data)
        except BaseException:
            self._budget.unhold(size)
            raise
        if self._queue.write_whole(place, data, partial(self._budget.unhold, size)):
            return Fill.MADE
        return Fill.NO_ROOM if member.is_usable() else Fill.NO_DISK

    def evict(self, key: str) -> int:
        """Remove what there is of an object on any disk; how many bytes that were."""
        name, shard = named(key)
        self._queue.quell(name)
        freed = 0
        for member in self.members:
            held = member.holding(name, shard) if member.is_usable() else None
            if held is not None and held.bytes and member.drop(name, shard):
                freed += held.bytes
        return freed

    # --- numbers ---------------------------------------------------------------------------------

    def numbers(self) -> dict[str, float]:
        """What `.stats` says of it."""
        queue = self._queue.numbers()
        with self._lock:
            counts: dict[str, float] = {
                "disk_cache_hits_total": self._hits,
                "disk_cache_misses_total": self._misses,
                "disk_cache_hit_bytes_total": self._hit_bytes,
                "disk_cache_written_bytes_total": queue.written,
                "disk_cache_drops_total": queue.drops,
                "disk_cache_bad_total": self._bad,
                "disk_cache_queue_bytes": queue.queued,
            }
        return counts | self._dirs.numbers()


def _alone(data: bytes) -> Sequence[Buffer]:
    return (data,)


def _front(pieces: Sequence[memoryview], size: int) -> list[memoryview]:
    """Views of the first `size` bytes."""
    out: list[memoryview] = []
    for piece in pieces:
        out.append(piece[:size])
        size -= len(out[-1])
    return out


def _conforms(cache: DiskCache) -> ObjectStore:
    return cache

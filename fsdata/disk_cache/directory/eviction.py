"""Room on one cache disk: what is being added, and which files go for it.

`Disk` reserves room before it writes a file. A volume keeps to its capacity, and leaves a share of
the disk free; eviction looks through one shard after the other, which counts it exactly, too.

Threading: any method from any thread. `_lock` guards what is being added and is a leaf; the lock
of `usage` is held across I/O to this disk.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from fsdata.disk_cache.directory.file_io import CacheFiles, Listed
from fsdata.disk_cache.directory.location import CacheLocation
from fsdata.disk_cache.directory.open_copies import OpenCopies
from fsdata.disk_cache.directory.usage import SHARDS
from fsmeta.runtime import Runtime

OPEN_MAX: Final = 128  # descriptors kept for each disk: more than readers use at a time
SLACK_BYTES_MAX: Final = 64 << 20  # evicted beyond what is needed: one look for many additions
SLACK_SHARE: Final = 64  # and no more than 1/64 of the capacity
EVICT_SHARE: Final = 8  # a shard loses an eighth at a time, so that all shards lose their oldest
EVICTIONS: Final = ("none", "2-random", "lru")


class DiskLimits(NamedTuple):
    """What a volume may take of one disk."""

    capacity_bytes: int
    free_ratio: float = 0.1  # of the disk, space and inodes, that stays free
    eviction: str = "2-random"
    expire_s: float = 0.0  # files not used for so long go; 0: never
    open_files: int = OPEN_MAX  # kept open


class Eviction:
    """Reserves room for one volume on one disk, and removes what is in its way."""

    def __init__(
        self,
        runtime: Runtime,
        files: CacheFiles,
        place: CacheLocation,
        limits: DiskLimits,
        copies: OpenCopies,
    ) -> None:
        self.evicted = 0
        self.full = False  # the last addition found no room
        self._runtime = runtime
        self._files = files
        self._place = place
        self._limits = limits
        self._copies = copies
        self._cursor = -1  # the shard that was looked through last for room
        self._lock = runtime.lock()
        self._inflight = 0  # guarded by _lock: bytes being written that `usage` does not know yet

    def take_room(self, size: int) -> bool:
        """Reserve `size` bytes, evicting if need be. Raises: OSError."""
        self.full = not self._make_room(size)
        return not self.full

    def _make_room(self, size: int) -> bool:
        for _ in range(SHARDS + 1):
            want = self.missing(size)
            if want <= 0:
                with self._lock:
                    self._inflight += size
                return True
            if self._limits.eviction == "none" or size > self._limits.capacity_bytes:
                return False
            slack = min(SLACK_BYTES_MAX, self._limits.capacity_bytes // SLACK_SHARE)
            if not self._evict(want + slack):
                return False
        return False

    def give_room(self, size: int) -> None:
        """What `take_room` has reserved was used, or is not needed."""
        with self._lock:
            self._inflight -= size

    def missing(self, size: int) -> int:
        """How many bytes have to go before `size` fit."""
        with self._lock:
            inflight = self._inflight
        space = self._files.space(self._place.base)
        over = self._place.usage.seen + inflight + size - self._limits.capacity_bytes
        floor = int(space.total_bytes * self._limits.free_ratio)
        short = floor - (space.free_bytes - size)
        if space.free_inodes_share < self._limits.free_ratio:
            short = max(short, 1)
        return max(over, short)

    def _evict(self, want: int) -> bool:
        """Look through the next shard that has anything; False where none has."""
        with self._place.usage.locked() as table:
            shard = table.next_used(self._cursor)
        if shard is None:
            return False
        self._cursor = shard
        self.look_through(shard, want)
        return True

    def look_through(self, shard: int, want: int = 0) -> None:
        """Count a shard exactly, and remove about `want` bytes of it and what has expired.

        Raises: OSError.
        """
        folder = self._place.folder(shard)
        with self._place.usage.locked() as table:
            listed = self._files.list(folder)
            left = sum(each.used_bytes for each in listed)
            try:
                for each in self._victims(listed, min(want, max(1, left // EVICT_SHARE))):
                    self._place.remove(f"{folder}/{each.name}")
                    self._copies.forget(each.name)
                    left -= each.used_bytes
                    self.evicted += 1
            finally:
                table.set(shard, left)

    def _victims(self, listed: list[Listed], want: int) -> list[Listed]:
        """Which files of a shard go for `want` bytes."""
        victims: list[Listed] = []
        if self._limits.expire_s:
            old = self._runtime.now_ns() - int(self._limits.expire_s * 1e9)
            victims = [each for each in listed if each.mtime_ns < old]
            listed = [each for each in listed if each.mtime_ns >= old]
            want -= sum(each.used_bytes for each in victims)
        if want <= 0:
            return victims
        pick = _oldest if self._limits.eviction == "lru" else self._older_of_two
        listed = sorted(listed, key=_age)
        while listed and want > 0:
            victims.append(listed.pop(pick(len(listed))))
            want -= victims[-1].used_bytes
        return victims

    def _older_of_two(self, length: int) -> int:
        """Of two random files in order of age the older one."""
        return int(min(self._runtime.random(), self._runtime.random()) * length)


def _oldest(_: int) -> int:
    return 0


def _age(listed: Listed) -> int:
    return listed.mtime_ns

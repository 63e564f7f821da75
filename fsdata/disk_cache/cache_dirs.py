"""`CacheDirs`: the cache directories of a mount, and which of them keeps the copy of an object.

Each name has a shard, and each shard its own order of the disks: rendezvous hashing, weighted by
capacity. A copy is on the first disk in that order that is usable, so a disk that fails or comes
back moves only the copies that are on it.

Owned by `DiskCache`. Threading: any method from any thread; `order` is replaced whole.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from hashlib import blake2b
from math import log as ln
from typing import Final

from fsdata.disk_cache.directory import usage
from fsdata.disk_cache.directory.disk import Disk
from fsdata.disk_cache.directory.format import KEY_BYTES_MAX
from fsdata.disk_cache.directory.health import HealthState
from fsdata.disk_cache.directory.member import CacheDir
from fsdata.disk_cache.write_queue import CopyTarget
from fsdata.resources.crc import crc32c
from fsmeta.runtime import Runtime

BLOCKS: Final = "chunks/"  # keys that begin so are written once and never changed


class CacheDirs:
    """The directories, in an order of preference for each shard."""

    def __init__(
        self,
        runtime: Runtime,
        disks: Sequence[Disk],
        writers: int,
        store_s: Callable[[], float],
        suspects: Container[str],
    ) -> None:
        """`store_s`: how long a request to the store takes; `suspects`: keys without a copy."""
        self._suspects = suspects
        self.members = [
            CacheDir(runtime, disk, number, writers, store_s, self.arrange)
            for number, disk in enumerate(disks)
        ]
        self.order: list[tuple[CacheDir, ...]] = []
        self.arrange()

    def arrange(self) -> None:
        """Which disks each shard prefers; once more where the id of one is known."""
        shards = range(usage.SHARDS)
        self.order = [
            tuple(sorted(self.members, key=lambda each: _score(each.disk, shard)))
            for shard in shards
        ]

    def place(self, key: str) -> CopyTarget | None:
        """Where copies of an object are: on the first disk in its order that is usable."""
        if not key.startswith(BLOCKS) or key in self._suspects:
            return None
        name, shard = named(key)
        for member in self.order[shard]:
            if member.is_usable():
                return CopyTarget(member, name, shard)
        return None

    def target(self, name: str) -> CopyTarget | None:
        """Where a file of this name is or would be, that is no copy of an object."""
        name, shard = named(name)
        for member in self.order[shard]:
            if member.is_usable():
                return CopyTarget(member, name, shard)
        return None

    def numbers(self) -> dict[str, float]:
        """What `.stats` says of the disks."""
        members = self.members
        return {
            "disk_cache_bytes": sum(each.disk.usage.seen for each in members),
            "disk_cache_limit_bytes": sum(each.disk.limits.capacity_bytes for each in members),
            "disk_cache_evictions_total": sum(each.disk.eviction.evicted for each in members),
            "disk_cache_errors_total": sum(each.health.errors for each in members),
            "disk_cache_waits_total": sum(each.disk.place.claims.waits for each in members),
            "disk_cache_disks": len(members),
            "disk_cache_disks_aside": sum(
                each.health.state is HealthState.ASIDE for each in members
            ),
        }


def named(key: str) -> tuple[str, int]:
    """The name of an object's file, and its shard."""
    name = key.replace("/", "-")
    assert len(name) <= KEY_BYTES_MAX, key
    return name, crc32c(name.encode()) % usage.SHARDS


def _score(disk: Disk, shard: int) -> float:
    """How far down a shard's order of preference a disk is."""
    seed = disk.place.id or disk.place.root.encode()
    digest = blake2b(seed + shard.to_bytes(4, "little"), digest_size=8).digest()
    chance = (int.from_bytes(digest, "little") + 1) / (2**64 + 1)
    return -ln(chance) / disk.limits.capacity_bytes

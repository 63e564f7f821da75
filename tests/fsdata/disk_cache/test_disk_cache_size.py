"""C1: a cache of many copies: no memory for those that nobody reads, after a restart, too."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from crc32c import crc32c

from fsdata.disk_cache.directory import member
from fsdata.disk_cache.directory.eviction import DiskLimits
from fsdata.disk_cache.directory.format import pack_whole
from fsdata.disk_cache.directory.usage import SHARDS
from fsdata.format.object_keys import object_key
from fsmeta.runtime import SystemRuntime
from fsmeta.types import SliceId
from tests.fsdata.disk_world import CacheWorld, wait_for

COPIES = 200_000
SIZE = 100
PAGE = 4096  # what such a copy takes on the disk
READS = 10_000
GROWTH_BYTES_MAX = 8 << 20  # 40 a copy, where a table of them takes 170; mostly open files
VOLUME = "volume"


def key(number: int) -> str:
    return object_key(SliceId(number), 0, SIZE)


def data(number: int) -> bytes:
    return number.to_bytes(4, "big") * (SIZE // 4)


def fill(root: Path) -> None:
    """A cache as earlier mounts have left it, with nothing in `usage`."""
    for shard in range(SHARDS):
        (root / VOLUME / f"{shard:03x}").mkdir(parents=True)
    for number in range(COPIES):
        name = key(number).replace("/", "-").encode()
        path = f"{root}/{VOLUME}/{crc32c(name) % SHARDS:03x}/{name.decode()}"
        with open(path, "wb", buffering=0) as file:
            file.write(pack_whole(name, SIZE) + data(number))


def memory() -> int:
    """Bytes that this process has in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * PAGE


def live(root: str) -> dict[str, float]:
    """A mount's cache from its start on: count, read, and make room for more. Runs by itself."""
    member.FIRST_ROUND_S = 0.0  # type: ignore[misc]
    member.STEP_S = 0.0  # type: ignore[misc]
    member.LOOK_S = 0.1  # type: ignore[misc]
    capacity = COPIES * PAGE * 98 // 100
    world = CacheWorld([Path(root)], DiskLimits(capacity, free_ratio=0), VOLUME)
    runtime = SystemRuntime()
    before = memory()
    begun = runtime.monotonic()
    numbers = random.Random(1).sample(range(COPIES), READS)
    assert world.cache.get(key(numbers[0])) == data(numbers[0]), "it serves before it has counted"
    world.start()
    wait_for(lambda: counted(world) == COPIES * PAGE, 100)
    counting_s = runtime.monotonic() - begun
    for number in numbers:
        assert world.cache.get(key(number)) == data(number)
    assert world.fetched() == 0
    begun = runtime.monotonic()
    world.put(COPIES, 1 << 20)
    assert world.right(COPIES, 1 << 20)
    world.settle()
    fetched = world.fetched()
    assert world.right(COPIES, 1 << 20)
    assert world.fetched() == fetched, "there was room made for it"
    assert counted(world) <= capacity
    assert world.number("evictions_total") >= COPIES * 2 // 100
    evicting_s = runtime.monotonic() - begun
    grown = memory() - before
    world.close()
    return {"counting_s": counting_s, "evicting_s": evicting_s, "grown_bytes": grown}


def counted(world: CacheWorld) -> int:
    with world.disks[0].usage.locked() as table:
        return table.total


def test_c1_many_copies_need_no_memory(tmp_path: Path) -> None:
    """Counted after a restart, read, and evicted from; in a process of its own, to be weighed."""
    fill(tmp_path)
    script = (
        "import json, sys; from tests.fsdata.disk_cache.test_disk_cache_size import live; "
        "print(json.dumps(live(sys.argv[1])))"
    )
    words = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    print(found)
    assert found["grown_bytes"] <= GROWTH_BYTES_MAX, found

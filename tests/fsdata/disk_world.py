"""A block store over a disk cache on real directories, for the tests of the cache."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from fsdata.blocks.blocks import BlockStore, Promoter
from fsdata.blocks.layout import BlockLayout
from fsdata.disk_cache.cache import CachePolicy, DiskCache
from fsdata.disk_cache.directory.disk import Disk
from fsdata.disk_cache.directory.eviction import DiskLimits
from fsdata.disk_cache.directory.file_io import CacheFiles, OsFiles
from fsdata.disk_cache.directory.location import ID_FILE, ID_MAGIC
from fsdata.format.block_v1 import Codec
from fsdata.objects.mem import MemObjects
from fsdata.resources.block_cache import BlockCache
from fsdata.resources.memory_budget import BUFFER_BYTES_MIN, MemoryBudget
from fsmeta.errors import StoreError
from fsmeta.runtime import Runtime, SystemRuntime
from fsmeta.types import SliceId
from tests.fsdata.faults import FaultyObjects
from tests.fsdata.reads import read_block

RUNTIME = SystemRuntime()
MIB = 1 << 20
BLOCK = MIB
WAIT_S = 60.0


def pattern(size: int, seed: int = 1) -> bytes:
    """`size` bytes without structure, the same for each seed; that of `world` takes long."""
    return random.Random(seed).randbytes(size)


class CacheWorld:
    """One mount's data side: nothing of what it reads stays in memory."""

    def __init__(
        self,
        roots: Sequence[Path],
        limits: DiskLimits | None = None,
        volume: str = "volume",
        objects: FaultyObjects | None = None,
        files: CacheFiles | None = None,
        policy: CachePolicy | None = None,
        codec: Codec = Codec.NONE,
        runtime: Runtime = RUNTIME,
    ) -> None:
        self.objects = objects or FaultyObjects(RUNTIME, MemObjects(RUNTIME))
        self.runtime = runtime
        self.budget = MemoryBudget(runtime, BUFFER_BYTES_MIN)
        self.memory = BlockCache(runtime, self.budget, BLOCK)
        self.idle = self.budget.gauges().cached
        limits = limits or DiskLimits(64 * MIB, free_ratio=0)
        self.disks = [Disk(runtime, files or OsFiles(), str(r), volume, limits) for r in roots]
        for disk in self.disks:
            disk.place.prepare()
        self.cache = DiskCache(runtime, self.objects, self.disks, self.budget, policy)
        self.layout = BlockLayout(codec, BLOCK)
        self.blocks = self.block_store()

    def block_store(self, promoter: Promoter | None = None) -> BlockStore:
        """One more over the same caches."""
        return BlockStore(self.runtime, self.cache, self.memory, self.layout, self.cache, promoter)

    def start(self) -> CacheWorld:
        self.cache.start()
        return self

    def put(self, slice_id: int, size: int = BLOCK) -> bytes:
        """A slice of one block in the store; its bytes."""
        data = pattern(size, slice_id)
        self.blocks.put_block(SliceId(slice_id), 0, bytearray(data))
        return data

    def read(
        self, slice_id: int, size: int = BLOCK, begin: int = 0, end: int | None = None
    ) -> bytes:
        end = size if end is None else end
        view = read_block(self.blocks, SliceId(slice_id), size, 0, begin, end)
        data = bytes(view)
        view.release()
        self.memory.shrink(1 << 40)
        return data

    def right(self, slice_id: int, size: int = BLOCK) -> bool:
        return self.read(slice_id, size) == pattern(size, slice_id)

    def settle(self) -> None:
        """Wait until what was offered is written or dropped."""
        wait_for(lambda: self.number("queue_bytes") == 0)

    def number(self, name: str) -> float:
        return self.cache.numbers()[f"disk_cache_{name}"]

    def fetched(self) -> int:
        """Requests to the store so far."""
        return len(self.objects.gets)

    def state(self, number: int = 0) -> str:
        return self.cache.members[number].health.state.name

    def close(self) -> None:
        """End the threads; nothing may be left in memory or half-written."""
        self.cache.close()
        self.memory.shrink(1 << 40)
        assert self.number("queue_bytes") == 0
        assert self.budget.gauges() == (BUFFER_BYTES_MIN, 0, self.idle, 0)
        assert self.cache._fetches.count() == 0
        assert not self.cache._suspects
        assert not self.cache._queue._offers


def name_disks(*roots: Path) -> None:
    """Ids for new disks, the same each time: by chance all blocks may be on one of a few."""
    for number, root in enumerate(roots):
        root.mkdir(exist_ok=True)
        (root / ID_FILE).write_bytes(ID_MAGIC + b"%032x\n" % number)


def cache_files(root: Path) -> list[Path]:
    """Every cache file below a directory."""
    return sorted(path for path in root.glob("*/[0-9a-f][0-9a-f][0-9a-f]/*") if path.is_file())


def used_bytes(root: Path) -> int:
    """What the cache files take on the disk; some may go meanwhile."""
    used = 0
    for path in cache_files(root):
        with suppress(FileNotFoundError):
            used += path.stat().st_blocks * 512
    return used


def wait_for(condition: Callable[[], bool], seconds: float = WAIT_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.01)


def fails(read: Callable[[], object]) -> bool:
    try:
        read()
    except StoreError:
        return True
    return False

"""C6: blocks that are brought into caches, looked for there, and removed."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from fsdata.blocks.warmup import SHARE, Warming, WarmupRequest
from fsdata.disk_cache.cache import CachePolicy, Copy, Fill
from fsdata.disk_cache.directory.eviction import DiskLimits
from fsdata.disk_cache.directory.file_io import CacheFile, OsFiles
from fsdata.format.block_v1 import Codec
from fsdata.format.object_keys import object_key
from fsdata.objects.contract import Buffer
from fsmeta.errors import ObjectDamaged, ObjectMissing
from fsmeta.types import FRAME_BYTES, SliceId
from tests.fsdata.disk_world import BLOCK, MIB, RUNTIME, CacheWorld, cache_files, pattern, wait_for

SMALL = 100 << 10


class GatedFiles(OsFiles):
    """Files are not made until somebody opens the gate."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.made = 0

    def create(self, path: str, pieces: Sequence[Buffer]) -> CacheFile:
        self.made += 1
        if "/volume/tmp/" in path:
            assert self.gate.wait(120)
        return super().create(path, pieces)


def warming_of(world: CacheWorld) -> Warming:
    return Warming(RUNTIME, world.blocks, world.memory, world.cache, world.budget)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[CacheWorld]:
    made = CacheWorld([tmp_path / "a", tmp_path / "b"])
    yield made
    made.close()


def wanted(number: int, size: int = BLOCK) -> WarmupRequest:
    return WarmupRequest(SliceId(number), size, 0)


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("size", [BLOCK, SMALL, 1])
def test_a_block_is_on_its_disk_when_the_call_returns(
    tmp_path: Path, codec: Codec, size: int
) -> None:
    world = CacheWorld([tmp_path / "a", tmp_path / "b"], codec=codec)
    warming = warming_of(world)
    world.put(1, size)
    assert warming.where(wanted(1, size)) == (False, None)
    assert warming.to_disk(wanted(1, size)) is Fill.MADE
    copy = warming.where(wanted(1, size)).copy
    assert copy is not None
    assert copy.whole
    assert world.fetched() == 1
    assert warming.to_disk(wanted(1, size)) is Fill.THERE
    assert world.right(1, size)
    assert world.fetched() == 1
    world.close()


def test_a_policy_of_small_reads_does_not_keep_it_out(tmp_path: Path) -> None:
    world = CacheWorld([tmp_path / "a"], policy=CachePolicy(partial_only=True))
    world.put(1)
    assert warming_of(world).to_disk(wanted(1)) is Fill.MADE
    assert world.right(1)
    assert world.fetched() == 1
    world.close()


def test_what_is_there_in_parts_is_made_whole(world: CacheWorld) -> None:
    warming = warming_of(world)
    world.put(1)
    world.read(1, BLOCK, 300_000, 300_100)
    world.settle()
    copy = warming.where(wanted(1)).copy
    assert copy is not None
    assert not copy.whole
    assert FRAME_BYTES <= copy.bytes < 3 * FRAME_BYTES
    assert warming.to_disk(wanted(1)) is Fill.MADE
    whole = warming.where(wanted(1)).copy
    assert whole == Copy(copy.disk, True, len(world.objects.get(object_key(SliceId(1), 0, BLOCK))))


def test_looking_is_no_use_and_warming_is(world: CacheWorld) -> None:
    """What was warmed again is not the next to go; what was only looked at may be."""
    warming = warming_of(world)
    world.put(1)
    warming.to_disk(wanted(1))
    (path,) = (path for disk in world.disks for path in cache_files(Path(disk.place.root)))
    used = path.stat().st_mtime_ns
    warming.where(wanted(1))
    assert path.stat().st_mtime_ns == used
    assert warming.to_disk(wanted(1)) is Fill.THERE
    assert path.stat().st_mtime_ns > used


def test_damage_on_the_way_is_asked_for_again(world: CacheWorld) -> None:
    """And damage in the store is an error, counted, and nothing is kept."""
    warming = warming_of(world)
    world.put(1)
    key = object_key(SliceId(1), 0, BLOCK)
    right = world.objects.get(key)
    answers = [right[:-1] + bytes((right[-1] ^ 1,)), right]
    original = world.objects.get

    def get(name: str, begin: int = 0, end: int | None = None) -> bytes:
        return answers.pop(0) if answers else original(name, begin, end)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world.objects, "get", get)
        assert warming.to_disk(wanted(1)) is Fill.MADE
    world.put(2)
    key = object_key(SliceId(2), 0, BLOCK)
    data = bytearray(world.objects.get(key))
    data[5000] ^= 1
    world.objects.put(key, (bytes(data),))
    with pytest.raises(ObjectDamaged):
        warming.to_disk(wanted(2))
    with pytest.raises(ObjectMissing):
        warming.to_disk(wanted(3))
    assert warming.where(wanted(2)) == warming.where(wanted(3)) == (False, None)
    assert world.blocks.stats().damaged == 1
    assert world.blocks.stats().missing == 1
    numbers = warming.numbers()
    assert numbers["warmup_blocks_total"] == 1
    assert numbers["warmup_failures_total"] == 2
    assert numbers["warmup_now_bytes"] == 0


def test_no_room_is_known_before_anything_is_fetched(tmp_path: Path) -> None:
    world = CacheWorld([tmp_path / "a"], DiskLimits(4 * MIB, 0, "none"))
    warming = warming_of(world)
    for number in range(1, 9):
        world.put(number)
    fills = [warming.to_disk(wanted(number)) for number in range(1, 9)]
    assert fills == 3 * [Fill.MADE] + 5 * [Fill.NO_ROOM]
    assert world.fetched() == 3
    world.put(20, SMALL)
    assert warming.to_disk(wanted(20, SMALL)) is Fill.MADE, "a smaller one fits"
    assert world.number("drops_total") == 0
    world.close()


def test_without_a_disk(world: CacheWorld) -> None:
    world.put(1)
    none = Warming(RUNTIME, world.blocks, world.memory, None, world.budget)
    assert none.to_disk(wanted(1)) is Fill.NO_DISK
    assert none.to_memory(wanted(1)) is Fill.MADE
    assert none.to_memory(wanted(1)) is Fill.THERE
    assert none.where(wanted(1)) == (True, None)
    assert none.evict(wanted(1)) == BLOCK
    assert none.where(wanted(1)) == (False, None)


def test_blocks_on_their_way_are_a_share_of_the_memory(tmp_path: Path) -> None:
    """Whoever finds none left is told so, and nothing is fetched for him."""
    files = GatedFiles()
    world = CacheWorld([tmp_path / "a"], files=files)
    warming = warming_of(world)
    most = world.budget.gauges().limit // SHARE // BLOCK
    fills: list[Fill] = []
    threads = []
    for number in range(1, most + 4):
        world.put(number)
        job = threading.Thread(target=lambda n=number: fills.append(warming.to_disk(wanted(n))))
        threads.append(job)
        job.start()
    wait_for(lambda: len(fills) == 3 and world.fetched() == most)
    assert fills == 3 * [Fill.BUSY]
    assert world.budget.gauges().ahead == most * BLOCK
    files.gate.set()
    for job in threads:
        job.join()
    assert fills.count(Fill.MADE) == most
    world.close()


def test_an_eviction_does_not_undo_what_comes_after_it(tmp_path: Path) -> None:
    """A copy that was being written meanwhile neither appears later nor takes another along."""
    files = GatedFiles()
    world = CacheWorld([tmp_path / "a"], files=files)
    warming = warming_of(world)
    world.put(1)
    assert world.right(1)  # the copy waits at the gate
    wait_for(lambda: files.made > 1)
    evicting = threading.Thread(target=warming.evict, args=(wanted(1),))
    evicting.start()
    evicting.join(0.1)
    assert evicting.is_alive(), "it waits for what is being written"
    files.gate.set()
    evicting.join()
    assert warming.where(wanted(1)).copy is None
    assert cache_files(tmp_path / "a") == []
    assert warming.to_disk(wanted(1)) is Fill.MADE
    world.settle()
    assert world.fetched() == 2
    assert warming.to_disk(wanted(1)) is Fill.THERE
    assert pattern(BLOCK, 1) == world.read(1)
    world.close()


def test_evicted_from_every_disk(world: CacheWorld) -> None:
    """Also from one that had the block while its own was away."""
    warming = warming_of(world)
    world.put(1)
    warming.to_disk(wanted(1))
    place = world.cache._place(object_key(SliceId(1), 0, BLOCK))
    assert place is not None
    other = next(each for each in world.cache.members if each is not place.member)
    other.disk.add_whole(place.name, place.shard, (b"x" * 100,))
    assert warming.evict(wanted(1)) >= BLOCK + 100
    assert all(not cache_files(Path(disk.place.root)) for disk in world.disks)

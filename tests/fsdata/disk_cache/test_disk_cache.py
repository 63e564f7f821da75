"""C1, C3, C4: reading through disk caches; whatever is on the disks, the bytes are right."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdata.disk_cache.cache import CachePolicy
from fsdata.disk_cache.directory.eviction import DiskLimits
from fsdata.files.prefetch import Prefetcher
from fsdata.files.reader import FileReader
from fsdata.format.block_v1 import Codec
from fsdata.format.object_keys import object_key
from fsdata.objects.mem import MemObjects
from fsdata.resources.worker_pool import WorkerPool
from fsmeta.errors import ObjectDamaged
from fsmeta.types import FRAME_BYTES, Slice, SliceId
from tests.conftest import LogWatch
from tests.fsdata.disk_world import (
    BLOCK,
    MIB,
    RUNTIME,
    CacheWorld,
    cache_files,
    fails,
    name_disks,
    pattern,
    used_bytes,
)
from tests.fsdata.faults import FaultyObjects
from tests.fsdata.reads import read_block

SMALL = 100 << 10
PAGE = 4096


@pytest.fixture
def world(tmp_path: Path) -> Iterator[CacheWorld]:
    made = CacheWorld([tmp_path / "a", tmp_path / "b"])
    yield made
    made.close()


def warm(world: CacheWorld, count: int, size: int = BLOCK) -> None:
    """Slices 1 to `count`, in the store and on the disks."""
    for number in range(1, count + 1):
        world.put(number, size)
        assert world.right(number, size)
        world.settle()


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def all_files(world: CacheWorld) -> list[Path]:
    return [path for disk in world.disks for path in cache_files(Path(disk.place.root))]


def reopen(world: CacheWorld) -> None:
    """As the next mount would: what is open is forgotten."""
    for disk in world.disks:
        disk.copies.close()


@pytest.mark.parametrize("size", [BLOCK, SMALL, 1, PAGE])
@pytest.mark.parametrize("codec", list(Codec))
def test_what_was_read_once_comes_from_the_disks(tmp_path: Path, size: int, codec: Codec) -> None:
    name_disks(tmp_path / "a", tmp_path / "b")
    world = CacheWorld([tmp_path / "a", tmp_path / "b"], codec=codec)
    warm(world, 20, size)
    fetched = world.fetched()
    for number in range(1, 21):
        assert world.right(number, size)
        reopen(world)
        assert world.read(number, size, size // 2) == pattern(size, number)[size // 2 :]
    assert world.fetched() == fetched
    assert world.number("misses_total") == 20
    assert world.number("written_bytes_total") > 0
    assert all(cache_files(Path(disk.place.root)) for disk in world.disks), "both have their share"
    world.close()


def test_disks_share_by_capacity_and_keep_their_share(tmp_path: Path) -> None:
    """A disk that is added takes from the others, and nothing moves between those."""
    roots = [tmp_path / name for name in "abc"]
    big, small = DiskLimits(300 * MIB, 0), DiskLimits(100 * MIB, 0)
    two = CacheWorld(roots[:2])
    three = CacheWorld(roots)
    for world in (two, three):
        for disk, limits in zip(world.disks, (big, small, small), strict=False):
            disk.limits = limits
        world.cache._dirs.arrange()
    before = [order[0].disk.place.root for order in two.cache._dirs.order]
    after = [order[0].disk.place.root for order in three.cache._dirs.order]
    assert 0.68 < before.count(str(roots[0])) / len(before) < 0.82
    assert 0.13 < after.count(str(roots[2])) / len(after) < 0.27
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {str(roots[2])}
    again = CacheWorld(roots[::-1])
    for disk, limits in zip(again.disks, (small, small, big), strict=True):
        disk.limits = limits
    again.cache._dirs.arrange()
    assert [order[0].disk.place.root for order in again.cache._dirs.order] == after, (
        "not by position"
    )
    for world in (two, three, again):
        world.close()


def test_a_disk_is_known_wherever_it_is_mounted(tmp_path: Path) -> None:
    world = CacheWorld([tmp_path / "a", tmp_path / "b"])
    warm(world, 10)
    world.close()
    (tmp_path / "b").rename(tmp_path / "moved")
    (tmp_path / "a").rename(tmp_path / "other")
    again = CacheWorld([tmp_path / "moved", tmp_path / "other"], objects=world.objects)
    fetched = world.fetched()
    assert all(again.right(number) for number in range(1, 11))
    assert world.fetched() == fetched
    again.close()


@pytest.mark.parametrize("at", [0, 5, 20, 30, 70, 90, 150, 5000, 70_000, -1])
def test_wrong_bytes_are_never_served(world: CacheWorld, log_watch: LogWatch, at: int) -> None:
    log_watch.expect("cache disk .* is suspect")
    warm(world, 1)
    flip(all_files(world)[0], at)
    reopen(world)
    fetched = world.fetched()
    assert world.right(1)
    assert world.fetched() == fetched + 1
    assert world.blocks.stats().damaged == 0, "the store is all right"
    assert sum(member.health.errors for member in world.cache.members) == 1
    assert world.right(1)
    world.settle()
    reopen(world)
    fetched = world.fetched()
    assert world.right(1)
    assert world.fetched() == fetched, "the file was made anew"


def test_wrong_bytes_of_a_range_are_never_served(world: CacheWorld, log_watch: LogWatch) -> None:
    log_watch.expect("cache disk .* is suspect")
    data = world.put(1)
    assert world.read(1, BLOCK, 300_000, 300_100) == data[300_000:300_100]
    world.settle()
    (path,) = all_files(world)
    flip(path, 4096 + 20 + 4 * 16 + 300_050)
    assert world.read(1, BLOCK, 300_000, 300_100) == data[300_000:300_100]
    assert world.number("bad_total") == 1


def test_files_that_were_exchanged(world: CacheWorld, log_watch: LogWatch) -> None:
    log_watch.expect("cache disk .* is (suspect|quarantined)")
    warm(world, 8, SMALL)
    files = all_files(world)
    contents = [path.read_bytes() for path in files]
    for path, content in zip(files, contents[1:] + contents[:1], strict=True):
        path.write_bytes(content)
    reopen(world)
    assert all(world.right(number, SMALL) for number in range(1, 9))


def test_files_that_were_exchanged_while_they_are_open(
    world: CacheWorld, log_watch: LogWatch
) -> None:
    """Found by the simulation, seed 32: objects of one length pass each other's checksums."""
    log_watch.expect("cache disk .* is (suspect|quarantined)")
    for size in (SMALL, BLOCK):
        warm(world, 4, size)
        files = all_files(world)
        assert all(world.right(number, size) for number in range(1, 5)), "all are open now"
        contents = [path.read_bytes() for path in files]
        for path, content in zip(files, contents[1:] + contents[:1], strict=True):
            path.write_bytes(content)
        for number in range(1, 5):
            middle = slice(size // 2, size // 2 + 10)
            got = world.read(number, size, middle.start, middle.stop)
            assert got == pattern(size, number)[middle]
            assert world.right(number, size)
        for number in range(1, 5):
            world.blocks.delete([(SliceId(number), size)])


def test_damage_in_the_store_is_not_the_disk_s_fault(world: CacheWorld) -> None:
    world.put(1)
    world.objects.flip_at = 8 * 90_000
    for _ in range(3):
        with pytest.raises(ObjectDamaged):
            world.read(1)
        world.settle()
    assert world.number("bad_total") == 0
    assert world.blocks.stats().damaged == 3
    assert {world.state(0), world.state(1)} == {"HEALTHY"}
    world.objects.flip_at = None
    assert world.right(1)


def test_deleted_slices_leave_the_disks(world: CacheWorld) -> None:
    warm(world, 3)
    assert len(all_files(world)) == 3
    world.blocks.delete([(SliceId(2), BLOCK)])
    assert len(all_files(world)) == 2
    assert fails(lambda: world.read(2))
    assert world.right(1)


def test_a_copy_older_than_a_put_goes(world: CacheWorld) -> None:
    """An id that is given out twice, after its metadata was lost, shows no bytes of the past."""
    world.objects.inner.put(object_key(SliceId(1), 0, 5), _encoded(b"older"))
    assert world.read(1, 5) == b"older"
    world.settle()
    world.blocks.put_block(SliceId(1), 0, bytearray(b"newer"))
    assert world.read(1, 5) == b"newer"


def _encoded(data: bytes) -> list[bytes | bytearray | memoryview]:
    from fsdata.format.block_v1 import encode

    return encode((data,))


@pytest.mark.parametrize("writes", [True, False])
def test_what_is_uploaded_is_kept_where_that_is_wanted(tmp_path: Path, writes: bool) -> None:
    world = CacheWorld([tmp_path], policy=CachePolicy(writes=writes))
    world.put(1)
    world.put(2, SMALL)
    world.settle()
    assert len(cache_files(tmp_path)) == (2 if writes else 0)
    assert world.right(1)
    assert world.right(2, SMALL)
    assert world.fetched() == (0 if writes else 2)
    world.close()


def test_partial_only_keeps_no_blocks_of_full_size(tmp_path: Path) -> None:
    world = CacheWorld([tmp_path], policy=CachePolicy(partial_only=True))
    warm(world, 2)
    assert cache_files(tmp_path) == []
    world.put(3, SMALL)
    world.read(3, SMALL)
    world.read(1, BLOCK, 5, 10)
    world.settle()
    assert len(cache_files(tmp_path)) == 2
    world.close()


def test_keys_that_are_no_blocks_are_not_kept(world: CacheWorld) -> None:
    for content in (b"one", b"two"):
        world.cache.put("volume", (content,))
        assert world.cache.get("volume") == content
        buffer = bytearray(9)
        assert world.cache.get_into("volume", (memoryview(buffer),)) == 3
    assert [info.key for info in world.cache.list("")] == ["volume"]
    info = world.cache.head("volume")
    assert info is not None
    assert info.size == 3
    world.cache.delete("volume")
    assert all_files(world) == []


# --- C3: small reads


def bytes_fetched(world: CacheWorld) -> int:
    """Bytes that the store has given."""
    total = 0
    for key, begin, end in world.objects.gets:
        size = len(world.objects.inner.get(key))
        total += (size if end is None else min(end, size)) - begin
    return total


def test_random_reads_of_an_epoch_fetch_each_byte_once(tmp_path: Path) -> None:
    """LMDB: pages in random order, all of them in the end, twice."""
    world = CacheWorld([tmp_path], DiskLimits(256 * MIB, 0))
    count = 16
    data = {number: world.put(number) for number in range(1, count + 1)}
    pages = [(number, at) for number in data for at in range(0, BLOCK, PAGE)]
    for seed in range(2):
        random.Random(seed).shuffle(pages)
        for number, at in pages:
            assert world.read(number, BLOCK, at, at + PAGE) == data[number][at : at + PAGE]
            if world.number("queue_bytes") > MIB:  # the store is memory, quicker than any disk
                world.settle()
        world.settle()
    asked = count * BLOCK
    assert world.number("drops_total") == 0
    assert bytes_fetched(world) <= 1.01 * asked
    world.close()


def test_random_records_fetch_what_they_ask(tmp_path: Path) -> None:
    """Records of some 100 KiB, a third of the file, no two of them beside each other."""
    world = CacheWorld([tmp_path], DiskLimits(256 * MIB, 0))
    data = {number: world.put(number) for number in range(1, 17)}
    dice, asked = random.Random(1), 0
    for number in data:
        begin = dice.randrange(BLOCK - 350_000)
        for part in range(begin, begin + 350_000, 10_000):
            got = world.read(number, BLOCK, part, part + 10_000)
            assert got == data[number][part : part + 10_000]
            asked += 10_000
        world.settle()
    assert bytes_fetched(world) <= 1.2 * asked + FRAME_BYTES
    world.close()


def test_a_range_is_found_before_it_is_written(world: CacheWorld) -> None:
    data = world.put(1)
    busy = RUNTIME.event()
    for member in world.cache.members:
        for _ in range(2):
            member._writers.submit(busy.wait)  # type: ignore[arg-type]
    for _ in range(3):
        assert world.read(1, BLOCK, 10, 20) == data[10:20]
    assert world.fetched() == 1
    assert all_files(world) == []
    busy.set()
    world.settle()
    assert len(all_files(world)) == 1


def test_without_room_ranges_become_the_block(tmp_path: Path) -> None:
    """Else a reader of many small pieces would fetch each again and again."""
    world = CacheWorld([tmp_path], DiskLimits(1 * MIB, 0, "none"))
    for number in (1, 2):
        world.put(number, BLOCK)
        world.read(number)
    world.settle()
    world.put(3)
    for left_out in (BLOCK, 0, 0, 0):
        for at in range(0, BLOCK, FRAME_BYTES):
            read_block(world.blocks, SliceId(3), BLOCK, 0, at, at + 9)
            world.settle()
        world.memory.shrink(left_out)  # what is around the pieces that were read
    assert world.blocks.stats().whole >= 3
    assert bytes_fetched(world) < 5 * BLOCK
    world.close()


@pytest.mark.parametrize("cached", [True, False])
def test_parts_of_a_strided_reader_are_fetched_ahead(tmp_path: Path, cached: bool) -> None:
    """As parts, to the disk; where they can't be kept, not at all."""
    limits = DiskLimits(256 * MIB if cached else 1, 0, "none")
    world = CacheWorld([tmp_path], limits)
    data = pattern(24 * MIB)
    for index in range(24):
        block = bytearray(data[index * BLOCK : (index + 1) * BLOCK])
        world.blocks.put_block(SliceId(1), index, block)
    piece = Slice(0, SliceId(1), len(data), 0, len(data))
    pool = WorkerPool(RUNTIME, "ahead", 2)
    ahead = Prefetcher(pool, world.budget, world.blocks)
    reader = FileReader(RUNTIME, world.blocks, lambda _: [piece], prefetcher=ahead)

    def read(turn: int) -> None:
        at = (3 * turn + 2) * MIB + 500_000  # far from the begin, where streams begin
        assert b"".join(reader.read(at, PAGE, len(data))) == data[at : at + PAGE]
        world.settle()

    for turn in range(4):
        read(turn)
    pool.close()
    world.settle()
    fetched = world.fetched()
    for turn in range(4, 8):
        read(turn)
    assert (world.fetched() == fetched) is cached
    assert bytes_fetched(world) < 8 * 2 * FRAME_BYTES
    assert world.blocks.stats().whole == 0
    reader.close()
    world.close()


# --- C4: memory


def test_the_queue_is_bounded_and_in_the_budget(world: CacheWorld) -> None:
    busy = RUNTIME.event()
    for member in world.cache.members:
        for _ in range(2):
            member._writers.submit(busy.wait)  # type: ignore[arg-type]
    for number in range(1, 11):
        world.put(number)
        assert world.right(number)
        gauges = world.budget.gauges()
        assert gauges.writing + gauges.cached + gauges.ahead <= gauges.limit
    assert world.number("queue_bytes") <= gauges.limit // 4
    assert world.number("drops_total") == 10 - world.number("queue_bytes") // BLOCK > 0
    assert gauges.cached >= world.number("queue_bytes")
    busy.set()
    world.settle()


def test_buffers_wait_for_the_disk_before_they_are_used_again(world: CacheWorld) -> None:
    """A block that is being written to a disk must not become another block meanwhile."""
    busy = RUNTIME.event()
    for member in world.cache.members:
        for _ in range(2):
            member._writers.submit(busy.wait)  # type: ignore[arg-type]
    for number in range(1, 9):
        world.put(number)
        assert world.right(number)
    busy.set()
    world.settle()
    reopen(world)
    fetched = world.fetched()
    kept = len(all_files(world))
    assert kept > 0
    assert all(world.right(number) for number in range(1, 9))
    assert world.fetched() == fetched + 8 - kept
    assert world.number("bad_total") == 0


# --- C1: sharing


def test_two_mounts_share_blocks_and_capacity(tmp_path: Path) -> None:
    limits = DiskLimits(10 * MIB, 0)
    one = CacheWorld([tmp_path], limits)
    two = CacheWorld([tmp_path], limits, objects=one.objects)
    for number in range(1, 4):
        one.put(number)
        assert one.right(number)
    one.settle()
    fetched = one.fetched()
    assert all(two.right(number) for number in range(1, 4))
    assert one.fetched() == fetched
    for number in range(4, 60):
        one.put(number)
        assert (one if number % 2 else two).right(number)
        one.settle()
        two.settle()
        assert used_bytes(tmp_path) <= 10 * MIB
    assert used_bytes(tmp_path) > 5 * MIB
    assert all(world.right(number) for number in range(1, 60) for world in (one, two))
    one.close()
    two.close()


def test_mounts_that_fight_for_a_directory(tmp_path: Path) -> None:
    """Readers, writers, evictions and deletions of three mounts at once: the bytes are right."""
    limits = DiskLimits(4 * MIB, 0, "lru")
    objects = FaultyObjects(RUNTIME, MemObjects(RUNTIME))
    worlds = [CacheWorld([tmp_path], limits, objects=objects) for _ in range(3)]
    sizes = {number: 50_000 * (1 + number % 8) for number in range(1, 30)}
    for number, size in sizes.items():
        worlds[0].put(number, size)
    wrong: list[int] = []

    def read(world: CacheWorld, seed: int) -> None:
        dice = random.Random(seed)
        for _ in range(150):
            number = dice.choice(list(sizes))
            size = sizes[number]
            begin = dice.randrange(size)
            end = dice.choice((size, min(size, begin + 100)))
            if world.read(number, size, begin, end) != pattern(size, number)[begin:end]:
                wrong.append(number)
            if dice.random() < 0.05:
                world.cache.drop(object_key(SliceId(number), 0, size))

    threads = [
        RUNTIME.spawn("reader", lambda w=world, s=seed: read(w, s))  # type: ignore[misc]
        for seed, world in enumerate(worlds * 2)
    ]
    for thread in threads:
        thread.join()
    for world in worlds:
        world.settle()
    assert wrong == []
    assert sum(world.number("bad_total") for world in worlds) == 0
    assert used_bytes(tmp_path) <= 4 * MIB
    for shard in range(1024):
        worlds[0].disks[0].eviction.look_through(shard)
    assert worlds[0].disks[0].usage.seen == used_bytes(tmp_path)
    for world in worlds:
        world.close()

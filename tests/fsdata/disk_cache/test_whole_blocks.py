"""C3: `--prefetch`: a block of which a range was read is fetched whole in the background."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from fsdata.blocks.promote import CALM_S, WAITING_MAX, WholeBlocks
from fsdata.blocks.read_plan import BlockRead
from fsdata.disk_cache.cache import CachePolicy
from fsdata.disk_cache.directory.eviction import DiskLimits
from fsdata.resources.block_cache import Block
from fsdata.resources.memory_budget import BUFFER_BYTES_MIN
from fsmeta.errors import Unavailable
from fsmeta.types import FRAME_BYTES, SliceId
from tests.fsdata.disk_world import BLOCK, MIB, RUNTIME, CacheWorld, pattern, wait_for
from tests.fsdata.reads import read_block

PAGE = 4096


class Prefetching:
    """A world that fetches whole blocks, and a store that may complain."""

    def __init__(self, world: CacheWorld) -> None:
        self.world = world
        self.complaints = 0
        self.late_s = 0.0
        self.whole = self.made()
        for number in range(1, 20):
            world.put(number)

    def made(self, threads: int = 1) -> WholeBlocks:
        found = WholeBlocks(RUNTIME, self.world.budget, threads, lambda: self.complaints)
        found._clock = lambda: self.late_s
        self.world.blocks = self.world.block_store(found)
        return found

    def page(self, number: int, at: int) -> None:
        """Read a page as random readers do; nothing of it stays in memory but by our doing."""
        view = read_block(self.world.blocks, SliceId(number), BLOCK, 0, at, at + PAGE)
        assert view == pattern(BLOCK, number)[at : at + PAGE]

    def end(self) -> None:
        """End all threads."""
        self.whole.close()
        self.world.settle()
        self.world.memory.shrink(1 << 40)
        self.world.close()

    def count(self, name: str) -> float:
        return self.whole.numbers()[name]

    def fetched_bytes(self) -> int:
        return sum(
            (end or len(pattern(BLOCK)) + 84) - begin for _, begin, end in self.world.objects.gets
        )


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Prefetching]:
    """With a cache disk."""
    yield from _lived(CacheWorld([tmp_path]))


@pytest.fixture
def memory() -> Iterator[Prefetching]:
    """With none: the disk cache has no disks."""
    yield from _lived(CacheWorld([]))


def _lived(world: CacheWorld) -> Iterator[Prefetching]:
    made = Prefetching(world)
    yield made
    made.end()


def test_the_whole_block_comes_once_to_the_disk(disk: Prefetching) -> None:
    world = disk.world
    disk.page(1, 300_000)
    wait_for(lambda: disk.count("prefetched_blocks_total") == 1)
    world.settle()
    asked = [(begin, end) for _, begin, end in world.objects.gets]
    assert len(asked) == 3, "head and range together, then all of it"
    assert world.memory.stats().blocks == 0, "the disk has it"
    for at in range(0, BLOCK, 100 * PAGE):
        disk.page(1, at)
    world.memory.shrink(1 << 40)
    assert len(world.objects.gets) == 3
    assert disk.count("prefetched_blocks_total") == 1


def test_without_a_disk_it_comes_to_free_memory(memory: Prefetching) -> None:
    world = memory.world
    memory.page(1, 300_000)
    wait_for(lambda: memory.count("prefetched_blocks_total") == 1)
    before = len(world.objects.gets)
    for at in range(0, BLOCK, 100 * PAGE):
        memory.page(1, at)
    assert len(world.objects.gets) == before


def test_nothing_is_pushed_out_of_memory(memory: Prefetching) -> None:
    world = memory.world
    taken = BUFFER_BYTES_MIN - world.idle - BLOCK
    assert world.budget.charge(taken)
    memory.page(1, 300_000)
    wait_for(lambda: memory.count("prefetch_skipped_total") == 1)
    assert memory.fetched_bytes() < 2 * FRAME_BYTES
    world.budget.uncharge(taken)
    world.memory.shrink(1 << 40)


@pytest.mark.parametrize("partial_only", [True, False])
def test_a_disk_that_keeps_no_blocks_is_no_place(tmp_path: Path, partial_only: bool) -> None:
    limits = DiskLimits(64 * MIB if partial_only else 1 * MIB, 0, "none")
    world = CacheWorld([tmp_path], limits, policy=CachePolicy(partial_only=partial_only))
    made = Prefetching(world)
    if not partial_only:  # the disk is full
        for number in (10, 11):
            world.read(number)
            world.settle()
    taken = BUFFER_BYTES_MIN - world.idle - BLOCK
    assert world.budget.charge(taken)
    before = len(world.objects.gets)
    made.page(1, 300_000)
    wait_for(lambda: made.count("prefetch_skipped_total") == 1)
    assert len(world.objects.gets) == before + 2
    world.budget.uncharge(taken)
    made.end()


def test_a_store_that_is_asked_too_much_is_left_alone(memory: Prefetching) -> None:
    def skipped(count: int) -> bool:
        return memory.count("prefetch_skipped_total") == count

    memory.complaints = 1
    for number in (1, 2):
        memory.page(number, 300_000)
        wait_for(partial(skipped, number))
    memory.late_s = CALM_S + 1
    memory.page(3, 300_000)
    wait_for(lambda: memory.count("prefetched_blocks_total") == 1)
    assert memory.count("prefetch_skipped_total") == 2
    memory.world.memory.shrink(1 << 40)


def test_readers_do_not_wait_for_it_and_few_blocks_do(memory: Prefetching) -> None:
    world = memory.world
    memory.page(1, 300_000)
    wait_for(lambda: memory.count("prefetched_blocks_total") == 1)
    flying, go_on = RUNTIME.event(), RUNTIME.event()
    reads = world.blocks._reads
    fetch = reads._whole_block

    def slow(read: BlockRead) -> Block:
        flying.set()
        go_on.wait()
        return fetch(read)

    reads._whole_block = slow  # type: ignore[method-assign]
    try:
        memory.page(2, 300_000)
        flying.wait()
        memory.page(2, 900_000)  # it is on its way
        for number in range(3, 3 + WAITING_MAX):
            memory.page(number, 300_000)
        assert memory.count("prefetch_skipped_total") == 1
    finally:
        go_on.set()
    wait_for(lambda: memory.count("prefetched_blocks_total") == 1 + WAITING_MAX)
    world.memory.shrink(1 << 40)


def test_a_store_that_fails_is_the_reader_s_business(memory: Prefetching) -> None:
    world = memory.world
    reads = world.blocks._reads
    fetch = reads._whole_block

    def fail(read: BlockRead) -> Block:
        raise Unavailable(f"the store of {read.key} is away")

    reads._whole_block = fail  # type: ignore[method-assign]
    memory.page(1, 300_000)
    wait_for(lambda: memory.count("prefetch_skipped_total") == 1)
    reads._whole_block = fetch  # type: ignore[method-assign]
    memory.page(1, 900_000)
    wait_for(lambda: memory.count("prefetched_blocks_total") == 1)
    world.memory.shrink(1 << 40)

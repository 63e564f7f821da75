"""C1: one cache directory on two hosts: a network file system without locks, and files that go.

Two mounts of one file system in memory are the two hosts' view of a server. It grants every lock,
and what one host has open and the other removes is ESTALE, as on NFS.
"""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from fsclient.kernel.contract import Buffer, OpenOut
from fsdata.disk_cache.directory import member
from fsdata.disk_cache.directory.eviction import SLACK_SHARE, DiskLimits
from fsdata.format.object_keys import object_key
from fsmeta.types import Caller, Ino, SliceId
from tests.fsclient.fuse.mounting import needs_root_and_fuse, serving
from tests.fsclient.fuse.ramfs import RamFS, fail
from tests.fsdata.disk_world import MIB, CacheWorld, cache_files, used_bytes, wait_for

pytestmark = needs_root_and_fuse

KIB = 1 << 10
CAPACITY = 6 * MIB
SIZE = 200 * KIB
SLICES = 60  # twice what fits
READS = 300


class Server(RamFS):
    """A file system on a network."""

    def read(
        self, caller: Caller, ino: Ino, fh: int, offset: int, size: int, past_pages: bool = False
    ) -> Sequence[Buffer]:
        if self._node(ino).attr.nlink == 0:
            raise fail(errno.ESTALE)
        return super().read(caller, ino, fh, offset, size, past_pages)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[CacheWorld]]:
    """Two hosts with one cache directory and what they read in the store."""
    server = Server()
    server.opened = OpenOut(0, direct_io=True)  # the host keeps no pages that would hide it
    with serving(server, tmp_path / "a"), serving(server, tmp_path / "b"):
        limits = DiskLimits(CAPACITY, free_ratio=0)
        worlds = [CacheWorld([tmp_path / name / "cache"], limits) for name in "ab"]
        for world in worlds:
            for number in range(1, SLICES + 1):
                world.put(number, SIZE)
        yield worlds
        for world in worlds:
            world.close()


def test_c1_a_copy_that_another_host_removes_is_a_miss(hosts: list[CacheWorld]) -> None:
    one, two = hosts
    assert one.right(1, SIZE)
    one.settle()
    fetched = one.fetched()
    assert one.right(1, SIZE)  # its file is open from here on
    assert one.fetched() == fetched
    assert two.cache.drop(object_key(SliceId(1), 0, SIZE))
    assert one.right(1, SIZE)
    assert one.fetched() > fetched
    one.settle()
    fetched = one.fetched()
    assert one.right(1, SIZE), "it is kept anew"
    assert one.fetched() == fetched
    assert [world.state() for world in hosts] == ["HEALTHY", "HEALTHY"]


def test_c1_two_hosts_read_and_evict_at_once(
    hosts: list[CacheWorld], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No wrong bytes, no disk aside; and what both have lost count of is found by counting."""
    wrong: list[str] = []

    def read(world: CacheWorld, seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(READS):
            number = chance.randrange(1, SLICES + 1)
            if not world.right(number, SIZE):
                wrong.append(f"slice {number}, seed {seed}")

    readers = [
        threading.Thread(target=read, args=(world, seed)) for seed, world in enumerate(hosts)
    ]
    for thread in readers:
        thread.start()
    for thread in readers:
        thread.join()
    assert not wrong
    for world in hosts:
        world.settle()
    assert [world.state() for world in hosts] == ["HEALTHY", "HEALTHY"]
    root = Path(hosts[0].disks[0].place.root)
    assert cache_files(root)
    # writes under way, and what both believed to be room at one moment
    assert used_bytes(root) <= 2 * CAPACITY
    monkeypatch.setattr(member, "FIRST_ROUND_S", 0.0)
    monkeypatch.setattr(member, "LOOK_S", 0.05)
    monkeypatch.setattr(member, "STEP_S", 0.0)
    hosts[0].start()
    disk = hosts[0].disks[0]
    wait_for(lambda: counted(used_bytes(root), hosts[0]), 100)
    assert hosts[0].put(SLICES + 1, SIZE)
    assert hosts[0].right(SLICES + 1, SIZE)
    hosts[0].settle()
    assert disk.usage.seen <= CAPACITY
    assert used_bytes(root) <= CAPACITY + CAPACITY // SLACK_SHARE


def counted(there: int, world: CacheWorld) -> bool:
    """Whether a host knows how much there is."""
    with world.disks[0].usage.locked() as table:
        return table.total == there

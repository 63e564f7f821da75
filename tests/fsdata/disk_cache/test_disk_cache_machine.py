"""C1: any sequence of reads, crashes, evictions, damage and other mounts: never a wrong byte."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fsdata.disk_cache.directory import usage
from fsdata.disk_cache.directory.eviction import DiskLimits
from fsdata.format.object_keys import object_key
from fsdata.objects.mem import MemObjects
from fsmeta.types import SliceId
from tests.fsdata.disk_world import (
    BLOCK,
    MIB,
    RUNTIME,
    CacheWorld,
    cache_files,
    pattern,
    used_bytes,
)
from tests.fsdata.faults import FaultyObjects

SLICES = range(1, 9)
SIZES = {number: (BLOCK, 300_000, 5_000, 70_000)[number % 4] for number in SLICES}
CAPACITY = 3 * MIB

numbers = st.sampled_from(list(SLICES))
places = st.integers(0, 2)


class Machine(RuleBasedStateMachine):
    """Two mounts with two directories between them, and a vandal."""

    @initialize(eviction=st.sampled_from(["lru", "2-random", "none"]))
    def begin(self, eviction: str) -> None:
        self.base = Path(tempfile.mkdtemp(prefix="slicefs-machine-"))
        self.objects = FaultyObjects(RUNTIME, MemObjects(RUNTIME))
        self.limits = DiskLimits(CAPACITY, 0.0, eviction)
        self.worlds = [self._open() for _ in range(2)]
        self.damaged = False
        for number, size in SIZES.items():
            self.worlds[0].put(number, size)

    def _open(self) -> CacheWorld:
        roots = [self.base / "a", self.base / "b"]
        return CacheWorld(roots, self.limits, objects=self.objects)

    def _settle(self) -> None:
        for world in self.worlds:
            world.settle()

    @rule(at=st.integers(0, 1), number=numbers, where=st.floats(0, 1), size=st.integers(1, BLOCK))
    def read(self, at: int, number: int, where: float, size: int) -> None:
        length = SIZES[number]
        begin = min(length - 1, int(where * length))
        end = min(length, begin + size)
        got = self.worlds[at].read(number, length, begin, end)
        assert got == pattern(length, number)[begin:end]

    @rule(at=st.integers(0, 1))
    def remount(self, at: int) -> None:
        self._settle()
        self.worlds[at].close()
        self.worlds[at] = self._open()

    @rule(at=st.integers(0, 1), number=numbers)
    def drop(self, at: int, number: int) -> None:
        self.worlds[at].cache.drop(object_key(SliceId(number), 0, SIZES[number]))

    def _some_file(self, where: int) -> Path | None:
        self._settle()
        files = [path for name in "ab" for path in cache_files(self.base / name)]
        return files[where % len(files)] if files else None

    @rule(where=st.integers(0, 1000), at=st.floats(0, 1), bit=st.integers(0, 7))
    def flip(self, where: int, at: float, bit: int) -> None:
        path = self._some_file(where)
        if path is not None and path.stat().st_size:
            with path.open("r+b") as file:
                spot = int(at * (path.stat().st_size - 1))
                file.seek(spot)
                wrong = file.read(1)[0] ^ 1 << bit
                file.seek(spot)
                file.write(bytes([wrong]))

    @rule(where=st.integers(0, 1000), share=st.floats(0, 1))
    def tear(self, where: int, share: float) -> None:
        path = self._some_file(where)
        if path is not None:
            os.truncate(path, int(share * path.stat().st_size))

    @rule(one=st.integers(0, 1000), two=st.integers(0, 1000))
    def exchange(self, one: int, two: int) -> None:
        first, second = self._some_file(one), self._some_file(two)
        if first is not None and second is not None and first != second:
            content = first.read_bytes()
            first.write_bytes(second.read_bytes())
            second.write_bytes(content)

    @rule(where=st.integers(0, 1000))
    def lose(self, where: int) -> None:
        path = self._some_file(where)
        if path is not None:
            path.unlink()

    @rule(name=st.sampled_from("ab"))
    def lose_the_count(self, name: str) -> None:
        """A crash between a file and its number; counting comes before more is added."""
        self._settle()
        (self.base / name / "volume/usage").unlink(missing_ok=True)
        for disk in (disk for world in self.worlds for disk in world.disks):
            for shard in range(usage.SHARDS):
                disk.eviction.look_through(shard)

    @invariant()
    def capacity_is_kept(self) -> None:
        for name in "ab":
            assert used_bytes(self.base / name) <= CAPACITY

    def teardown(self) -> None:
        if not hasattr(self, "worlds"):
            return
        for number, size in SIZES.items():
            assert all(world.right(number, size) for world in self.worlds)
        for world in self.worlds:
            assert world.blocks.stats().damaged == 0
            world.close()
        for name in "ab":
            assert not list((self.base / name).glob("volume/tmp/*"))
        shutil.rmtree(self.base)


@pytest.fixture(autouse=True)
def _few_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "SHARDS", 4)


@pytest.mark.usefixtures("_few_shards", "_expect_suspects")
def test_any_sequence() -> None:
    machine = settings(max_examples=40, stateful_step_count=25, deadline=None)
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(Machine, settings=machine)


@pytest.fixture
def _expect_suspects(log_watch) -> None:  # type: ignore[no-untyped-def]
    log_watch.expect("cache disk .* is (suspect|quarantined)")

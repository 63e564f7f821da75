"""C2: cache disks that fail, fill up, vanish, hang and lie, for real; readers notice nothing."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fsclient.kernel.contract import OpenOut
from fsdata.disk_cache.directory import health as disk_cache_health, member
from fsdata.disk_cache.directory.eviction import DiskLimits
from fsdata.disk_cache.directory.format import BadFile
from fsdata.disk_cache.directory.health import ERRORS_MAX, PROBE_S_MAX, PROBES_GOOD, Health
from fsmeta.runtime import SystemRuntime
from tests.conftest import LogWatch
from tests.fsclient.fuse.mounting import needs_root_and_fuse, serving
from tests.fsclient.fuse.ramfs import RamFS
from tests.fsdata.disk_world import MIB, CacheWorld, cache_files, name_disks, wait_for
from tests.support.waiting import SOON_S

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount")
ASIDE = "cache disk .* is quarantined: "
SUSPECT = "cache disk .* is suspect: "
BACK = "cache disk .* is used again"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the keeper does after seconds it does after hundredths; it counts only what is back."""
    monkeypatch.setattr(member, "FIRST_ROUND_S", 1e6)
    monkeypatch.setattr(member, "LOOK_S", 0.05)
    monkeypatch.setattr(disk_cache_health, "PROBE_S", 0.05)
    monkeypatch.setattr(disk_cache_health, "PROBE_S_MAX", 0.1)
    monkeypatch.setattr(disk_cache_health, "PAUSE_S", 0.3)


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A disk of 16 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    mount(path)
    yield path
    subprocess.run(["umount", "-l", str(path)], check=False, capture_output=True)


def mount(path: Path, options: str = "size=16m,mode=0700") -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(path)], check=True)


def bind(path: Path, target: Path) -> None:
    subprocess.run(["mount", "--bind", str(path), str(target)], check=True)


@contextmanager
def elsewhere(disk: Path | None = None) -> Iterator[Path]:
    """Where a disk is mounted, too, by default a new one: so it may be pulled out and plugged in.

    At once, as it is: what is mounted empty and filled then the keeper may find half-filled.
    """
    path = Path(tempfile.mkdtemp(prefix="slicefs-disk-"))
    if disk is None:
        mount(path)
    else:
        bind(disk, path)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)
        path.rmdir()


@contextmanager
def without_probes(disk: RamFS) -> Iterator[None]:
    """The keeper's next probe takes until the end of this: what is put aside stays there."""
    go_on = threading.Event()
    disk.hooks["create"] = lambda: (go_on.wait(), None)[1]
    try:
        yield
    finally:
        disk.hooks.clear()
        go_on.set()


def fill(world: CacheWorld, count: int = 6) -> None:
    """Slices 1 to `count`, in the store and on the disk."""
    for number in range(1, count + 1):
        world.put(number)
        assert world.right(number)
        world.settle()


def all_right(world: CacheWorld, count: int = 6) -> bool:
    return all(world.right(number) for number in range(1, count + 1))


def caches(world: CacheWorld, number: int) -> bool:
    """Whether a slice that is read now comes from the disk the next time."""
    world.put(number)
    assert world.right(number)
    world.settle()
    fetched = world.fetched()
    assert world.right(number)
    return world.fetched() == fetched


# --- the state machine


class Clock(SystemRuntime):
    """Time that stands still unless it is moved."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.monotonic = lambda: self.now


def test_errors_within_a_minute_put_a_disk_aside(log_watch: LogWatch) -> None:
    log_watch.expect("cache disk sda is ")
    clock = Clock()
    health = Health(clock, "sda")
    for _ in range(ERRORS_MAX - 1):
        health.failed("an error")
        assert health.state.name == "SUSPECT"
        assert health.usable()
        clock.now += 25
    clock.now += 15
    health.failed("the first is forgotten")
    assert health.state.name == "SUSPECT"
    health.failed("three in a row")
    assert health.state.name == "ASIDE"
    assert not health.usable()
    assert not health.writable()
    assert health.errors == ERRORS_MAX + 1


def test_a_suspect_that_does_nothing_wrong_is_healthy(log_watch: LogWatch) -> None:
    log_watch.expect("cache disk sda is ")
    clock = Clock()
    health = Health(clock, "sda")
    health.failed("an error")
    clock.now += 30
    health.calm_down()
    assert health.state.name == "SUSPECT"
    clock.now += 31
    health.calm_down()
    assert health.state.name == "HEALTHY"


def test_good_probes_in_a_row_bring_a_disk_back(
    log_watch: LogWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_watch.expect("cache disk sda is ")
    monkeypatch.setattr(disk_cache_health, "PROBE_S", 1.0)
    monkeypatch.setattr(disk_cache_health, "PROBE_S_MAX", PROBE_S_MAX)
    health = Health(Clock(), "sda")
    health.lost("gone")
    pauses = [health.probed(good=False) for _ in range(8)]
    assert pauses == [2, 4, 8, 16, 32, 60, 60, 60]
    for _ in range(PROBES_GOOD - 1):
        health.probed(good=True)
    health.probed(good=False)
    for _ in range(PROBES_GOOD - 1):
        health.probed(good=True)
        assert health.state.name == "ASIDE"
    health.probed(good=True)
    assert health.state.name == "HEALTHY"


# --- disks


@needs_root
def test_a_disk_that_others_fill(tmpfs: Path) -> None:
    """It is read on, written no more, and written again when there is room."""
    world = CacheWorld([tmpfs / "cache"], DiskLimits(64 * MIB, 0.0, "none")).start()
    fill(world)
    with (tmpfs / "other").open("wb") as other:
        try:
            while True:
                other.write(bytes(MIB))
                other.flush()
        except OSError as error:
            assert error.errno == errno.ENOSPC
    fetched = world.fetched()
    assert all_right(world)
    assert world.fetched() == fetched, "still found"
    assert not caches(world, 10)
    assert world.state() == "HEALTHY"
    assert list(tmpfs.glob("cache/volume/tmp/*")) == []
    (tmpfs / "other").unlink()
    wait_for(lambda: caches(world, 11))
    world.close()


@needs_root
@pytest.mark.parametrize("eviction", ["lru", "2-random"])
def test_the_floor_makes_room_for_others(tmpfs: Path, eviction: str) -> None:
    """Where others need the disk the cache gives way."""
    world = CacheWorld([tmpfs / "cache"], DiskLimits(64 * MIB, 0.25, eviction)).start()
    for number in range(1, 30):
        world.put(number)
        assert world.right(number)
        world.settle()
        assert os.statvfs(tmpfs).f_bavail >= 0.24 * os.statvfs(tmpfs).f_blocks
    assert len(cache_files(tmpfs / "cache")) >= 9
    (tmpfs / "other").write_bytes(bytes(3 * MIB))
    for number in range(30, 40):
        world.put(number)
        assert world.right(number)
        world.settle()
    assert os.statvfs(tmpfs).f_bavail >= 0.24 * os.statvfs(tmpfs).f_blocks
    assert world.number("errors_total") == 0
    world.close()


@needs_root
def test_a_disk_that_becomes_read_only(tmpfs: Path) -> None:
    world = CacheWorld([tmpfs / "cache"]).start()
    fill(world)
    subprocess.run(["mount", "-o", "remount,ro", str(tmpfs)], check=True)
    fetched = world.fetched()
    assert all_right(world)
    assert world.fetched() == fetched, "still found"
    assert not caches(world, 10)
    assert world.state() == "HEALTHY"
    subprocess.run(["mount", "-o", "remount,rw", str(tmpfs)], check=True)
    wait_for(lambda: caches(world, 11))
    world.close()


def test_a_directory_that_is_removed(tmp_path: Path, log_watch: LogWatch) -> None:
    """It is made again: on the same file system, so it can't be the naked mount point."""
    log_watch.expect(ASIDE + "|" + BACK)
    world = CacheWorld([tmp_path / "a"]).start()
    fill(world)
    identity = world.disks[0].place.id
    (tmp_path / "a").rename(tmp_path / "gone")  # at once, the keeper may be about
    wait_for(lambda: world.state() == "ASIDE" or (tmp_path / "a").exists())
    assert all_right(world)
    wait_for(lambda: world.state() == "HEALTHY")
    wait_for(lambda: caches(world, 10))
    assert world.disks[0].place.id == identity
    assert world.number("disks_aside") == 0
    world.close()


def test_a_directory_that_is_emptied(tmp_path: Path, log_watch: LogWatch) -> None:
    log_watch.expect(ASIDE + "|" + BACK)
    world = CacheWorld([tmp_path / "a"]).start()
    fill(world)
    for path in (tmp_path / "a").iterdir():
        path.rename(tmp_path / f"gone-{path.name}")
    assert all_right(world)
    wait_for(lambda: world.number("errors_total") > 0 and world.state() == "HEALTHY")
    wait_for(lambda: caches(world, 10))
    world.close()


def test_what_is_removed_of_one_volume(tmp_path: Path, log_watch: LogWatch) -> None:
    """The disk's id is there as before, and nothing could be written any more."""
    log_watch.expect(ASIDE + "|" + BACK)
    world = CacheWorld([tmp_path / "a"]).start()
    fill(world)
    (tmp_path / "a/volume").rename(tmp_path / "gone")
    wait_for(lambda: caches(world, 10))
    assert world.state() == "HEALTHY"
    world.close()


@needs_root
def test_a_disk_that_is_unplugged(tmpfs: Path, log_watch: LogWatch) -> None:
    """Its mount point is not filled, its keys go to the other disk, and it is taken back."""
    log_watch.expect(ASIDE + "|" + BACK)
    other = tmpfs.parent / "other"
    name_disks(tmpfs, other)
    world = CacheWorld([tmpfs, other]).start()
    fill(world, 12)
    before = len(cache_files(other))
    assert 0 < before < 12
    with elsewhere(tmpfs) as plug:
        subprocess.run(["umount", "-l", str(tmpfs)], check=True)
        wait_for(lambda: world.state() == "ASIDE")
        assert list(tmpfs.iterdir()) == [], "the naked mount point"
        # a busy disk drops copies, and has them when they are read again
        wait_for(lambda: all_right(world, 12) and len(cache_files(other)) == 12)
        assert world.number("disks_aside") == 1
        bind(plug, tmpfs)
    wait_for(lambda: world.state() == "HEALTHY")
    fetched = world.fetched()
    assert all_right(world, 12)
    assert world.fetched() == fetched
    world.close()


@needs_root
def test_another_disk_in_its_place(tmpfs: Path, log_watch: LogWatch) -> None:
    """An SSD was exchanged: the new one gets the share of its own id."""
    log_watch.expect(f"{ASIDE}|{BACK}")
    world = CacheWorld([tmpfs]).start()
    fill(world)
    with elsewhere() as plug:
        stranger = CacheWorld([plug], volume="other")
        subprocess.run(["umount", "-l", str(tmpfs)], check=True)
        bind(plug, tmpfs)
    identity = stranger.disks[0].place.id
    wait_for(lambda: world.disks[0].place.id == identity and world.state() == "HEALTHY")
    assert all_right(world)
    wait_for(lambda: caches(world, 10))
    stranger.close()
    world.close()


@needs_root_and_fuse
class TestFuse:
    """Disks that a file system of our own plays."""

    @pytest.fixture
    def disk(self, monkeypatch: pytest.MonkeyPatch) -> RamFS:
        fs = RamFS()
        # it says that a file system should not answer EIO; this one is told to
        monkeypatch.setattr(logging.getLogger("fsclient.fuse.dispatch.errnos"), "disabled", True)
        fs.opened = OpenOut(0, direct_io=True)
        return fs

    @pytest.mark.parametrize("verb", ["read", "open"])
    def test_a_disk_that_errs(
        self, tmp_path: Path, disk: RamFS, log_watch: LogWatch, verb: str
    ) -> None:
        """EIO: suspect, aside after three, back after it behaves."""
        log_watch.expect(f"{ASIDE}|{SUSPECT}|{BACK}")
        with serving(disk, tmp_path / "mnt"):
            world = CacheWorld([tmp_path / "mnt" / "cache"]).start()
            fill(world)

            def err() -> None:
                raise OSError(errno.EIO, "injected")

            disk.hooks[verb] = err
            assert all_right(world)
            wait_for(lambda: world.state() == "ASIDE")
            misses = world.number("misses_total")
            assert all_right(world)
            assert world.number("misses_total") == misses, "it is left alone but for probes"
            disk.hooks.clear()
            wait_for(lambda: world.state() == "HEALTHY")
            fetched = world.fetched()
            assert all_right(world)
            assert world.fetched() == fetched
            world.close()

    def test_a_disk_that_errs_when_written(
        self, tmp_path: Path, disk: RamFS, log_watch: LogWatch
    ) -> None:
        log_watch.expect(f"{ASIDE}|{SUSPECT}|{BACK}")
        with serving(disk, tmp_path / "mnt"):
            world = CacheWorld([tmp_path / "mnt" / "cache"]).start()

            def err() -> None:
                raise OSError(errno.EIO, "injected")

            disk.hooks["write"] = err
            fill(world, 4)
            wait_for(lambda: world.state() == "ASIDE")
            disk.hooks.clear()
            wait_for(lambda: world.state() == "HEALTHY")
            assert caches(world, 10)
            world.close()

    def test_a_slow_disk(
        self,
        tmp_path: Path,
        disk: RamFS,
        log_watch: LogWatch,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Reads that take longer than the store's by far."""
        log_watch.expect(f"{ASIDE}|{SUSPECT}|{BACK}")
        with serving(disk, tmp_path / "mnt"):
            world = CacheWorld([tmp_path / "mnt" / "cache"]).start()
            fill(world)
            world.cache._timer.average_s = 0.0  # the machine may have held it up
            monkeypatch.setattr(member, "SLOW_S", 0.2)
            with without_probes(disk):
                disk.hooks["read"] = lambda: time.sleep(0.3)
                assert all_right(world)
                assert world.state() == "ASIDE"
            wait_for(lambda: world.state() == "HEALTHY")
            world.close()

    def test_a_disk_that_hangs(
        self,
        tmp_path: Path,
        disk: RamFS,
        log_watch: LogWatch,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Who reads when it begins waits for it; all later ones go to the store."""
        log_watch.expect(f"{ASIDE}|{SUSPECT}|{BACK}")
        runtime = SystemRuntime()
        free = runtime.event()
        with serving(disk, tmp_path / "mnt"):
            world = CacheWorld([tmp_path / "mnt" / "cache"]).start()
            fill(world)
            monkeypatch.setattr(member, "HUNG_S", 0.5)
            disk.hooks["read"] = lambda: (free.wait(120), None)[1]
            done: list[bool] = []
            victim = runtime.spawn("victim", lambda: done.append(world.right(1)))
            wait_for(lambda: bool(world.cache.members[0]._reads))
            wait_for(lambda: not world.cache.members[0].is_usable())
            assert all(world.right(number) for number in range(2, 7))
            assert world.state() == "ASIDE"
            assert not done, "it hangs as before"
            disk.hooks.clear()
            free.set()
            victim.join()
            assert done == [True]
            wait_for(lambda: world.state() == "HEALTHY")
            world.close()

    def test_a_write_that_hangs_does_not_keep_a_mount_from_ending(
        self,
        tmp_path: Path,
        disk: RamFS,
        log_watch: LogWatch,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """The writer is left behind with what it writes, and all others end."""
        log_watch.expect(f"{ASIDE}|{SUSPECT}|{BACK}|hangs: its writers are abandoned")
        monkeypatch.setattr(member, "CLOSE_S", 0.5)
        free = SystemRuntime().event()
        hung = SystemRuntime().event()

        def hang() -> None:
            hung.set()
            free.wait(120)

        with serving(disk, tmp_path / "mnt"):
            world = CacheWorld([tmp_path / "mnt" / "cache"]).start()
            world.put(1)
            disk.hooks["write"] = hang
            assert world.right(1)
            assert hung.wait(SOON_S)
            world.cache.close()
            assert not free.is_set(), "it hangs as before"
            disk.hooks.clear()
            free.set()
            world.settle()
            world.close()

    def test_a_disk_that_lies(self, tmp_path: Path, disk: RamFS, log_watch: LogWatch) -> None:
        """Every read brings other bytes."""
        log_watch.expect(f"{ASIDE}|{SUSPECT}|{BACK}")
        with serving(disk, tmp_path / "mnt"):
            world = CacheWorld([tmp_path / "mnt" / "cache"]).start()
            fill(world)
            for node in disk.nodes.values():
                if len(node.data) > MIB:
                    node.data[-100] ^= 1
            with without_probes(disk):
                assert all_right(world)
                assert world.number("bad_total") >= ERRORS_MAX
                assert world.state() == "ASIDE"
            wait_for(lambda: world.state() == "HEALTHY")
            assert caches(world, 10)
            world.close()


def test_a_probe_that_comes_back_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = CacheWorld([tmp_path])
    place = world.disks[0].place
    place.probe()
    monkeypatch.setattr(
        type(world.disks[0]._files.open(str(tmp_path / "disk-id"))), "read", lambda *_: b""
    )
    with pytest.raises((BadFile, OSError)):
        place.probe()
    monkeypatch.undo()
    assert list(tmp_path.glob("volume/tmp/*")) == []
    world.close()

"""C1: one cache disk on a real directory: what is added is found, room is kept, order is kept."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from fsdata.disk_cache.directory.disk import Disk
from fsdata.disk_cache.directory.eviction import OPEN_MAX, DiskLimits
from fsdata.disk_cache.directory.file_io import OsFiles, Space
from fsdata.disk_cache.directory.format import BadFile
from fsdata.disk_cache.directory.location import TMP_AGE_NS
from tests.fsdata.disk_world import MIB, RUNTIME, cache_files, pattern, used_bytes
from tests.support.processes import descriptors

KIB = 1 << 10
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def open_disk(root: Path, **limits: float | str | int) -> Disk:
    wanted: Any = {"capacity_bytes": 64 * MIB, "free_ratio": 0.0} | limits
    disk = Disk(RUNTIME, OsFiles(), str(root), "volume", DiskLimits(**wanted))
    disk.place.prepare()
    return disk


def add(disk: Disk, number: int, size: int = 100 * KIB, shard: int = 7) -> bool:
    return disk.add_whole(f"n{number}", shard, (pattern(size, number),))


def has(disk: Disk, number: int, shard: int = 7) -> bool:
    return disk.read(f"n{number}", shard, 0, None) is not None


def age(root: Path, number: int, seconds: float) -> None:
    """Make a file look as if it had been used long ago."""
    (path,) = root.glob(f"volume/*/n{number}")
    then = path.stat().st_mtime - seconds
    os.utime(path, (then, then))


def test_objects_are_found_again_by_the_next_mount(tmp_path: Path) -> None:
    disk = open_disk(tmp_path / "d")
    data = pattern(1 * MIB)
    assert disk.read("x", 3, 0, None) is None
    assert disk.add_whole("x", 3, (data[:10], memoryview(data)[10:]))
    for found in (disk, open_disk(tmp_path / "d")):
        assert found.read("x", 3, 0, None) == data
        assert found.read("x", 3, 5, 50) == data[5:50]
        assert found.read("x", 3, MIB - 5, MIB + 5) == data[-5:], "fewer past its end"
        assert found.read("x", 3, MIB + 5, MIB + 9) == b""
        head, rest = bytearray(100), bytearray(MIB)
        assert found.read_into("x", 3, (memoryview(head), memoryview(rest))) == MIB
        assert head + rest[:-100] == data
        assert found.read("y", 3, 0, None) is None
    assert disk.place.id == open_disk(tmp_path / "d").place.id
    assert disk.usage.seen == used_bytes(tmp_path / "d")


def test_ranges_gather_in_one_sparse_file(tmp_path: Path) -> None:
    disk, data = open_disk(tmp_path), pattern(4 * MIB)
    parts = [(0, 84), (65620, 131156), (3 * MIB, 3 * MIB + 9), (131156, 140000), (50, 200)]
    for begin, end in parts:
        assert disk.read("x", 3, begin, end) is None
        assert disk.add_range("x", 3, begin, data[begin:end])
    for found in (disk, open_disk(tmp_path)):
        for begin, end in [*parts, (0, 200), (65620, 140000)]:
            assert found.read("x", 3, begin, end) == data[begin:end]
        assert found.read("x", 3, 100, 201) is None
        assert found.read("x", 3, 0, None) is None
        assert found.read_into("x", 3, (memoryview(bytearray(9)),)) is None
    (file,) = cache_files(tmp_path)
    assert file.stat().st_blocks * 512 < 200 * KIB, "sparse"
    assert disk.usage.seen == used_bytes(tmp_path)
    assert disk.add_whole("x", 3, (data,)), "replaces the ranges"
    assert disk.read("x", 3, 0, None) == data
    assert disk.usage.seen == used_bytes(tmp_path)
    assert disk.add_range("x", 3, 7, b"something else"), "it is there already"
    assert disk.read("x", 3, 0, None) == data


def test_ranges_that_another_mount_added_are_found(tmp_path: Path) -> None:
    one, two = open_disk(tmp_path), open_disk(tmp_path)
    assert one.add_range("x", 3, 0, b"abcde")
    assert two.read("x", 3, 0, 5) == b"abcde"
    assert one.add_range("x", 3, 100, b"fghij")
    assert two.read("x", 3, 100, 105) == b"fghij"
    assert one.add_whole("x", 3, (pattern(1000),))
    assert two.read("x", 3, 0, None) == pattern(1000)


def test_drop(tmp_path: Path) -> None:
    disk = open_disk(tmp_path)
    add(disk, 1)
    other = open_disk(tmp_path)
    assert has(other, 1)
    assert disk.drop("n1", 7)
    assert not disk.drop("n1", 7)
    assert not has(disk, 1)
    assert has(other, 1), "an open file outlives its name; the bytes are right"
    other.copies.close()
    assert not has(other, 1)
    assert disk.usage.seen == 0 == used_bytes(tmp_path)


@pytest.mark.parametrize("eviction", ["lru", "2-random"])
def test_capacity_is_kept(tmp_path: Path, eviction: str) -> None:
    disk = open_disk(tmp_path, capacity_bytes=MIB, eviction=eviction)
    for number in range(60):
        assert add(disk, number, shard=number % 5)
        assert used_bytes(tmp_path) == disk.usage.seen <= MIB
    assert disk.eviction.evicted >= 50
    assert used_bytes(tmp_path) > MIB // 2
    assert not add(disk, 99, 2 * MIB), "it would never fit"
    assert list(tmp_path.glob("*/tmp/*")) == []


def test_nothing_is_evicted_where_nothing_is_to_be(tmp_path: Path) -> None:
    disk = open_disk(tmp_path, capacity_bytes=MIB, eviction="none")
    added = [add(disk, number) for number in range(20)]
    assert added == [True] * 10 + [False] * 10 or sum(added) in (9, 10)
    assert [has(disk, number) for number in range(20)] == added
    assert disk.eviction.evicted == 0


def test_lru_keeps_what_is_used(tmp_path: Path) -> None:
    disk = open_disk(tmp_path, capacity_bytes=MIB, eviction="lru")
    for number in range(9):
        add(disk, number)
        age(tmp_path, number, 5000 - number)
    disk.copies.close()
    assert has(disk, 0), "and thereby young again"
    for number in (100, 101, 102):
        add(disk, number)
    assert has(disk, 0)
    assert not has(disk, 1)
    assert has(disk, 8)


def test_an_open_file_that_is_used_stays_young(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = open_disk(tmp_path)
    add(disk, 1)
    assert has(disk, 1)
    age(tmp_path, 1, 5000)
    before = cache_files(tmp_path)[0].stat().st_mtime
    assert has(disk, 1)
    assert cache_files(tmp_path)[0].stat().st_mtime == before, "it is looked at now and then only"
    now = RUNTIME.monotonic()
    monkeypatch.setattr(RUNTIME, "monotonic", lambda: now + 301)
    assert has(disk, 1)
    assert cache_files(tmp_path)[0].stat().st_mtime > before + 4000


def test_two_random_keeps_the_younger(tmp_path: Path) -> None:
    """Of many files the youngest are the likeliest to stay."""
    disk = open_disk(tmp_path, capacity_bytes=MIB)
    for number in range(200):
        add(disk, number, 8 * KIB)
        if number < 100:
            age(tmp_path, number, 5000)
    kept = [number for number in range(200) if has(disk, number)]
    assert sum(number >= 100 for number in kept) > 0.7 * len(kept)


def test_what_nobody_used_expires(tmp_path: Path) -> None:
    disk = open_disk(tmp_path, expire_s=1000)
    for number in (1, 2):
        add(disk, number)
    age(tmp_path, 1, 2000)
    disk.eviction.look_through(7)
    disk.copies.close()
    assert (has(disk, 1), has(disk, 2)) == (False, True)
    assert disk.usage.seen == used_bytes(tmp_path)


class Shared(OsFiles):
    """Files on a disk of which others leave so much."""

    free_bytes = 0

    def space(self, path: str) -> Space:
        assert super().space(path).total_bytes > 0
        return Space(100 * MIB, self.free_bytes, 1.0)


def test_the_floor_of_free_space(tmp_path: Path) -> None:
    """Nothing is added where the disk has less free than it should."""
    files = Shared()
    disk = Disk(RUNTIME, files, str(tmp_path), "volume", DiskLimits(64 * MIB, free_ratio=0.25))
    disk.place.prepare()
    files.free_bytes = 25 * MIB
    assert not add(disk, 1)
    assert cache_files(tmp_path) == []
    files.free_bytes = 26 * MIB
    assert add(disk, 1)


def test_counting_repairs_what_a_crash_left(tmp_path: Path) -> None:
    disk = open_disk(tmp_path)
    add(disk, 1)
    exact = disk.usage.seen
    usage = tmp_path / "volume/usage"
    usage.write_bytes(b"\xff" * 8 * 1024)
    assert open_disk(tmp_path).usage.seen == 0, "absurd numbers are none"
    usage.write_bytes(b"\x01\x02")
    disk = open_disk(tmp_path)
    for shard in range(8):
        disk.eviction.look_through(shard)
    assert disk.usage.seen == exact


def test_half_written_files_are_swept(tmp_path: Path) -> None:
    disk = open_disk(tmp_path)
    old, new = Path(disk.place.tmp()), Path(disk.place.tmp())
    old.write_bytes(b"x")
    new.write_bytes(b"x")
    then = (RUNTIME.now_ns() - 2 * TMP_AGE_NS) / 1e9
    os.utime(old, (then, then))
    disk.place.sweep_tmp()
    assert (old.exists(), new.exists()) == (False, True)


def test_descriptors_are_bounded(tmp_path: Path) -> None:
    def kept() -> int:
        copies = f"{tmp_path}/volume/007/"
        return sum(place.startswith(copies) for place in descriptors())

    disk = open_disk(tmp_path)
    for number in range(OPEN_MAX + 50):
        add(disk, number, 10)
        assert has(disk, number)
    assert kept() == OPEN_MAX
    disk.copies.close()
    assert kept() == 0


@pytest.mark.parametrize("cut", [0, 10, 30, 70, 5000])
def test_a_torn_file_is_none(tmp_path: Path, cut: int) -> None:
    add(open_disk(tmp_path), 1)
    os.truncate(cache_files(tmp_path)[0], cut)
    with pytest.raises(BadFile):
        has(open_disk(tmp_path), 1)


def test_a_file_of_another_name_is_none(tmp_path: Path) -> None:
    disk = open_disk(tmp_path)
    add(disk, 1)
    add(disk, 2)
    one, two = cache_files(tmp_path)
    one.rename(two)
    with pytest.raises(BadFile, match="n1"):
        has(open_disk(tmp_path), 2)
    assert add(open_disk(tmp_path), 2), "it is replaced"
    assert has(open_disk(tmp_path), 2)


def test_volumes_do_not_share(tmp_path: Path) -> None:
    limits = DiskLimits(MIB, free_ratio=0)
    disks = [Disk(RUNTIME, OsFiles(), str(tmp_path), volume, limits) for volume in "ab"]
    for disk in disks:
        disk.place.prepare()
    add(disks[0], 1)
    assert not has(disks[1], 1)
    assert disks[0].place.id == disks[1].place.id
    assert disks[1].usage.seen == 0
    assert oct((tmp_path / "a").stat().st_mode) == "0o40700"


@pytest.fixture
def exchanged(tmp_path: Path) -> tuple[Disk, Path]:
    """A disk whose directory another user has exchanged in a sticky place, and a victim's files.

    The shard that the disk looks through for room is a link to those.
    """
    place = tmp_path / "shared"
    place.mkdir()
    place.chmod(0o1777)
    disk = open_disk(place / "d", expire_s=60.0)
    assert add(disk, 1)
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "n1").write_bytes(b"precious")
    os.utime(victim / "n1", (0, 0))
    (place / "d").rename(tmp_path / "gone")
    (place / "d/volume/tmp").mkdir(parents=True)
    (place / "d/volume/007").symlink_to(victim)
    return disk, victim


@needs_root
def test_what_another_user_puts_in_place_of_a_cache_is_not_used(
    exchanged: tuple[Disk, Path],
) -> None:
    """Room was made, as root, in a directory of that user's choice."""
    disk, victim = exchanged
    root = Path(disk.place.root)
    shutil.copy(root.parents[1] / "gone/volume/usage", root / "volume/usage")
    for path in (root, *root.rglob("*")):
        os.chown(path, 1001, 1001, follow_symlinks=False)
    for act in (
        lambda: disk.eviction.look_through(7, 1 << 20),
        lambda: disk.drop("n1", 7),
        lambda: add(disk, 1),
        disk.place.restore,
        disk.place.sweep_tmp,
    ):
        with pytest.raises(PermissionError):
            act()
    assert [path.name for path in victim.iterdir()] == ["n1"]
    assert not (root / "disk-id").exists()


@needs_root
def test_a_link_in_a_cache_is_not_followed(exchanged: tuple[Disk, Path]) -> None:
    """Directories of the owner's own: they are one disk, but for the link."""
    disk, victim = exchanged
    root = Path(disk.place.root)
    shutil.copy(root.parents[1] / "gone/volume/usage", root / "volume/usage")
    for path in (root, root / "volume", root / "volume/tmp"):
        path.chmod(0o700)
    with pytest.raises(NotADirectoryError):
        disk.eviction.look_through(7, 1 << 20)
    with pytest.raises(NotADirectoryError):
        disk.place._files.unlink(f"{root}/volume/007/n1")
    assert [path.name for path in victim.iterdir()] == ["n1"]

"""What checkpoints are measured on: a disk that is held back, each turn beside it, and nothing."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tools.benchlib import checkpoint, disk, nothing
from tools.benchlib.checkpoint import CheckpointRun
from tools.benchlib.systems import SLICEFS
from tools.benchlib.volume import BenchVolume
from tools.benchlib.workloads import MIB, Options


def test_version_1_holds_the_device_and_lets_it_go(tmp_path: Path) -> None:
    limits = tmp_path / "blkio" / "blkio.throttle.write_bps_device"
    limits.parent.mkdir()
    limits.touch()
    with disk.throttled(tmp_path, "7:3", 4096):
        assert limits.read_text() == "7:3 4096\n"
    assert limits.read_text() == "7:3 0\n"


def test_version_2_holds_who_is_in_a_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpu io memory\n")
    group = tmp_path / f"slicefs-bench-{os.getpid()}"
    monkeypatch.setattr(disk, "SELF", tmp_path / "self")
    (tmp_path / "self").write_text("0::/\n")
    monkeypatch.setattr(Path, "rmdir", shutil.rmtree)  # the kernel's files go with the group
    with disk.throttled(tmp_path, "7:3", 4096):
        assert (tmp_path / "cgroup.subtree_control").read_text() == "+io\n"
        assert (group / "io.max").read_text() == "7:3 wbps=4096\n"
        assert (group / "cgroup.procs").read_text() == f"{os.getpid()}\n"
    assert (tmp_path / "cgroup.procs").read_text() == f"{os.getpid()}\n"
    assert not group.exists()


def test_a_kernel_that_can_not_is_told_plainly(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpu memory\n")
    with (
        pytest.raises(RuntimeError, match="no blkio"),
        disk.throttled(tmp_path, "7:3", 4096),
    ):
        pass


def test_what_is_cached_goes_to_a_disk_that_is_given(tmp_path: Path) -> None:
    volume = BenchVolume(SLICEFS, tmp_path, "redis://h/1", disk=tmp_path / "disk")
    assert volume.cache == tmp_path / "disk" / "slicefs" / "cache"
    assert tmp_path / "disk" not in volume.store.parents


def test_each_turn_is_beside_the_raw_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    volume = BenchVolume(SLICEFS, tmp_path, "redis://h/1")
    raw = iter([2.0, 4.0, 1.0] * 2)
    written: list[Path] = []

    def write(folder: Path, _sizes: object, _sync: bool) -> float:
        folder.mkdir(parents=True)
        written.append(folder)
        return next(raw)

    monkeypatch.setattr(checkpoint, "write", write)
    monkeypatch.setattr(checkpoint, "_run", lambda *_: CheckpointRun(3.0, 5.0, 0.0))
    monkeypatch.setattr(BenchVolume, "more_mounts", _one_mount)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)  # nobody mounts anything
    found = [*checkpoint.checkpoint(volume, Options((1,), None, 0, None))]
    stalls = [each.value for each in found if each.operation == "fsync+close: stall in raw disks"]
    assert stalls == [1.5, 0.75, 3.0]
    assert sum(each.operation == "close: stall in raw disks" for each in found) == 3
    assert [folder.parent for folder in written] == [volume.disk] * 6
    assert not any(folder.exists() for folder in written)


@contextmanager
def _one_mount(volume: BenchVolume, _count: int) -> Iterator[list[Path]]:
    yield [volume.root / "mnt0"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_disk_takes_what_it_is_held_to(tmp_path: Path) -> None:
    where, image = tmp_path / "disk", tmp_path / f"{tmp_path.name}.ext4"
    try:
        with disk.held_to(64.0, tmp_path, where):
            assert image.exists()
            begin = time.monotonic()
            with (where / "file").open("wb") as file:
                for _ in range(64):
                    file.write(bytes(MIB))
                file.flush()
                os.fsync(file.fileno())
            took = time.monotonic() - begin
    except RuntimeError as error:
        pytest.skip(str(error))
    assert not image.exists()
    assert not os.path.ismount(where)
    assert took > 0.8  # bursts of a tenth of a second pass at once


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize("way", nothing.WAYS)
def test_a_file_system_that_does_nothing_takes_a_checkpoint(tmp_path: Path, way: str) -> None:
    try:
        with nothing.mounted(tmp_path / "mnt", way) as mount:
            checkpoint.write(mount / "first", [3 * MIB, 5], True)
            checkpoint.write(mount / "second", [MIB], False)
    except RuntimeError as error:
        pytest.skip(str(error))
    assert not os.path.ismount(tmp_path / "mnt")

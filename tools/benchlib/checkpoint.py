"""Checkpoints to a store that is slow to take them: how long a program waits, and what others see.

`checkpoint`: ten shards and a marker, 192 MiB, with fsync of each file and without. `markers`: 200
small files and a marker. In each turn the same program writes to a plain directory beside the
caches, too, and to a file system that does nothing (`nothing`): a stall is told in raw disks.
`rclone copy --transfers 16` of that directory, in no order, is the same for storing. Every system
answers from its cache and uploads later. From a second mount the marker must not be seen while
shards are on their way: how much earlier it was, is the one number of which only 0 is good.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

from tools.benchlib import machine, nothing, procs
from tools.benchlib.results import Metric
from tools.benchlib.systems import JUICEFS, RCLONE, SLICEFS, System
from tools.benchlib.volume import BenchVolume
from tools.benchlib.workloads import MIB, Options

SHARDS: Final = 10
TOTAL_MIB: Final = 192
SMALL_FILES: Final = 200
SMALL_BYTES: Final = 16 << 10
MARKER: Final = "complete"
STORED_S_MAX: Final = 300.0
LOOK_S: Final = 0.02
NOTICE_S: Final = 0.2  # what is seen so much earlier than we notice that all is stored is in order
TIMES: Final = 3  # in one volume, each in turn with the raw disk; the table has the median of all
MEMORY_TIMES: Final = 4  # of a checkpoint: pages of raw files, cache and store, and some to spare

# answers from the cache; rclone waits 5 s before it begins, and looks at a directory every 5 min
WRITE_BACK: Final = {
    SLICEFS.name: " --writeback --staging-dir {cache}/staging",
    JUICEFS.name: " --writeback",
    RCLONE.name: " --vfs-write-back 0s --dir-cache-time 100ms --transfers 16",
}


def writing_back(system: System) -> System:
    """`system` with the options that let it answer before its store has."""
    return replace(system, mount=system.mount + WRITE_BACK[system.name])


class CheckpointRun(NamedTuple):
    """One checkpoint."""

    stall_s: float  # until the program went on
    durable_s: float  # until the store had all of it
    early_s: float  # how long before that others saw the marker


def checkpoint(volume: BenchVolume, _options: Options) -> Iterator[Metric]:
    """Ten shards of 19.2 MiB and a marker."""
    sizes = [TOTAL_MIB * MIB // SHARDS] * SHARDS
    for sync in (True, False):
        label = "fsync+close" if sync else "close"
        yield from _measure(volume, sizes, sync, label)


def markers(volume: BenchVolume, options: Options) -> Iterator[Metric]:
    """Many small files and a marker."""
    sizes = [SMALL_BYTES] * options.count_or(SMALL_FILES)
    yield from _measure(volume, sizes, False, f"{len(sizes)} small files")


def _measure(volume: BenchVolume, sizes: Sequence[int], sync: bool, label: str) -> Iterator[Metric]:
    early = []
    with volume.more_mounts(1) as (other,):
        for turn in range(TIMES):
            folder = f"{label}-{turn}".replace(" ", "-")
            beside = volume.disk / f"raw-{folder}"
            machine.touch_memory(MEMORY_TIMES * sum(sizes))
            raw = write(beside, sizes, sync)
            copied = volume.copy_beside(beside)
            shutil.rmtree(beside)
            run = _run(volume, other, folder, sizes, sync)
            yield Metric(f"{label}: raw disk", raw, "s")
            yield Metric(f"{label}: until the program goes on", run.stall_s, "s")
            yield Metric(f"{label}: stall in raw disks", run.stall_s / raw, "×")
            for way in _ways(volume):
                with nothing.mounted(volume.root / f"nothing-{way}", way) as mount:
                    least = write(mount / folder, sizes, sync)
                yield Metric(f"{label}: nothing, {way}, in raw disks", least / raw, "×")
            yield Metric(f"{label}: until the store has it", run.durable_s, "s")
            if copied is not None:
                yield Metric(f"{label}: rclone copy, 16 at a time", copied, "s")
                yield Metric(
                    f"{label}: until the store has it, in copies", run.durable_s / copied, "×"
                )
            early.append(run.early_s)
    yield Metric(f"{label}: marker seen too early", max(early), "s early")


def _ways(volume: BenchVolume) -> Sequence[str]:
    """How a file system that does nothing is measured: beside ours, and only root can mount it."""
    return nothing.WAYS if volume.system.name == SLICEFS.name and os.geteuid() == 0 else ()


def _run(
    volume: BenchVolume, other: Path, name: str, sizes: Sequence[int], sync: bool
) -> CheckpointRun:
    watcher = NameWatcher(other / name / MARKER)
    begin = time.monotonic()
    stall = write(volume.mountpoint / name, sizes, sync)
    if not procs.wait_until(lambda: is_stored(volume, name), STORED_S_MAX):
        raise RuntimeError(f"{volume.system.name} does not store {name}")
    durable = time.monotonic() - begin
    early = begin + durable - watcher.seen_at()
    return CheckpointRun(stall, durable, early if early > NOTICE_S else 0.0)


def write(folder: Path, sizes: Sequence[int], sync: bool) -> float:
    """Write a checkpoint as programs do; how many seconds that took."""
    data = os.urandom(MIB)
    begin = time.monotonic()
    folder.mkdir()
    for number, size in enumerate(sizes):
        _write_file(folder / f"shard{number}", data, size, sync)
    _write_file(folder / MARKER, b"all is there\n", 13, sync)
    return time.monotonic() - begin


def _write_file(path: Path, data: bytes, size: int, sync: bool) -> None:
    view = memoryview(data)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        while size:
            size -= os.write(fd, view[: min(size, len(view))])
        if sync:
            os.fsync(fd)
    finally:
        os.close(fd)


def is_stored(volume: BenchVolume, name: str) -> bool:
    """Whether the store has all that was written, as the system itself knows best."""
    if volume.system.name == SLICEFS.name:
        return os.getxattr(volume.mountpoint / name, "user.slicefs.durable") == b"1"
    if volume.system.name == JUICEFS.name:
        staged = (path for path in volume.cache.rglob("*") if "rawstaging" in path.parts)
        return not any(path.is_file() for path in staged)
    return volume.is_stored()


class NameWatcher:
    """Looks for a name until it is there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = 0.0
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        give_up = time.monotonic() + STORED_S_MAX
        while not _exists(self._path) and time.monotonic() < give_up:
            time.sleep(LOOK_S)
        self._seen = time.monotonic()

    def seen_at(self) -> float:
        """When it was seen, by the monotonic clock; waits for it."""
        self._thread.join()
        return self._seen


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # of a system that can't say
        return False

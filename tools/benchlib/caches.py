"""What a disk cache gives back, beside the same bytes in plain files on the same disk.

`cache`: a data set of small files and a large file have been read once, so that the cache has them.
Then the same client program reads them through the mount and in a plain directory beside the cache:

- *from disk*: neither the kernel nor the client has them, and the kernel has dropped its pages of
  the cache's files and of the plain ones;
- *from page cache*: the kernel has the pages of the cache's files and of the plain ones;
- *warm*: nothing was dropped at all.

`records`: programs that map a large file and read records in shuffled order, as users of LMDB do.
What counts is how many bytes come from the store for a byte that is asked for.

`lmdb`: random gets from databases of LMDB, each value once at most, told not to read ahead and as
LMDB comes. What counts is the same, for a byte of the values.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tools.benchlib import client, machine, procs
from tools.benchlib.results import OF_RAW, RATE, Metric
from tools.benchlib.volume import BenchVolume
from tools.benchlib.workloads import (
    KIB,
    MIB,
    SEED,
    SMALL_FILE_BYTES,
    SMALL_FILE_THREADS,
    Options,
)

FILLS_MAX = 6  # readings until the store is asked for nothing any more: files are packed meanwhile
SETTLE_S = 1.0  # for which a cache directory does not change when all copies are written
SETTLED_S_MAX = 60.0
PAGES = 2000  # single pages, of the many that a file has
PAGE_BYTES = 4 * KIB
GETS = 500
VALUES = (KIB, 16 * KIB, 100 * KIB)  # what a tree's page holds several of, and what takes pages


def cache(volume: BenchVolume, options: Options) -> Iterator[Metric]:
    """Small files and a large one: from the disk cache, and in plain files beside it."""
    files, size = options.count_or(2000), options.size_mib * MIB
    raw = volume.disk / "raw"
    raw.mkdir()
    machine.touch_memory(2 * size)
    for where in (raw, volume.mountpoint):
        client.run("dataloop", "writemany", where / "small", *_sizes(files))
        client.run("dataloop", "write", where / "big", size, MIB)
    volume.remount(keep_cache=False)
    _fill(volume, files)
    for state in ("from disk", "from page cache", "warm"):
        if state != "warm":
            volume.remount(keep_cache=True)
        if state == "from disk":
            drop_pages(raw, volume.cache)
        yield from _both(f"epoch of {files} files, {state}", volume, raw, files)


def _sizes(files: int) -> tuple[int, ...]:
    return SMALL_FILE_THREADS, files, SMALL_FILE_BYTES


def _both(name: str, volume: BenchVolume, raw: Path, files: int) -> Iterator[Metric]:
    """One state: the small files, then the large one, plain and through the mount."""
    epochs, reads = [], []
    for where in (raw, volume.mountpoint):
        epochs += client.run("dataloop", "readmany", where / "small", *_sizes(files), SEED)
    before = volume.cpu_seconds()
    for where in (raw, volume.mountpoint):
        reads += client.run("dataloop", "read", where / "big", MIB)
    spent = volume.cpu_seconds() - before
    plain, ours = epochs
    yield Metric(name, ours.us_per_op, "µs/op")
    yield Metric(f"{name}: of plain files", plain.us_per_op / ours.us_per_op, OF_RAW)
    name = name.replace(f"epoch of {files} files", "large file")
    plain, ours = reads
    yield Metric(name, ours.mb_per_s, RATE)
    yield Metric(f"{name}: of a plain file", ours.mb_per_s / plain.mb_per_s, OF_RAW)
    yield Metric(name, spent / (ours.bytes / 1e9), "CPU s/GB")


def _fill(volume: BenchVolume, files: int) -> None:
    """Read everything until the store is not asked any more, and the copies are on the disk."""
    for _ in range(FILLS_MAX):
        before = volume.fetched_bytes()
        client.run("dataloop", "readmany", volume.mountpoint / "small", *_sizes(files), SEED)
        client.run("dataloop", "read", volume.mountpoint / "big", MIB)
        _settle(volume.cache)
        if volume.fetched_bytes() == before:
            return
        volume.remount(keep_cache=True)
    raise RuntimeError(f"{volume.system.name} does not keep in its cache what it has read")


def _settle(directory: Path) -> None:
    """Until nothing is written into a directory."""
    seen: list[tuple[float, int]] = []

    def is_quiet() -> bool:
        size = sum(path.lstat().st_size for path in _files(directory))
        if not seen or seen[-1][1] != size:
            seen.append((time.monotonic(), size))
        return time.monotonic() - seen[-1][0] > SETTLE_S

    if not procs.wait_until(is_quiet, SETTLED_S_MAX):
        raise RuntimeError(f"{directory} is written to without an end")


def _files(directory: Path) -> Iterator[Path]:
    return (path for path in directory.rglob("*") if path.is_file() and not path.is_symlink())


def drop_pages(*directories: Path) -> None:
    """Have the kernel forget the pages of all files below; only clean ones can go."""
    os.sync()
    for directory in directories:
        for path in _files(directory):
            fd = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def lmdb(volume: BenchVolume, options: Options) -> Iterator[Metric]:
    """Random gets from a cold database for each size of values."""
    gets = options.count_or(GETS)
    for length in VALUES:
        path = volume.mountpoint / f"values-{length}.mdb"
        made = volume.root / path.name  # LMDB wants to share memory with other writers
        _lmdb("fill", made, length, options.size_mib * MIB // length)
        shutil.copyfile(made, path)
        made.unlink()
        for ahead in (0, 1):
            volume.remount(keep_cache=False)
            name = f"{gets} values of {length // KIB} KiB{', the kernel reads ahead' * ahead}"
            before = volume.fetched_bytes()
            timing = _lmdb("get", path, length, gets, SEED, ahead)
            _settle(volume.cache)  # what is fetched in the background counts, too
            fetched = volume.fetched_bytes() - before
            yield Metric(name, timing.us_per_op, "µs/op")
            yield Metric(f"{name}: fetched for a byte", fetched / timing.bytes, "bytes")


def _lmdb(*words: str | int | Path) -> client.Timing:
    """One phase of a process of its own."""
    command = [sys.executable, "-m", "tools.benchlib.lmdbloop", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=client.RUN_S_MAX)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return client.parse(done.stdout)[0]


def records(volume: BenchVolume, options: Options) -> Iterator[Metric]:
    """A mapped file: all its records, shuffled; some pages of it; then all of them once more."""
    size = options.size_mib * MIB
    path = volume.mountpoint / "data.mdb"
    machine.touch_memory(size)
    client.run("dataloop", "write", path, size, MIB)
    for length, count, name in (
        (SMALL_FILE_BYTES, size // SMALL_FILE_BYTES, "all records of 100 KiB"),
        (PAGE_BYTES, options.count_or(PAGES), f"{options.count_or(PAGES)} pages of 4 KiB"),
    ):
        volume.remount(keep_cache=False)
        for state in ("cold", "cached"):
            before = volume.fetched_bytes()
            (timing,) = client.run("dataloop", "mapped", path, length, count, SEED)
            fetched = volume.fetched_bytes() - before
            yield Metric(f"{name}, {state}", timing.us_per_op, "µs/op")
            yield Metric(f"{name}, {state}: fetched for a byte", fetched / timing.bytes, "bytes")
            _settle(volume.cache)
            volume.remount(keep_cache=True)

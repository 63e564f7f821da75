"""What is run on each volume. A workload is a function from a mounted volume to metrics.

Cold means a fresh mount with an emptied cache directory. Cached means that the client has the data
but the kernel has not. Warm means that nothing was dropped. The object store's own files stay in
the page cache throughout, for both systems alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from tools.benchlib import client, machine
from tools.benchlib.redis import Redis
from tools.benchlib.results import RATE, Metric
from tools.benchlib.volume import BenchVolume

GB = 1e9
MIB = 1 << 20
KIB = 1 << 10
SMALL_FILE_THREADS = 4
SMALL_FILE_BYTES = 100 * KIB
RANDOM_READS = 2000
SEED = 1


@dataclass(frozen=True)
class Options:
    """What the command line says about the sizes of workloads; None means the default."""

    threads: tuple[int, ...]
    count: int | None
    size_mib: int
    redis: Redis | None  # None where the metadata is in SQLite

    def count_or(self, default: int) -> int:
        """--count, or `default`."""
        return default if self.count is None else self.count


Workload: TypeAlias = Callable[[BenchVolume, Options], Iterator[Metric]]


def meta(volume: BenchVolume, options: Options) -> Iterator[Metric]:
    """Metadata operations, each thread in its own directory and then all in one."""
    for threads in options.threads:
        for layout in ("own", "shared") if threads > 1 else ("own",):
            label = f"{threads} threads, {layout} dir" if threads > 1 else "1 thread"
            yield from _meta_once(volume, options, threads, layout, label)


def _meta_once(
    volume: BenchVolume, options: Options, threads: int, layout: str, label: str
) -> Iterator[Metric]:
    root = volume.mountpoint / f"meta-{layout}-{threads}"
    first = (root, threads, options.count_or(2000), layout)
    names = {
        "mkdir": ["mkdir"],
        "rmdir": ["rmdir"],
        "create": ["create+close"],
        "stat": ["stat", "stat again"],
        "open": ["open+close"],
        "ls": ["readdir+lstat", "readdir+lstat, fresh mount", "readdir+lstat again"],
        "rename": ["rename"],
        "unlink": ["unlink"],
    }
    for phase in ("mkdir", "rmdir", "create", "stat", "stat", "open", "ls"):
        yield from _meta_phase(volume, options, first, phase, f"{names[phase].pop(0)}, {label}")
    volume.remount(keep_cache=True)
    for phase in ("ls", "ls", "rename", "unlink"):
        yield from _meta_phase(volume, options, first, phase, f"{names[phase].pop(0)}, {label}")


def _meta_phase(
    volume: BenchVolume, options: Options, first: Sequence[str | int | Path], phase: str, name: str
) -> Iterator[Metric]:
    """One phase, with what it cost the client and Redis: wall times of two machines, or of one on
    two days, do not compare."""
    server = options.redis
    before, before_s = volume.spent(), server.cpu_seconds() if server else 0.0
    (timing,) = client.run("metaloop", *first, phase)
    used, used_s = volume.spent().since(before), server.cpu_seconds() if server else 0.0
    each = 1e6 / max(1, timing.ops)
    yield Metric(name, timing.us_per_op, "µs/op")
    yield Metric(name, used.user_s * each, "client user µs/op")
    yield Metric(name, used.system_s * each, "client system µs/op")
    if server:
        yield Metric(name, (used_s - before_s) * each, "Redis µs/op")
    yield Metric(name, used.switches / max(1, timing.ops), "switches/op")


def bigfile(volume: BenchVolume, options: Options) -> Iterator[Metric]:
    """One large file: sequential writes and reads, then random reads."""
    size = options.size_mib * MIB
    for io, name in ((MIB, "1 MiB"), (128 * KIB, "128 KiB")):
        path = volume.mountpoint / f"big-{io}"
        machine.touch_memory(3 * size)
        yield from _sequential(volume, f"write+fsync {name}", "write", path, size, io)
    yield Metric("peak memory of the client, writing", volume.peak_rss_bytes() / MIB, "MiB")
    path = volume.mountpoint / f"big-{MIB}"
    volume.remount(keep_cache=False)
    machine.touch_memory(3 * size)
    yield from _sequential(volume, "read 1 MiB, cold", "read", path, MIB)
    client.run("dataloop", "drop", path)
    machine.touch_memory(size)
    yield from _sequential(volume, "read 1 MiB, cached", "read", path, MIB)
    yield from _sequential(volume, "read 1 MiB, warm", "read", path, MIB)
    for io, name in ((4 * KIB, "4 KiB"), (128 * KIB, "128 KiB")):
        volume.remount(keep_cache=False)
        machine.touch_memory(2 * size)
        arguments = ("random", path, io, options.count_or(RANDOM_READS), SEED)
        for state in ("cold", "cached", "warm"):
            if state == "cached":
                client.run("dataloop", "drop", path)
            (timing,) = client.run("dataloop", *arguments)
            yield Metric(f"random read {name}, {state}", timing.us_per_op, "µs/op")
    yield Metric("peak memory of the client, all", volume.peak_rss_bytes() / MIB, "MiB")


def _sequential(volume: BenchVolume, name: str, *arguments: object) -> Iterator[Metric]:
    before = volume.cpu_seconds()
    (timing,) = client.run("dataloop", *(str(argument) for argument in arguments))
    spent = volume.cpu_seconds() - before
    yield Metric(name, timing.mb_per_s, RATE)
    yield Metric(name, spent / (timing.bytes / GB), "CPU s/GB")


def redis_memory(volume: BenchVolume, options: Options) -> Iterator[Metric]:
    """What Redis holds for one-block files, in directories of 1,000."""
    if options.redis is None:
        raise ValueError("redis-memory needs --meta redis")
    files = options.count_or(100_000)
    volume.umount()
    before = options.redis.used_memory_bytes()
    volume.mount()
    threads = SMALL_FILE_THREADS
    (timing,) = client.run(
        "metaloop", volume.mountpoint / "fill", threads, files // threads, "own", "fill"
    )
    volume.umount()
    used = options.redis.used_memory_bytes()
    options.redis.forget_tracking()
    kept = options.redis.used_memory_bytes()
    volume.mount()
    name = f"Redis memory of {timing.ops:,} files"
    yield Metric(name, (kept - before) / timing.ops, "B/file")
    yield Metric(f"{name}, and who has read them", (used - before) / timing.ops, "B/file")
    yield Metric("create+write+close 100 B, 4 threads", timing.us_per_op, "µs/op")


WORKLOADS: Mapping[str, Workload] = {
    "meta": meta,
    "bigfile": bigfile,
    "redis-memory": redis_memory,
}

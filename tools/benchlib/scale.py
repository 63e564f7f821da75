"""Many clients in one directory, and volumes of more and more files: the workloads of scale.

`crowd`: client processes, each with a mount of its own, create files in the same directory.
`processes`: more and more of them on one mount, and the same divided between two mounts: what a
second process that serves could gain.
`sizes`: what a create, a listing, a dump cost where there are 10,000 files and where there are
100,000 or a million. SliceFS' volumes are filled by `fill`, others' through their mount, and so
not beyond PEER_FILES_MAX.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tools.benchlib import client, fill
from tools.benchlib.redis import Redis
from tools.benchlib.results import Metric
from tools.benchlib.systems import SLICEFS
from tools.benchlib.volume import BenchVolume
from tools.benchlib.workloads import Options

CLIENTS = (1, 2, 4, 8)
CREATES = 2000
PROCESSES = (1, 2, 4, 8, 32)
SIZES = (10_000, 100_000, 1_000_000)
PEER_FILES_MAX = 100_000  # through a mount; a million would take a quarter of an hour
FILES_A_DIRECTORY = 10_000
LOAD_DB = 7  # of Redis, for a load
COMMAND_S_MAX = 1800


def crowd(volume: BenchVolume, options: Options) -> Iterator[Metric]:
    """Creates in one directory by more and more clients."""
    server = _server(options)
    for clients in CLIENTS:
        with volume.more_mounts(clients - 1) as others:
            yield from _crowd(
                volume, [volume.mountpoint, *others], server, options.count_or(CREATES)
            )


def _crowd(
    volume: BenchVolume, mounts: Sequence[Path], server: Redis, count: int
) -> Iterator[Metric]:
    root = f"crowd-{len(mounts)}"
    for mount in mounts:  # each knows the directory, as it would when it has worked for a while
        client.run("metaloop", mount / root, 1, 1, f"shared+{1000 + mounts.index(mount)}", "create")
    before = [_stats(mount) for mount in mounts]
    spent = server.cpu_seconds()
    begin = time.monotonic()
    with ThreadPoolExecutor(len(mounts)) as pool:
        runs = [
            pool.submit(client.run, "metaloop", mount / root, 1, count, f"shared+{first}", "create")
            for first, mount in enumerate(mounts)
        ]
        for run in runs:
            run.result()
    took = time.monotonic() - begin
    spent = server.cpu_seconds() - spent
    creates = count * len(mounts)
    label = f"{len(mounts)} clients" if len(mounts) > 1 else "1 client"
    yield Metric(f"create+close, one directory, {label}", took * 1e6 / creates, "µs/op")
    yield Metric(f"Redis, {label}", spent * 1e6 / creates, "CPU µs/op")
    yield Metric(f"Redis, {label}", 100 * spent / took, "% of a CPU")
    if volume.system.name == SLICEFS.name:
        after = [_stats(mount) for mount in mounts]
        for name, unit in (("conflicts", "conflicts"), ("round_trips", "requests/op")):
            key = f"slicefs_meta_{name}_total"
            moved = sum(map(lambda new, old: new[key] - old[key], after, before))
            yield Metric(f"metadata, {label}", moved / (1 if unit == name else creates), unit)


def processes(volume: BenchVolume, options: Options) -> Iterator[Metric]:
    """Programs that each work in a directory of their own, on one mount and on two."""
    for mounts in (1, 2) if volume.system.name == SLICEFS.name else (1,):
        with volume.more_mounts(mounts - 1) as others:
            places = [volume.mountpoint, *others]
            for count in PROCESSES:
                each = max(50, options.count_or(CREATES) // count)
                roots = [places[at % mounts] / f"p{mounts}-{count}-{at}" for at in range(count)]
                for phase in ("create", "open", "rename"):
                    took_s = _at_once(roots, each, phase)
                    label = f"{phase}, {count} processes, {mounts} mount{'s' * (mounts > 1)}"
                    yield Metric(label, took_s * 1e6 / (each * count), "µs/op")


def _at_once(roots: Sequence[Path], count: int, phase: str) -> float:
    """Seconds that one process for each root needs for a phase, all at the same time."""
    begin = time.monotonic()
    with ThreadPoolExecutor(len(roots)) as pool:
        run = partial(client.run, "metaloop")
        for _ in pool.map(lambda root: run(root, 1, count, "own", phase), roots):
            pass
    return time.monotonic() - begin


def _stats(mount: Path) -> dict[str, float]:
    """The numbers of a mount of ours."""
    path = mount / ".stats"
    if not path.exists():
        return {}
    pairs = (line.rpartition(" ") for line in path.read_text().splitlines())
    return {name: float(value) for name, _, value in pairs}


def sizes(volume: BenchVolume, options: Options) -> Iterator[Metric]:
    """What single calls and whole passes cost as the volume grows."""
    server = _server(options)
    ours = volume.system.name == SLICEFS.name
    volume.umount()
    empty = server.used_memory_bytes()
    volume.mount()
    files = 0
    for size in SIZES:
        if size > (
            options.count_or(SIZES[-1]) if ours else min(PEER_FILES_MAX, options.count_or(size))
        ):
            return
        label = f"{size:,} files"
        yield from _grow(volume, files, size, label, ours)
        files = size
        volume.umount()
        server.forget_tracking()
        used = server.used_memory_bytes() - empty
        yield Metric(f"Redis memory, {label}", used / size, "B/file")
        yield from _passes(volume, server, size, label, ours)
        volume.mount()


def _grow(volume: BenchVolume, files: int, size: int, label: str, ours: bool) -> Iterator[Metric]:
    begin = time.monotonic()
    for number in range(files // FILES_A_DIRECTORY, size // FILES_A_DIRECTORY):
        if ours:
            path = f"s{number}/0"
            fill.fill_path(volume.meta_url, path.encode(), 0, FILES_A_DIRECTORY)
        else:
            root = volume.mountpoint / f"s{number}"
            client.run("metaloop", root, 1, FILES_A_DIRECTORY, "own", "create")
    if not ours:
        took = time.monotonic() - begin
        yield Metric(f"filling through the mount, {label}", took * 1e6 / (size - files), "µs/op")
    made = volume.mountpoint / f"more-{size}"
    (timing,) = client.run("metaloop", made, 1, CREATES, "own", "create")
    yield Metric(f"create+close, {label}", timing.us_per_op, "µs/op")
    volume.remount(keep_cache=True)
    last = volume.mountpoint / f"s{size // FILES_A_DIRECTORY - 1}"
    (timing,) = client.run("metaloop", last, 1, FILES_A_DIRECTORY, "own", "ls")
    yield Metric(f"readdir+lstat, fresh mount, {label}", timing.us_per_op, "µs/op")


def _passes(
    volume: BenchVolume, server: Redis, size: int, label: str, ours: bool
) -> Iterator[Metric]:
    """Commands that go through everything."""
    dump = volume.root / "dump"
    commands = {"dump": ["dump", volume.meta_url, str(dump)]}
    if ours:
        target = f"redis://127.0.0.1:{server.port}/{LOAD_DB}"
        commands["load"] = ["load", target, str(dump)]
        commands["fsck of the metadata"] = ["fsck", target]
        server.ask("flushdb", db=LOAD_DB)
    for name, words in commands.items():
        begin = time.monotonic()
        _command(volume, words)
        took = time.monotonic() - begin
        yield Metric(f"{name}, {label}", took * 1e6 / size, "µs/file")
    if ours:
        server.ask("flushdb", db=LOAD_DB)
    dump.unlink()


def _command(volume: BenchVolume, words: Sequence[str]) -> None:
    done = subprocess.run(
        [*volume.system.program, *words],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=COMMAND_S_MAX,
        env=os.environ,
    )
    if done.returncode:
        raise RuntimeError(f"{words[0]} exited with {done.returncode}: {done.stderr[-500:]}")


def _server(options: Options) -> Redis:
    if options.redis is None:
        raise ValueError("the workloads of scale need --meta redis")
    return options.redis

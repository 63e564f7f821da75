"""Measure SliceFS against JuiceFS on this machine: `python -m tools.bench meta --threads 1,4`.

Starts a Redis of its own, then takes turns: for each repeat and each system a fresh volume is
formatted, mounted, worked on by the same client program and removed. So drifts of the machine hit
both alike; the table shows medians over the repeats. `tools/benchlib/` holds the parts.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from tools.benchlib import (
    bare,
    caches,
    ceph,
    checks,
    clean,
    csi,
    delay,
    disk,
    floor,
    machine,
    redis,
    results,
    s3,
    sync,
    train,
    train_link,
    train_memory,
)
from tools.benchlib.checkpoint import checkpoint, markers, writing_back
from tools.benchlib.epochs import epochs
from tools.benchlib.passed import passed
from tools.benchlib.pieces import pieces
from tools.benchlib.profile import SUFFIXES, Profiler
from tools.benchlib.s3 import S3
from tools.benchlib.scale import crowd, processes, sizes
from tools.benchlib.small import smallfiles
from tools.benchlib.systems import JUICEFS, RCLONE, SLICEFS, System, adjusted, polling
from tools.benchlib.volume import BenchVolume, bucket_of, mounted
from tools.benchlib.workloads import WORKLOADS, Options

ALL = ("meta", "bigfile", "smallfiles")
CHOICES = {
    **WORKLOADS,
    "smallfiles": smallfiles,
    "crowd": crowd,
    "sizes": sizes,
    "processes": processes,
    "pieces": pieces,
    "cache": caches.cache,
    "records": caches.records,
    "epochs": epochs,
    "passed": passed,
    "lmdb": caches.lmdb,
    "checkpoint": checkpoint,
    "markers": markers,
}
PROGRAMS = {  # with options of their own
    "checks": checks.main,
    "clean": clean.main,
    "csi": csi.main,
    "floor": floor.main,
    "sync": sync.main,
    "train": train.main,
    "train-link": train_link.main,
    "train-memory": train_memory.main,
}
GROUPS = {"all": ALL, "scale": ("crowd", "sizes")}
STORES = ("file", "s3", "radosgw", "rados")
BEHIND_PROXY = ("s3", "radosgw")
BARE = [("bigfile", store) for store in BEHIND_PROXY]
WRITING_BACK = ("checkpoint", "markers")
CACHED = ("cache", "records", "lmdb")  # with a disk cache, wherever data goes
ON_DISK = (*WRITING_BACK, "cache")  # what they cost is the disk's time
MEMORY_STORE = Path("/dev/shm")  # so that a noisy disk is not what is measured
DISK_STORE = Path("/tmp")
BIGFILE_COPIES = 5  # two files in the store, as much in the cache, and some to spare


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m tools.bench", description=__doc__)
    made.add_argument("workload", choices=[*CHOICES, *GROUPS], help=_groups())
    made.add_argument("--peer", choices=["juicefs", "rclone", "both", "none"], default="juicefs")
    made.add_argument("--only", choices=["slicefs", "juicefs"], help="run one system alone")
    made.add_argument("--store", choices=STORES, default="file", help="where data goes")
    made.add_argument(
        "--delay-ms", type=float, default=0.0, help="let each request to the S3 store wait so long"
    )
    made.add_argument(
        "--uplink-mib", type=float, default=0.0, help="MiB a second that reach the S3 store"
    )
    made.add_argument(
        "--downlink-mib", type=float, default=0.0, help="MiB a second that come from it"
    )
    made.add_argument(
        "--writeback", action="store_true", help="let all systems answer before the store has it"
    )
    made.add_argument(
        "--bare", action="store_true", help="bigfile: beside a program that only sends and gets"
    )
    made.add_argument("--threads", type=_numbers, default=(1, 4), help="of meta; 1,4")
    made.add_argument("--count", type=int, help="names per thread, small files or random reads")
    made.add_argument("--size-mib", type=int, default=1024, help="of the big file; 1024")
    made.add_argument("--meta", choices=["redis", "sqlite"], default="redis")
    made.add_argument("--repeat", type=int, default=3)
    made.add_argument("--dir", type=Path, help="for store, cache and mounts; /dev/shm or /tmp")
    made.add_argument(
        "--disk-mib",
        type=float,
        metavar="N",
        help="caches and plain files on a disk in memory, held to N MiB a second (0: not); root",
    )
    made.add_argument("--json", type=Path, metavar="OUT", help="write every value there")
    made.add_argument("--profile", type=Path, metavar="DIR", help="py-spy of our mounts")
    made.add_argument("--profile-format", choices=SUFFIXES, default="flamegraph")
    made.add_argument("--slicefs", default="", metavar="COMMAND", help="another slicefs to run")
    made.add_argument("--format-options", default="", help="more options of slicefs format")
    made.add_argument("--mount-options", default="", help="more options of slicefs mount")
    return made


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    """Raises: SystemExit where the words don't go together."""
    made = parser()
    arguments = made.parse_args(words)
    limits = (arguments.delay_ms, arguments.uplink_mib, arguments.downlink_mib)
    if any(limits) and arguments.store not in BEHIND_PROXY:
        made.error(f"a delay or a narrow link needs --store {' or '.join(BEHIND_PROXY)}")
    if arguments.bare and (arguments.workload, arguments.store) not in BARE:
        made.error(f"--bare needs bigfile with --store {' or '.join(BEHIND_PROXY)}")
    return arguments


def _groups() -> str:
    return "; ".join(f"{name}: {', '.join(parts)}" for name, parts in GROUPS.items())


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


def chosen_systems(arguments: argparse.Namespace) -> list[System]:
    """The systems to measure, ours first."""
    # a cache that the benchmark can empty, where there is one: docs/OPERATING.md, Disk caches
    cache = " --cache-dir {cache}" if _is_cached(arguments) else ""
    options = (arguments.format_options, arguments.mount_options + cache)
    ours = adjusted(SLICEFS, arguments.slicefs, *options)
    systems = _chosen(arguments, ours)
    if arguments.workload == "meta" and "--idle-poll" not in arguments.mount_options:
        both = [polling(ours, "never", ours.name, 1), polling(ours, "auto", "slicefs-auto", 5)]
        systems = [each for one in systems for each in (both if one is ours else [one])]
    waits = arguments.workload not in WRITING_BACK and not arguments.writeback
    return systems if waits else [*map(writing_back, systems)]


def _is_cached(arguments: argparse.Namespace) -> bool:
    return arguments.store != "file" or arguments.workload in CACHED


def _chosen(arguments: argparse.Namespace, ours: System) -> list[System]:
    if arguments.only:
        return [ours if arguments.only == ours.name else JUICEFS]
    peers = {"none": [], "juicefs": [JUICEFS], "rclone": [RCLONE], "both": [JUICEFS, RCLONE]}
    return [ours, *peers[arguments.peer]]


def chosen_directory(arguments: argparse.Namespace) -> Path:
    """Where stores go: --dir, or memory if all fits there, or the disk."""
    if arguments.dir:
        return Path(arguments.dir).resolve()
    if arguments.workload in ON_DISK:
        return DISK_STORE
    needed = arguments.size_mib * (1 << 20) * BIGFILE_COPIES
    return MEMORY_STORE if machine.room_bytes(MEMORY_STORE) > needed else DISK_STORE


class Places(NamedTuple):
    """Where things are while all takes turns."""

    workspace: Path
    bucket: S3 | None  # where data goes, if not into a directory
    held: Path | None  # a disk of the benchmark's own for what is cached


def measure(
    arguments: argparse.Namespace, systems: Sequence[System], workspace: Path
) -> results.Results:
    """Run all workloads on all systems, in turn."""
    found = results.Results()
    workloads = GROUPS.get(arguments.workload, (arguments.workload,))
    with ExitStack() as stack:
        server = stack.enter_context(redis.running(workspace / "redis.log"))
        bucket = stack.enter_context(_bucket(arguments, workspace))
        held = stack.enter_context(_disk(arguments, workspace))
        places = Places(workspace, bucket, held)
        options = Options(
            arguments.threads,
            arguments.count,
            arguments.size_mib,
            server if arguments.meta == "redis" else None,
        )
        for workload in workloads:
            for repeat in range(arguments.repeat):
                for system in systems:
                    begin = time.monotonic()
                    _measure_one(arguments, system, places, options, workload, found)
                    took = f"{time.monotonic() - begin:.0f} s"
                    _note(f"{workload} {repeat + 1}/{arguments.repeat} {system.name}: {took}")
                if arguments.bare and bucket:
                    for metric in bare.bigfile(bucket, options):
                        found.add(workload, bare.NAME, metric)
    return found


@contextmanager
def _bucket(arguments: argparse.Namespace, workspace: Path) -> Iterator[S3 | None]:
    """Where data goes, if not into a directory."""
    if arguments.store == "file":
        yield None
        return
    if arguments.store == "s3":
        store = s3.running(workspace)
    else:  # JuiceFS can't make buckets in a radosgw
        store = ceph.running(workspace, (bucket_of(JUICEFS),), direct=arguments.store == "rados")
    limits = (arguments.delay_ms, arguments.uplink_mib, arguments.downlink_mib)
    with store as bucket, delay.before(bucket, workspace, *limits) as reached:
        yield reached


@contextmanager
def _disk(arguments: argparse.Namespace, workspace: Path) -> Iterator[Path | None]:
    """A disk that is held to a speed, if one was asked for."""
    if arguments.disk_mib is None:
        yield None
        return
    with disk.held_to(arguments.disk_mib, MEMORY_STORE, workspace / "disk") as made:
        yield made


def _measure_one(
    arguments: argparse.Namespace,
    system: System,
    places: Places,
    options: Options,
    workload: str,
    found: results.Results,
) -> None:
    workspace, bucket, held = places
    database = workspace / f"{system.name}.db"
    if options.redis:
        options.redis.ask("flushdb", db=system.redis_db)
    for file in workspace.glob(f"{database.name}*"):
        file.unlink()
    port = options.redis.port if options.redis else 0
    url = system.meta_urls[arguments.meta].format(port=port, path=database)
    profiler = None
    if arguments.profile and system.name == SLICEFS.name:
        profiler = Profiler(arguments.profile, workload, arguments.profile_format)
    with BenchVolume(system, workspace, url, bucket, profiler, held) as volume:
        for metric in CHOICES[workload](volume, options):
            found.add(workload, system.name, metric)


def _note(message: str) -> None:
    print(f"bench: {message}", file=sys.stderr, flush=True)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt  # so that SIGTERM unmounts as well


def _write_json(
    file: Path, facts: dict[str, object], rows: Sequence[results.Row], peers: Sequence[str]
) -> None:
    content = {**facts, "results": results.as_json(rows, SLICEFS.name, peers)}
    file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main(words: Sequence[str]) -> int:
    """Measure, print the table, write the JSON; 1 if a system failed."""
    if words and words[0] in PROGRAMS:
        return PROGRAMS[words[0]](words[1:])
    arguments = _parsed(words)
    systems = chosen_systems(arguments)
    directory = chosen_directory(arguments)
    signal.signal(signal.SIGTERM, _interrupt)
    facts: dict[str, object] = {
        "command": "python -m tools.bench " + shlex.join(words),
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "store": str(directory),
        "machine": machine.facts(systems),
    }
    workspace = Path(tempfile.mkdtemp(prefix="slicefs-bench-", dir=directory))
    failed = False
    before = machine.stolen_ticks()
    try:
        found = measure(arguments, systems, workspace)
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        _note(str(error))
        failed = True
    except KeyboardInterrupt:
        _note("interrupted")
        failed = True
    finally:
        if not any(mounted(workspace / system.name / "mnt") for system in systems):
            shutil.rmtree(workspace, ignore_errors=True)
    if failed:
        return 1
    print(f"store, cache and metadata in {directory}; medians of {arguments.repeat}")
    for key, value in facts["machine"].items() if isinstance(facts["machine"], dict) else ():
        print(f"  {key}: {value}")
    now = machine.stolen_ticks()
    share = (now[0] - before[0]) / max(1, now[1] - before[1])
    print(f"  stolen meanwhile: {100 * share:.1f} % of processor time")
    peers = [system.name for system in systems if system.name != SLICEFS.name]
    peers += [bare.NAME] if arguments.bare else []
    print(results.table(found.rows, SLICEFS.name, peers))
    if arguments.json:
        _write_json(arguments.json, facts, found.rows, peers)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

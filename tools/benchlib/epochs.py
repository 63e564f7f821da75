"""`epochs`: a data set of small files that many processes read again and again, read-only.

The volume is mounted once more with `--read-only`; 1, 8 and 32 processes then read all files in
shuffled orders, each its own. Nothing is dropped in between, so the kernel has all bytes: what
counts is what is still asked of the client, and the processor time that it takes. The same
processes read plain files beside it.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tools.benchlib import client
from tools.benchlib.results import OF_RAW, Metric
from tools.benchlib.volume import BenchVolume
from tools.benchlib.workloads import KIB, Options

READERS = (1, 8, 32)
FILES = 1000
FILE_BYTES = 100 * KIB
_REQUESTS = ("slicefs_operations_total", "juicefs_fuse_ops_total")


def epochs(volume: BenchVolume, options: Options) -> Iterator[Metric]:
    """Warm epochs of a read-only mount, and of plain files."""
    files = options.count_or(FILES)
    raw = volume.disk / "raw"
    raw.mkdir()
    for where in (raw, volume.mountpoint):
        client.run("dataloop", "writemany", where / "small", 1, files, FILE_BYTES)
    with volume.more_mounts(1, "--read-only") as (mount,):
        for where in (raw, mount):
            _read(where, 1, files)
        for readers in READERS:
            plain = _read(raw, readers, files)
            asked, spent = _requests(mount), volume.cpu_seconds()
            ours = _read(mount, readers, files)
            reads = readers * files
            name = f"warm epoch, {readers} readers"
            yield Metric(name, ours / reads * 1e6, "µs/file")
            yield Metric(name, (volume.cpu_seconds() - spent) / reads * 1e6, "CPU µs/file")
            yield Metric(name, (_requests(mount) - asked) / reads, "requests/file")
            yield Metric(f"{name}: of plain files", plain / ours, OF_RAW)


def _read(where: Path, readers: int, files: int) -> float:
    """Seconds until every reader has read every file."""
    program = str(client.program("dataloop"))
    begun = time.monotonic()
    running = [
        subprocess.Popen(
            [
                program,
                "readmany",
                str(where / "small"),
                "1",
                str(files),
                str(FILE_BYTES),
                str(seed),
            ],
            stdout=subprocess.DEVNULL,
        )
        for seed in range(readers)
    ]
    codes = [reader.wait() for reader in running]  # of all: none may go on
    if any(codes):
        raise RuntimeError(f"a reader of {where} failed")
    return time.monotonic() - begun


def _requests(mount: Path) -> float:
    """Requests of the kernel that the client has served. Reading them is some itself."""
    lines = (mount / ".stats").read_text().splitlines()
    return sum(float(line.rsplit(None, 1)[1]) for line in lines if line.startswith(_REQUESTS))

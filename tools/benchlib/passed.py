"""`passed`: a large file of a snapshot that the kernel reads from the cache disk by itself.

The file was read until it is whole on the cache disk. Then the same client program reads it through
the mount and as a plain file beside the cache: in a row, at random and through a map, each time
with the kernel's pages of both dropped. Once more without passthrough. Of SliceFS alone.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

from tools.benchlib import client, procs
from tools.benchlib.caches import drop_pages
from tools.benchlib.results import OF_RAW, RATE, Metric
from tools.benchlib.volume import BenchVolume
from tools.benchlib.workloads import KIB, MIB, SEED, Options

WHOLE_S_MAX = 120.0
READS = 500


def passed(volume: BenchVolume, options: Options) -> Iterator[Metric]:
    """A file that is passed through, then the same one read by the client."""
    size = options.size_mib * MIB
    raw = volume.disk / "raw"
    raw.mkdir()
    top = volume.mountpoint / "top"
    top.mkdir()
    for where in (raw, top):
        client.run("dataloop", "write", where / "big", size, MIB)
    subprocess.run([*volume.system.program, "snapshot", "create", str(top), "one"], check=True)
    shown = "--cache-dir {cache} --subdir /top --snapshot one"
    for how, label in (
        ("--passthrough", "passed"),
        ("--open-requests always", "through the client"),
    ):
        with volume.more_mounts(1, f"{shown} {how}") as (mount,):
            _warm(mount)
            yield from _compared(volume, options, raw, mount, label)


def _warm(mount: Path) -> None:
    """Read the file until it is on the cache disk, and whole if it is to be passed through."""

    def is_there() -> bool:
        client.run("dataloop", "read", mount / "big", MIB)
        lines = (mount / ".stats").read_text().splitlines()
        opens = [line for line in lines if "passthrough_opens_total" in line]
        return any(float(line.split()[1]) > 0 for line in opens)

    procs.wait_until(is_there, WHOLE_S_MAX if _passes(mount) else 0.0)


def _passes(mount: Path) -> bool:
    """What the mount says that it was told."""
    return '"passthrough": true' in (mount / ".config").read_text()


def _compared(
    volume: BenchVolume, options: Options, raw: Path, mount: Path, label: str
) -> Iterator[Metric]:
    reads = options.count_or(READS)
    phases = {
        "in a row": ("read", MIB),
        "random 4 KiB": ("random", 4 * KIB, reads, SEED),
        "mapped pages": ("mapped", 4 * KIB, reads, SEED),
    }
    for phase, (command, *arguments) in phases.items():
        drop_pages(raw, volume.disk)
        (plain,) = client.run("dataloop", str(command), raw / "big", *arguments)
        client.run("dataloop", "drop", mount / "big")
        drop_pages(volume.disk)
        before = volume.cpu_seconds()
        (ours,) = client.run("dataloop", str(command), mount / "big", *arguments)
        spent = volume.cpu_seconds() - before
        name = f"{phase}, {label}"
        yield Metric(f"{name}: of a plain file", plain.us_per_op / ours.us_per_op, OF_RAW)
        if command == "read":
            yield Metric(name, ours.mb_per_s, RATE)
            yield Metric(name, spent / (ours.bytes / 1e9), "CPU s/GB")
        else:
            yield Metric(name, spent / ours.ops * 1e6, "CPU µs/op")

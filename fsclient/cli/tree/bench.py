"""`slicefs bench` and `slicefs mdtest`: how fast a mount is."""

from __future__ import annotations

from collections.abc import Sequence

import click

from fsclient.cli.options.examples import examples
from fsclient.cli.options.options import complete_directories, size
from fsclient.cli.options.progress import ProgressLine
from fsclient.cli.options.tell import tell
from fsclient.trees.bench import (
    BenchSizes,
    Phase,
    TreeSizes,
    bench as run_bench,
    mdtest as run_mdtest,
)
from fsmeta.runtime import SystemRuntime

_MANY = click.IntRange(1, 1_000_000)


@click.command(
    epilog=examples("slicefs bench /mnt/vol", "slicefs bench -p 4 --big-file-size 1GiB /mnt/vol")
)
@click.argument("mountpoint", shell_complete=complete_directories)
@click.option("--big-file-size", type=size, default=256 << 20, show_default="256MiB")
@click.option("--small-file-size", type=size, default=128 << 10, show_default="128KiB")
@click.option("--small-file-count", type=_MANY, default=100, show_default=True)
@click.option(
    "-p",
    "--threads",
    type=click.IntRange(1, 256),
    default=1,
    show_default=True,
    help="Number of threads; each one has its own files.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def bench(
    mountpoint: str,
    big_file_size: int,
    small_file_size: int,
    small_file_count: int,
    threads: int,
    as_json: bool,
) -> None:
    """Write, read and stat files in a directory of its own in MOUNTPOINT, and print how fast.

    Files are synced when written, and leave the kernel's page cache before they are read; caches of
    the mount may still have them. Any file system can be measured.
    """
    sizes = BenchSizes(big_file_size, small_file_size, small_file_count, threads)
    runtime = SystemRuntime()
    line = ProgressLine(runtime)
    try:
        phases = run_bench(mountpoint, sizes, runtime, line.show)
    finally:
        line.clear()
    _print(mountpoint, phases, sizes._asdict(), as_json)


@click.command(
    epilog=examples("slicefs mdtest /mnt/vol", "slicefs mdtest -p 8 --depth 3 --files 50 /mnt/vol")
)
@click.argument("mountpoint", shell_complete=complete_directories)
@click.option("--dirs", type=click.IntRange(1, 1000), default=3, show_default=True)
@click.option("--depth", type=click.IntRange(0, 10), default=2, show_default=True)
@click.option("--files", type=_MANY, default=10, show_default=True, help="Files in each directory.")
@click.option(
    "-p",
    "--threads",
    type=click.IntRange(1, 256),
    default=4,
    show_default=True,
    help="Number of trees at a time.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def mdtest(mountpoint: str, dirs: int, depth: int, files: int, threads: int, as_json: bool) -> None:
    """Make, look at, rename and remove trees of empty files in MOUNTPOINT, and print how fast."""
    sizes = TreeSizes(dirs, depth, files, threads)
    runtime = SystemRuntime()
    line = ProgressLine(runtime)
    try:
        phases = run_mdtest(mountpoint, sizes, runtime, line.show)
    finally:
        line.clear()
    _print(mountpoint, phases, sizes._asdict(), as_json)


def _print(path: str, phases: Sequence[Phase], sizes: dict[str, int], as_json: bool) -> None:
    if as_json:
        tell({"sizes": sizes, "phases": [each.plain() for each in phases]}, path=path)
        return
    click.echo(f"{'':<18}{'MiB/s':>10}{'ops/s':>12}{'mean ms':>10}{'p99 ms':>10}{'max ms':>10}")
    for each in phases:
        speed = f"{each.bytes_s / (1 << 20):.1f}" if each.bytes else "-"
        times = (each.mean_seconds, each.p99_seconds, each.max_seconds)
        late = "".join(f"{1000 * seconds:>10.2f}" for seconds in times)
        click.echo(f"{each.what:<18}{speed:>10}{each.per_s:>12.1f}{late}")

"""`slicefs summary`: how large a tree is, and what is large in it."""

from __future__ import annotations

import click

from fsclient.cli.options.examples import examples
from fsclient.cli.options.options import complete_files
from fsclient.cli.options.progress import ProgressLine
from fsclient.cli.options.tell import tell
from fsclient.trees.summary import DEPTH_MAX, ENTRIES_MAX, SubtreeSum, summarize
from fsclient.trees.walk import THREADS, THREADS_MAX
from fsclient.volume.units import format_size
from fsmeta.runtime import SystemRuntime


@click.command(
    epilog=examples(
        "slicefs summary /mnt/vol/dataset", "slicefs summary --depth 3 --entries 5 --json /mnt/vol"
    )
)
@click.argument("path", shell_complete=complete_files)
@click.option(
    "-d",
    "--depth",
    type=click.IntRange(0, DEPTH_MAX),
    default=2,
    show_default=True,
    help="Levels of directories that are shown.",
)
@click.option(
    "-e",
    "--entries",
    type=click.IntRange(1, ENTRIES_MAX),
    default=10,
    show_default=True,
    help="Largest entries of each directory that are shown.",
)
@click.option(
    "-p",
    "--threads",
    type=click.IntRange(1, THREADS_MAX),
    default=THREADS,
    show_default=True,
    help="Directories that are read at once.",
)
@click.option("--csv", "as_csv", is_flag=True, help="Print lines of comma-separated values.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def summary(path: str, depth: int, entries: int, threads: int, as_csv: bool, as_json: bool) -> int:
    """Count files, directories, bytes and space of PATH, and show what takes most of it.

    A file with several names counts once. Exit code 1: a part could not be read.
    """
    runtime = SystemRuntime()
    line = ProgressLine(runtime)
    try:
        found = summarize(
            path, runtime, depth, entries, threads, lambda files: line.show(f"{files} files")
        )
    finally:
        line.clear()
    for each in found.failures if not as_json else ():
        click.echo(f"slicefs: {each.path}: {each.why}", err=True)
    if as_json:
        tell(found.plain(), path=path)
    else:
        rows = [found.top, *found.parts]
        _print_csv(rows) if as_csv else _print(rows)
    return 1 if found.failed else 0


def _print_csv(rows: list[SubtreeSum]) -> None:
    click.echo("path,kind,space,bytes,files,directories")
    for each in rows:
        quoted = each.path.replace('"', '""')
        numbers = f"{each.space},{each.bytes},{each.files},{each.directories}"
        click.echo(f'"{quoted}",{each.kind},{numbers}')


def _print(rows: list[SubtreeSum]) -> None:
    click.echo(f"{'space':>12}{'size':>12}{'files':>10}{'dirs':>8}  path")
    for each in rows:
        path = each.path + ("/" if each.kind == "directory" else "")
        sizes = f"{format_size(each.space):>12}{format_size(each.bytes):>12}"
        click.echo(f"{sizes}{each.files:>10}{each.directories:>8}  {path}")

"""`slicefs compact`: scattered chunks of files are rewritten."""

from __future__ import annotations

import click

from fsclient.cli.options.examples import examples
from fsclient.cli.options.jobs import require_mount
from fsclient.cli.options.options import complete_files
from fsclient.cli.options.progress import ProgressLine
from fsclient.cli.tree.report import report
from fsclient.trees.compact import THREADS, compact as compact_paths
from fsmeta.errors import ConfigError
from fsmeta.runtime import SystemRuntime


@click.command(
    epilog=examples("slicefs compact /mnt/vol/log.bin", "slicefs compact -p 8 /mnt/vol/database")
)
@click.argument("paths", nargs=-1, required=True, metavar="PATH…", shell_complete=complete_files)
@click.option(
    "-p",
    "--threads",
    type=click.IntRange(1, 64),
    default=THREADS,
    show_default=True,
    help="Files at once.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def compact(paths: tuple[str, ...], threads: int, as_json: bool) -> int:
    """Let the mount rewrite the scattered chunks of PATH, or of all files below it.

    A chunk is rewritten if it has many small slices, or more hidden than visible bytes. Mounts
    compact the files that they write; this command is for files that other mounts wrote, or that
    were written before. Only root and the owner of a file may use it.
    """
    for path in paths:
        try:
            require_mount(path)
        except FileNotFoundError as error:
            raise ConfigError(f"{path} does not exist") from error
        except OSError as error:
            raise ConfigError(
                f"{path} is not on a SliceFS mount: use `slicefs gc --compact META`"
            ) from error
    runtime = SystemRuntime()
    line = ProgressLine(runtime)
    try:
        done = compact_paths(
            paths,
            runtime,
            threads,
            lambda files, chunks: line.show(f"{files} files, {chunks} chunks"),
        )
    finally:
        line.clear()
    counts = f"{done.files} files, {done.compacted} of {done.chunks} chunks rewritten"
    return report(done, paths, counts, as_json)

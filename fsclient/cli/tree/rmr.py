"""`slicefs rmr`: whole trees are removed, in parallel."""

from __future__ import annotations

import os

import click

from fsclient.cli.options.examples import examples
from fsclient.cli.options.jobs import require_mount
from fsclient.cli.options.options import complete_files
from fsclient.cli.options.progress import ProgressLine
from fsclient.cli.tree.report import report
from fsclient.trees.remove import remove
from fsclient.trees.walk import THREADS, THREADS_MAX, split
from fsmeta.errors import ConfigError
from fsmeta.runtime import SystemRuntime


@click.command(epilog=examples("slicefs rmr /mnt/vol/old-run", "slicefs rmr -p 32 /mnt/vol/tmp/*"))
@click.argument("paths", nargs=-1, required=True, metavar="PATH…", shell_complete=complete_files)
@click.option(
    "-p",
    "--threads",
    type=click.IntRange(1, THREADS_MAX),
    default=THREADS,
    show_default=True,
    help="Removals at once.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def rmr(paths: tuple[str, ...], threads: int, as_json: bool) -> int:
    """Remove each PATH on a SliceFS mount, with everything below it.

    Links are removed and never followed, and nothing on another mount is touched, even if other
    users change the tree at the same time. The same command completes an interrupted run. Exit
    code 1: a part could not be removed.
    """
    for path in paths:
        _check(path)
    runtime = SystemRuntime()
    line = ProgressLine(runtime)
    try:
        done = remove(
            paths,
            runtime,
            threads,
            lambda files, folders: line.show(f"{files} files, {folders} directories removed"),
        )
    finally:
        line.clear()
    counts = f"{done.files} files, {done.directories} directories removed"
    return report(done, paths, counts, as_json)


def _check(path: str) -> None:
    """Raises: ConfigError where `path` is not on a mount of ours, or is the mount itself."""
    if not path:
        raise ConfigError("a path is empty: name a file or directory")
    if not os.path.lexists(path):
        raise ConfigError(f"{path} does not exist")
    above, name = split(path)
    if os.path.ismount(os.path.join(above, name)):
        raise ConfigError(f"{path} is a mount: name what is to be removed in it")
    try:
        require_mount(above)
    except OSError as error:
        raise ConfigError(f"{path} is not on a SliceFS mount: use `rm -r`") from error

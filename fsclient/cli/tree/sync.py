"""`slicefs sync`: a tree is made like another one, between directories, mounts and S3."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import Final

import click

from fsclient.cli.options.examples import examples
from fsclient.cli.options.options import complete_files, no_keys_here, rate, store_option
from fsclient.cli.options.progress import ProgressLine
from fsclient.sync.engine import CHECKS, THREADS, Sync, Synced, Wish
from fsclient.sync.items import Rules
from fsclient.sync.places import Opener, parse
from fsclient.volume.object_options import parse_options
from fsclient.volume.units import format_size
from fsmeta.runtime import SystemRuntime

_SHOWN_MAX: Final = 100
_TIMEOUT_S: Final = 120.0


@click.command(
    epilog=examples(
        "slicefs sync -p 20 /data/imagenet/ /mnt/vol/imagenet/",
        "slicefs sync --delete --exclude '*.tmp' /mnt/vol/runs s3://backup/volume",
    )
)
@click.argument("source", metavar="SRC", shell_complete=complete_files)
@click.argument("target", metavar="DST", shell_complete=complete_files)
@click.option("--include", multiple=True, metavar="PATTERN", help="Names that no --exclude hides.")
@click.option("--exclude", multiple=True, metavar="PATTERN", help="Names that are left out.")
@click.option("--delete", is_flag=True, help="Delete in DST what SRC does not have.")
@click.option("-n", "--dry-run", is_flag=True, help="Print what would be done; change nothing.")
@click.option(
    "--check",
    type=click.Choice(CHECKS),
    default="mtime",
    show_default=True,
    help="What tells that a file is the same: size and time, size alone, or all bytes.",
)
@click.option(
    "-p",
    "--threads",
    type=click.IntRange(1, 256),
    default=THREADS,
    show_default=True,
    help="Files at once.",
)
@click.option("--bwlimit", type=rate, default=0, metavar="RATE", help="Bytes a second, at most.")
@store_option
@no_keys_here
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def sync(
    source: str,
    target: str,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    delete: bool,
    dry_run: bool,
    check: str,
    threads: int,
    bwlimit: int,
    store_options: tuple[str, ...],
    as_json: bool,
) -> int:
    """Make DST like SRC: copy what is missing or differs.

    A place is a path (on a mount, too), file:///PATH, s3://BUCKET/PREFIX or
    http(s)://HOST/BUCKET/PREFIX. `SRC/` copies what is in the directory, `SRC` the directory itself
    into DST. Between directories owners, modes, times, xattrs, hard links and symlinks are kept;
    S3 has files only. An interrupted run is completed by the same command. Exit code 1: something
    failed, and is listed.
    """
    runtime = SystemRuntime()
    line = ProgressLine(runtime)
    wish = Wish(Rules(include, exclude), delete, dry_run, check, threads, bwlimit)
    places = parse(source), parse(target)

    def told(what: str, key: str) -> None:
        if dry_run and not as_json:
            click.echo(f"{what} {key}")

    with ExitStack() as closing:
        opener = Opener(parse_options("s3", store_options), runtime, _TIMEOUT_S)
        pair = opener.open(*places, dry_run, delete)
        closing.callback(pair.source.close)
        closing.callback(pair.target.close)
        try:
            done = Sync(*pair, wish, runtime, line.show, told).run()
        finally:
            line.clear()
    _print(source, target, done, dry_run, as_json)
    return 1 if done.failed else 0


def _print(source: str, target: str, done: Synced, dry_run: bool, as_json: bool) -> None:
    if as_json:
        failures = [each._asdict() for each in done.failures]
        shown = {"source": source, "target": target, "dry_run": dry_run, **done._asdict()}
        click.echo(json.dumps({**shown, "failures": failures}, indent=2))
        return
    for each in done.failures[:_SHOWN_MAX]:
        click.echo(f"slicefs: {each.path}: {each.why}", err=True)
    if done.failed > _SHOWN_MAX:
        click.echo(f"slicefs: … {done.failed - _SHOWN_MAX} more failures: see --json", err=True)
    click.echo(
        f"{'would be: ' if dry_run else ''}{done.copied} copied ({format_size(done.bytes)}), "
        f"{done.same} the same, {done.deleted} deleted, {done.skipped} skipped, "
        f"{done.failed} failed"
    )

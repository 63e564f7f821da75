"""`slicefs sync`: a tree is made like another one, between directories, mounts and S3."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

import click

from fsclient.cli.options.arguments import command
from fsclient.cli.options.examples import examples
from fsclient.cli.options.options import complete_files, no_keys_here, rate, store_option
from fsclient.cli.options.progress import ProgressLine
from fsclient.cli.options.tell import tell
from fsclient.sync.engine import CHECKS, THREADS, Sync, Synced, SyncRequest
from fsclient.sync.items import PathFilter
from fsclient.sync.places import Opener, parse
from fsclient.volume.object_options import parse_options
from fsclient.volume.units import format_size
from fsmeta.runtime import SystemRuntime

_SHOWN_MAX: Final = 100
_TIMEOUT_S: Final = 120.0


@dataclass(frozen=True, kw_only=True)
class SyncArguments:
    """The command line of `slicefs sync`."""

    source: str
    target: str
    include: tuple[str, ...]
    exclude: tuple[str, ...]
    delete: bool
    dry_run: bool
    check: str
    threads: int
    ordered: bool
    links: bool
    dirs: bool
    bwlimit: int
    store_options: tuple[str, ...]
    as_json: bool


@command(
    SyncArguments,
    epilog=examples(
        "slicefs sync -p 20 /data/imagenet/ /mnt/vol/imagenet/",
        "slicefs sync --delete --exclude '*.tmp' /mnt/vol/runs s3://backup/volume",
        "slicefs sync --links --dirs redis://localhost/1#home s3://backup/home",
    ),
)
@click.argument("source", metavar="SRC", shell_complete=complete_files)
@click.argument("target", metavar="DST", shell_complete=complete_files)
@click.option(
    "--include",
    multiple=True,
    metavar="PATTERN",
    help="Names that are copied even if an --exclude matches.",
)
@click.option("--exclude", multiple=True, metavar="PATTERN", help="Names that are left out.")
@click.option("--delete", is_flag=True, help="Delete in DST what SRC does not have.")
@click.option("-n", "--dry-run", is_flag=True, help="Print what would be done; change nothing.")
@click.option(
    "--check",
    type=click.Choice(CHECKS),
    default="mtime",
    show_default=True,
    help="How equal files are recognised: by size and time, by size alone, or by all bytes.",
)
@click.option(
    "-p",
    "--threads",
    type=click.IntRange(1, 256),
    default=THREADS,
    show_default=True,
    help="Files at once.",
)
@click.option("--ordered", is_flag=True, help="One file at a time, in the order of their paths.")
@click.option("--links", is_flag=True, help="In S3 NAME.rclonelink stands for a symlink.")
@click.option("--dirs", is_flag=True, help="In S3 an empty object stands for a directory.")
@click.option("--bwlimit", type=rate, default=0, metavar="RATE", help="Bytes a second, at most.")
@store_option
@no_keys_here
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def sync(args: SyncArguments) -> int:
    """Make DST like SRC: copy what is missing or differs.

    A place is a path (on a mount, too), file:///PATH, s3://BUCKET/PREFIX,
    http(s)://HOST/BUCKET/PREFIX, or a volume that need not be mounted: META-URL#PATH,
    slicefs://VOLUME/PATH. `SRC/` copies what is in the directory, `SRC` the directory itself into
    DST. Between directories owners, modes, times, xattrs, hard links and symlinks are kept; S3 has
    files, and what --links and --dirs put in the place of others. An interrupted run is completed
    by the same command. Exit code 1: something failed, and is listed.
    """
    runtime = SystemRuntime()
    line = ProgressLine(runtime)
    wish = SyncRequest(
        PathFilter(args.include, args.exclude),
        args.delete,
        args.dry_run,
        args.check,
        args.threads,
        args.bwlimit,
        args.ordered,
        args.dirs,
    )
    places = parse(args.source), parse(args.target)

    def told(what: str, key: str) -> None:
        if args.dry_run and not args.as_json:
            click.echo(f"{what} {key}")

    with ExitStack() as closing:
        opener = Opener(parse_options("s3", args.store_options), runtime, _TIMEOUT_S, args.links)
        pair = opener.open(*places, args.dry_run, args.delete)
        closing.callback(pair.source.close)
        closing.callback(pair.target.close)
        try:
            done = Sync(*pair, wish, runtime, line.show, told).run()
        finally:
            line.clear()
    _print(places[0].text, places[1].text, done, args.dry_run, args.as_json)
    return 1 if done.failed else 0


def _print(source: str, target: str, done: Synced, dry_run: bool, as_json: bool) -> None:
    if as_json:
        failures = [each._asdict() for each in done.failures]
        found = {"dry_run": dry_run, **done._asdict(), "failures": failures}
        tell(found, source=source, target=target)
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

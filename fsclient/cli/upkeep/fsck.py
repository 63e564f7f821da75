"""`slicefs fsck`: metadata true to itself, and every object there and right."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Final

import click

from fsclient.cli.options.arguments import command
from fsclient.cli.options.examples import examples
from fsclient.cli.options.key_options import key_options, offered
from fsclient.cli.options.look import tell_problem, tell_verdict
from fsclient.cli.options.options import META_WAIT_S, cursor_option, store_option
from fsclient.cli.options.progress import ProgressLine
from fsclient.cli.options.tell import tell
from fsclient.cli.upkeep.scrub import ScrubRequest, examine_data
from fsclient.upkeep.fsck import FsckReport, FsckRequest, examine, forget_notes
from fsclient.volume.metadata_url import naming, open_store
from fsmeta.check.repair import plan, repair
from fsmeta.errors import Corrupt
from fsmeta.meta.meta import Meta
from fsmeta.runtime import SystemRuntime
from fsmeta.store.url import shown_url

_SHOWN_MAX: Final = 100
REPAIRED: Final = 1  # of fsck(8), as the next one
LEFT: Final = 4


@dataclass(frozen=True, kw_only=True)
class FsckArguments:
    """The command line of `slicefs fsck`."""

    meta: str
    data: bool
    paths: tuple[str, ...]
    mend: bool
    dry_run: bool
    cursor_file: str | None
    store_options: tuple[str, ...]
    encrypt_rsa_key: str | None
    encrypt_passphrase: bool
    as_json: bool


@command(
    FsckArguments,
    epilog=examples(
        "slicefs fsck redis://localhost/1",
        "slicefs fsck --repair --dry-run redis://localhost/1",
        "slicefs fsck --data --path /datasets/imagenet redis://localhost/1",
    ),
)
@click.argument("meta")
@click.option("--data", is_flag=True, help="Read every object and verify its checksums, too.")
@click.option(
    "--path", "paths", multiple=True, metavar="PATH", help="Check what is below PATH only."
)
@click.option("--repair", "mend", is_flag=True, help="Repair the metadata where that is safe.")
@click.option("-n", "--dry-run", is_flag=True, help="With --repair: only print what it would do.")
@cursor_option("in FILE and beside it")
@store_option
@key_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def fsck(args: FsckArguments) -> int:
    """Check the volume in META.

    Exit codes are those of fsck(8): 0 clean, 1 all problems were repaired, 4 problems are left, 8
    it could not be checked, 16 the command line is wrong, 32 interrupted. On a volume in use,
    changes during the check may be reported as problems. The checksums of an encrypted volume can
    be verified without its key. --repair needs a volume that no client uses. With --cursor an
    interrupted or killed run continues where it was, if no client has joined the volume since.
    --path also checks quotas of directories. It does not check quotas of users and groups, files
    without a name, the trash, counters of the volume, and objects that belong to nothing: these
    checks need all inodes, which only a check of the whole volume reads.
    """
    _require_sense(args.mend, args.dry_run, args.paths, args.cursor_file)
    offer = offered(args.encrypt_rsa_key, args.encrypt_passphrase)
    try:
        repaired = _repair(args.meta, args.dry_run) if args.mend else []
        report = _examine(
            args.meta,
            FsckRequest(
                args.store_options, args.paths, args.cursor_file, args.mend and not args.dry_run
            ),
        )
        report = report._replace(repaired=[*repaired, *report.repaired])
        if args.data:
            reading = ScrubRequest(args.store_options, offer, paths=args.paths)
            if args.cursor_file is not None:
                reading = reading._replace(cursor_file=f"{args.cursor_file}.data")
            read = examine_data(args.meta, reading, SystemRuntime())
            wrong = [str(each) for each in read.problems if each.what == "damaged"]
            report = report.with_problems(wrong, len(wrong))
        if args.cursor_file is not None:
            forget_notes(args.cursor_file)
    except Corrupt as error:  # the settings themselves, or what leads to everything else
        click.echo(f"slicefs: {error}", file=sys.stderr)
        return LEFT
    if args.as_json:
        tell({"dry_run": args.dry_run, **report._asdict()}, meta=args.meta, paths=args.paths)
    else:
        _print(report, args.meta, args.dry_run)
    return _code(report, args.dry_run)


def _require_sense(
    mend: bool, dry_run: bool, paths: tuple[str, ...], cursor_file: str | None
) -> None:
    """Raises: UsageError where options don't go together."""
    if dry_run and not mend:
        raise click.UsageError("--dry-run says what --repair would do: add --repair")
    if mend and (paths or cursor_file):
        option = "--path" if paths else "--cursor"
        raise click.UsageError(f"--repair is for the whole volume, at once: leave out {option}")
    if paths and cursor_file:
        raise click.UsageError("--cursor is for the whole volume: leave out --path")


def _code(report: FsckReport, dry_run: bool) -> int:
    """As fsck(8) has it."""
    if report.problem_count:
        return LEFT
    return REPAIRED if report.repaired and not dry_run else 0


def _examine(meta: str, request: FsckRequest) -> FsckReport:
    """Metadata first, then the objects that it names, and the backups."""
    runtime = SystemRuntime()
    line = ProgressLine(runtime)
    store = open_store(meta, runtime)
    try:
        with naming(meta):
            opened = Meta(store, runtime, META_WAIT_S)
        return examine(opened, request, runtime, line.show)
    finally:
        line.clear()
        store.close()


def _repair(meta: str, dry_run: bool) -> list[str]:
    """What was mended, or would be first. Raises: ConfigError where the volume is in use."""
    runtime = SystemRuntime()
    line = ProgressLine(runtime)
    store = open_store(meta, runtime)
    try:
        with naming(meta):
            opened = Meta(store, runtime, META_WAIT_S)
        now_s = runtime.now_ns() // 10**9
        if dry_run:
            return plan(opened, now_s, line.show)
        done, _ = repair(opened, now_s, line.show)
        store.sync()
        return done
    finally:
        line.clear()
        store.close()


def _print(report: FsckReport, meta: str, dry_run: bool) -> None:
    for line in report.repaired:
        click.echo(f"{'would repair' if dry_run else 'repaired'}: {line}")
    click.echo(f"{report.inodes} inodes, {report.slices} slices, {report.objects} objects")
    if report.leaked_objects:
        remedy = f"`slicefs gc --delete {shown_url(meta)}` removes them"
        click.echo(f"{report.leaked_objects} objects belong to nothing: {remedy}")
    if report.unfinished_backups:
        click.echo(f"{report.unfinished_backups} backups were not completed, or are being made")
    for problem in report.problems[:_SHOWN_MAX]:
        tell_problem(problem)
    if report.problem_count > _SHOWN_MAX:
        click.echo(f"… and {report.problem_count - _SHOWN_MAX} more: see --json", file=sys.stderr)
    tell_verdict(report.problem_count)

"""`slicefs ckpt`: clean, verify, unshard, move, map, export, and a pipeline of these.

The command line finds this group as an entry point, when it is called. URLs are what
`slicefs.open_tree` takes. Exit codes: 0 done, 1 failed, 2 wrong command line, 3 problems found.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import click

from fsclient.cli.options.arguments import command
from fsclient.cli.options.examples import examples
from fsclient.cli.options.options import duration, size
from fsclient.cli.options.progress import ProgressLine
from fsclient.cli.options.tell import tell
from fsclient.volume.units import format_size
from fsmeta.errors import ConfigError, Corrupt
from fsmeta.runtime import SystemRuntime
from slicefs.checkpoint.layout import parse_step
from slicefs.checkpoint.step import joined, url_below
from slicefs.cli.pipeline import pipeline
from slicefs.cli.unshard import unshard
from slicefs.client.parallel import Readers
from slicefs.lifecycle.clean import (
    ARCHIVE_BYTES_MAX,
    CleanPolicy,
    Doomed,
    RunVerdict,
    judge,
    refuse_non_runs,
    remove_runs,
)
from slicefs.lifecycle.move import OpenTrees, export as export_files, move as move_files, move_logs
from slicefs.lifecycle.run_map import (
    Resolver,
    map_run,
    plugged_resolver,
    table_resolver,
    wandb_resolver,
)
from slicefs.lifecycle.transfer import Copier, CopyReport, TransferEnd
from slicefs.lifecycle.verify import NO_STEP, StepVerdict, verify_step

F = TypeVar("F", bound=Callable[..., Any])
FOUND: Final = 3
_RUNTIME: Final = SystemRuntime()
_CLEAN_JOBS: Final = 32  # they wait for listings and deletions, and move no bytes


def _jobs_of(default: int) -> Callable[[F], F]:
    kind, text = click.IntRange(1, 64), "Number of runs or files at a time."
    return click.option("-j", "--jobs", default=default, show_default=True, type=kind, help=text)


_jobs = _jobs_of(4)
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group(
    name="ckpt",
    epilog=examples(
        "slicefs ckpt verify /mnt/vol/run", "slicefs ckpt move /mnt/vol/run s3://archive/run"
    ),
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.pass_context
def ckpt(ctx: click.Context) -> None:
    """Checkpoints of training runs: clean, verify, unshard, move, map, export, pipeline.

    A URL is a directory, file:///DIR, s3://BUCKET/PREFIX, r2://…, gs://…, slicefs://VOLUME/PATH or
    META-URL#PATH.
    """
    ctx.obj = ctx.with_resource(OpenTrees())


def _each(urls: Sequence[str], jobs: int, work: Callable[[str], Any]) -> list[tuple[str, Any]]:
    """Do `work` for each URL, several at a time; results in order, an error in its place."""
    found: dict[str, Any] = {}

    def one(url: str) -> None:
        try:
            found[url] = work(url)
        except (OSError, Corrupt) as error:
            found[url] = error

    Readers(jobs).run(list(dict.fromkeys(urls)), one)
    return [(url, found[url]) for url in dict.fromkeys(urls)]


def _why(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


@dataclass(frozen=True, kw_only=True)
class CleanArguments:
    """The command line of `slicefs ckpt clean`."""

    runs: tuple[str, ...]
    dry_run: bool
    ignore_non_runs: bool
    older_than: float | None
    jobs: int
    as_json: bool
    verify: bool
    bypass_run_verification: bool
    max_archive_size: int


@command(
    CleanArguments,
    group=ckpt,
    short_help="Remove runs that have no checkpoint beyond step 0.",
    epilog=examples(
        "slicefs ckpt clean -n --older-than 7d s3://runs/a s3://runs/b",
        "slicefs ckpt clean --verify /mnt/vol/runs/*",
    ),
)
@click.argument("runs", nargs=-1, required=True, metavar="RUN…")
@click.option("-n", "--dry-run", is_flag=True, help="Only print what would be removed.")
@click.option("--verify", is_flag=True, help="Count only complete steps.")
@click.option("--ignore-non-runs", is_flag=True, help="Skip what does not look like a run.")
@click.option(
    "--bypass-run-verification", is_flag=True, help="Treat each RUN as a run, without a test."
)
@click.option(
    "--older-than",
    type=duration,
    metavar="TIME",
    help="Only runs without a change for this time, as 7d or 12h.",
)
@click.option(
    "--max-archive-size", type=size, default=ARCHIVE_BYTES_MAX, metavar="SIZE", show_default="5GiB"
)
@_jobs_of(_CLEAN_JOBS)
@_json
@click.pass_obj
def clean(stores: OpenTrees, args: CleanArguments) -> int:
    """Remove each RUN, a directory or a tar archive, that has no checkpoint beyond step 0.

    Nothing is removed if one of them does not look like a run. In a volume with a trash, files go
    there: `slicefs restore` brings them back.
    """
    before = None if args.older_than is None else _RUNTIME.now_ns() - int(args.older_than * 1e9)
    rules = CleanPolicy(args.verify, args.bypass_run_verification, before, args.max_archive_size)
    found = _each(args.runs, args.jobs, lambda url: judge(stores.endpoint(url), rules))
    if not args.ignore_non_runs:
        refuse_non_runs([(u, v) for u, v in found if isinstance(v, RunVerdict)])
    doomed = [
        Doomed(url, stores.endpoint(url), verdict)
        for url, verdict in found
        if isinstance(verdict, RunVerdict) and verdict.verdict == "remove"
    ]
    if not args.dry_run:
        failed = remove_runs(doomed, args.jobs)
        found = [(url, failed.get(url, verdict)) for url, verdict in found]
    if args.as_json:
        judged = [{"path": url, **_verdict(each)} for url, each in found]
        tell({"dry_run": args.dry_run, "runs": judged}, paths=args.runs)
    else:
        for url, each in found:
            shown = _verdict(each)
            click.echo(f"{shown['verdict']:8} {url}  {shown['why']}")
        gone = [v for _, v in found if isinstance(v, RunVerdict) and v.verdict == "remove"]
        freed = sum(each.size for each in gone)
        verb = "would be removed" if args.dry_run else "removed"
        click.echo(f"{len(gone)} of {len(found)} runs {verb}, {format_size(freed)}")
    return int(any(isinstance(each, Exception) for _, each in found))


def _verdict(each: RunVerdict | Exception) -> dict[str, Any]:
    if isinstance(each, RunVerdict):
        return each.told()
    return {"verdict": "failed", "why": _why(each)}


@ckpt.command(
    short_help="Check whether each step is complete.",
    epilog=examples(
        "slicefs ckpt verify /mnt/vol/run",
        "slicefs ckpt verify --digest --json s3://runs/a/step-1000",
    ),
)
@click.argument("urls", nargs=-1, required=True, metavar="URL…")
@click.option("--digest", is_flag=True, help="Read all bytes and compare the manifest's digests.")
@_jobs
@_json
@click.pass_obj
def verify(stores: OpenTrees, urls: tuple[str, ...], digest: bool, jobs: int, as_json: bool) -> int:
    """Check whether each step is complete; URL is a step, or a run whose steps are checked."""
    steps = [step for url in urls for step in _steps(stores, url)]
    found = _each(steps, jobs, lambda url: _verify(stores, url, digest))
    problems = {
        url: [_why(each)] if isinstance(each, Exception) else _problems(stores, url, each)
        for url, each in found
    }
    none = {url for url, each in found if isinstance(each, StepVerdict) and each.kind == NO_STEP}
    if as_json:
        tell(
            {"steps": [{"path": url, "problems": lines} for url, lines in problems.items()]},
            paths=urls,
        )
    else:
        for url, lines in problems.items():
            verdict = "no step" if url in none else "damaged" if lines else "whole"
            click.echo(f"{verdict:8} {url}")
            for line in lines:
                click.echo(f"         {line}")
    return FOUND if any(problems.values()) else 0


def _verify(stores: OpenTrees, url: str, digest: bool) -> StepVerdict:
    at = stores.endpoint(url)
    return verify_step(at.tree, at.path, digest=digest)


def _problems(stores: OpenTrees, url: str, verdict: StepVerdict) -> list[str]:
    """What is wrong, with paths that begin at the step."""
    folder = stores.endpoint(url).path
    prefixes = (f"{folder}/", f"{folder}: ")
    return [
        next((line.removeprefix(each) for each in prefixes if line.startswith(each)), line)
        for line in verdict.problems
    ]


def _steps(stores: OpenTrees, url: str) -> list[str]:
    """The steps of a run, or the step itself."""
    at = stores.endpoint(url)
    if parse_step(at.path.rpartition("/")[2]):
        return [url]
    with suppress(FileNotFoundError, NotADirectoryError):
        names = [entry.name for entry in at.tree.list_dir(at.path) if entry.is_dir]
        steps = [name for name in names if parse_step(name)]
        return [_below(at, name) for name in steps] or [url]
    raise ConfigError(f"{url}: is not there: name the directory of a run or a step")


def _below(at: TransferEnd, name: str) -> str:
    return url_below(at.tree.url, joined(at.path, name))


@dataclass(frozen=True, kw_only=True)
class MoveArguments:
    """The command line of `slicefs ckpt move`."""

    src: str
    dst: str
    keep_src: bool
    entry: str
    with_logs: tuple[str, ...]
    dry_run: bool
    jobs: int
    as_json: bool


@command(
    MoveArguments,
    group=ckpt,
    epilog=examples(
        "slicefs ckpt move -n /mnt/vol/run s3://archive/run",
        "slicefs ckpt move --keep-src --json /mnt/vol/run s3://archive/run",
    ),
)
@click.argument("src")
@click.argument("dst")
@click.option("--keep-src", is_flag=True, help="Copy, and leave SRC as it is.")
@click.option("--entry", default="", metavar="NAME", help="Only this file or directory of SRC.")
@click.option(
    "--with-logs", multiple=True, metavar="GLOB", help="Copy these local files to DST/logs, too."
)
@click.option("-n", "--dry-run", "--plan", is_flag=True, help="Only print what would be sent.")
@_jobs
@_json
@click.pass_obj
def move(stores: OpenTrees, args: MoveArguments) -> int:
    """Move the run SRC to DST. Each copy is read back before its source is removed.

    Files that are there with the same content are skipped, so an interrupted move is run again.
    """
    source, target = stores.endpoints(args.src, args.dst)
    line = ProgressLine(_RUNTIME)
    copier = Copier(source, target, jobs=args.jobs, runtime=_RUNTIME, say=line.show)
    if args.dry_run:
        files, count = copier.plan()
        if args.as_json:
            tell(
                {"dry_run": True, "files": files, "bytes": count}, source=args.src, target=args.dst
            )
        else:
            click.echo(
                f"{files} files, {format_size(count)} would be sent from {args.src} to {args.dst}"
            )
        return 0
    report = move_files(source, target, copier, keep_src=args.keep_src, entry=args.entry)
    line.clear()
    logs = 0
    if args.with_logs and not (report.copy.failures or report.left):
        logs = move_logs(args.with_logs, target, keep=args.keep_src)
    if args.as_json:
        done = {"dry_run": False, "renamed": report.renamed, **report.copy.told()}
        left = {"removed": report.removed, "left": list(report.left), "logs": logs}
        tell({**done, **left}, source=args.src, target=args.dst)
        return int(bool(report.copy.failures or report.left))
    if logs:
        click.echo(f"{logs} log files are in {args.dst}/logs")
    if report.renamed:
        click.echo(f"renamed, {report.removed} files")
        return 0
    _said(report.copy)
    for path in report.left:
        click.echo(f"{path}: has changed during the move and stays: run the move again", err=True)
    return int(bool(report.copy.failures or report.left))


@ckpt.command(
    short_help="Copy a step as plain files, verified.",
    epilog=examples(
        "slicefs ckpt export /mnt/vol/run/step-1000 /data/step-1000",
        "slicefs ckpt export --json redis://localhost/1#run s3://public/run",
    ),
)
@click.argument("src")
@click.argument("dst")
@_jobs
@_json
@click.pass_obj
def export(stores: OpenTrees, src: str, dst: str, jobs: int, as_json: bool) -> int:
    """Copy the step or directory SRC to DST as plain files, verified, without any of our own."""
    source, target = stores.endpoints(src, dst)
    line = ProgressLine(_RUNTIME)
    report = export_files(
        source, lambda at: Copier(at, target, jobs=jobs, runtime=_RUNTIME, say=line.show)
    )
    line.clear()
    if as_json:
        tell(report.told(), source=src, target=dst)
    else:
        _said(report)
    return int(bool(report.failures))


def _said(report: CopyReport) -> None:
    click.echo(
        f"{report.copied} files copied, {format_size(report.copied_bytes)}; "
        f"{report.skipped} were there"
    )
    for failure in report.failures:
        click.echo(failure, err=True)


@ckpt.command(
    name="map",
    short_help="Print which path of the tracker each run has.",
    epilog=examples(
        "slicefs ckpt map --table paths.json /mnt/vol/runs/*",
        "slicefs ckpt map --resolver lab:paths_of --output map.json s3://runs/a",
    ),
)
@click.argument("runs", nargs=-1, required=True, metavar="RUN…")
@click.option(
    "--table",
    type=click.Path(exists=True, dir_okay=False),
    help="JSON file that gives the path of each id.",
)
@click.option(
    "--resolver", metavar="MODULE:FUNCTION", help="Python function that returns the paths of an id."
)
@click.option("--wandb", metavar="ENTITY/PROJECT", help="Ask W&B for runs with this name or id.")
@click.option("--output", type=click.Path(dir_okay=False), help="Write the JSON to this file.")
@click.option("--json", is_flag=True, expose_value=False, help="Print JSON; it always does.")
@click.pass_obj
def map_(
    stores: OpenTrees,
    runs: tuple[str, ...],
    table: str | None,
    resolver: str | None,
    wandb: str | None,
    output: str | None,
) -> int:
    """Print, as JSON, which path of the tracker each RUN has, by the ids in its wandb/ logs."""
    resolve = _resolver(table, resolver, wandb)
    found = {url: map_run(stores.endpoint(url), resolve) for url in runs}
    text = json.dumps({url: each.path for url, each in found.items() if each.path}, indent=2)
    if output is None:
        click.echo(text)
    else:
        at = stores.endpoint(output)
        at.tree.write_atomic(at.path, [f"{text}\n".encode()])
    for url, each in found.items():
        if each.problem:
            click.echo(f"{url}: {each.problem}", err=True)
    return FOUND if any(each.problem for each in found.values()) else 0


def _resolver(table: str | None, resolver: str | None, wandb: str | None) -> Resolver:
    if [table, resolver, wandb].count(None) != 2:
        raise ConfigError("map: name the source of the paths: --table, --resolver or --wandb")
    if wandb is not None:
        return wandb_resolver(wandb)
    if resolver is not None:
        return plugged_resolver(resolver)
    with open(str(table), encoding="utf-8") as file:
        return table_resolver(file.read(), str(table))


ckpt.add_command(pipeline)
ckpt.add_command(unshard)

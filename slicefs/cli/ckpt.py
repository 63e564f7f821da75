"""`slicefs ckpt`: clean, verify, unshard, move, map and export checkpoints.

The command line finds this group as an entry point, when it is called. URLs are what
`slicefs.open_tree` takes. Exit codes: 0 done, 1 failed, 2 wrong command line, 3 problems found.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import click

from fsclient.cli.options.options import duration, size
from fsclient.cli.options.progress import ProgressLine
from fsclient.volume.units import format_size
from fsmeta.errors import ConfigError, Corrupt
from fsmeta.runtime import SystemRuntime
from slicefs.checkpoint.layout import parse_step, real_steps
from slicefs.checkpoint.step import joined, url_below
from slicefs.client.parallel import Readers
from slicefs.lifecycle.clean import (
    ARCHIVE_BYTES_MAX,
    Rules,
    RunVerdict,
    judge,
    refuse_non_runs,
    remove_run,
)
from slicefs.lifecycle.move import Stores, export as export_files, move as move_files
from slicefs.lifecycle.run_map import Resolver, map_run, plugged_resolver, table_resolver
from slicefs.lifecycle.transfer import Copier, CopyReport, Endpoint
from slicefs.lifecycle.unshard import unshard as unshard_step
from slicefs.lifecycle.verify import verify_step

FOUND: Final = 3
_RUNTIME: Final = SystemRuntime()
_jobs = click.option(
    "-j", "--jobs", default=4, type=click.IntRange(1, 64), help="How many at a time."
)
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group(name="ckpt", context_settings={"help_option_names": ["-h", "--help"]})
@click.pass_context
def ckpt(ctx: click.Context) -> None:
    """Checkpoints of training runs: clean, verify, unshard, move, map and export.

    A URL is a directory, file:///DIR, s3://BUCKET/PREFIX, r2://…, gs://…, slicefs://VOLUME/PATH or
    META-URL#PATH.
    """
    ctx.obj = ctx.with_resource(Stores())


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


@ckpt.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN…")
@click.option("-n", "--dry-run", is_flag=True, help="Only say what would be removed.")
@click.option("--verify", is_flag=True, help="Count a step only if it is whole.")
@click.option("--ignore-non-runs", is_flag=True, help="Pass over what does not look like a run.")
@click.option("--bypass-run-verification", is_flag=True, help="Take each RUN for a run.")
@click.option("--older-than", type=duration, metavar="TIME", help="Only runs at rest for 7d, 12h.")
@click.option(
    "--max-archive-size", type=size, default=ARCHIVE_BYTES_MAX, metavar="SIZE", show_default="5GiB"
)
@_jobs
@_json
@click.pass_obj
def clean(
    stores: Stores,
    /,
    runs: tuple[str, ...],
    dry_run: bool,
    ignore_non_runs: bool,
    older_than: float | None,
    jobs: int,
    as_json: bool,
    **words: Any,
) -> int:
    """Remove each RUN, a directory or a tar archive, that has no checkpoint beyond step 0.

    Nothing is removed if one of them does not look like a run. In a volume with a trash, files go
    there: `slicefs restore` brings them back.
    """
    before = None if older_than is None else _RUNTIME.now_ns() - int(older_than * 1e9)
    rules = Rules(
        words["verify"], words["bypass_run_verification"], before, words["max_archive_size"]
    )
    found = _each(runs, jobs, lambda url: judge(stores.endpoint(url), rules))
    if not ignore_non_runs:
        refuse_non_runs([(u, v) for u, v in found if isinstance(v, RunVerdict)])
    doomed = [url for url, v in found if isinstance(v, RunVerdict) and v.verdict == "remove"]
    if not dry_run:
        removed = dict(_each(doomed, jobs, lambda url: remove_run(stores.endpoint(url))))
        found = [(u, e if isinstance(e := removed.get(u), Exception) else v) for u, v in found]
    if as_json:
        click.echo(json.dumps({url: _verdict(each) for url, each in found}, indent=2))
    else:
        for url, each in found:
            shown = _verdict(each)
            click.echo(f"{shown['verdict']:8} {url}  {shown['why']}")
        freed = sum(v.size for u, v in found if u in doomed and isinstance(v, RunVerdict))
        verb = "would be removed" if dry_run else "removed"
        click.echo(f"{len(doomed)} of {len(found)} runs {verb}, {format_size(freed)}")
    return int(any(isinstance(each, Exception) for _, each in found))


def _verdict(each: RunVerdict | Exception) -> dict[str, Any]:
    if isinstance(each, RunVerdict):
        return each._asdict()
    return {"verdict": "failed", "why": _why(each)}


@ckpt.command()
@click.argument("urls", nargs=-1, required=True, metavar="URL…")
@click.option("--digest", is_flag=True, help="Read all bytes and compare the manifest's digests.")
@_jobs
@_json
@click.pass_obj
def verify(stores: Stores, urls: tuple[str, ...], digest: bool, jobs: int, as_json: bool) -> int:
    """Say of each step whether it is whole; URL is a step, or a run whose steps are looked at."""
    steps = [step for url in urls for step in _steps(stores, url)]
    found = _each(steps, jobs, lambda url: _verify(stores, url, digest))
    problems = {
        url: [_why(each)] if isinstance(each, Exception) else list(each.problems)
        for url, each in found
    }
    if as_json:
        click.echo(json.dumps(problems, indent=2))
    else:
        for url, lines in problems.items():
            click.echo(f"{'damaged' if lines else 'whole':8} {url}")
            for line in lines:
                click.echo(f"         {line}")
    return FOUND if any(problems.values()) else 0


def _verify(stores: Stores, url: str, digest: bool) -> Any:
    at = stores.endpoint(url)
    return verify_step(at.tree, at.path, digest=digest)


def _steps(stores: Stores, url: str) -> list[str]:
    """The steps of a run, or the step itself."""
    at = stores.endpoint(url)
    if parse_step(at.path.rpartition("/")[2]):
        return [url]
    with suppress(FileNotFoundError, NotADirectoryError):
        names = [entry.name for entry in at.tree.list_dir(at.path) if entry.is_dir]
        steps = [name for name in names if parse_step(name)]
        return [_below(at, name) for name in steps] or [url]
    raise ConfigError(f"{url}: is not there: name the directory of a run or a step")


def _below(at: Endpoint, name: str) -> str:
    return url_below(at.tree.url, joined(at.path, name))


@ckpt.command()
@click.argument("src")
@click.argument("dst")
@click.option("--latest-checkpoint-only", is_flag=True, help="Of a run, the newest step.")
@click.option("--checkpoint-num", type=click.IntRange(0), help="Of a run, this step.")
@click.option("--model-only", is_flag=True, help="Leave out the optimizer and what is no tensor.")
@click.option("--delete-sharded", is_flag=True, help="Remove the shards after the result is read.")
@_json
@click.pass_obj
def unshard(
    stores: Stores,
    src: str,
    dst: str,
    latest_checkpoint_only: bool,
    checkpoint_num: int | None,
    model_only: bool,
    delete_sharded: bool,
    as_json: bool,
) -> int:
    """Write safetensors of the DCP step, or of each step of the run, SRC to DST.

    One tensor is in memory at a time. Of a run, DST gets a directory stepN-unsharded for each step.
    """
    if latest_checkpoint_only and checkpoint_num is not None:
        raise ConfigError("--checkpoint-num: leave out --latest-checkpoint-only")
    line = ProgressLine(_RUNTIME)
    reports = {}
    for step, target in _pairs(stores, src, dst, latest_checkpoint_only, checkpoint_num):
        first, second = stores.endpoints(step, target)
        report = unshard_step(
            first, second, model_only=model_only, delete_sharded=delete_sharded, say=line.show
        )
        line.clear()
        reports[target] = report._asdict()
        if not as_json:
            done = "is there already" if report.skipped else format_size(report.written_bytes)
            click.echo(f"{target}: {report.tensors} tensors, {done}")
    if as_json:
        click.echo(json.dumps(reports, indent=2))
    return 0


def _pairs(
    stores: Stores, src: str, dst: str, latest: bool, number: int | None
) -> list[tuple[str, str]]:
    at = stores.endpoint(src)
    if parse_step(at.path.rpartition("/")[2]) and not latest and number is None:
        return [(src, dst)]
    names = real_steps(e.name for e in at.tree.list_dir(at.path) if e.is_dir)
    sharded = [name for name in names if not name.endswith("-unsharded")]
    if number is not None:
        sharded = [n for n in sharded if (p := parse_step(n)) and p.number == number]
    if not sharded:
        raise ConfigError(f"{src}: has no such step: see `slicefs ckpt verify {src}`")
    target = stores.endpoint(dst)
    wanted = sharded[-1:] if latest else sharded
    return [(_below(at, name), _below(target, f"{name}-unsharded")) for name in wanted]


@ckpt.command()
@click.argument("src")
@click.argument("dst")
@click.option("--keep-src", is_flag=True, help="Copy, and leave SRC as it is.")
@click.option("--entry", default="", metavar="NAME", help="Only this file or directory of SRC.")
@click.option("-n", "--dry-run", "--plan", is_flag=True, help="Only say what would be sent.")
@_jobs
@click.pass_obj
def move(
    stores: Stores, src: str, dst: str, keep_src: bool, entry: str, dry_run: bool, jobs: int
) -> int:
    """Move the run SRC to DST. Each copy is read back before its source is removed.

    Files that are there with the same content are skipped, so an interrupted move is run again.
    """
    source, target = stores.endpoints(src, dst)
    line = ProgressLine(_RUNTIME)
    copier = Copier(source, target, jobs=jobs, runtime=_RUNTIME, say=line.show)
    if dry_run:
        files, count = copier.plan()
        click.echo(f"{files} files, {format_size(count)} would be sent from {src} to {dst}")
        return 0
    report = move_files(source, target, copier, keep_src=keep_src, entry=entry)
    line.clear()
    if report.renamed:
        click.echo(f"renamed, {report.removed} files")
        return 0
    _said(report.copy)
    for path in report.left:
        click.echo(f"{path}: has changed meanwhile and stays: run the move again", err=True)
    return int(bool(report.copy.failures or report.left))


@ckpt.command()
@click.argument("src")
@click.argument("dst")
@_jobs
@click.pass_obj
def export(stores: Stores, src: str, dst: str, jobs: int) -> int:
    """Copy the step or directory SRC to DST as plain files, verified, without any of our own."""
    source, target = stores.endpoints(src, dst)
    line = ProgressLine(_RUNTIME)
    report = export_files(
        source, lambda at: Copier(at, target, jobs=jobs, runtime=_RUNTIME, say=line.show)
    )
    line.clear()
    _said(report)
    return int(bool(report.failures))


def _said(report: CopyReport) -> None:
    click.echo(
        f"{report.copied} files copied, {format_size(report.copied_bytes)}; "
        f"{report.skipped} were there"
    )
    for failure in report.failures:
        click.echo(failure, err=True)


@ckpt.command(name="map")
@click.argument("runs", nargs=-1, required=True, metavar="RUN…")
@click.option("--table", type=click.Path(exists=True, dir_okay=False), help="JSON: id to path.")
@click.option("--resolver", metavar="MODULE:FUNCTION", help="A function from an id to its paths.")
@click.option("--output", type=click.Path(dir_okay=False), help="Write the JSON to this file.")
@click.pass_obj
def map_(
    stores: Stores,
    runs: tuple[str, ...],
    table: str | None,
    resolver: str | None,
    output: str | None,
) -> int:
    """Print, as JSON, which path of the tracker each RUN has, by the ids in its wandb/ logs."""
    resolve = _resolver(table, resolver)
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


def _resolver(table: str | None, resolver: str | None) -> Resolver:
    if (table is None) == (resolver is None):
        raise ConfigError("map: say how ids become paths, with --table or with --resolver")
    if resolver is not None:
        return plugged_resolver(resolver)
    with open(str(table), encoding="utf-8") as file:
        return table_resolver(file.read(), str(table))

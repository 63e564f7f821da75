"""`slicefs fsck`: metadata true to itself, and every object there and right."""

from __future__ import annotations

import json
import sys
from typing import Final, NamedTuple

import click

from fsclient.cli.options import META_WAIT_S
from fsclient.config import naming, open_objects, open_store
from fsclient.verify import verify_objects
from fsmeta.check import check
from fsmeta.engine import Meta
from fsmeta.errors import Corrupt
from fsmeta.runtime import SystemRuntime

FOUND: Final = 3  # the exit code where something is wrong
_SHOWN_MAX: Final = 100


@click.command()
@click.argument("meta")
@click.option("--data", is_flag=True, help="Read every object and verify its checksums, too.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def fsck(meta: str, data: bool, as_json: bool) -> int:
    """Check the volume in META. Exit code 0: clean, 3: problems were found.

    On a volume in use, what changes during the check may be reported as a problem.
    """
    try:
        report = _examine(meta, data)
    except Corrupt as error:  # the settings themselves, or what leads to everything else
        click.echo(f"slicefs: {error}", file=sys.stderr)
        return FOUND
    if as_json:
        click.echo(json.dumps(report._asdict(), indent=2))
    else:
        _print(report)
    return FOUND if report.problems else 0


class _Report(NamedTuple):
    inodes: int
    slices: int
    objects: int
    leaked_objects: int
    problems: list[str]


def _examine(meta: str, data: bool) -> _Report:
    """Metadata first, then the objects that it names."""
    runtime = SystemRuntime()
    store = open_store(meta, runtime)
    try:
        with naming(meta):
            settings = Meta(store, runtime, META_WAIT_S).format
        found = check(store)
        objects = open_objects(settings, runtime)
        try:
            verdict = verify_objects(objects, settings.block_bytes, found.slices, found.dead, data)
        finally:
            objects.close()
    finally:
        store.close()
    problems = [str(each) for each in found.problems] + verdict.problems
    return _Report(found.inodes, len(found.slices), verdict.objects, verdict.leaked, problems)


def _print(report: _Report) -> None:
    click.echo(f"{report.inodes} inodes, {report.slices} slices, {report.objects} objects")
    if report.leaked_objects:
        click.echo(f"{report.leaked_objects} objects belong to nothing")
    for problem in report.problems[:_SHOWN_MAX]:
        click.echo(f"problem: {problem}", file=sys.stderr)
    if len(report.problems) > _SHOWN_MAX:
        click.echo(f"… and {len(report.problems) - _SHOWN_MAX} more: see --json", file=sys.stderr)
    click.echo(f"{len(report.problems)} problems" if report.problems else "clean")

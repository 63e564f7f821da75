"""`slicefs fsck`: metadata true to itself, and every object there and right."""

from __future__ import annotations

import json
import sys
from typing import Final

import click

from fsclient.config import open_objects, open_store
from fsclient.verify import verify_objects
from fsmeta.check import check
from fsmeta.engine import Meta
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
    runtime = SystemRuntime()
    store = open_store(meta, runtime)
    try:
        settings = Meta(store, runtime).format
        found = check(store)
        objects = open_objects(settings, runtime)
        verdict = verify_objects(objects, settings.block_bytes, found.slices, found.dead, data)
    finally:
        store.close()
    problems = [str(each) for each in found.problems] + verdict.problems
    report = {
        "inodes": found.inodes,
        "slices": len(found.slices),
        "objects": verdict.objects,
        "leaked_objects": verdict.leaked,
        "problems": problems,
    }
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        click.echo(f"{found.inodes} inodes, {len(found.slices)} slices, {verdict.objects} objects")
        if verdict.leaked:
            click.echo(f"{verdict.leaked} objects belong to nothing")
        for problem in problems[:_SHOWN_MAX]:
            click.echo(f"problem: {problem}", file=sys.stderr)
        click.echo(f"{len(problems)} problems" if problems else "clean")
    return FOUND if problems else 0

"""`slicefs ckpt pipeline`: see `slicefs/lifecycle/pipeline`."""

from __future__ import annotations

import click

from fsclient.cli.options.examples import examples
from fsclient.cli.options.progress import ProgressLine
from fsclient.cli.options.tell import tell
from fsmeta.runtime import SystemRuntime
from slicefs.lifecycle.move import OpenTrees
from slicefs.lifecycle.pipeline import Pipeline, parse_plan


@click.command(
    short_help="Clean, unshard and upload runs by a plan.",
    epilog=examples("slicefs ckpt pipeline --dry-run runs.toml", "slicefs ckpt pipeline runs.toml"),
)
@click.argument("plan", type=click.Path(exists=True, dir_okay=False))
@click.option("-n", "--dry-run", is_flag=True, help="Only print what would be done.")
@click.option("-j", "--jobs", default=4, type=click.IntRange(1, 64), help="Runs at a time.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def pipeline(stores: OpenTrees, plan: str, dry_run: bool, jobs: int, as_json: bool) -> int:
    """Clean, unshard, upload and remove runs as the TOML file PLAN says.

    An interrupted pipeline is run again: what is done is skipped. A run that fails stays where it
    is, and the others go on; the exit code is 1 then.
    """
    runtime = SystemRuntime()
    with open(plan, encoding="utf-8") as file:
        parsed = parse_plan(file.read(), plan)
    line = ProgressLine(runtime)
    made = Pipeline(parsed, stores, runtime, jobs=jobs, say=line.show)
    if dry_run:
        steps = list(made.dry_run())
        if as_json:
            tell({"dry_run": True, "steps": steps}, path=plan)
        else:
            click.echo("\n".join(steps))
        return 0
    outcomes = made.run()
    line.clear()
    if as_json:
        runs = [outcome._asdict() for outcome in outcomes]
        tell({"dry_run": False, "runs": runs}, path=plan)
        return int(any(outcome.failure for outcome in outcomes))
    for outcome in outcomes:
        click.echo(f"{outcome.run}: {'; '.join(outcome.done) or 'nothing was to be done'}")
        if outcome.failure:
            click.echo(f"{outcome.run}: {outcome.failure}", err=True)
    return int(any(outcome.failure for outcome in outcomes))

"""`slicefs destroy`: a volume is removed, with its objects."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import click

from fsclient.cli.options.arguments import command
from fsclient.cli.options.examples import examples
from fsclient.cli.options.options import META_WAIT_S, store_option
from fsclient.cli.options.progress import ProgressLine
from fsclient.cli.options.tell import tell
from fsclient.upkeep.destroy import THREADS, Destroyed, DestroyPlan, destroy as destroy_volume
from fsclient.volume.units import format_size
from fsmeta.errors import ConfigError
from fsmeta.runtime import SystemRuntime


@dataclass(frozen=True, kw_only=True)
class DestroyArguments:
    """The command line of `slicefs destroy`."""

    meta: str
    name: str
    uuid: str
    force: bool
    keep_objects: bool
    sole: bool
    threads: int
    dry_run: bool
    yes: bool
    store_options: tuple[str, ...]
    as_json: bool


@command(
    DestroyArguments,
    epilog=examples(
        "slicefs destroy redis://10.0.0.1/1 training",
        "slicefs destroy --yes --keep-objects sqlite:///copy.db training",
    ),
)
@click.argument("meta")
@click.argument("name")
@click.option("--uuid", default="", metavar="UUID", help="Refuse unless the volume has this uuid.")
@click.option("--force", is_flag=True, help="Remove it even while clients use it: they get errors.")
@click.option("--keep-objects", is_flag=True, help="Remove the metadata only.")
@click.option(
    "--sole",
    is_flag=True,
    help="This metadata is the only one that uses the objects, although it looks like a copy.",
)
@click.option(
    "--threads",
    type=click.IntRange(1, 256),
    default=THREADS,
    show_default=True,
    help="Deletions at once.",
)
@click.option("-n", "--dry-run", is_flag=True, help="Count what would go; change nothing.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@store_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def destroy(args: DestroyArguments) -> None:
    """Remove the volume NAME in META: its metadata and its objects. Nothing can be restored.

    Objects that SliceFS has not written are left in place. The command is refused while clients
    have the volume mounted, if the object store belongs to another volume, and if the metadata is a
    copy of a volume that may live on. An interrupted run is completed by the same command.
    """
    order = DestroyPlan(
        args.meta,
        args.name,
        args.uuid,
        args.force,
        args.keep_objects,
        args.sole,
        args.store_options,
        args.threads,
        args.dry_run,
        META_WAIT_S,
    )
    if not args.yes and not args.dry_run:
        _ask(args.name)
    runtime = SystemRuntime()
    line = ProgressLine(runtime)
    try:
        done = destroy_volume(order, runtime, line.show)
    finally:
        line.clear()
    if args.as_json:
        tell({"dry_run": args.dry_run, **done._asdict()}, meta=args.meta)
    else:
        click.echo(_words(done, args.dry_run))


def _ask(name: str) -> None:
    """Have the name typed once more. Raises: ConfigError."""
    if sys.stdin is None or not sys.stdin.isatty():
        raise ConfigError("there is no terminal to ask at: add --yes")
    typed = click.prompt(f"Everything in {name!r} is lost. Type its name to go on", err=True)
    if typed != name:
        raise ConfigError("the name differs: nothing was changed")


def _words(done: Destroyed, dry_run: bool) -> str:
    what = f"{done.objects} objects ({format_size(done.bytes)}) in {done.place}"
    line = f"volume {done.volume} ({done.uuid}): "
    if dry_run:
        line += f"would delete {what}"
    else:
        line += f"destroyed, {done.rows} records and {what}"
    if done.kept:
        line += f"; {done.kept} objects that SliceFS did not write are left there"
    return line

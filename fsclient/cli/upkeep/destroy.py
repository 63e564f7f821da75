"""`slicefs destroy`: a volume is removed, with its objects."""

from __future__ import annotations

import json
import sys

import click

from fsclient.cli.options.examples import examples
from fsclient.cli.options.options import META_WAIT_S, store_option
from fsclient.cli.options.progress import ProgressLine
from fsclient.upkeep.destroy import THREADS, Destroyed, Order, destroy as destroy_volume
from fsclient.volume.units import format_size
from fsmeta.errors import ConfigError
from fsmeta.runtime import SystemRuntime


@click.command(
    epilog=examples(
        "slicefs destroy redis://10.0.0.1/1 training",
        "slicefs destroy --yes --keep-objects sqlite:///copy.db training",
    )
)
@click.argument("meta")
@click.argument("name")
@click.option("--uuid", default="", metavar="UUID", help="Refuse unless the volume has this uuid.")
@click.option("--force", is_flag=True, help="Although clients have it in use: they get errors.")
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
def destroy(
    meta: str,
    name: str,
    uuid: str,
    force: bool,
    keep_objects: bool,
    sole: bool,
    threads: int,
    dry_run: bool,
    yes: bool,
    store_options: tuple[str, ...],
    as_json: bool,
) -> None:
    """Remove the volume NAME in META: its metadata and its objects. Nothing can be restored.

    Objects that SliceFS has not written are left in place. The command is refused while clients
    have the volume mounted, if the object store belongs to another volume, and if the metadata is a
    copy of a volume that may live on. An interrupted run is completed by the same command.
    """
    order = Order(
        meta, name, uuid, force, keep_objects, sole, store_options, threads, dry_run, META_WAIT_S
    )
    if not yes and not dry_run:
        _ask(name)
    runtime = SystemRuntime()
    line = ProgressLine(runtime)
    try:
        done = destroy_volume(order, runtime, line.show)
    finally:
        line.clear()
    if as_json:
        click.echo(json.dumps({**done._asdict(), "dry_run": dry_run}, indent=2))
    else:
        click.echo(_words(done, dry_run))


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

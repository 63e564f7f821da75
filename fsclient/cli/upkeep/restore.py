"""`slicefs restore`: what is in the trash, and back with it."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import click

from fsclient.cli.options.options import META_WAIT_S
from fsclient.cli.options.progress import ProgressLine, bar
from fsclient.upkeep.restore import RestoreOutcome, Restorer, Trashed
from fsclient.volume.metadata_url import naming, open_store
from fsclient.volume.units import format_size
from fsmeta.errors import ConfigError
from fsmeta.meta.meta import Meta
from fsmeta.runtime import SystemRuntime
from fsmeta.schema.trash import hour_name
from fsmeta.types import Caller


@click.command()
@click.argument("meta")
@click.argument("hours", nargs=-1, metavar="[HOUR]...")
@click.option("--put-back", is_flag=True, help="Restore; else it is only shown.")
@click.option("--path", default="", help="What was deleted last under this path, with all in it.")
@click.option(
    "--threads",
    type=click.IntRange(1, 64),
    default=10,
    show_default=True,
    help="How many things are put back at a time.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def restore(
    meta: str, hours: tuple[str, ...], put_back: bool, path: str, threads: int, as_json: bool
) -> int:
    """Show the trash of the volume in META, or restore from it.

    Without HOUR and --path: the hours (UTC, like 2026-11-21-19) and how much was deleted in each.
    With them: what that is, by path, and with --put-back it goes back to where it was; directories
    come before what was in them, and a name that exists is never replaced. A directory of --path
    comes with all that was deleted in it and is in the trash, also before. Who is not root may
    restore what is his own. Several may restore the same things at once.
    """
    if path and hours:
        raise ConfigError("--path: leave out the hours, or the path")
    if put_back and not path and not hours:
        raise ConfigError("--put-back: name the hours to restore, or a --path")
    runtime = SystemRuntime()
    store = open_store(meta, runtime)
    try:
        with naming(meta):
            client = Meta(store, runtime, META_WAIT_S)
        info = {"host": socket.gethostname(), "pid": os.getpid(), "does": "slicefs restore"}
        client.sessions.open({**info, "started": runtime.now_ns() // 10**9})
        try:
            caller = Caller(os.getuid(), os.getgid(), tuple(os.getgroups()))
            restorer = Restorer(client, runtime, caller)
            things = _wanted(restorer, hours, path)
            if things is None:
                _print_hours(restorer.hours(), as_json)
            elif put_back:
                return _put_back(restorer, things, threads, ProgressLine(runtime), as_json)
            else:
                for thing in things:
                    click.echo(json.dumps(_record(thing)) if as_json else _line(thing))
            return 0
        finally:
            client.sessions.close()
    finally:
        store.close()


def _wanted(restorer: Restorer, hours: tuple[str, ...], path: str) -> list[Trashed] | None:
    """What was asked for; None: only the hours. Raises: ConfigError."""
    if path:
        return restorer.tree(path)
    return [each for hour in sorted({*hours}) for each in restorer.of_hour(hour)] or None


def _put_back(
    restorer: Restorer, things: Sequence[Trashed], threads: int, line: ProgressLine, as_json: bool
) -> int:
    """The exit code."""
    seen = 0

    def tell(outcome: RestoreOutcome) -> None:
        nonlocal seen
        seen += 1
        record = {**_record(outcome.thing), "error": outcome.error or None}
        if as_json:
            click.echo(json.dumps(record))
        elif outcome.error:
            line.say(f"slicefs: {outcome.thing.path}: {outcome.error}")
        else:
            line.show(f"{bar(seen, len(things))}  {seen} of {len(things)}")

    try:
        failed = restorer.put_back(things, tell, threads)
    finally:
        line.clear()
    if not as_json:
        click.echo(f"{len(things) - failed} of {len(things)} are back")
    return 1 if failed else 0


def _print_hours(found: list[tuple[str, int]], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps([{"hour": name, "count": count} for name, count in found]))
        return
    for name, count in found:
        click.echo(f"{name}  {count}")
    if not found:
        click.echo("the trash is empty")


def _shown(name: bytes) -> str:
    return name.decode(errors="replace")


def _record(thing: Trashed) -> dict[str, Any]:
    return {
        "hour": _shown(hour_name(thing.hour)),
        "entry": _shown(thing.entry),
        "ino": thing.attr.ino,
        "parent": thing.origin.parent,
        "name": _shown(thing.origin.name),
        "path": thing.path,
        "type": thing.attr.type.name.lower(),
        "uid": thing.attr.uid,
        "size": thing.attr.size,
        "deleted": thing.attr.ctime_ns // 10**9,
    }


def _line(thing: Trashed) -> str:
    deleted = datetime.fromtimestamp(thing.attr.ctime_ns // 10**9, UTC)
    size = "directory" if thing.attr.is_dir else format_size(thing.attr.size)
    what = f"{deleted:%Y-%m-%d %H:%M:%S}  uid {thing.attr.uid}  {size}"
    return f"{what}  {thing.path}  (inode {thing.attr.ino})"

"""`slicefs restore`: what is in the trash, and back with it."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import click

from fsclient.cli.options.examples import examples
from fsclient.cli.options.options import META_WAIT_S
from fsclient.cli.options.progress import ProgressLine, bar
from fsclient.cli.options.tell import tell, tell_line
from fsclient.upkeep.restore import RestoreOutcome, Restorer, Trashed
from fsclient.volume.metadata_url import naming, open_store
from fsclient.volume.units import format_size
from fsmeta.errors import ConfigError
from fsmeta.meta.meta import Meta
from fsmeta.runtime import SystemRuntime
from fsmeta.schema.trash import hour_name
from fsmeta.types import Caller
from fsmeta.user_namespace import own_gid, own_groups, own_uid


@click.command(
    epilog=examples(
        "slicefs restore redis://localhost/1",
        "slicefs restore --put-back redis://localhost/1 2026-11-28-04",
    )
)
@click.argument("meta")
@click.argument("hours", nargs=-1, metavar="[HOUR]...")
@click.option("--put-back", is_flag=True, help="Restore it; by default it is only shown.")
@click.option(
    "--path",
    default="",
    help="Show or restore what was last deleted at this path, with everything in it.",
)
@click.option(
    "--threads",
    type=click.IntRange(1, 64),
    default=10,
    show_default=True,
    help="Number of files that are restored at a time.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def restore(
    meta: str, hours: tuple[str, ...], put_back: bool, path: str, threads: int, as_json: bool
) -> int:
    """Show the trash of the volume in META, or restore from it.

    Without HOUR and --path the command shows the hours (UTC, like 2026-11-21-19) and how much was
    deleted in each. With them it shows the deleted files by path, and --put-back moves them back
    to where they were. Directories come before their contents, and a name that exists is never
    replaced. If --path names a directory, everything that was deleted in it and is in the trash
    comes back, too, even if the directory exists. The same command completes an interrupted run. A
    user other than root may restore only files of their own. Several commands may restore the same
    files at the same time.
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
            caller = Caller(own_uid(), own_gid(), own_groups())
            restorer = Restorer(client, runtime, caller)
            things = _wanted(restorer, hours, path)
            if things is None:
                _print_hours(meta, restorer.hours(), as_json)
            elif put_back:
                return _put_back(restorer, things, threads, ProgressLine(runtime), meta, as_json)
            else:
                for thing in things:
                    if as_json:
                        tell_line(_record(thing), meta=meta)
                    else:
                        click.echo(_line(thing))
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
    restorer: Restorer,
    things: Sequence[Trashed],
    threads: int,
    line: ProgressLine,
    meta: str,
    as_json: bool,
) -> int:
    """The exit code."""
    seen = 0

    def tell(outcome: RestoreOutcome) -> None:
        nonlocal seen
        seen += 1
        record = {**_record(outcome.thing), "error": outcome.error or None}
        if as_json:
            tell_line(record, meta=meta)
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


def _print_hours(meta: str, found: list[tuple[str, int]], as_json: bool) -> None:
    if as_json:
        tell({"hours": [{"hour": name, "count": count} for name, count in found]}, meta=meta)
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
        "deleted_at": thing.attr.ctime_ns // 10**9,
    }


def _line(thing: Trashed) -> str:
    deleted = datetime.fromtimestamp(thing.attr.ctime_ns // 10**9, UTC)
    size = "directory" if thing.attr.is_dir else format_size(thing.attr.size)
    what = f"{deleted:%Y-%m-%d %H:%M:%S}  uid {thing.attr.uid}  {size}"
    return f"{what}  {thing.path}  (inode {thing.attr.ino})"

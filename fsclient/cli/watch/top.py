"""`slicefs top`: which users, groups, processes or files a mount works for."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

import click

from fsclient.cli.options.options import SecondsType
from fsclient.cli.options.tell import tell_line
from fsclient.cli.watch.source import (
    ACCESS_LOG,
    AccessFeed,
    ending_well,
    require_mount,
    shown_name,
)
from fsclient.observe.access_line import Line
from fsclient.volume.units import format_size
from fsmeta.runtime import SystemRuntime

KEYS_MAX: Final = 100_000  # users or files that are counted apart; the rest is "other"
NAMES_MAX: Final = 100_000  # names of files that are remembered
_ENTRY: Final = frozenset(("lookup", "create", "mknod", "mkdir", "symlink", "link"))
_EXAMPLES: Final = """\b
Examples:
  slicefs top /data
  slicefs top /data --by file --interval 10 --count 1 --json"""


@dataclass
class _Row:
    """What was done for one of them in an interval."""

    requests: int = 0
    errors: int = 0
    read_bytes: int = 0
    write_bytes: int = 0
    seconds: float = 0.0


class _Table:
    """Rows of one interval, and the names of files."""

    def __init__(self, by: str) -> None:
        self._by = by
        self.rows: dict[str, _Row] = {}
        self._names: dict[int, str] = {}

    def take(self, line: Line) -> None:
        """Count a request."""
        led = line.verb in _ENTRY and line.outcome == "OK" and line.number and line.name
        if led and (len(self._names) < NAMES_MAX or line.number in self._names):
            self._names[line.number] = line.name
        key = str(line.ino if self._by == "file" else getattr(line, self._by))
        if len(self.rows) >= KEYS_MAX and key not in self.rows:
            key = "other"
        row = self.rows.setdefault(key, _Row())
        row.requests += 1
        row.errors += line.outcome not in ("OK", "LATER")
        row.read_bytes += line.number if line.verb == "read" else 0
        row.write_bytes += line.number if line.verb == "write" else 0
        row.seconds += line.seconds

    def name_of(self, key: str) -> str:
        """The name a file was last looked up by; "" where it was not."""
        if self._by != "file" or not key.isdigit():
            return ""
        return "/" if key == "1" else self._names.get(int(key), "")


@click.command(epilog=_EXAMPLES)
@click.argument("mountpoint", type=click.Path())
@click.option(
    "--by",
    type=click.Choice(("uid", "gid", "pid", "file")),
    default="uid",
    show_default=True,
    help="What a row stands for; a file is shown by its inode and the name last looked up.",
)
@click.option(
    "--interval",
    type=SecondsType(0.1, 3600),
    default=2.0,
    show_default=True,
    help="Seconds between two tables.",
)
@click.option(
    "--count",
    type=click.IntRange(1),
    default=None,
    help="Number of tables; by default until Ctrl-C.",
)
@click.option(
    "--rows", type=click.IntRange(1), default=20, show_default=True, help="Rows of a table."
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object a table.")
def top(
    mountpoint: str, by: str, interval: float, count: int | None, rows: int, as_json: bool
) -> None:
    """Show for which users, groups, processes or files the mount on MOUNTPOINT works most, by time,
    a table each interval.

    Only the user of the mount may run it: it reads .accesslog. Requests that the kernel answers by
    itself are not counted. The mount is in use while the command runs.
    """
    path = require_mount(mountpoint, ACCESS_LOG)
    runtime = SystemRuntime()
    table = _Table(by)
    lock = runtime.lock()
    with ending_well(mountpoint):
        feed = AccessFeed(path, table.take, runtime, lock)
        printed = 0
        while count is None or printed < count:
            if feed.ended.wait(interval):
                click.echo(f"slicefs: {mountpoint} is no longer mounted", err=True)
                return
            with lock:
                found, table.rows = table.rows, {}
                ranked = sorted(found.items(), key=lambda each: -each[1].seconds)[:rows]
                named = [(key, table.name_of(key), row) for key, row in ranked]
            if as_json:
                _print_json(mountpoint, by, named)
            else:
                _print(by, named)
            printed += 1


def _print_json(mountpoint: str, by: str, rows: list[tuple[str, str, _Row]]) -> None:
    shown: list[dict[str, Any]] = []
    for key, name, row in rows:
        shown.append({by: int(key) if key.isdigit() else key, "name": name, **asdict(row)})
    tell_line({"by": by, "rows": shown}, mountpoint=mountpoint)


def _print(by: str, rows: list[tuple[str, str, _Row]]) -> None:
    head = f"{by:>12} {'requests':>9} {'errors':>7} {'read':>9} {'written':>9} {'seconds':>8}"
    click.echo(head + ("  name" if by == "file" else ""))
    for key, name, row in rows:
        moved = f"{format_size(row.read_bytes):>9} {format_size(row.write_bytes):>9}"
        line = f"{key:>12} {row.requests:>9} {row.errors:>7} {moved} {row.seconds:>8.3f}"
        click.echo(f"{line}  {shown_name(name)}".rstrip())
    click.echo("")

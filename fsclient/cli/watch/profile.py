"""`slicefs profile`: which verbs take the time, from a live mount or a file of `--access-log`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

import click

from fsclient.cli.options.options import SecondsType
from fsclient.cli.options.tell import tell_line
from fsclient.cli.watch.source import ACCESS_LOG, AccessFeed, ending_well, require_mount
from fsclient.observe.access_line import Line
from fsmeta.errors import ConfigError
from fsmeta.runtime import SystemRuntime

_EXAMPLES: Final = """\b
Examples:
  slicefs profile /data --seconds 30
  slicefs profile /var/log/slicefs.access --uid 1000 --json"""


@dataclass
class _Verb:
    """One verb so far."""

    count: int = 0
    errors: int = 0
    seconds: float = 0.0


class _Profile:
    """Sums by verb of the lines of one user, group or process, or of all."""

    def __init__(self, uid: int | None, gid: int | None, pid: int | None) -> None:
        self._wanted = (uid, gid, pid)
        self.verbs: dict[str, _Verb] = {}

    def take(self, line: Line) -> None:
        """Count a request."""
        for wanted, found in zip(self._wanted, (line.uid, line.gid, line.pid), strict=True):
            if wanted is not None and wanted != found:
                return
        verb = self.verbs.setdefault(line.verb, _Verb())
        verb.count += 1
        verb.errors += line.outcome not in ("OK", "LATER")
        verb.seconds += line.seconds


@click.command(epilog=_EXAMPLES)
@click.argument("source", type=click.Path(), metavar="MOUNTPOINT|LOGFILE")
@click.option(
    "--seconds",
    type=SecondsType(0.1, 86400),
    default=None,
    help="Profile a mount for this time; by default until Ctrl-C.",
)
@click.option("--uid", type=int, default=None, help="Only requests of this user.")
@click.option("--gid", type=int, default=None, help="Only requests of this group.")
@click.option("--pid", type=int, default=None, help="Only requests of this process.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def profile(
    source: str,
    seconds: float | None,
    uid: int | None,
    gid: int | None,
    pid: int | None,
    as_json: bool,
) -> None:
    """Show how often each verb was called and how long it took, sorted by time.

    For a mount it reads .accesslog and counts requests from now on; only the user of the mount may
    read it. For a file that --access-log has written, it counts all requests in it.
    """
    live = not os.path.isfile(source)
    if not live and seconds is not None:
        raise ConfigError("--seconds is for mounts: a file is read to its end; leave it out")
    path = require_mount(source, ACCESS_LOG) if live else source
    runtime = SystemRuntime()
    found = _Profile(uid, gid, pid)
    lock = runtime.lock()
    with ending_well(source):
        feed = AccessFeed(path, found.take, runtime, lock)
        try:
            ended = feed.ended.wait(seconds)
        finally:
            feed.settle()
        if ended and live:
            click.echo(f"slicefs: {source} is no longer mounted", err=True)
        if ended and not live and not feed.accepted and feed.comments:
            raise ConfigError(f"{source} has no line of an access log: name a file of --access-log")
    with lock:
        _print(source, found.verbs, as_json)


def _print(source: str, verbs: dict[str, _Verb], as_json: bool) -> None:
    ranked = sorted(verbs.items(), key=lambda each: -each[1].seconds)
    if as_json:
        shown = [
            {
                "verb": name,
                "count": verb.count,
                "errors": verb.errors,
                "average_seconds": round(verb.seconds / verb.count, 9),
                "total_seconds": round(verb.seconds, 9),
            }
            for name, verb in ranked
        ]
        tell_line({"verbs": shown}, source=source)
        return
    total = sum(verb.seconds for verb in verbs.values()) or 1.0
    click.echo(f"{'verb':16} {'count':>9} {'errors':>7} {'avg µs':>10} {'total µs':>12} {'%':>6}")
    for name, verb in ranked:
        average, spent = 1e6 * verb.seconds / verb.count, 1e6 * verb.seconds
        share = 100 * verb.seconds / total
        line = f"{name:16} {verb.count:>9} {verb.errors:>7} {average:>10.1f}"
        click.echo(f"{line} {spent:>12.0f} {share:>6.1f}")

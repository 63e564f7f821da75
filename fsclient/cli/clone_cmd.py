"""`slicefs clone`: a copy of a directory that shares all data."""

from __future__ import annotations

import errno
import json
import os
from typing import Final

import click

from fsclient.cli.jobs import run_job
from fsmeta.errors import ConfigError
from fsmeta.runtime import SystemRuntime

_LOOK_S: Final = 0.01
_TOLD_S: Final = 3.0  # news to the own kernel takes a millisecond
_WHY: Final = {
    errno.EEXIST: "exists already: choose another name",
    errno.ENOTDIR: "is no directory; `cp` shares the data of a file",
    errno.ENOSPC: "the volume is full",
    errno.EDQUOT: "a quota is full",
    errno.EACCES: "there is something in it that you may not read",
    errno.ECANCELED: "was stopped",
    errno.EIO: "can't be cloned: the log of the mount says why",
}


@click.command()
@click.argument("source", type=click.Path(exists=True, file_okay=False))
@click.argument("target", type=click.Path())
@click.option("--preserve", is_flag=True, help="Keep owners and groups; for root.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def clone(source: str, target: str, preserve: bool, as_json: bool) -> None:
    """Make TARGET a copy of the directory SOURCE, both on one SliceFS mount.

    No data is copied: both use the same objects until one of them is changed. TARGET appears when
    all of it is there. Modes, times, extended attributes and hard links within SOURCE are kept.
    What is changed in SOURCE meanwhile may be in TARGET or not.
    """
    above, name = os.path.split(os.path.abspath(target))
    if not os.path.isdir(above):
        raise ConfigError(f"{above} is no directory: make it first")
    if os.path.lexists(target):
        raise ConfigError(f"{target} exists already: choose another name")
    if os.stat(source).st_dev != os.stat(above).st_dev:
        raise ConfigError(f"{source} and {above} are not on the same mount: use `cp -r`")
    if os.path.realpath(above).startswith(os.path.realpath(source) + os.sep) or os.path.samefile(
        above, source
    ):
        raise ConfigError(f"{target} is in {source}: choose a place beside it")
    wish = {"source": os.stat(source).st_ino, "name": name, "preserve": preserve}
    report = run_job(above, wish, as_json)
    code = report["errno"]
    if code:
        what = target if code in (errno.EEXIST, errno.ECANCELED) else source
        raise ConfigError(f"{what} {_WHY.get(code, os.strerror(code))}")
    _wait_for(target)
    if as_json:
        click.echo(json.dumps({"inodes": report["inodes"]}))
    else:
        click.echo(f"{target}: {report['inodes']} inodes")


def _wait_for(target: str) -> None:
    """Until the kernel has been told that the name exists."""
    runtime = SystemRuntime()
    give_up = runtime.monotonic() + _TOLD_S
    while not os.path.lexists(target) and runtime.monotonic() < give_up:
        runtime.sleep(_LOOK_S)

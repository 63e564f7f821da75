"""`slicefs snapshot create|list|delete`: what a directory was like at a moment, read-only."""

from __future__ import annotations

import errno
import json
import os
from datetime import UTC, datetime
from typing import Any, Final

import click

from fsclient.cli.options.jobs import require_mount, run_job
from fsclient.kernel.snapshot_view import SNAPSHOT_XATTR
from fsclient.volume.units import format_size
from fsmeta.errors import ConfigError
from fsmeta.runtime import SystemRuntime
from fsmeta.schema.snapshot_inos import SHELF_NAME

_HEAD: Final = ("NAME", "TAKEN", "INODES", "SPACE", "CHANGED")
_TIME: Final = "%Y-%m-%dT%H-%M-%SZ"  # a name that a shell needs no quotes for
_WHY: Final = {
    errno.EEXIST: "has a snapshot of that name already: choose another",
    errno.EINVAL: "can't have a snapshot of that name: choose another",
    errno.ENAMETOOLONG: "can't have a snapshot of that name: it is longer than 255 bytes",
    errno.EROFS: "is in a snapshot itself",
    errno.ENOENT: "was removed meanwhile",
    errno.ESTALE: "was removed meanwhile",
    errno.ENOSPC: "has more than the volume has room for",
    errno.EMLINK: "can't have one more: the volume has too many, delete some",
    errno.ECANCELED: "has no snapshot: it was stopped",
    errno.EIO: "has no snapshot: the log of the mount says why",
}
_directory = click.argument("path", type=click.Path(exists=True, file_okay=False))
_as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group("snapshot")
def snapshot() -> None:
    """Keep what a directory on a mount is like now.

    PATH/.snapshots/NAME shows it, and nobody can change it. Its data is shared. Taking and deleting
    snapshots is root's; a directory that has some can't be removed.
    """


@snapshot.command("create")
@_directory
@click.argument("name", default="")
@_as_json
def create(path: str, name: str, as_json: bool) -> None:
    """Take a snapshot of the directory PATH; by default NAME is the time in UTC.

    What this mount was given to write is stored first, and published where it writes back. CHANGED
    says how much changed while the tree was read: with 0 all of it is of one moment.
    """
    if not name:
        name = datetime.fromtimestamp(SystemRuntime().now_ns() / 10**9, UTC).strftime(_TIME)
    wish = {"source": os.stat(path).st_ino, "name": name, "preserve": False, "snapshot": True}
    report = run_job(path, wish, as_json)
    code = report["errno"]
    if code:
        raise ConfigError(f"{path} {_WHY.get(code, os.strerror(code))}")
    _print([_describe(path, name)], as_json, one=True)


@snapshot.command("list")
@_directory
@_as_json
def list_(path: str, as_json: bool) -> None:
    """Show the snapshots of the directory PATH."""
    try:
        require_mount(path)
    except OSError as error:
        raise ConfigError(f"{path} is not on a SliceFS mount") from error
    try:
        names = os.listdir(_shelf(path))
    except FileNotFoundError:
        names = []
    found = sorted((_describe(path, each) for each in names), key=lambda each: each["created"])
    _print(found, as_json)


@snapshot.command("delete")
@_directory
@click.argument("name")
@_as_json
def delete(path: str, name: str, as_json: bool) -> None:
    """Delete the snapshot NAME of the directory PATH.

    It is gone at once; what it takes up becomes free in the background.
    """
    if not name or "/" in name or name in (".", ".."):
        raise ConfigError(f"{name or 'the name'} is no name of a snapshot")
    _describe(path, name)
    try:
        os.rmdir(os.path.join(_shelf(path), name))
    except OSError as error:
        whose = error.errno in (errno.EPERM, errno.EACCES)
        why = "that is root's to do" if whose else error.strerror
        raise ConfigError(f"snapshot {name} of {path} can't be deleted: {why}") from error
    click.echo(json.dumps({"deleted": name}) if as_json else f"{name} is deleted")


def _shelf(path: str) -> str:
    return os.path.join(path, os.fsdecode(SHELF_NAME))


def _describe(path: str, name: str) -> dict[str, Any]:
    """What is known of a snapshot. Raises: ConfigError."""
    try:
        value = os.getxattr(os.path.join(_shelf(path), name), SNAPSHOT_XATTR)
    except OSError as error:
        if os.path.lexists(_shelf(path)) and error.errno == errno.ENODATA:
            why = "there is a file of its own that is called .snapshots: rename it"
        else:
            why = f"see `slicefs snapshot list {path}`"
        raise ConfigError(f"{path} has no snapshot {name}: {why}") from error
    found: dict[str, Any] = json.loads(value)
    return {**found, "path": os.path.join(_shelf(path), name)}


def _print(found: list[dict[str, Any]], as_json: bool, one: bool = False) -> None:
    if as_json:
        click.echo(json.dumps(found[0] if one else found, indent=2))
        return
    rows = [_HEAD, *map(_row, found)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(_HEAD))]
    for row in rows:
        cells = [text.rjust(width) for text, width in zip(row, widths, strict=True)]
        click.echo("  ".join((row[0].ljust(widths[0]), *cells[1:])))


def _row(each: dict[str, Any]) -> tuple[str, ...]:
    taken = datetime.fromtimestamp(each["created"], UTC).strftime("%Y-%m-%d %H:%M:%S")
    return (
        each["name"],
        taken,
        str(each["inodes"]),
        format_size(each["space"]),
        str(each["changed"]),
    )

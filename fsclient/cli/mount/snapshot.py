"""`slicefs snapshot create|list|delete`: what a directory was like at a moment, read-only."""

from __future__ import annotations

import errno
import json
import os
from datetime import UTC, datetime
from typing import Any, Final

import click

from fsclient.cli.options.examples import examples
from fsclient.cli.options.jobs import require_mount, run_job
from fsclient.cli.options.tell import tell
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


@click.group(
    "snapshot",
    epilog=examples(
        "slicefs snapshot create /mnt/vol/dataset v1",
        "slicefs snapshot list --json /mnt/vol/dataset",
    ),
)
def snapshot() -> None:
    """Keep the present state of a directory on a mount.

    PATH/.snapshots/NAME shows it, read-only. Its data is shared. Only root takes and deletes
    snapshots. A directory that has snapshots can't be removed.
    """


@snapshot.command(
    "create",
    short_help="Take a snapshot of a directory.",
    epilog=examples(
        "slicefs snapshot create /mnt/vol/dataset", "slicefs snapshot create /mnt/vol/dataset v1"
    ),
)
@_directory
@click.argument("name", default="")
@_as_json
def create(path: str, name: str, as_json: bool) -> None:
    """Take a snapshot of the directory PATH; by default NAME is the time in UTC.

    Data that was written through this mount is stored first, and published if the mount writes
    back. CHANGED is the number of changes while the tree was read: with 0 the snapshot shows the
    tree at one moment.
    """
    if not name:
        name = datetime.fromtimestamp(SystemRuntime().now_ns() / 10**9, UTC).strftime(_TIME)
    wish = {"source": os.stat(path).st_ino, "name": name, "preserve": False, "snapshot": True}
    report = run_job(path, wish, as_json)
    code = report["errno"]
    if code:
        raise ConfigError(f"{path} {_WHY.get(code, os.strerror(code))}")
    made = _describe(path, name)
    if as_json:
        tell({"snapshot": made}, path=path)
    else:
        _print([made])


@snapshot.command(
    "list",
    epilog=examples(
        "slicefs snapshot list /mnt/vol/dataset", "slicefs snapshot list --json /mnt/vol/dataset"
    ),
)
@_directory
@_as_json
def list_(path: str, as_json: bool) -> None:
    """Show the snapshots of the directory PATH."""
    try:
        require_mount(path)
    except OSError as error:
        raise ConfigError(f"{path} is not on a SliceFS mount") from error
    try:
        names = os.listdir(_snapshot_dir(path))
    except FileNotFoundError:
        names = []
    found = sorted((_describe(path, each) for each in names), key=lambda each: each["created"])
    if as_json:
        tell({"snapshots": found}, path=path)
    else:
        _print(found)


@snapshot.command(
    "delete",
    epilog=examples(
        "slicefs snapshot delete /mnt/vol/dataset v1",
        "slicefs snapshot delete --json /mnt/vol/dataset v1",
    ),
)
@_directory
@click.argument("name")
@_as_json
def delete(path: str, name: str, as_json: bool) -> None:
    """Delete the snapshot NAME of the directory PATH.

    It disappears at once; its space becomes free in the background.
    """
    if not name or "/" in name or name in (".", ".."):
        raise ConfigError(f"{name or 'the name'} is no name of a snapshot")
    _describe(path, name)
    try:
        os.rmdir(os.path.join(_snapshot_dir(path), name))
    except OSError as error:
        whose = error.errno in (errno.EPERM, errno.EACCES)
        why = "that is root's to do" if whose else error.strerror
        raise ConfigError(f"snapshot {name} of {path} can't be deleted: {why}") from error
    if as_json:
        tell({"deleted": name}, path=path)
    else:
        click.echo(f"{name} is deleted")


def _snapshot_dir(path: str) -> str:
    return os.path.join(path, os.fsdecode(SHELF_NAME))


def _describe(path: str, name: str) -> dict[str, Any]:
    """What is known of a snapshot. Raises: ConfigError."""
    try:
        value = os.getxattr(os.path.join(_snapshot_dir(path), name), SNAPSHOT_XATTR)
    except OSError as error:
        if os.path.lexists(_snapshot_dir(path)) and error.errno == errno.ENODATA:
            why = "there is a file of its own that is called .snapshots: rename it"
        else:
            why = f"see `slicefs snapshot list {path}`"
        raise ConfigError(f"{path} has no snapshot {name}: {why}") from error
    found: dict[str, Any] = json.loads(value)
    return {**found, "path": os.path.join(_snapshot_dir(path), name)}


def _print(found: list[dict[str, Any]]) -> None:
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

"""`slicefs flush`: is it stored, and seen by others? With `--wait`, when it is."""

from __future__ import annotations

import errno
import os
from typing import Final

import click

from fsclient.cli.options.examples import examples
from fsclient.cli.options.options import SecondsType, complete_files
from fsclient.cli.options.tell import tell
from fsclient.control.durable_xattr import FLUSH_XATTR, WAIT_XATTR
from fsmeta.errors import ConfigError
from fsmeta.runtime import SystemRuntime

_DURABLE: Final = b"1"


@click.command(
    epilog=examples(
        "slicefs flush /mnt/vol", "slicefs flush --wait --timeout 60 /mnt/vol/run/step-1000"
    )
)
@click.argument("paths", nargs=-1, required=True, metavar="PATH…", shell_complete=complete_files)
@click.option("--wait", is_flag=True, help="Wait until it is stored and other clients see it.")
@click.option(
    "--timeout",
    type=SecondsType(0, 86400 * 7),
    default=None,
    metavar="SECONDS",
    help="With --wait: give up after this time.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def flush(paths: tuple[str, ...], wait: bool, timeout: float | None, as_json: bool) -> int:
    """Store what was written to PATH, a file, a directory or a whole mount.

    Open files are flushed. With write-back other clients see the data some time later; exit code 1
    says that they do not see it yet. For a directory this covers everything that is published in
    order with it: by default the whole tree below the same top directory of the mount.
    """
    if timeout is not None and not wait:
        raise ConfigError("--timeout is for --wait: add it, or leave this out")
    clock = SystemRuntime().monotonic
    deadline = None if timeout is None else clock() + timeout
    waiting = []
    for path in paths:
        durable = _ask(path, FLUSH_XATTR)
        while wait and durable != _DURABLE and (deadline is None or clock() < deadline):
            durable = _ask(path, WAIT_XATTR)
        if durable != _DURABLE:
            waiting.append(path)
    if as_json:
        shown = [{"path": path, "stored": path not in waiting} for path in paths]
        tell({"files": shown}, paths=paths)
        return 1 if waiting else 0
    for path in waiting:
        click.echo(f"slicefs: {path}: not in the store yet", err=True)
    return 1 if waiting else 0


def _ask(path: str, name: bytes) -> bytes:
    """Raises: ConfigError, OSError."""
    try:
        return os.getxattr(path, name)
    except OSError as error:
        if error.errno in (errno.ENODATA, errno.ENOTSUP):
            raise ConfigError(
                f"{path} is not on a SliceFS mount: see `findmnt -t fuse.slicefs`"
            ) from error
        raise

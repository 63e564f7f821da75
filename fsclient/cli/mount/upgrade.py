"""`slicefs upgrade`: a mount goes on with the version of SliceFS that is installed now."""

from __future__ import annotations

import os
import sys
from typing import Final

import click

from fsclient.cli.options.examples import examples
from fsclient.cli.options.options import complete_directories
from fsclient.cli.options.tell import tell
from fsclient.fuse.mount.mount import real_path
from fsclient.mount.supervised_mount import mount_config, supervisor_address, unreachable
from fsclient.survival import channel
from fsmeta.errors import ConfigError

ANSWER_S: Final = 150.0  # longer than a client may take to start


@click.command(
    epilog=examples("slicefs upgrade /mnt/vol", "slicefs upgrade --json /mnt/vol"),
)
@click.argument("mountpoint", shell_complete=complete_directories)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def upgrade(mountpoint: str, as_json: bool) -> None:
    """Let this version of SliceFS serve MOUNTPOINT, without unmounting it.

    The mount needs a supervisor: see `slicefs mount --help`. If the new version does not start,
    the old one continues.
    """
    path = real_path(mountpoint)
    answer = _ask(supervisor_address(path))
    if answer != channel.OK:
        raise ConfigError(answer.decode(errors="replace") or "the supervisor has ended")
    pid = mount_config(path)["pid"]
    if as_json:
        tell({"pid": pid}, mountpoint=path)
    else:
        click.echo(f"{path} is served by process {pid}")


def _ask(address: str) -> bytes:
    """The answer of a supervisor. Raises: ConfigError."""
    program = [sys.executable, "-P", "-m", "fsclient.cli.main"]
    try:
        with channel.connect(address, ANSWER_S) as asking:
            asking.send(b"\n".join([channel.UPGRADE, *map(os.fsencode, program)]))
            return asking.recv(4096)
    except OSError as error:
        raise unreachable(error) from error

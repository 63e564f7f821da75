"""`slicefs`: the command line. One file per command; this one names them and ends them.

Exit codes: 0 done, 1 it failed and said why in one line, 2 the command line is wrong, 3 a check
found something (fsck).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from fsclient.cli import format_cmd, fsck_cmd, info_cmd, mount_cmd, status_cmd
from fsmeta.errors import ConfigError, StoreError


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="slicefs", prog_name="slicefs")
def commands() -> None:
    """A POSIX file system with metadata in Redis or SQLite and data in an object store."""


for _command in (
    format_cmd.format_,
    mount_cmd.mount,
    mount_cmd.umount,
    status_cmd.status,
    fsck_cmd.fsck,
    info_cmd.info,
):
    commands.add_command(_command)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    try:
        result = commands.main(
            args=None if arguments is None else list(arguments),
            prog_name="slicefs",
            standalone_mode=False,
        )
    except click.UsageError as error:
        error.show()
        return 2
    except click.exceptions.Abort:
        print("slicefs: interrupted", file=sys.stderr)
        return 1
    except (ConfigError, StoreError) as error:
        print(f"slicefs: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"slicefs: {error.strerror or error}", file=sys.stderr)
        return 1
    return result if isinstance(result, int) else 0


def main() -> None:
    """The `slicefs` program."""
    sys.exit(run())


def mount_helper() -> None:
    """`mount.slicefs SOURCE DIR [-o OPTIONS]`, which mount(8) runs for fstab entries."""
    sys.exit(run(mount_cmd.helper_arguments(sys.argv[1:])))

"""`slicefs mount --transport`, and the options that only the native one has."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

import click
from click.core import ParameterSource

from fsclient.fuse.session.transport import NATIVE, TRANSPORTS
from fsmeta.errors import ConfigError

# by parameter: what it is called
_NATIVE_ONLY: Final = {
    "threads": "--threads",
    "idle_poll": "--idle-poll",
    "open_requests": "--open-requests",
    "passthrough": "--passthrough",
    "supervisor": "--supervisor",
    "take_over": "--take-over",
    "hang_after": "--hang-after",
    "direct_writes": "--direct-writes",
    "access_log": "--access-log",
    "slow_op_log": "--slow-op-log",
    "read_limit": "--read-limit",
    "write_limit": "--write-limit",
    "ops_limit": "--ops-limit",
}

transport_option: Final = click.option(
    "--transport",
    type=click.Choice(TRANSPORTS),
    default=NATIVE,
    show_default=True,
    help="What speaks to the kernel. pyfuse3: where the native one can't run; without locks for "
    "other hosts, fallocate, holes in lseek, O_TMPFILE, chattr (extra pyfuse3, libfuse3-dev).",
)


def require_native(ctx: click.Context, settings: Mapping[str, Any], typed: Collection[str]) -> None:
    """Nothing was asked for that the transport can't do; `typed` came as `-o` words.

    Raises: ConfigError.
    """

    def asked(name: str) -> bool:
        return name in typed or ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE

    transport = settings["transport"]
    if transport == NATIVE:
        return
    for name, option in _NATIVE_ONLY.items():
        if asked(name) and settings[name]:
            raise ConfigError(f"--transport {transport} has no {option}: leave one of them out")

"""The options of `slicefs mount` that limit how much one mount does in a second."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import click

from fsclient.cli.options.options import rate, requests
from fsmeta.rules.rate_limits import RateLimits

_Command = TypeVar("_Command", bound=Callable[..., Any])

# by what `-o name` calls them
RATE_WORDS: Final = {
    "read-limit": "read_limit",
    "write-limit": "write_limit",
    "ops-limit": "ops_limit",
}
_OPTIONS: Final = (
    click.option(
        "--read-limit", type=rate, default=0, help="Bytes a second that programs may read."
    ),
    click.option(
        "--write-limit", type=rate, default=0, help="Bytes a second that programs may write."
    ),
    click.option(
        "--ops-limit",
        type=requests,
        default=0,
        metavar="N",
        help="Requests a second that programs may make.",
    ),
)


def rate_options(command: _Command) -> _Command:
    """Give a command these options."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def parse_rates(settings: Mapping[str, Any]) -> RateLimits:
    """What one mount may do in a second."""
    return RateLimits(settings["read_limit"], settings["write_limit"], settings["ops_limit"])

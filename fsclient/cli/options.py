"""Parameter types that several commands share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

from fsclient.sizes import SIZE_MAX, parse_size
from fsmeta.errors import ConfigError

_Command = TypeVar("_Command", bound=Callable[..., Any])
META_WAIT_S: Final = 5.0  # a metadata store that is away is reported by commands, not waited for


def size(text: str | int) -> int:
    """Bytes, written like 4MiB; click shows the name of this function in the help."""
    try:
        return text if isinstance(text, int) else parse_size(text)
    except ConfigError as error:
        raise click.BadParameter(str(error)) from error


class SecondsType(click.FloatRange):
    """Seconds within bounds; `nan` is within none."""

    name = "seconds"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Raises: BadParameter."""
        try:
            seconds = float(value)
        except ValueError:
            seconds = math.nan
        if math.isnan(seconds):
            self.fail(f"{value!r} is not a number of seconds", param, ctx)
        return float(super().convert(seconds, param, ctx))


def _refuse_keys(_ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    if value is not None:
        raise ConfigError(
            f"{param.opts[0]}: a key on the command line is seen in `ps`: set ACCESS_KEY and "
            "SECRET_KEY, or name a file with --store-option credentials=FILE"
        )


def no_keys_here(command: _Command) -> _Command:
    """Tell whoever types keys, as with other programs, where they belong."""
    for name in ("--access-key", "--secret-key", "--session-token"):
        command = click.option(name, hidden=True, expose_value=False, callback=_refuse_keys)(
            command
        )
    return command


store_option: Final = click.option(
    "--store-option",
    "store_options",
    multiple=True,
    metavar="NAME=VALUE",
    help="Of the object store; see docs/OPERATING.md.",
)
COUNT: Final = click.IntRange(0, SIZE_MAX)

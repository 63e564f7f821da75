"""Parameter types that several commands share."""

from __future__ import annotations

import math
from typing import Any, Final

import click

from fsclient.sizes import SIZE_MAX, parse_size
from fsmeta.errors import ConfigError

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


COUNT: Final = click.IntRange(0, SIZE_MAX)

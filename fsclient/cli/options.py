"""Parameter types that several commands share."""

from __future__ import annotations

from typing import Any

import click

from fsclient.config import parse_size
from fsmeta.errors import ConfigError


class SizeType(click.ParamType[int]):
    """Bytes, written like 4MiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return parse_size(str(value))
        except ConfigError as error:
            self.fail(str(error), param, ctx)


SIZE = SizeType()

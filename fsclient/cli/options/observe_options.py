"""The options of `slicefs mount` for what a mount shows of itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import click

from fsclient.observe.http import parse_address
from fsclient.observe.options import ObserveOptions

_Command = TypeVar("_Command", bound=Callable[..., Any])

# by what `-o name=value` calls them
OBSERVE_WORDS: Final = {
    "metrics": "metrics",
}

_OPTIONS: Final = (
    click.option(
        "--metrics",
        default=None,
        metavar="HOST:PORT",
        help="Serve /metrics for Prometheus and /healthz there; without HOST on 127.0.0.1.",
    ),
)


def observe_options(command: _Command) -> _Command:
    """Give a command these options."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def parse_observe(settings: Mapping[str, Any]) -> ObserveOptions:
    """What the options say. Raises: ConfigError."""
    metrics = settings["metrics"]
    return ObserveOptions(
        metrics=None if metrics is None else parse_address(metrics, "--metrics"),
    )

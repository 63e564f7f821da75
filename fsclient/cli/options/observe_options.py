"""The options of `slicefs mount` for what a mount shows of itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import click

from fsclient.cli.options.look import Look, note_format
from fsclient.cli.options.options import complete_files, size
from fsclient.observe.log_file import KEPT
from fsclient.observe.options import ObserveOptions
from fsclient.observe.routes import parse_address
from fsclient.tracing.options import parse_trace
from fsmeta.errors import ConfigError

LOG_BYTES_MIN: Final = 64 << 10  # less would begin anew with each stack of all threads
_Command = TypeVar("_Command", bound=Callable[..., Any])

# by what `-o name=value` calls them
OBSERVE_WORDS: Final = {
    "metrics": "metrics",
    "web": "web",
    "access-log": "access_log",
    "slow-op-log": "slow_op_log",
    "trace": "trace",
    "trace-sample": "trace_sample",
    "hide-internal": "hide_internal",
    "log-format": "log_format",
    "log-max-size": "log_max_size",
    "syslog": "syslog",
}

_OPTIONS: Final = (
    click.option(
        "--metrics",
        default=None,
        metavar="HOST:PORT",
        help="Serve /metrics for Prometheus and /healthz there; without HOST on 127.0.0.1.",
    ),
    click.option(
        "--web",
        default=None,
        metavar="HOST:PORT",
        help="Serve a web page of the mount there; may be the same address.",
    ),
    click.option(
        "--access-log",
        default="",
        metavar="FILE",
        shell_complete=complete_files,
        help="Write a line for each request to FILE.",
    ),
    click.option(
        "--slow-op-log",
        type=click.FloatRange(0, min_open=True),
        default=None,
        metavar="MS",
        help="Log requests that take at least MS milliseconds, as warnings.",
    ),
    click.option(
        "--trace",
        default=None,
        metavar="URL",
        help="Send OpenTelemetry traces of requests to this OTLP/HTTP collector, as in "
        "http://127.0.0.1:4318.",
    ),
    click.option(
        "--trace-sample",
        type=click.FloatRange(0, 1),
        default=None,
        show_default="1",
        metavar="RATIO",
        help="Trace this share of all requests, as in 0.01.",
    ),
    click.option(
        "--hide-internal",
        is_flag=True,
        help="The root has no .stats and no .accesslog.",
    ),
    click.option(
        "--log-format",
        type=click.Choice(("text", "json")),
        default="text",
        show_default=True,
        callback=note_format,
        help="The log's lines: text, or a JSON object each.",
    ),
    click.option(
        "--syslog",
        default="",
        metavar="ADDRESS",
        help="Log there, too: `local`, the path of a socket, or HOST[:PORT].",
    ),
    click.option(
        "--log-max-size",
        type=size,
        default=0,
        show_default="no limit",
        metavar="SIZE",
        help=f"Start a new log and access log at SIZE; {KEPT} older files are kept.",
    ),
)


def observe_options(command: _Command) -> _Command:
    """Give a command these options."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def parse_observe(settings: Mapping[str, Any], look: Look) -> ObserveOptions:
    """What the options say, and those of all commands. Raises: ConfigError."""
    metrics, web = settings["metrics"], settings["web"]
    log_max = settings["log_max_size"]
    if 0 < log_max < LOG_BYTES_MIN:
        raise ConfigError(f"--log-max-size: at least {LOG_BYTES_MIN >> 10}KiB, or 0 for no limit")
    return ObserveOptions(
        metrics=None if metrics is None else parse_address(metrics, "--metrics"),
        web=None if web is None else parse_address(web, "--web"),
        access_log=os.path.abspath(settings["access_log"]) if settings["access_log"] else "",
        slow_ms=settings["slow_op_log"],
        hide=settings["hide_internal"],
        log_json="json" in (settings["log_format"], look.log_format),
        trace=parse_trace(settings["trace"], settings["trace_sample"], os.environ),
        syslog=settings["syslog"] or look.syslog,
        log_max_bytes=log_max,
    )

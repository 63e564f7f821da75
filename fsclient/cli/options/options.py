"""Parameter types that several commands share."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import click

from fsclient.volume.units import SIZE_MAX, parse_size
from fsmeta.errors import ConfigError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

Completion: TypeAlias = "list[CompletionItem]"
_Command = TypeVar("_Command", bound=Callable[..., Any])
META_WAIT_S: Final = 5.0  # a metadata store that is away is reported by commands, not waited for
RATE_MIN: Final = 64 << 10  # bytes a second: below it a block takes longer than a minute
REQUESTS_MIN: Final = 10  # a second: with fewer a listing takes minutes
REQUESTS_MAX: Final = 1_000_000_000
BARE_MIN: Final = 1 << 20  # a limit below 1 MiB says that it is in bytes
WAIT_MS: Final = 1000  # of --redis-wait; a replica that lives needs less than one


def size(text: str | int) -> int:
    """Bytes, written like 4MiB; click shows the name of this function in the help."""
    try:
        return text if isinstance(text, int) else parse_size(text)
    except ConfigError as error:
        raise click.BadParameter(str(error)) from error


def capacity_size(text: str | int) -> int:
    """Bytes; a small number without its unit was meant in others, as elsewhere it is GiB."""
    found = size(text)
    if isinstance(text, str) and text.strip().isdigit() and 0 < found < BARE_MIN:
        raise click.BadParameter(
            f"{text!r} is {found} bytes: write a unit, as in {found}GiB, or {found}B if it is meant"
        )
    return found


def rate(text: str | int) -> int:
    """Bytes a second; too few are a number without its unit, which elsewhere means megabits."""
    found = size(text)
    if 0 < found < RATE_MIN:
        raise click.BadParameter(f"{text!r}: at least 64KiB a second; write a unit, as in 100MiB")
    return found


def requests(text: str | int) -> int:
    """Requests a second."""
    try:
        found = int(text)
    except ValueError:
        found = -1
    if found < 0 or 0 < found < REQUESTS_MIN or found > REQUESTS_MAX:
        raise click.BadParameter(f"{text!r}: a whole number from {REQUESTS_MIN} on, or 0: no limit")
    return found


_UNITS_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def duration(text: str | float) -> float:
    """Seconds, written like 90, 30m, 2h or 7d."""
    if not isinstance(text, str):
        return text
    unit = _UNITS_S.get(text[-1:])
    number = text if unit is None else text[:-1]
    if not (number.isascii() and number.isdigit()):
        raise click.BadParameter(f"{text!r} is not a time like 90, 30m, 2h or 7d")
    return float(number) * (unit or 1)


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


class WaitType(click.ParamType[tuple[int, int]]):
    """`N`, `N:MS` or `N,MS`: replicas, and milliseconds they may take before they are asked again.

    `-o` is split at commas, so the colon.
    """

    name = "replicas"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, int]:
        """Raises: BadParameter."""
        if isinstance(value, tuple):
            return value
        found = re.fullmatch(r"([1-9]\d?)(?:[:,]([1-9]\d{0,4}))?", value)
        if not found:
            self.fail(
                f"{value!r}: 1 to 99 replicas, with `:` and milliseconds if wanted", param, ctx
            )
        return int(found[1]), int(found[2] or WAIT_MS)


def _refuse_keys(_ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    if value is not None:
        raise ConfigError(
            f"{param.opts[0]}: a key on the command line is seen in `ps`: set ACCESS_KEY and "
            "SECRET_KEY, or name a file with --store-option credentials=FILE"
        )


def no_keys_here(command: _Command) -> _Command:
    """Refuse keys as options, as other programs take them, and say where they belong."""
    for name in ("--access-key", "--secret-key", "--session-token"):
        command = click.option(name, hidden=True, expose_value=False, callback=_refuse_keys)(
            command
        )
    return command


def complete_files(_ctx: click.Context, _param: click.Parameter, begun: str) -> Completion:
    """Let the shell complete names of files."""
    return _completed_by_the_shell(begun, "file")


def complete_directories(_ctx: click.Context, _param: click.Parameter, begun: str) -> Completion:
    """Let the shell complete names of directories."""
    return _completed_by_the_shell(begun, "dir")


def _completed_by_the_shell(begun: str, kind: str) -> Completion:
    from click.shell_completion import CompletionItem  # needed only here

    return [CompletionItem(begun, type=kind)]


def cursor_option(where: str) -> Callable[[_Command], _Command]:
    """`--cursor FILE` of a command that is gone on with; it keeps its place `where`."""
    return click.option(
        "--cursor",
        "cursor_file",
        default=None,
        metavar="FILE",
        shell_complete=complete_files,
        help=f"Record the progress {where}, and continue from there.",
    )


store_option: Final = click.option(
    "--store-option",
    "store_options",
    multiple=True,
    metavar="NAME=VALUE",
    help="Of the object store; see docs/OPERATING.md.",
)
COUNT: Final = click.IntRange(0, SIZE_MAX)

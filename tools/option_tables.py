"""The options of `slicefs format`, `slicefs mount` and the object stores, as tables of the site."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import click

from fsclient.cli.main import commands
from fsclient.volume.object_options import OPTIONS

COMMANDS: Final = ("format", "mount")
_HEAD: Final = "| option | default | unit | what it is for |\n|---|---|---|---|"
_UNITS: Final = {
    "SIZE": "bytes; KiB, MiB, GiB, TiB",
    "RATE": "bytes a second; KiB, MiB, GiB",
    "SECONDS": "seconds",
    "DURATION": "seconds; m, h, d",
    "MS": "milliseconds",
}
_NUMBERS: Final = re.compile(r"INTEGER( RANGE)?|FLOAT( RANGE)?")


def option_tables() -> Iterator[str]:
    """The page."""
    yield "# Options\n\nOf the commands that make and mount a volume. A flag is off by default."
    top = click.Context(commands, info_name="slicefs")
    for name in COMMANDS:
        command = commands.get_command(top, name)
        assert command is not None
        context = click.Context(command, info_name=name, parent=top)
        yield f"\n## slicefs {name}\n\n{_HEAD}"
        for option in shown_options(command):
            yield _row(option, context)
    for storage, options in OPTIONS.items():
        if options:
            yield f"\n## --store-option, of --storage {storage}\n\n{_HEAD}"
        for name, each in options.items():
            unit = _UNITS.get(each.value, "")
            yield _cells(f"`{name}={each.value}`", each.default, unit, each.meaning)


def shown_options(command: click.Command) -> list[click.Option]:
    """Those that the help lists."""
    return [each for each in command.params if isinstance(each, click.Option) and not each.hidden]


def _row(option: click.Option, context: click.Context) -> str:
    value = "" if option.is_flag else option.make_metavar(context)
    value = _NUMBERS.sub("N", value)
    names = ", ".join((*option.opts, *option.secondary_opts))
    words = f"{names} {value}".strip() if len(value) < 40 else names
    return _cells(f"`{words}`", _default(option, context), _unit(option, value), option.help or "")


def _default(option: click.Option, context: click.Context) -> str:
    if isinstance(option.show_default, str):
        return option.show_default
    value = option.get_default(context)
    if isinstance(value, int | float):
        return "" if option.is_flag else f"{value:,g}"
    return value if isinstance(value, str) else ""


def _unit(option: click.Option, value: str) -> str:
    """What a number counts; "" where the option takes none, or its name says it."""
    bounds = option.type if isinstance(option.type, click.IntRange | click.FloatRange) else None
    found = _UNITS.get(value) or _UNITS.get(option.type.name.upper(), "")
    if bounds is None or bounds.min is None:
        return found
    top = f" to {bounds.max:,}" if bounds.max is not None else " or more"
    return f"{found}, {bounds.min}{top}".removeprefix(", ")


def _cells(*texts: str) -> str:
    escaped = (re.sub(r"\s+", " ", text).replace("|", r"\|") for text in texts)
    return f"| {' | '.join(escaped)} |"

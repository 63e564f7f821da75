"""Commands that get their command line as a record: fields and options agree, in name and type."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import click
import pytest
from click.testing import CliRunner

from fsclient.cli.main import commands
from fsclient.cli.options.arguments import command

WITH_RECORD = {
    *("destroy", "format", "fsck", "gc", "objbench", "restore-meta", "scrub", "sync", "warmup"),
    *("ckpt clean", "ckpt move", "ckpt unshard"),
}


@dataclass(frozen=True, kw_only=True)
class EchoArguments:
    """The command line of a command for these tests."""

    text: str
    loud: bool


def _say(args: EchoArguments) -> int:
    """Print TEXT."""
    click.echo(args.text.upper() if args.loud else args.text)
    return 3


def _echo(*options: Callable[[Any], Any], **more: Any) -> click.Command:
    say: Callable[[EchoArguments], int] = _say
    for option in options:
        say = option(say)
    return command(EchoArguments, "echo", **more)(say)


TEXT = click.argument("text")
LOUD = click.option("--loud", is_flag=True, help="In capitals.")


@pytest.fixture(autouse=True)
def no_options_left() -> Iterator[None]:
    """click keeps the options of a function at it until a command takes them."""
    yield
    vars(_say).pop("__click_params__", None)


def test_function_gets_what_the_command_line_says() -> None:
    echo = _echo(TEXT, LOUD)
    assert echo.name == "echo"
    assert echo.help == "Print TEXT."
    done = CliRunner().invoke(echo, ["--loud", "some words"], standalone_mode=False)
    assert done.output == "SOME WORDS\n"
    assert done.return_value == 3


def test_command_of_a_group() -> None:
    group = click.Group()
    assert group.commands == {"echo": _echo(TEXT, LOUD, group=group)}


def test_option_that_takes_no_value_needs_no_field() -> None:
    _echo(TEXT, LOUD, click.option("--quiet", is_flag=True, expose_value=False))


@pytest.mark.parametrize(
    ("options", "names"),
    [((TEXT,), "loud"), ((TEXT, LOUD, click.option("--new")), "new"), ((), "loud, text")],
)
def test_difference_is_found_at_import(
    options: tuple[Callable[[Any], Any], ...], names: str
) -> None:
    message = f"EchoArguments and the options of echo differ in: {names}"
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        _echo(*options)


def _records(above: click.Group, path: str = "") -> Iterator[tuple[str, click.Command, Any]]:
    """The commands that get a record: path, command and the record's class."""
    context = click.Context(above)
    for name in above.list_commands(context):
        each = above.get_command(context, name)
        assert each is not None
        if isinstance(each, click.Group):
            yield from _records(each, f"{path}{name} ")
            continue
        assert each.callback is not None
        function = inspect.unwrap(each.callback)
        if "args" in inspect.signature(function).parameters:
            yield path + name, each, get_type_hints(function)["args"]


def _fits(value: object, hint: Any) -> bool:
    """Whether a value has a type of those that records use."""
    if isinstance(hint, UnionType):
        return any(_fits(value, each) for each in get_args(hint))
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(_fits(each, get_args(hint)[0]) for each in value)
    return type(value) is hint


def test_fields_have_the_types_of_their_options() -> None:
    """A type can be seen in what click passes on: the default, or the words that must be there."""
    seen = set()
    for path, each, record in _records(commands):
        seen.add(path)
        words = ["word" for param in each.params if param.required]
        values = each.make_context(path, words).params
        hints = get_type_hints(record)
        for field in fields(record):
            value, hint = values[field.name], hints[field.name]
            assert _fits(value, hint), f"{path}: {field.name} is {value!r}, not {hint}"
            assert value is None or NoneType not in get_args(hint), f"{path}: {field.name}"
    assert seen == WITH_RECORD

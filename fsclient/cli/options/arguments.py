"""A command that gets its command line as one record, not as a dozen parameters.

    @dataclass(frozen=True, kw_only=True)
    class EchoArguments:
        text: str
        loud: bool

    @command(EchoArguments, epilog=examples("slicefs echo hello"))
    @click.argument("text")
    @click.option("--loud", is_flag=True, help="In capitals.")
    def echo(args: EchoArguments) -> None:
        ...

The options stay where click has them, so help, defaults and completion are click's. The record has
one field for each option or argument, by the name under which click passes it on. The import of
the module fails where the two differ. `tests/fsclient/cli/test_arguments.py` compares the types.

Commands of few options take them as parameters, as usual with click.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Record = TypeVar("_Record", bound="DataclassInstance")


def command(
    record: type[_Record], name: str | None = None, group: click.Group | None = None, **more: Any
) -> Callable[[Callable[[_Record], int | None]], click.Command]:
    """As `click.command(name, **more)`, or that of `group`; the function gets a `record`.

    Raises: TypeError, from the decorator, where a field has no option or an option no field.
    """
    make = click.command if group is None else group.command

    def decorate(function: Callable[[_Record], int | None]) -> click.Command:
        @wraps(function)
        def run(**values: Any) -> int | None:
            return function(record(**values))

        made: click.Command = make(name, **more)(run)
        options = {each.name for each in made.params if each.expose_value}
        differ = options ^ {each.name for each in fields(record)}
        if differ:
            found = ", ".join(sorted(map(str, differ)))
            raise TypeError(f"{record.__name__} and the options of {made.name} differ in: {found}")
        return made

    return decorate

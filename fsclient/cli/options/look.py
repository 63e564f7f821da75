"""How a command shows itself: `-q`, `-v`, `--color`, `--log-format`, `--syslog`.

Each command takes them, before its name and behind it. What they say is kept in the `Invocation` of
a run, which is the object of click's root context. The log of a mount has settings of its own,
which begin with these.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TextIO

import click

_TEXT: Final = "slicefs: %(levelname)s %(name)s: %(message)s"
COLORS: Final = ("auto", "always", "never")
FORMATS: Final = ("text", "json")


@dataclass
class Look:
    """What was asked for, and the handlers of the log that follow from it."""

    quiet: bool = False
    verbose: int = 0
    color: str = "auto"
    log_format: str = "text"
    syslog: str = ""  # an address; "": none
    _handlers: list[logging.Handler] = field(default_factory=list)

    def apply(self) -> None:
        """Have the log follow. Raises: UsageError, ConfigError."""
        if self.quiet and self.verbose:
            raise click.UsageError("-q and -v: choose one")
        self.end()
        if not (self.quiet or self.verbose or self.syslog or self.log_format == "json"):
            return
        shown = logging.StreamHandler(sys.stderr)
        shown.setLevel(_level(self.quiet, self.verbose))
        shown.setFormatter(self._formatter())
        self._handlers.append(shown)
        if self.syslog:
            from fsclient.observe.syslog import syslog_handler

            self._handlers.append(syslog_handler(self.syslog))
        root = logging.getLogger()
        for handler in self._handlers:
            root.addHandler(handler)
        root.setLevel(min(_level(self.quiet, self.verbose), logging.INFO if self.syslog else 100))

    def end(self) -> None:
        """Take the handlers away again."""
        root = logging.getLogger()
        for handler in self._handlers:
            root.removeHandler(handler)
            handler.close()
        self._handlers = []

    def _formatter(self) -> logging.Formatter:
        if self.log_format == "text":
            return logging.Formatter(_TEXT)
        from fsclient.mount.logs import JsonLines  # most commands don't need it

        return JsonLines()

    def failed(self, line: str) -> None:
        """Say why a command ends: one line on standard error, and one in the log of the system."""
        record = logging.LogRecord("slicefs", logging.ERROR, "", 0, line, None, None)
        if self.log_format == "json":
            print(self._formatter().format(record), file=sys.stderr)
        else:
            prefix = "slicefs:"
            if self.paints(sys.stderr):
                prefix = click.style(prefix, fg="red", bold=True)
            print(f"{prefix} {line}", file=sys.stderr)
        for handler in self._handlers[1:]:
            handler.handle(record)

    def paints(self, stream: TextIO) -> bool:
        """Whether what goes there has colours."""
        if self.color != "auto":
            return self.color == "always"
        return not os.environ.get("NO_COLOR") and stream.isatty()

    def click_color(self) -> bool | None:
        """The same, as click has it: None leaves it to the terminal."""
        if self.color != "auto":
            return self.color == "always"
        return False if os.environ.get("NO_COLOR") else None


@dataclass
class Invocation:
    """One run of the program."""

    words: Sequence[str]  # for a supervisor, which says them to the next client
    look: Look = field(default_factory=Look)


def look_of(context: click.Context | None) -> Look:
    """How the command that runs in `context` shows itself."""
    found = None if context is None else context.find_root().obj
    return found.look if isinstance(found, Invocation) else Look()


def words_of(context: click.Context) -> Sequence[str]:
    """The command line."""
    found = context.find_root().obj
    return found.words if isinstance(found, Invocation) else ()


def tell_problem(text: str) -> None:
    """A line of standard error for something that a check has found."""
    click.echo(f"{click.style('problem:', fg='red')} {text}", err=True)


def tell_verdict(count: int) -> None:
    """The last line of a check."""
    click.echo(click.style(f"{count} problems", fg="red") if count else clean())


def clean() -> str:
    """The word for a check that has found nothing."""
    return click.style("clean", fg="green")


def _level(quiet: bool, verbose: int) -> int:
    if quiet:
        return logging.ERROR
    return (logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)]


def _note(context: click.Context, parameter: click.Parameter, value: Any) -> None:
    """Keep what an option says, wherever it stands."""
    root = context.find_root()
    if not value or not isinstance(root.obj, Invocation):
        return
    look, name = root.obj.look, str(parameter.name)
    setattr(look, name, look.verbose + value if name == "verbose" else value)
    look.apply()
    root.color = context.color = look.click_color()


def note_format(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
    """For a command that has --log-format itself: its errors follow, too."""
    if value == "json":
        _note(context, parameter, value)
    return value


def _option(*names: str, **words: Any) -> Callable[[], click.Option]:
    return lambda: click.Option(names, expose_value=False, callback=_note, **words)


_OPTIONS: Final = (
    _option("-q", "--quiet", is_flag=True, help="No progress and no warnings, only errors."),
    _option("-v", "--verbose", count=True, help="Log what is done; -vv: in detail."),
    _option("--color", type=click.Choice(COLORS), help="Colours; auto: at a terminal, if NO_COLOR "
            "is not set."),
    _option("--log-format", type=click.Choice(FORMATS), help="Format of the log and of errors."),
    _option("--syslog", metavar="ADDRESS", help="Log there, too: `local`, a socket, HOST[:PORT]."),
)  # fmt: skip


def add_options(command: click.Command, hidden: bool) -> click.Command:
    """Have a command take the options, but for those that it has itself."""
    taken = {word for parameter in command.params for word in parameter.opts}
    for make in _OPTIONS:
        option = make()
        if not taken & set(option.opts):
            option.hidden = hidden
            command.params.append(option)
    return command

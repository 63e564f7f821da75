"""A line that says how far a long command is, rewritten in place; only at a terminal.

Commands that print JSON show none: a program that reads JSON accepts nothing else.
"""

from __future__ import annotations

import os
import sys
from typing import Final

import click

from fsclient.cli.options.look import look_of
from fsmeta.runtime import Runtime

EVERY_S: Final = 0.5
_BAR: Final = 30  # characters
_COLUMNS: Final = 80  # of a terminal that does not say
_CLEAR: Final = "\r\x1b[K"


class ProgressLine:
    """Shows the latest text on standard error."""

    def __init__(self, runtime: Runtime) -> None:
        self._clock = runtime.monotonic
        self._next = 0.0
        self.on = sys.stderr.isatty() and not _is_silent()
        self._dirty = False

    def show(self, text: str) -> None:
        """Put `text` in place of the last one, twice a second at most."""
        now = self._clock()
        if self.on and now >= self._next:
            self._next, self._dirty = now + EVERY_S, True
            # a line that is wrapped could not be taken back
            print(f"{_CLEAR}{text[: _columns() - 1]}", end="", file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """A line of standard error that stays."""
        self.clear()
        click.echo(text, err=True)

    def clear(self) -> None:
        """Leave nothing behind."""
        if self._dirty:
            self._dirty, self._next = False, 0.0
            print(_CLEAR, end="", file=sys.stderr, flush=True)


def _is_silent() -> bool:
    """Whether the command that runs was asked for JSON, or to be quiet (`slicefs -q`)."""
    context = click.get_current_context(silent=True)
    words = {} if context is None else context.params
    if look_of(context).quiet:
        return True
    return bool(words.get("as_json") or words.get("as_json_"))


def _columns() -> int:
    """How wide the terminal is by now."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or _COLUMNS
    except OSError:
        return _COLUMNS


def bar(done: int, total: int) -> str:
    """How much of it is done, as a bar with a percentage."""
    part = done / total if total else 1.0
    return f"[{'#' * int(part * _BAR):<{_BAR}}] {part:4.0%}"

"""A line that says how far a long command is, rewritten in place; only at a terminal."""

from __future__ import annotations

import sys
from typing import Final

from fsmeta.runtime import Runtime

EVERY_S: Final = 0.5
_BAR: Final = 30  # characters
_CLEAR: Final = "\r\x1b[K"


class ProgressLine:
    """Shows the latest text on standard error."""

    def __init__(self, runtime: Runtime) -> None:
        self._clock = runtime.monotonic
        self._shown = -EVERY_S
        self._on = sys.stderr.isatty()

    def show(self, text: str) -> None:
        """Put `text` in place of the last one, twice a second at most."""
        now = self._clock()
        if self._on and now - self._shown >= EVERY_S:
            self._shown = now
            print(f"{_CLEAR}{text}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Leave nothing behind."""
        if self._on and self._shown > 0:
            print(_CLEAR, end="", file=sys.stderr, flush=True)


def bar(done: int, total: int) -> str:
    """How much of it is done, as a bar with a percentage."""
    part = done / total if total else 1.0
    return f"[{'#' * int(part * _BAR):<{_BAR}}] {part:4.0%}"

"""Lines of a mount's log: an entry is one line, and stacks of threads on request.

Names of files are in messages, and other users choose those: a newline in one would begin a line of
its own, and an escape sequence would work on the terminal of an administrator that reads the log.

Threading: `dump_stacks` from one thread; the formatter from any.
"""

from __future__ import annotations

import logging
import sys
import traceback
from types import TracebackType
from typing import Final, TextIO, TypeAlias, cast

LOG_FORMAT: Final = "%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s%(request)s"
_CONTROLS: Final = (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)  # C0, DEL, C1, separators
_ESCAPES: Final = {
    code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in _CONTROLS
}


_Raised: TypeAlias = (
    tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
)


class OneLine(logging.Formatter):
    """Writes control characters of a message as escapes; a traceback keeps its lines."""

    def __init__(self) -> None:
        super().__init__(LOG_FORMAT, defaults={"request": ""})

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  (logging's name)
        """The line of an entry, without its traceback."""
        return one_line(super().formatMessage(record))

    def formatException(self, ei: _Raised) -> str:  # noqa: N802  (logging's name)
        """A traceback, whose messages can't pass for entries: each of its lines is indented."""
        text = super().formatException(ei)
        return "\n".join(f"    {one_line(line)}" for line in text.split("\n"))


def one_line(text: str) -> str:
    """`text` with its control characters as escapes, and bytes of names that are no UTF-8."""
    return text.translate(_ESCAPES).encode("utf-8", "backslashreplace").decode()


def dump_stacks() -> None:
    """Write the stack of each thread where the log goes.

    It holds the interpreter's lock: a signal handler that does not, as that of faulthandler, reads
    frames which other threads change meanwhile.
    """
    pieces: list[str] = []
    for ident, frame in sys._current_frames().items():
        pieces.append(f"Thread 0x{ident:016x} (most recent call last):\n")
        pieces += traceback.format_stack(frame)
    stream = _stream()
    stream.write("".join(pieces))
    stream.flush()


def _stream() -> TextIO:
    for handler in logging.getLogger().handlers:
        stream = getattr(handler, "stream", None)
        if stream is not None:
            return cast(TextIO, stream)
    return sys.stderr

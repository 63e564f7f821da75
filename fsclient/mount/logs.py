"""The log of a mount: text or JSON, with the ids of requests, in a file that may begin anew.

Called as the mount begins. A crash, and SIGUSR1, leave the stack of every thread in the same place.
Threading: logging's own; handlers hold their lock while they write.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, TextIO

from fsclient.mount.daemon import open_log
from fsclient.mount.log_lines import OneLine, dump_stacks
from fsclient.observe.log_file import LogFile
from fsclient.observe.options import ObserveOptions
from fsclient.observe.syslog import syslog_handler
from fsmeta.errors import ConfigError


class JsonLines(logging.Formatter):
    """A record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Time in UTC; `request` and `exception` where there are any."""
        at = datetime.fromtimestamp(record.created, UTC)
        shown: dict[str, Any] = {
            "time": at.isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "pid": record.process,
            "thread": record.threadName,
            "message": record.getMessage(),
        }
        unique = getattr(record, "unique", None)
        if unique is not None:
            shown["request"] = unique
        if record.exc_info:
            shown["exception"] = self.formatException(record.exc_info)
        return json.dumps(shown)


class RequestIds(logging.Filter):
    """Adds to warnings which request they are about: `req` of the access log."""

    def __init__(self, current: Callable[[], int | None]) -> None:
        """`current` knows what the calling thread serves."""
        super().__init__()
        self._current = current

    def filter(self, record: logging.LogRecord) -> bool:
        """Let every record pass."""
        unique = self._current() if record.levelno >= logging.WARNING else None
        if unique is not None:
            record.unique = unique
            record.request = f" [req {unique}]"
        return True


class _Rotating(logging.Handler):
    """Writes to a file that begins anew."""

    def __init__(self, file: LogFile, stream: TextIO) -> None:
        """`stream` has the descriptor of `file`."""
        super().__init__()
        self._file = file
        self.stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line; what can't be written is lost, as a StreamHandler has it."""
        try:
            self._file.write(self.format(record).encode(errors="backslashreplace") + b"\n")
        except Exception:  # noqa: BLE001  (logging's own way: it must not harm what it reports)
            self.handleError(record)


def start_log(log_file: str | None, options: ObserveOptions, debug: bool) -> None:
    """Log to the file or to standard error. Raises: ConfigError."""
    stream: TextIO = sys.stderr
    if log_file is not None:
        stream = os.fdopen(open_log(log_file), "a")
    handler: logging.Handler = logging.StreamHandler(stream)
    if options.log_max_bytes:
        path = log_place(log_file)
        if path is None:
            raise ConfigError("--log-max-size: standard error is no file; name one with --log")
        file = LogFile(path, stream.fileno(), options.log_max_bytes, open_log)
        handler = _Rotating(file, stream)
    handler.setFormatter(JsonLines() if options.log_json else OneLine())
    faulthandler.enable(stream)
    signal.signal(signal.SIGUSR1, lambda _number, _frame: dump_stacks())  # until there is `Ending`
    root = logging.getLogger()
    root.handlers[:] = [handler]
    if options.syslog:
        root.addHandler(syslog_handler(options.syslog))
    root.setLevel(logging.DEBUG if debug else logging.INFO)


def name_requests(current: Callable[[], int | None]) -> None:
    """There is a session: have warnings name the request that the thread serves."""
    for handler in logging.getLogger().handlers:
        handler.addFilter(RequestIds(current))


def log_place(log_file: str | None) -> str | None:
    """The file of the log: the one we were told, or that standard error is; None: neither."""
    if log_file is not None:
        return os.path.abspath(log_file)
    try:
        path = os.readlink("/proc/self/fd/2")
    except OSError:
        path = ""
    return path if os.path.isfile(path) else None

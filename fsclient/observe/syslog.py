"""Log lines for the log of the system (`--syslog`)."""

from __future__ import annotations

import errno
import logging
import os
import socket
from logging.handlers import SYSLOG_UDP_PORT, SysLogHandler
from typing import Final

from fsmeta.errors import ConfigError

LOCAL: Final = "/dev/log"
_FORMAT: Final = "slicefs[%(process)d]: %(levelname)s %(name)s: %(message)s"


class _Syslog(SysLogHandler):
    """A line that can't be sent is lost: the log is elsewhere, too."""

    append_nul = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  (logging's name)
        """Nothing can be done."""


def syslog_handler(address: str) -> logging.Handler:
    """`local`, the path of a socket, or HOST[:PORT] by UDP. Raises: ConfigError."""
    try:
        handler = _Syslog(_place(address))
    except OSError as error:
        why = f"{error.strerror or error}: start the daemon, or name another place"
        raise ConfigError(f"--syslog {address}: {why}") from error
    handler.setLevel(logging.INFO)
    handler.setFormatter(logging.Formatter(_FORMAT))
    return handler


def _place(address: str) -> str | tuple[str, int]:
    """Where that is. Raises: ConfigError, OSError where no daemon is."""
    path = LOCAL if address == "local" else address
    if path.startswith("/"):
        _require_daemon(path)
        return path
    host, _, port = address.partition(":")
    if not host or (port and not (port.isascii() and port.isdigit())):
        raise ConfigError(f"--syslog {address}: write `local`, a socket's path, or HOST[:PORT]")
    return host, int(port or SYSLOG_UDP_PORT)


def _require_daemon(path: str) -> None:
    """Raises: OSError where no process listens, of which the handler says nothing."""
    os.stat(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(path)
        except OSError as error:
            if error.errno != errno.EPROTOTYPE:  # a stream socket, which the handler tries next
                raise

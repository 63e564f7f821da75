"""Going to the background: the command returns when the mount is ready, or says why it is not.

The fork comes before any connection and any thread, because none of them survives one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Final

from fsmeta.errors import ConfigError, StoreError

_READY: Final = b"\0"
_MESSAGE_BYTES_MAX: Final = 4096


def default_log() -> str:
    """Where a mount in the background logs unless told otherwise."""
    if os.geteuid() == 0:
        return "/var/log/slicefs.log"
    return os.path.join(os.path.expanduser("~"), ".slicefs", "slicefs.log")


def daemonize(serve: Callable[[Callable[[], None]], int]) -> int:
    """Run `serve(ready)` in a process of its own; returns once it calls `ready`.

    Raises: ConfigError with what the child says when it fails before that.
    """
    told, tell = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    if os.fork() == 0:
        os.close(told)
        os._exit(_child(serve, tell))
    os.close(tell)
    message = b""
    while part := os.read(told, _MESSAGE_BYTES_MAX):
        message += part
        if message == _READY:
            break
    os.close(told)
    if message == _READY:
        return 0
    raise ConfigError(message.decode(errors="replace") or "the mount ended without a word")


def _child(serve: Callable[[Callable[[], None]], int], tell: int) -> int:
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)

    def ready() -> None:
        os.write(tell, _READY)
        os.close(tell)

    try:
        return serve(ready)
    except (ConfigError, StoreError, OSError) as error:
        try:
            os.write(tell, str(error).encode()[:_MESSAGE_BYTES_MAX])
        except OSError:
            pass  # it was ready already; the log has the error
        return 1

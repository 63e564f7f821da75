"""Going to the background: the command returns when the mount is ready, or says why it is not.

The fork comes before any connection and any thread, because none of them survives one.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from typing import Final

from fsmeta.errors import ConfigError, StoreError

log = logging.getLogger(__name__)

_READY: Final = b"\0"
_MESSAGE_BYTES_MAX: Final = 4096


def default_log() -> str:
    """Where a mount in the background logs unless told otherwise."""
    if os.geteuid() == 0:
        return "/var/log/slicefs.log"
    return os.path.join(os.path.expanduser("~"), ".slicefs", "slicefs.log")


def open_log(path: str) -> int:
    """A descriptor that appends to the log `path`, whose directory is made if need be.

    Raises: ConfigError.
    """
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigError(f"can't write the log {path}: {error.strerror}; choose --log") from error


def daemonize(serve: Callable[[Callable[[], None]], int], log_file: str) -> int:
    """Run `serve(ready)` in a process of its own; returns once it calls `ready`.

    Its standard error is `log_file`, so that whatever Python has to say is there as well.
    Raises: ConfigError with what the child says when it fails before that.
    """
    log_fd = open_log(log_file)
    told, tell = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    if os.fork() == 0:
        os.close(told)
        os._exit(_child(serve, tell, log_fd))
    os.close(log_fd)
    os.close(tell)
    message = b""
    while part := os.read(told, _MESSAGE_BYTES_MAX):
        message += part
        if message == _READY:
            break
    os.close(told)
    if message == _READY:
        return 0
    raise ConfigError(
        message.decode(errors="replace") or f"the mount ended without a word: see {log_file}"
    )


def _child(serve: Callable[[Callable[[], None]], int], tell: int, log_fd: int) -> int:
    """The process that stays: its exit code, whatever happens."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)

    def ready() -> None:
        os.chdir("/")  # or the directory we were started in could not be unmounted
        _say(tell, _READY)
        os.close(tell)

    try:
        return serve(ready)
    except (ConfigError, StoreError, OSError) as error:
        log.error("the mount has failed: %s", error)
        _say(tell, str(error).encode()[:_MESSAGE_BYTES_MAX])
    except Exception as error:
        log.exception("the mount has failed")
        _say(tell, f"unforeseen: {error!r}".encode()[:_MESSAGE_BYTES_MAX])
    return 1


def _say(tell: int, message: bytes) -> None:
    """Tell the command that waits, if it still does."""
    try:
        os.write(tell, message)
    except OSError:
        pass  # it was told already, or was interrupted; the log has it

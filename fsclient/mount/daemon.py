"""Going to the background: the command returns when the mount is ready, or says why it is not.

The fork comes before any connection and any thread, because none of them survives one.
"""

from __future__ import annotations

import logging
import os
import select
import sys
from collections.abc import Callable
from typing import Final, Protocol

from fsdata.resources.private_paths import open_private
from fsmeta.errors import ConfigError, StoreError
from fsmeta.user_namespace import has_system_paths

log = logging.getLogger(__name__)

SILENT_S: Final = 2.0  # then the command says what the mount waits for
_READY: Final = b"\0"
_STEP: Final = b"\1"  # and a line, that ends: what is being waited for from now on
_MESSAGE_BYTES_MAX: Final = 4096


def default_log() -> str:
    """Where a mount in the background logs unless told otherwise."""
    if has_system_paths():
        return "/var/log/slicefs.log"
    return os.path.join(os.path.expanduser("~"), ".slicefs", "slicefs.log")


def open_log(path: str) -> int:
    """A descriptor that appends to the log `path`, whose directory is made if need be.

    Raises: ConfigError.
    """
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        if path.startswith("/dev/"):
            return os.open(path, flags)
        if os.path.islink(path) and os.lstat(path).st_uid in (0, os.geteuid()):
            path = os.path.realpath(path)
        return open_private(path, flags, 0o644)
    except OSError as error:
        raise ConfigError(f"can't write the log {path}: {error.strerror}; choose --log") from error


class Teller(Protocol):
    """Takes the progress of a mount that begins. Threading: one thread."""

    def step(self, what: str) -> None:
        """It begins to wait for something: named in the words of a user, with no secret in them."""

    def ready(self) -> None:
        """It can be used."""

    def descriptor(self) -> int:
        """Of the pipe through which it is told; -1: none."""


class Untold:
    """No process waits: a mount in the foreground."""

    def step(self, what: str) -> None:
        pass

    def ready(self) -> None:
        pass

    def descriptor(self) -> int:
        return -1


def daemonize(serve: Callable[[Teller], int], log_file: str) -> int:
    """Run `serve(teller)` in a process of its own; returns once that is told that it is ready.

    Says on standard error what it waits for where that takes long.
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
    message = _heard(told)
    os.close(told)
    if message == _READY:
        return 0
    raise ConfigError(
        message.decode(errors="replace") or f"the mount ended without a message: see {log_file}"
    )


def _heard(told: int) -> bytes:
    """What the child says in the end; what it waits for is told when it takes long."""
    poll = select.poll()
    poll.register(told, select.POLLIN)
    message = step = b""
    while message != _READY:
        if step and not poll.poll(SILENT_S * 1000):
            print(f"slicefs: waiting for {step.decode(errors='replace')}", file=sys.stderr)
            step = b""
        part = os.read(told, _MESSAGE_BYTES_MAX)
        if not part:
            break
        message += part
        while message.startswith(_STEP) and b"\n" in message:
            step, _, message = message[len(_STEP) :].partition(b"\n")
    return message


class PipeTeller:
    """Tells the command that waits, if it still does."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def step(self, what: str) -> None:
        self.say(_STEP + what.encode()[:_MESSAGE_BYTES_MAX] + b"\n")

    def ready(self) -> None:
        os.chdir("/")  # or the directory we were started in could not be unmounted
        self.say(_READY)
        os.close(self._fd)

    def descriptor(self) -> int:
        return self._fd

    def say(self, message: bytes) -> None:
        """Send it."""
        try:
            os.write(self._fd, message)
        except OSError:
            pass  # it was told already, or was interrupted; the log has it


def _child(serve: Callable[[Teller], int], tell: int, log_fd: int) -> int:
    """The process that stays: its exit code, whatever happens."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    pipe = PipeTeller(tell)
    return run_told(serve, pipe)


def run_told(serve: Callable[[Teller], int], pipe: PipeTeller) -> int:
    """The exit code of `serve`; the waiting parent learns why it failed."""
    try:
        return serve(pipe)
    except (ConfigError, StoreError, OSError) as error:
        log.error("the mount has failed: %s", error)
        pipe.say(str(error).encode()[:_MESSAGE_BYTES_MAX])
    except Exception as error:
        log.exception("the mount has failed")
        said = f"unforeseen, {error!r}: a bug, please report it with the end of its log"
        pipe.say(said.encode()[:_MESSAGE_BYTES_MAX])
    return 1


_CONFORMS: tuple[Callable[[], Teller], Callable[[int], Teller]] = (Untold, PipeTeller)

"""What the watching commands read from a mount, and how they end: on Ctrl-C, or with the mount."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import click

from fsclient.fuse.mount import mount as kernel
from fsclient.observe.access_line import Line, parse_line
from fsclient.observe.registry import parse
from fsmeta.errors import ConfigError
from fsmeta.runtime import Lock, Runtime

GONE: Final = frozenset(
    (errno.ENOTCONN, errno.ENOENT, errno.ECONNABORTED, errno.ENODEV, errno.ESTALE, errno.EIO)
)
STATS: Final = ".stats"
ACCESS_LOG: Final = ".accesslog"
_PIECE_BYTES: Final = 1 << 16
SETTLE_S: Final = 0.3
SETTLE_MAX: Final = 5


class MountGoneError(Exception):
    """The mount has ended while it was watched."""


def require_mount(mountpoint: str, name: str) -> str:
    """The virtual file `name` of the mount. Raises: ConfigError."""
    root = os.path.abspath(mountpoint)
    path = os.path.join(root, name)
    if not mountpoint or kernel.find_mount(root) is None:
        raise ConfigError(f"{mountpoint!r} is no mount point: name the directory of a mount")
    if not os.path.exists(path):
        raise ConfigError(f"{path} is not there: mount without --hide-internal{_beside(name)}")
    return path


def _beside(name: str) -> str:
    """What else a file may be missing for."""
    if name != ACCESS_LOG:
        return ""
    return " or --transport pyfuse3; if it is read-only, with --open-requests always"


def read_numbers(path: str) -> dict[str, float]:
    """The numbers of a mount by name. Raises: MountGoneError, OSError."""
    try:
        with open(path, encoding="utf-8") as stats:
            return parse(stats.read())
    except OSError as error:
        if error.errno in GONE:
            raise MountGoneError from error
        raise


@contextmanager
def ending_well(mountpoint: str) -> Iterator[None]:
    """Ctrl-C and the end of the mount are ends like any other."""
    try:
        yield
    except KeyboardInterrupt:
        pass
    except MountGoneError:
        click.echo(f"slicefs: {mountpoint} is no longer mounted", err=True)


class AccessFeed:
    """Lines of an access log, live or from a file, read by a thread of its own.

    The thread does not end before the log does: it may wait in read(2) when the command ends.
    """

    def __init__(
        self, path: str, take: Callable[[Line], None], runtime: Runtime, lock: Lock
    ) -> None:
        """`take` is called with each line, under `lock`. Raises: OSError."""
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._take = take
        self._lock = lock
        self.ended = runtime.event()  # set: there are no more lines
        self.accepted = self.comments = 0  # lines, and what is none; final once it has ended
        runtime.spawn("access-feed", self._run)

    def settle(self) -> None:
        """Return once no line has come for SETTLE_S, or after SETTLE_MAX times that: those of
        requests that have ended are on their way."""
        for _ in range(SETTLE_MAX):
            before = self.accepted
            if self.ended.wait(SETTLE_S) or self.accepted == before:
                return

    def _run(self) -> None:
        rest = b""
        try:
            while piece := os.read(self._fd, _PIECE_BYTES):
                *whole, rest = (rest + piece).split(b"\n")
                with self._lock:
                    for text in whole:
                        line = parse_line(text.decode(errors="replace"))
                        if line is None:
                            self.comments += 1
                        else:
                            self.accepted += 1
                            self._take(line)
        except OSError:
            pass  # the mount has gone: no more lines
        finally:
            os.close(self._fd)
            self.ended.set()


def shown_name(name: str) -> str:
    """A name from the log as a table shows it: one line, printable."""
    return "".join(each if each.isprintable() else "?" for each in name)

"""What a client that is unmounting reports to the processes that wait for its end.

Its files can't be read any more. Its name in /proc/PID/comm says how much it has yet to store, in
bytes: `left 12345678`; `ps` and `top` show it, too. `slicefs umount` waits as long as it changes.

How it ended is in a file without a name that it has open from the beginning: a process that opens
that in /proc/PID/fd before the end can read it after the end, and nothing is left on any disk. It
is as private as the process.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from fsmeta.runtime import Runtime

EVERY_S: Final = 0.5
LEFT: Final = 3  # the exit code where a journal is left on the host, and lost with it
_WORD: Final = b"left "
_FILE: Final = "slicefs-end"
_FILE_BYTES_MAX: Final = 1 << 16
_MOST: Final = 10**10 - 1  # the kernel keeps 15 bytes of a name


@contextmanager
def telling(runtime: Runtime, left: Callable[[], int]) -> Iterator[None]:
    """Tell `left()` while the body runs."""
    done = runtime.event()

    def tell() -> None:
        while True:
            _show(left())
            if done.wait(EVERY_S):
                return

    thread = runtime.spawn("leaving", tell)
    try:
        yield
    finally:
        done.set()
        thread.join()


def _show(count: int) -> None:
    try:
        with open("/proc/self/comm", "wb") as name:
            name.write(_WORD + b"%d" % min(count, _MOST))
    except OSError:
        pass  # no /proc: a waiting process gets no number


def left_by(pid: int) -> int | None:
    """Bytes that a client has yet to store; None where it does not say."""
    try:
        with open(f"/proc/{pid}/comm", "rb") as name:
            said = name.read().strip()
    except OSError:
        return None
    number = said.removeprefix(_WORD)
    return int(number) if said.startswith(_WORD) and number.isdigit() else None


class ExitRecord(NamedTuple):
    """How a client has ended, as far as it came to say so."""

    log: str  # where its log is
    ended: bool  # it has done all that it does at its end
    lost: dict[str, Any] | None  # see `WriteError`: what it could not store


class ExitStatus:
    """The file in which a client says how it ended. Made by the client before it serves."""

    def __init__(self, log: str, fd: int = -1) -> None:
        """`log`: where the log is; `fd`: of the file, where there is one already."""
        self._log = log
        try:
            self._fd = os.memfd_create(_FILE) if fd < 0 else fd
        except OSError:  # forbidden here: `umount` learns nothing, as from an older client
            self._fd = -1
        self._write(ExitRecord(log, False, None))

    def end(self, lost: dict[str, Any] | None) -> None:
        """All is done; what could not be stored."""
        self._write(ExitRecord(self._log, True, lost))

    def _write(self, parting: ExitRecord) -> None:
        if self._fd < 0:
            return
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, json.dumps(parting._asdict()).encode(), 0)


def open_exit_record(pid: int) -> int | None:
    """A descriptor of a client's `ExitStatus`; None where it has none, or we may not see it."""
    place = f"/proc/{pid}/fd"
    try:
        for each in os.listdir(place):
            path = os.path.join(place, each)
            if os.readlink(path).startswith(f"/memfd:{_FILE} "):
                return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        pass  # it is gone, or another user's
    return None


def read_exit_record(fd: int) -> ExitRecord | None:
    """What a client has said so far; None where that is nothing we understand."""
    try:
        said = json.loads(os.pread(fd, _FILE_BYTES_MAX, 0))
        return ExitRecord(said["log"], said["ended"], said["lost"])
    except (OSError, ValueError, KeyError, TypeError):
        return None

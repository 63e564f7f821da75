"""A process that locks files as it is told: `python -m tests.posix.locker`; see `lockers`.

Each line on standard input is a Python list: a command and its arguments; each answer is a line
with the result, or the name of an errno. `fork` makes a child that has the same descriptors;
`child` passes a command on to it.
"""

from __future__ import annotations

import ast
import errno
import fcntl
import os
import select
import signal
import struct
import sys
import threading
from collections.abc import Callable
from typing import Any, Final, TextIO

# struct flock of 64-bit Linux: type, whence, start, len, pid
_FLOCK: Final = struct.Struct("hhqqi4x")
_TYPES: Final = {"r": fcntl.F_RDLCK, "w": fcntl.F_WRLCK, "u": fcntl.F_UNLCK}
_LETTERS: Final = {value: letter for letter, value in _TYPES.items()}
_OFD_GETLK, _OFD_SETLK, _OFD_SETLKW = 36, 37, 38  # linux/fcntl.h; Python 3.11 has no names for them
_CODES: Final = {errno.EDEADLK: "EDEADLK", errno.EAGAIN: "EAGAIN"}


def _pack(kind: str, begin: int, length: int, whence: int) -> bytes:
    return _FLOCK.pack(_TYPES[kind], whence, begin, length, 0)


class Locker:
    """The commands."""

    def __init__(self) -> None:
        self._child: tuple[int, TextIO, TextIO] | None = None
        self._waits: dict[int, list[str]] = {}

    def open(self, path: str, flags: int) -> int:
        return os.open(path, flags, 0o644)

    def close(self, fd: int) -> None:
        os.close(fd)

    def dup(self, fd: int) -> int:
        return os.dup(fd)

    def pid(self) -> int:
        return os.getpid()

    def posix(
        self,
        fd: int,
        kind: str,
        begin: int = 0,
        length: int = 0,
        whence: int = 0,
        wait: bool = False,
    ) -> None:
        command = fcntl.F_SETLKW if wait else fcntl.F_SETLK
        fcntl.fcntl(fd, command, _pack(kind, begin, length, whence))

    def ofd(self, fd: int, kind: str, begin: int = 0, length: int = 0, wait: bool = False) -> None:
        fcntl.fcntl(fd, _OFD_SETLKW if wait else _OFD_SETLK, _pack(kind, begin, length, 0))

    def getlk(
        self, fd: int, kind: str, begin: int = 0, length: int = 0, ofd: bool = False
    ) -> tuple[str, int, int, int]:
        """Type, begin, length and pid of what is in the way."""
        asked = _pack(kind, begin, length, 0)
        reply = fcntl.fcntl(fd, _OFD_GETLK if ofd else fcntl.F_GETLK, asked)
        found, _, start, size, pid = _FLOCK.unpack(reply)
        return _LETTERS[found], start, size, pid

    def flock(self, fd: int, kind: str, wait: bool = False) -> None:
        operation = {"r": fcntl.LOCK_SH, "w": fcntl.LOCK_EX, "u": fcntl.LOCK_UN}[kind]
        fcntl.flock(fd, operation if wait else operation | fcntl.LOCK_NB)

    def interruptible(self) -> None:
        """From now on SIGUSR1 does nothing, but for EINTR."""

        def interrupted(_number: int, _frame: object) -> None:
            raise InterruptedError(errno.EINTR, "interrupted")

        signal.signal(signal.SIGUSR1, interrupted)

    def begin(self, number: int, command: str, *arguments: Any) -> None:
        """Run a command in a thread of its own; `outcome` tells."""
        self._waits[number] = []
        body = lambda: self._waits[number].append(run(self, [command, *arguments]))  # noqa: E731
        threading.Thread(target=body, daemon=True).start()

    def outcome(self, number: int, seconds: float) -> str:
        """What a command that was begun came to, or "waits"."""
        waited = 0.0
        while not self._waits[number] and waited < seconds:
            select.select([], [], [], 0.005)
            waited += 0.005
        return self._waits[number][0] if self._waits[number] else "waits"

    def read(self, fd: int, offset: int, size: int) -> bytes:
        return os.pread(fd, size, offset)

    def write(self, fd: int, data: bytes, offset: int = -1) -> int:
        return os.write(fd, data) if offset < 0 else os.pwrite(fd, data, offset)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def fork(self) -> int:
        to_child, from_child = os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(to_child[1])
            os.close(from_child[0])
            serve(os.fdopen(to_child[0]), os.fdopen(from_child[1], "w"))
            os._exit(0)
        os.close(to_child[0])
        os.close(from_child[1])
        self._child = pid, os.fdopen(to_child[1], "w"), os.fdopen(from_child[0])
        return pid

    def child(self, *words: Any) -> Any:
        """Have the child do something; without words it ends."""
        assert self._child is not None
        pid, asks, answers = self._child
        if not words:
            asks.close()
            answers.close()
            os.waitpid(pid, 0)
            self._child = None
            return None
        print(list(words), file=asks, flush=True)
        return ast.literal_eval(answers.readline())

    def exec(self) -> None:
        """Become another program, with descriptors that survive it, and wait to be killed."""
        os.execv("/bin/sleep", ["sleep", "1000"])

    def keep(self, fd: int) -> None:
        os.set_inheritable(fd, True)


def run(locker: Locker, words: list[Any]) -> Any:
    """One command's result."""
    verb: Callable[..., Any] = getattr(locker, words[0])
    try:
        return verb(*words[1:])
    except OSError as error:
        number = error.errno or 0
        return _CODES.get(number, errno.errorcode[number])


def serve(asks: TextIO, answers: TextIO) -> None:
    """Do what is asked until nobody asks any more."""
    locker = Locker()
    for line in iter(asks.readline, ""):
        print(repr(run(locker, ast.literal_eval(line))), file=answers, flush=True)


if __name__ == "__main__":
    serve(sys.stdin, sys.stdout)

"""Processes that lock files, for tests: each a `Locker` behind a pipe."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from tests.support.waiting import SOON_S

NOT_S: Final = 0.15  # who is in line and still waits then is believed to wait on
_IN_LINE: Final = re.compile(r"-> .* [0-9a-f]+:[0-9a-f]+:(\d+) ")  # of /proc/locks: the inode


class Process:
    """A process that locks files below one directory; every method is a command of `locker`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        words = [sys.executable, "-m", "tests.posix.locker"]
        self.popen = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._begun = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *arguments: self._ask(name, *arguments)

    def _ask(self, *words: Any) -> Any:
        self.say(*words)
        return self.poll_invalidations()

    def say(self, *words: Any) -> None:
        """A command whose answer is to be heard later, if there is one."""
        assert self.popen.stdin is not None
        print(list(words), file=self.popen.stdin, flush=True)

    def poll_invalidations(self) -> Any:
        """The answer to what was said."""
        assert self.popen.stdout is not None
        return ast.literal_eval(self.popen.stdout.readline())

    def opens(self, name: str, flags: int) -> int:
        """A descriptor of a file below the directory."""
        fd = self._ask("open", str(self.folder / name), flags)
        assert isinstance(fd, int), fd
        return fd

    def starts(self, *words: Any) -> Wait:
        """Begin a command that may have to wait."""
        self._begun += 1
        self._ask("begin", self._begun, *words)
        return Wait(self, self._begun)

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()

    def end(self) -> None:
        """Let it end by itself, and bury it."""
        for stream in (self.popen.stdin, self.popen.stdout):
            assert stream is not None
            stream.close()
        try:
            self.popen.wait(SOON_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise


class Wait:
    """A command that was begun."""

    def __init__(self, process: Process, number: int) -> None:
        self._process = process
        self._number = number

    def goes_on(self) -> bool:
        """Whether it has not come to its end after a while."""
        return bool(self._process.outcome(self._number, NOT_S) == "waits")

    def result(self) -> Any:
        """What it came to; waits for that."""
        return self._process.outcome(self._number, SOON_S)


def in_line(*mounts: Path) -> int:
    """How many requests of all processes on these mounts wait for locks."""
    lines = [line for root in mounts for line in (root / ".stats").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("slicefs_lock_waits "))


def in_line_of_the_kernel(folder: Path) -> int:
    """How many requests wait for locks of files in a directory whose locks the kernel has."""
    inos = {entry.inode() for entry in os.scandir(folder)}
    return sum(int(ino) in inos for ino in _IN_LINE.findall(Path("/proc/locks").read_text()))


@contextmanager
def processes(*folders: Path) -> Iterator[list[Process]]:
    """One process for each directory; they end with the block, even those that wait."""
    made = [Process(folder) for folder in folders]
    try:
        yield made
    finally:
        for process in made:
            process.kill()
            for stream in (process.popen.stdin, process.popen.stdout):
                assert stream is not None
                stream.close()


def eventually(attempt: Callable[[], Any], wanted: Any = None) -> None:
    """RELEASE comes a moment after close(2) returns, so what a last close frees is free soon."""
    deadline = time.monotonic() + SOON_S
    while True:
        got = attempt()
        if got == wanted:
            return
        assert time.monotonic() < deadline, f"{got!r} instead of {wanted!r}"
        time.sleep(0.01)

"""A process that works in one directory of a mount and journals what was acknowledged.

    python -m tests.faults.load DIRECTORY JOURNAL SEED

The journal lies outside the mount: one JSON line before each operation and one after it. So whoever
reads it knows what must be there, whatever happened to the mount, and the one operation that may
or may not have happened. The process ends when told (SIGTERM) or when an operation fails; then the
journal's last line says how.

What an operation promises is POSIX: what was closed or fsynced is there, a rename or unlink that
returned has happened. Of a file in the middle of being written, old content or any prefix of the
new may be found.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

NAMES = 12
BIG_BYTES = 5 << 20  # more than a block


def content(seed: int, size: int) -> bytes:
    """The bytes that `seed` stands for."""
    return random.Random(seed).randbytes(size)


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


class Load:
    """Random operations in the working directory."""

    def __init__(self, journal: IO[str], seed: int, known: set[str]) -> None:
        self._journal = journal
        self._random = random.Random(seed)
        self._known = known
        self._stop = False
        signal.signal(signal.SIGTERM, self._told)

    def _told(self, number: int, frame: Any) -> None:
        del number, frame
        self._stop = True

    def note(self, **fields: Any) -> None:
        self._journal.write(json.dumps(fields) + "\n")
        self._journal.flush()

    def run(self) -> None:
        verbs: list[Callable[[], None]] = [
            *[self.write] * 4,
            *[self.replace] * 3,
            *[self.append] * 3,
            self.rename,
            self.unlink,
        ]
        parent = os.getppid()
        while not self._stop and os.getppid() == parent:  # nobody is left behind by a dead test
            self._random.choice(verbs)()
        self.note(end="told")

    def _does(self, act: Callable[[], None], **fields: Any) -> None:
        """Journal, act, journal; an operation that fails ends the process."""
        self.note(begin=fields)
        started = time.monotonic()
        try:
            act()
        except OSError as error:
            seconds = time.monotonic() - started
            self.note(end="failed", errno=error.errno, seconds=seconds)
            sys.exit(0)
        self.note(done=True)

    def _new(self) -> tuple[int, int]:
        """Seed and size of new content."""
        most = self._random.choice((100, 5_000, 5_000, 100_000, 100_000, 300_000, BIG_BYTES))
        return self._random.randrange(1 << 40), self._random.randrange(most)

    def _name(self) -> str:
        return f"f{self._random.randrange(NAMES)}"

    def _pick(self) -> str | None:
        return self._random.choice(sorted(self._known)) if self._known else None

    def write(self) -> None:
        """Truncate or create, write, close."""
        name, (seed, size), sync = self._name(), self._new(), self._random.random() < 0.3

        def act() -> None:
            fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            try:
                write_all(fd, content(seed, size))
                if sync:
                    os.fsync(fd)
            finally:
                os.close(fd)

        self._does(act, verb="write", name=name, seed=seed, size=size)
        self._known.add(name)

    def replace(self) -> None:
        """Write another file and rename it over this one, as careful programs do."""
        name, (seed, size) = self._name(), self._new()

        def act() -> None:
            fd = os.open("tmp", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            try:
                write_all(fd, content(seed, size))
                os.fsync(fd)
            finally:
                os.close(fd)
            os.rename("tmp", name)

        self._does(act, verb="replace", name=name, seed=seed, size=size)
        self._known.add(name)

    def append(self) -> None:
        """Add to the end, fsync, close."""
        name, (seed, size) = self._pick(), self._new()
        if name is None or not 0 < size <= 100_000:  # nothing to add needs no store
            return

        def act() -> None:
            fd = os.open(name, os.O_WRONLY | os.O_APPEND)
            try:
                write_all(fd, content(seed, size))
                os.fsync(fd)
            finally:
                os.close(fd)

        self._does(act, verb="append", name=name, seed=seed, size=size)

    def rename(self) -> None:
        old, new = self._pick(), self._name()
        if old is None or old == new:
            return
        self._does(lambda: os.rename(old, new), verb="rename", name=old, to=new)
        self._known.discard(old)
        self._known.add(new)

    def unlink(self) -> None:
        name = self._pick()
        if name is None:
            return
        self._does(lambda: os.unlink(name), verb="unlink", name=name)
        self._known.discard(name)


def main(directory: str, journal: str, seed: int) -> None:
    """Work until told to stop or an operation fails."""
    os.chdir(directory)
    known = {name for name in os.listdir() if name != "tmp"}
    with Path(journal).open("a") as lines:
        Load(lines, seed, known).run()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))

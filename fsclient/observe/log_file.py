"""Files of log lines that begin anew when they are large: FILE, FILE.1, … FILE.5.

Called for the log of a mount and for the file of `--access-log`. Threading: one thread at a time,
which the caller sees to.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

from fsmeta.errors import ConfigError

KEPT: Final = 5  # older files that are kept besides the one that is written


class LogFile:
    """Appends to a file through one descriptor, whose number never changes."""

    def __init__(self, path: str, fd: int, max_bytes: int, reopen: Callable[[str], int]) -> None:
        """`fd` is open on `path`; `reopen` opens it anew. `max_bytes` 0: it only grows."""
        self._path = path
        self.fd = fd
        self._max_bytes = max_bytes
        self._reopen = reopen
        self._written = os.fstat(fd).st_size

    def write(self, data: bytes) -> None:
        """Append; before that begin anew where the file would be too large. Raises: OSError."""
        if self._max_bytes and self._written and self._written + len(data) > self._max_bytes:
            try:
                self._rotate()
            except (OSError, ConfigError):
                self._written = 0  # it goes on in the file that is open, and tries as much later
        while data:
            count = os.write(self.fd, data)
            self._written += count
            data = data[count:]

    def _rotate(self) -> None:
        """Move the files up by one; standard error goes along where it was this file."""
        new = f"{self._path}.new"  # first: where there is none, the older files stay as they are
        fresh = self._reopen(new)
        for number in range(KEPT, 0, -1):
            older = self._path if number == 1 else f"{self._path}.{number - 1}"
            try:
                os.rename(older, f"{self._path}.{number}")
            except FileNotFoundError:
                pass  # fewer than KEPT so far, or removed meanwhile
        os.rename(new, self._path)
        before = os.fstat(self.fd)
        for fd in {self.fd, 1, 2}:
            try:
                found = os.fstat(fd)
            except OSError:
                continue  # closed
            if (found.st_dev, found.st_ino) == (before.st_dev, before.st_ino):
                os.dup2(fresh, fd, inheritable=fd < 3)
        os.close(fresh)
        self._written = os.fstat(self.fd).st_size

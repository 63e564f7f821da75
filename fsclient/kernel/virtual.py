"""The files at the root of a mount that are not in the volume: `.stats`, `.config`.

They are found by name and left out of listings. Their content is made when they are opened, so one
read sees one moment.

Threading: any method from any thread.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from typing import Final

from fsclient.kernel.contract import Buffer, Entry, Opened, Stat
from fsmeta.runtime import Runtime
from fsmeta.types import NO_PARENT, Attr, Ino

FIRST_INO: Final = 1 << 62  # far above any id a volume hands out
FIRST_FH: Final = 1 << 62
_MODE: Final = 0o100444


class VirtualFiles:
    """A few read-only files, each made by a function."""

    def __init__(self, runtime: Runtime, makers: Mapping[bytes, Callable[[], bytes]]) -> None:
        self._runtime = runtime
        self._inos = {name: Ino(FIRST_INO + at) for at, name in enumerate(makers)}
        self._makers = {self._inos[name]: make for name, make in makers.items()}
        self._lock = runtime.lock()
        self._open: dict[int, bytes] = {}  # guarded by _lock
        self._next = FIRST_FH  # guarded by _lock

    def has(self, name: bytes) -> bool:
        """Whether the root has a virtual file of that name."""
        return name in self._inos

    def owns(self, ino: Ino) -> bool:
        """Whether `ino` is one of ours."""
        return ino >= FIRST_INO

    def lookup(self, name: bytes) -> Entry:
        return Entry(self._attr(self._inos[name]), 1.0, 0.0)

    def getattr(self, ino: Ino) -> Stat:
        return Stat(self._attr(ino), 0.0)

    def _attr(self, ino: Ino) -> Attr:
        if ino not in self._makers:
            raise OSError(errno.ESTALE, f"no virtual file {ino}")
        now = self._runtime.now_ns()
        return Attr(ino, _MODE, 0, 0, 0, 0, NO_PARENT, now, 0, 1, 0, now, now, now)

    def open(self, ino: Ino) -> Opened:
        """The content is made now. The size is unknown to the kernel, so reads come to us."""
        content = self._makers[ino]()
        with self._lock:
            self._next += 1
            self._open[self._next] = content
            return Opened(self._next, direct_io=True, no_flush=True)

    def read(self, fh: int, offset: int, size: int) -> list[Buffer]:
        content = self._open.get(fh)
        if content is None:
            raise OSError(errno.EBADF, f"no open virtual file {fh}")
        return [content[offset : offset + size]]

    def release(self, fh: int) -> None:
        with self._lock:
            self._open.pop(fh, None)

"""The files at the root of a mount that are not in the volume: `.stats`, `.config`, `.accesslog`.

They are found by name and left out of listings. The content of most is made when they are opened,
so one read sees one moment; a stream is new at each open, for the user of the mount alone, and its
reads wait for bytes.

Threading: any method from any thread.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from fsclient.kernel.contract import FIRST_VIRTUAL_INO, Buffer, EntryOut, OpenOut, Stat
from fsclient.kernel.later import Later
from fsmeta.rules import access
from fsmeta.runtime import Runtime
from fsmeta.types import NO_PARENT, ROOT_CALLER, Attr, Caller, Ino
from fsmeta.user_namespace import own_uid

FIRST_INO: Final = FIRST_VIRTUAL_INO
FIRST_FH: Final = 1 << 62
_MODE: Final = 0o100444
_STREAM_MODE: Final = 0o100400


class VirtualStream(Protocol):
    """What one open handle of a stream reads."""

    close: Callable[[], None]

    def read(self, size: int) -> Sequence[Buffer] | Later[Sequence[Buffer]]:
        """The next bytes, now or when there are any; none at the end."""


class VirtualFiles:
    """A few read-only files, each made by a function, and streams."""

    def __init__(
        self,
        runtime: Runtime,
        makers: Mapping[bytes, Callable[[], bytes]],
        streams: Mapping[bytes, Callable[[], VirtualStream]] | None = None,
    ) -> None:
        self._runtime = runtime
        streams = streams or {}
        self._inos = {name: Ino(FIRST_INO + at) for at, name in enumerate((*makers, *streams))}
        self._makers = {self._inos[name]: make for name, make in makers.items()}
        self._streams = {self._inos[name]: make for name, make in streams.items()}
        self._reading: dict[int, VirtualStream] = {}  # open streams; guarded by _lock
        self._lock = runtime.lock()
        self._open: dict[int, bytes] = {}  # guarded by _lock
        self._next = FIRST_FH  # guarded by _lock

    def has(self, name: bytes) -> bool:
        """Whether the root has a virtual file of that name."""
        return name in self._inos

    def owns(self, ino: Ino) -> bool:
        """Whether `ino` is one of ours."""
        return ino >= FIRST_INO

    def lookup(self, name: bytes) -> EntryOut:
        return EntryOut(self._attr(self._inos[name]), 1.0, 0.0)

    def getattr(self, ino: Ino) -> Stat:
        return Stat(self._attr(ino), 0.0)

    def _attr(self, ino: Ino) -> Attr:
        mode, uid = _MODE, 0
        if ino in self._streams:
            mode, uid = _STREAM_MODE, own_uid()
        elif ino not in self._makers:
            raise OSError(errno.ESTALE, f"no virtual file {ino}")
        now = self._runtime.now_ns()
        return Attr(ino, mode, uid, 0, 0, 0, NO_PARENT, now, 0, 1, 0, now, now, now)

    def open(self, caller: Caller, ino: Ino, flags: int) -> OpenOut:
        """The content is made now. The size is unknown to the kernel, so reads come to us.

        Raises: EACCES.
        """
        writes = flags & os.O_ACCMODE != os.O_RDONLY
        access.require(caller, self._attr(ino), access.WRITE if writes else access.READ)
        if ino in self._streams:
            stream = self._streams[ino]()
            with self._lock:
                self._next += 1
                self._reading[self._next] = stream
                return OpenOut(self._next, direct_io=True, no_flush=True)
        content = self._makers[ino]()
        with self._lock:
            self._next += 1
            self._open[self._next] = content
            return OpenOut(self._next, direct_io=True, no_flush=True)

    def reopen(self, ino: Ino, fh: int) -> None:
        """Open for a handle that an earlier process has given; content and stream begin anew."""
        if fh in self._open or fh in self._reading:
            return
        made = self.open(ROOT_CALLER, ino, os.O_RDONLY).fh  # its opener was checked then
        with self._lock:
            self._next = max(self._next, fh)
            if made in self._open:
                self._open[fh] = self._open.pop(made)
            else:
                self._reading[fh] = self._reading.pop(made)

    def read(self, fh: int, offset: int, size: int) -> list[Buffer]:
        content = self._open.get(fh)
        if content is None:
            raise OSError(errno.EBADF, f"no open virtual file {fh}")
        return [content[offset : offset + size]]

    def read_or_wait(
        self, fh: int, offset: int, size: int
    ) -> Sequence[Buffer] | Later[Sequence[Buffer]]:
        """`read`, of a stream too, whatever the offset."""
        stream = self._reading.get(fh)
        return self.read(fh, offset, size) if stream is None else stream.read(size)

    def end_streams(self) -> int:
        """Let readers of streams find the end, for they keep the mount busy; how many there are."""
        with self._lock:
            streams = list(self._reading.values())
        for stream in streams:
            stream.close()
        return len(streams)

    def release(self, fh: int) -> None:
        with self._lock:
            self._open.pop(fh, None)
            stream = self._reading.pop(fh, None)
        if stream is not None:
            stream.close()

"""Handles for reads that name none: the kernel has opened a file or directory without asking.

The first read of an inode by a process opens it for that process, because read-ahead and listings
belong to a handle. A handle ends when it was not used for IDLE_S, or when it was used least
recently of AT_MOST. Until then the inode is open here, and outlives its last name as any open file.

Called by `ZeroMessageOpens`. Threading: any thread. The lock is a leaf: nothing is opened or
released under it. A thread named after the table ends idle handles while there are any.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from fsmeta.runtime import Runtime
from fsmeta.types import Ino

IDLE_S: Final = 60.0  # as long as a dead client keeps what it had open
AT_MOST: Final = 1024  # readers at a time; 20 kB each at most, with what was read ahead apart


class ImplicitHandle:
    """A handle, and how it is used."""

    def __init__(self, fh: int) -> None:
        self.fh = fh
        self.users = 1  # requests; guarded by the table
        self.used_s = 0.0  # when the last one began or ended; guarded by the table


class ImplicitHandles:
    """The handles of files, or those of directories."""

    def __init__(
        self,
        name: str,
        runtime: Runtime,
        open_: Callable[[Ino], int],
        release: Callable[[Ino, int], None],
        idle_s: float = IDLE_S,
        at_most: int = AT_MOST,
    ) -> None:
        self._name = name
        self._runtime = runtime
        self._open = open_
        self._release = release
        self._idle_s = idle_s
        self._at_most = at_most
        self._cond = runtime.condition()
        self._held: OrderedDict[tuple[Ino, int], ImplicitHandle] = OrderedDict()  # guarded by _cond
        self._expiring = False  # whether the thread runs; guarded by _cond
        self._closed = False  # guarded by _cond

    def __len__(self) -> int:
        return len(self._held)

    def take(self, ino: Ino, pid: int) -> ImplicitHandle:
        """The handle of a process, to be given back with `put`. Raises: what opening does."""
        with self._cond:
            found = self._take(ino, pid)
        if found is not None:
            return found
        made = ImplicitHandle(self._open(ino))
        with self._cond:
            found = self._take(ino, pid)
            if found is None:
                self._held[ino, pid] = made
                made.used_s = self._runtime.monotonic()
                surplus = self._surplus()
                self._begin_expiring()
            else:
                surplus = [((ino, pid), made)]  # another thread of the process was faster
        self._end(surplus)
        return made if found is None else found

    def adopt(self, ino: Ino, fh: int) -> None:
        """A handle that an earlier process of this mount has made; its reader gets one of its own,
        and it ends as any other that is not used."""
        handle = ImplicitHandle(fh)
        handle.users = 0
        handle.used_s = self._runtime.monotonic()
        with self._cond:
            self._held[ino, -fh] = handle
            self._begin_expiring()

    def _take(self, ino: Ino, pid: int) -> ImplicitHandle | None:
        """The caller holds the lock."""
        found = self._held.get((ino, pid))
        if found is not None:
            found.users += 1
            self._held.move_to_end((ino, pid))
        return found

    def put(self, handle: ImplicitHandle) -> None:
        """A request that took `handle` is over."""
        with self._cond:
            handle.users -= 1
            handle.used_s = self._runtime.monotonic()

    def close(self) -> None:
        """End all handles. No request is under way any more."""
        with self._cond:
            self._closed = True
            ended = list(self._held.items())
            self._held.clear()
            self._cond.notify_all()
        self._end(ended)

    def _surplus(self) -> list[tuple[tuple[Ino, int], ImplicitHandle]]:
        """Those that are one too many, oldest first. The caller holds the lock."""
        ended = []
        for key, handle in list(self._held.items()):
            if len(self._held) <= self._at_most:
                break
            if not handle.users:
                ended.append((key, self._held.pop(key)))
        return ended

    def _begin_expiring(self) -> None:
        """The caller holds the lock."""
        if not self._expiring and not self._closed:
            self._expiring = True
            self._runtime.spawn(self._name, self._expire)

    def _expire(self) -> None:
        """End what is idle, until there are no handles."""
        while True:
            with self._cond:
                ended = self._idle()
                if not ended:
                    if not self._held:
                        self._expiring = False
                        return
                    self._cond.wait(self._idle_s / 2)
                    continue
            self._end(ended)

    def _idle(self) -> list[tuple[tuple[Ino, int], ImplicitHandle]]:
        """The caller holds the lock."""
        before = self._runtime.monotonic() - self._idle_s
        idle = [
            (key, handle)
            for key, handle in self._held.items()
            if not handle.users and handle.used_s < before
        ]
        for key, _ in idle:
            del self._held[key]
        return idle

    def _end(self, ended: list[tuple[tuple[Ino, int], ImplicitHandle]]) -> None:
        for (ino, _), handle in ended:
            self._release(ino, handle.fh)

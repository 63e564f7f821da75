"""Forking while a SQLite volume is open: what makes that safe for the child's own connection.

SQLite keeps the locks of a process in memory, and a forked child inherits that memory but not the
locks: its new connection takes the parent's shared locks for its own. The last process to leave
would then remove the log under it. So the parent forks between transactions, and the child takes
the two shared locks that a connection holds for life (os_unix.c: the SHARED range of the database,
the "deadman switch" of its index).

Called by `connection`, around fork(2). Threading: the thread that forks.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from typing import Final

from fsmeta.runtime import Lock
from fsmeta.store.contract import Store
from fsmeta.store.sqlite import SqliteStore

HOLD_S: Final = 30.0  # a transaction that takes longer hangs: the fork goes on without
_SHARED: Final = (0x40000002, 510)  # begin and length: SHARED_FIRST and SHARED_SIZE
_DEADMAN: Final = (128, 1)  # UNIX_SHM_DMS


class ForkGuard:
    """Of one open SQLite store."""

    def __init__(self, statements: Lock, path: str) -> None:
        self._statements = statements
        self._path = path
        self._held = False  # by the thread that forks

    def hold(self) -> None:
        """Before a fork: wait for the statement that runs, and let none begin."""
        self._held = self._statements.acquire(timeout=HOLD_S)

    def release(self) -> None:
        """In the parent, behind the fork."""
        if self._held:
            self._held = False
            self._statements.release()

    def keep(self) -> None:
        """In the child: hold what its connections believe to hold, as long as it runs."""
        for path, (begin, length) in ((self._path, _SHARED), (f"{self._path}-shm", _DEADMAN)):
            with suppress(OSError):  # the file went with the volume
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB, length, begin)


def guard_of(store: Store) -> ForkGuard | None:
    """What a store needs around a fork; None for servers, which know their connections."""
    if not isinstance(store, SqliteStore):
        return None
    return ForkGuard(store.statements, store.path)

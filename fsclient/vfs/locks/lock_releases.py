"""Locks of a mount that are given up: at once, or when other clients see what was written under
them.

`LockRequests` has one. Threading: any method from any thread; `owed` is guarded by the table's
`cond`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, NamedTuple

from fsclient.vfs.locks.lock_table import HeldLock, Holder, LockTable
from fsclient.vfs.locks.parking import Parked, Parking, Publishing
from fsmeta.errors import StoreError
from fsmeta.meta.meta import Meta
from fsmeta.runtime import Runtime
from fsmeta.schema.locks import LOCK_END
from fsmeta.types import Ino

log = logging.getLogger(__name__)

PUBLISHED_S: Final = 0.5  # between two looks whether the client ends


class Debt(NamedTuple):
    """What is to be given up, and when: `upto` is published."""

    ino: Ino
    holder: Holder
    grants: int
    upto: int


class LockReleases:
    """See the module."""

    parking: Parking  # where there is something to wait for

    def __init__(
        self,
        meta: Meta,
        table: LockTable,
        wake: Callable[[], None],
        handed: Callable[[], None],
    ) -> None:
        """`wake`, with `cond` held, has `pay` called soon; `handed` is told that a lock is given
        up, perhaps to a wait of this mount."""
        self._meta = meta
        self._table = table
        self._wake = wake
        self._handed = handed
        self._publishing: Publishing | None = None  # None: what is stored is seen
        self._stopped = False
        self.owed: list[Debt] = []  # the store was away, or other clients don't see the writes yet

    def wait_for(self, publishing: Publishing, runtime: Runtime) -> None:
        """Other clients see what was written under a lock before it is given up."""
        self._publishing = publishing
        self.parking = Parking(runtime, publishing)

    def stop(self) -> None:
        """Nothing is waited for any more."""
        self._stopped = True
        if self._publishing is not None:
            self.parking.stop()

    def cancel(self, request: int) -> bool:
        """See `Parking`."""
        return self._publishing is not None and self.parking.cancel(request)

    def give_up(self, ino: Ino, holder: Holder, upto: int | None = None) -> None:
        """All that an owner has of a file; later, where the store is away, or other clients see too
        little of what it wrote.
        """
        holding = self._table.holding(ino, holder)
        if holding is None:
            return
        upto = self._table.mark() if upto is None else upto
        try:
            if self._is_published(ino, holding, upto):
                self.unlock(ino, holder, 0, LOCK_END)
                return
        except StoreError as error:
            log.debug("giving up locks of inode %d: %s", ino, error)
        with self._table.cond:
            self.owed.append(Debt(ino, holder, holding.grants, upto))
            self._wake()

    def _is_published(self, ino: Ino, holding: HeldLock, upto: int) -> bool:
        """Whether other clients see what was written under a lock. Raises: StoreError."""
        since = holding.since
        if self._publishing is None or since is None:
            return True
        return self._publishing.await_written(ino, since, upto, 0.0)

    def unseen(self, ino: Ino, holding: HeldLock, waits: bool, request: int = 0) -> Parked | None:
        """What a request has to wait for before a lock is given up; None where nothing.

        It `waits` here where no transport could answer it later. Raises: StoreError.
        """
        since, upto = holding.since, self._table.mark()
        if self._publishing is None or since is None:
            return None
        wait_s = PUBLISHED_S if waits else 0.0
        while not self._publishing.await_written(ino, since, upto, wait_s):
            if not waits or self._stopped:
                return Parked(ino, since, upto, request)
        return None

    def pay(self) -> None:
        """Give up locks without an owner: each debt that can be paid. Raises: StoreError."""
        with self._table.cond:
            owed = list(self.owed)
        failed: StoreError | OSError | None = None
        for each in owed:
            try:
                if not self._is_paid(each):
                    continue
            except (StoreError, OSError) as error:
                failed = error
                continue
            with self._table.cond:
                if each in self.owed:  # not if it was lost meanwhile
                    self.owed.remove(each)
        if failed is not None:
            raise failed

    def _is_paid(self, debt: Debt) -> bool:
        """Pay a debt; False where other clients see too little yet. Raises: StoreError, OSError."""
        holding = self._table.holding(debt.ino, debt.holder)
        if holding is not None and self._is_owed(debt):
            if not self._is_published(debt.ino, holding, debt.upto):
                return False
            self.unlock(debt.ino, debt.holder, 0, LOCK_END)
        return True

    def _is_owed(self, debt: Debt) -> bool:
        """Whether the owner has locked nothing since it gave all up."""
        holding = self._table.holding(debt.ino, debt.holder)
        return holding is not None and holding.grants == debt.grants

    def released(self) -> set[tuple[Ino, Holder]]:
        """Owners that have given up all they have of a file, and still hold it in the store."""
        with self._table.cond:
            return {(each.ino, each.holder) for each in self.owed if self._is_owed(each)}

    def unlock(self, ino: Ino, holder: Holder, begin: int, end: int) -> None:
        """Give up a range of what an owner has. Raises: StoreError, OSError."""
        holding = self._table.holding(ino, holder)
        if holding is None:
            return
        grants = holding.grants
        left = self._meta.locks.unlock(ino, *holder, begin, end)
        self._handed()
        if not left:
            self._table.given_up(ino, holder, holding, grants)

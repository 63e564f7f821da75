"""What one mount knows of its programs' file locks: possible holders, waiters, lost locks.

Called by this folder alone. An owner is noted before the store is asked, so that an answer that is
lost leaves a note too much, never one too few. Threading: `cond` guards everything; methods take
it, except those that say that their caller has.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection
from typing import Final, NamedTuple, TypeAlias

from fsclient.files.handles.open_files import OpenFile
from fsclient.kernel.contract import FileLock
from fsclient.survival.records import NOT_KEPT, Keeper
from fsmeta.meta.locks import Range
from fsmeta.runtime import Runtime
from fsmeta.schema.locks import Kind
from fsmeta.types import Ino

WAITS_MAX: Final = 10_000  # of a mount; each is a few hundred bytes
LOCKED_MAX: Final = 100_000  # files that were locked once; about 6 MB

Holder: TypeAlias = tuple[Kind, int]  # kind of lock, and the kernel's name for its owner


class HeldLock:
    """What one owner may have of one file."""

    def __init__(self) -> None:
        self.handles: set[int] = set()  # through which it has asked
        self.asking = 0  # requests under way, waits included
        self.grants = 0  # how often it got something
        self.held = False  # it may have something
        self.since: int | None = None  # the last change before it might write; None: it might not


class Waiter:
    """A request for a lock, which may come to wait."""

    def __init__(self, request: int, file: OpenFile, holder: Holder, lock: FileLock) -> None:
        self.request = request
        self.file = file
        self.ino = file.ino
        self.holder = holder
        self.pid = lock.pid
        self.want = Range(lock.write, lock.begin, lock.end)
        self.commits = file.commits  # before the store was asked: see `OpenFile.learn`
        self.ticket = 0  # 0: it is a try
        self.session = 0  # in whose name the store has it in line; 0: it does not
        self.cancelled = False


class Spent(NamedTuple):
    """Notes in the store that say nothing any more."""

    tickets: list[int]
    owners: list[int]


class LockTable:
    """See the module."""

    def __init__(self, runtime: Runtime, locked: set[Ino], keeper: Keeper = NOT_KEPT) -> None:
        """`locked` is `OpenFiles.locked`: it is added to here, and cut back when it is too long."""
        self.cond = runtime.condition()
        self._locked = locked
        self._keeper = keeper
        self.waiters: dict[int, Waiter] = {}  # by request
        self.held: dict[Ino, dict[Holder, HeldLock]] = {}
        self.lost: dict[Ino, dict[Holder, set[int]]] = {}  # with the handles
        self._tickets = runtime.random_bits(32) << 31  # so that no other client's mistake hits ours
        self.mark: Callable[[], int] = int  # the number of the last change of this mount
        self._spent: list[int] = []
        self._spent_owners: set[int] = set()

    def begin(self, waiter: Waiter, fh: int, wait: bool) -> HeldLock:
        """Note what is going to be asked for. Raises: ENOLCK."""
        with self.cond:
            if len(self.waiters) >= WAITS_MAX:
                raise OSError(errno.ENOLCK, f"{WAITS_MAX} requests wait for locks")
            holders = self.held.setdefault(waiter.ino, {})
            holding = holders.setdefault(waiter.holder, HeldLock())
            holding.handles.add(fh)
            holding.asking += 1
            if len(self._locked) >= LOCKED_MAX:
                self._locked.intersection_update({*self.held, *self.lost})
            self._locked.add(waiter.ino)
            if wait:
                self._tickets += 1
                waiter.ticket = self._tickets
                self.waiters[waiter.request] = waiter
                self._keeper.waits(waiter.ticket, waiter.ino, waiter.holder[0])
            self._keeper.locked(waiter.ino, *waiter.holder, holding.handles)
        return holding

    def end(self, waiter: Waiter, holding: HeldLock, granted: bool) -> None:
        """A request has its answer; the caller has `cond`."""
        self.waiters.pop(waiter.request, None)
        if waiter.ticket:
            self._keeper.waited(waiter.ticket)
        holding.asking -= 1
        if granted:
            holding.held = True
            holding.grants += 1
            if waiter.want.write and holding.since is None:
                holding.since = self.mark()
        else:
            self._forget_idle(waiter.ino, waiter.holder, holding)

    def settle(self, waiter: Waiter, granted: bool) -> bool:
        """A wait is over; False where another thread was first to see it."""
        with self.cond:
            if self.waiters.get(waiter.request) is not waiter:
                return False
            self.end(waiter, self.held[waiter.ino][waiter.holder], granted)
            self._spent.append(waiter.ticket)
            if waiter.holder[0] is Kind.POSIX:
                self._spent_owners.add(waiter.holder[1])
        return True

    def take_spent(self, at_least: int) -> Spent:
        """What can be removed from the store, if it is worth a request."""
        with self.cond:
            if len(self._spent) < at_least:
                return Spent([], [])
            spent = Spent(self._spent, sorted(self._spent_owners))
            self._spent, self._spent_owners = [], set()
        return spent

    def has_spent(self) -> bool:
        """Whether there is something to remove; the caller has `cond`."""
        return bool(self._spent)

    def waits_at(self, owner: int) -> set[Ino]:
        """At which files an owner waits for fcntl locks."""
        with self.cond:
            mine = (each for each in self.waiters.values() if each.holder == (Kind.POSIX, owner))
            return {each.ino for each in mine}

    def holding(self, ino: Ino, holder: Holder) -> HeldLock | None:
        """What an owner may have of a file; None where that is nothing."""
        found = self.held.get(ino, {}).get(holder)
        return found if found is not None and found.held else None

    def given_up(self, ino: Ino, holder: Holder, holding: HeldLock, grants: int) -> None:
        """It has nothing left, unless it got something since it had had `grants`."""
        with self.cond:
            if holding.grants == grants and not holding.asking:
                holding.held = False
                holding.since = None
                self._forget_idle(ino, holder, holding)

    def _forget_idle(self, ino: Ino, holder: Holder, holding: HeldLock) -> None:
        if holding.held or holding.asking:
            return
        holders = self.held.get(ino, {})
        if holders.get(holder) is holding:
            del holders[holder]
            self._keeper.unlocked(ino, *holder)
            if not holders:
                del self.held[ino]

    def restore(self, ino: Ino, holder: Holder, handles: Collection[int]) -> None:
        """An earlier process may have had a lock for an owner, and written under it."""
        with self.cond:
            holding = self.held.setdefault(ino, {}).setdefault(holder, HeldLock())
            holding.handles.update(handles)
            holding.held = True
            holding.grants += 1
            holding.since = 0
            self._locked.add(ino)

    def leave_handle(self, ino: Ino, fh: int) -> tuple[list[Holder], list[Holder]]:
        """A handle is closed for good: the owners with locks through it alone, and those with lost
        ones.

        A flock lock is its handle's own. So is an OFD lock; what processes had, their closes ended.
        """
        alone: list[Holder] = []
        with self.cond:
            for holder, holding in self.held.get(ino, {}).items():
                if fh in holding.handles:
                    holding.handles.discard(fh)
                    if not holding.handles:
                        alone.append(holder)
            lost = [holder for holder, fhs in self.lost.get(ino, {}).items() if fh in fhs]
        return alone, lost

    # --- a session that was ended ----------------------------------------------------------------

    def lose(self, released: Collection[tuple[Ino, Holder]] = ()) -> tuple[list[Ino], int]:
        """All that is held is lost: of which files, and how many owners that concerns.

        An owner that has closed, or is in `released`, loses nothing: the end of the session is the
        release that it waits for. What it wrote may be left, so its file is named.
        """
        count = 0
        inos: list[Ino] = []
        with self.cond:
            for ino, holders in list(self.held.items()):
                gone = {holder: set(each.handles) for holder, each in holders.items() if each.held}
                if gone:
                    inos.append(ino)
                    asking = {
                        holder: fhs
                        for holder, fhs in gone.items()
                        if fhs and (ino, holder) not in released
                    }
                    count += len(asking)
                    if asking:
                        self.lost.setdefault(ino, {}).update(asking)
                for holder, holding in list(holders.items()):
                    holding.held = False
                    holding.since = None
                    self._forget_idle(ino, holder, holding)
            self._spent, self._spent_owners = [], set()
        return inos, count

    def forget_lost(self, ino: Ino, holder: Holder, fh: int = 0) -> bool:
        """The owner knows, or its handle `fh` is gone; whether it had lost anything."""
        with self.cond:
            holders = self.lost.get(ino, {})
            if holder not in holders:
                return False
            holders[holder].discard(fh)
            if not fh or not holders[holder]:
                del holders[holder]
            if not holders:
                del self.lost[ino]
        return True

    def lost_handles(self, ino: Ino) -> frozenset[int]:
        """Handles of a file through which a program had a lock that was lost."""
        with self.cond:
            return frozenset(fh for fhs in self.lost.get(ino, {}).values() for fh in fhs)

    def numbers(self) -> dict[str, float]:
        """Gauges for `.stats`."""
        with self.cond:
            held = sum(each.held for holders in self.held.values() for each in holders.values())
            in_line = sum(waiter.session != 0 for waiter in self.waiters.values())
            return {"lock_owners": held, "lock_waits": in_line}

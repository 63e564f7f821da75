"""flock(2) and fcntl(2) locks: take, give up, stop waiting; EDEADLK; what a dead session had.

A commit that gives up a lock also grants it to the waits that it barred, and notes that in the `g`
rows of their sessions (docs/design/locks-permissions-quotas). A verb here may decide on reads that
its commit does not check, where a change would leave the decision as it is; each place says why.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum
from typing import Final, NamedTuple

from fsmeta.errors import Conflict
from fsmeta.rules import locks
from fsmeta.rules.context import get_attr
from fsmeta.schema import inode, keys as schema, locks as rows
from fsmeta.schema.locks import Kind, LockRecord, LockWait, Owner
from fsmeta.store.contract import Key
from fsmeta.txn.txn import Txn
from fsmeta.types import Attr, Ino, SessionId

RING_STEPS_MAX: Final = 32  # requests to follow a ring of waits; a longer ring is not found
ONE: Final = b"1"


class LockOutcome(Enum):
    """What became of a request for a lock."""

    GRANTED = 1
    QUEUED = 2
    REFUSED = 3


class Ask(NamedTuple):
    """A request for a lock."""

    ino: Ino
    kind: Kind
    lock: LockRecord
    ticket: int  # how its session calls the wait; 0: it does not wait
    waits_at: Collection[Ino] = ()  # where other threads of the owner may be waiting
    guess: bool = False  # assume that there are no locks and no waits, until that proves wrong


class LockAnswer(NamedTuple):
    """What became of it."""

    outcome: LockOutcome
    attr: Attr | None = None  # where granted: the file as the last holder has left it, if known
    shared: bool = False  # other sessions hold or await locks of this file
    session: int = 0  # in whose name


class _State:
    """The locks of one kind of an inode, as read; and as they are to be."""

    def __init__(self, txn: Txn, ino: Ino, kind: Kind) -> None:
        self._txn = txn
        self.ino = ino
        self.kind = kind
        self.held_key = rows.held_key(ino, kind)
        self.queue_key = rows.queue_key(ino, kind)
        held, queue = txn.get_many((self.held_key, self.queue_key))
        self.held = rows.unpack_locks(self.held_key, held)
        self.queue = rows.unpack_waits(self.queue_key, queue)

    def sessions(self) -> set[int]:
        """The sessions that hold or await one of them."""
        found = {lock.owner.session for lock in self.held}
        return found | {wait.lock.owner.session for wait in self.queue}

    def change(self, held: list[LockRecord], queue: list[LockWait]) -> None:
        """Write these locks and waits, after granting the waits that nothing bars any more."""
        before = self.sessions()
        holding, waiting, granted = locks.handed_over(held, queue)
        if len(holding) > rows.RECORDS_MAX:
            raise OSError(errno.ENOLCK, f"inode {self.ino} has {len(holding)} locks")
        if holding != self.held:
            self._write(self.held_key, rows.pack_locks(holding))
        if waiting != self.queue:
            self._write(self.queue_key, rows.pack_waits(waiting))
        for wait in granted:
            row = rows.grant_row(wait.lock.owner.session)
            self._txn.put(row, rows.ticket_field(wait.ticket), ONE)
        self.held, self.queue = holding, waiting
        for session in before - self.sessions():
            self._txn.delete(rows.grant_row(session), rows.place_field(self.ino, self.kind))

    def _write(self, key: Key, value: bytes) -> None:
        if value:
            self._txn.put(*key, value)
        else:
            self._txn.delete(*key)

    def note_place(self, session: int) -> None:
        """Let `session` say that it has locks here; before anything that lets it have some."""
        if session not in self.sessions():
            self._txn.put(rows.grant_row(session), rows.place_field(self.ino, self.kind), ONE)


def setlk(txn: Txn, ask: Ask, first: bool) -> LockAnswer:
    """Take a lock, or get in line for it; `first`: nothing has proved wrong yet.

    The first attempt knows what the file is, because its commit checks that, too. Another one
    leaves it open, as constant changes of the file could make each commit fail. It is to be read
    when the lock is had: between the read of the locks and the commit another owner may have taken
    the lock, changed the file and given the lock up, after which the locks are what they were.
    Raises: EDEADLK, ENOLCK, ESTALE.
    """
    # in no other session's name: what an ended one had would stay for ever
    txn.fence = schema.session_row(ask.lock.owner.session)
    if first and ask.guess:
        txn.assume(*rows.held_key(ask.ino, ask.kind), None)
        txn.assume(*rows.queue_key(ask.ino, ask.kind), None)
    keys = inode.attr_keys(ask.ino)
    txn.get_many((rows.held_key(ask.ino, ask.kind), rows.queue_key(ask.ino, ask.kind), *keys))
    attr: Attr | None = get_attr(txn, ask.ino)
    if not first:
        attr = None
        for key in keys:
            txn.drop_check(*key)
    state = _State(txn, ask.ino, ask.kind)
    me = ask.lock.owner
    shared = bool(state.sessions() - {me.session})
    mine = [lock for lock in state.held if lock.owner == me]
    if ask.kind is Kind.FLOCK and mine and mine[0].write == ask.lock.write:
        return LockAnswer(LockOutcome.GRANTED, attr, shared, me.session)
    held = state.held
    if ask.kind is Kind.FLOCK:  # what it had goes first, even if it can't have the other
        held = [lock for lock in held if lock.owner != me]
    line = state.queue if ask.ticket and not mine else []
    bars = locks.bars_of(held, line, ask.lock)
    if bars and ask.ticket and first and ask.guess:
        raise Conflict("a waiter must know of the other waiters")
    if bars and ask.ticket and ask.kind is Kind.POSIX and _closes_ring(txn, ask, state):
        if locks.first_bar(held, ask.lock):
            raise OSError(errno.EDEADLK, "each owner would wait for another one")
        bars = []  # only waits bar it, and these wait for it themselves
    if not bars:
        state.note_place(me.session)
        state.change(locks.taken(held, ask.lock), state.queue)
        return LockAnswer(LockOutcome.GRANTED, attr, shared, me.session)
    if not ask.ticket:
        state.change(held, state.queue)
        return LockAnswer(LockOutcome.REFUSED, None, shared, me.session)
    _enqueue(txn, ask, state, held, first)
    for key in keys:
        txn.drop_check(*key)
    return LockAnswer(LockOutcome.QUEUED, None, shared, me.session)


def _enqueue(txn: Txn, ask: Ask, state: _State, held: list[LockRecord], first: bool) -> None:
    """Get in line. Raises: ENOLCK."""
    if len(state.queue) >= rows.RECORDS_MAX:
        raise OSError(errno.ENOLCK, f"{len(state.queue)} wait for locks of inode {ask.ino}")
    wait = LockWait(ask.lock, ask.ticket)
    state.note_place(ask.lock.owner.session)
    if ask.kind is Kind.POSIX:
        field = rows.grant_row(ask.lock.owner.session), rows.waits_field(ask.lock.owner.id)
        if first:
            txn.assume(*field, None)
        txn.get(*field)  # of two threads of the owner one must see the other
        txn.put(*field, rows.pack_places({*ask.waits_at, ask.ino}, ask.ticket))
    if held != state.held:
        state.change(held, [*state.queue, wait])
        return
    txn.append(*state.queue_key, rows.pack_waits((wait,)))
    if locks.first_bar(held, ask.lock):
        # the commit that gives the lock up will see all waits of that time
        txn.drop_check(*state.queue_key)


def _closes_ring(txn: Txn, ask: Ask, state: _State) -> bool:
    """Whether an owner that `ask` would wait for waits for the owner of `ask`.

    All that is read is checked by the commit, so two requests can't close a ring together.
    """
    found = _holders_before(state.held, state.queue, ask.lock)
    seen: set[Owner] = set()
    for _ in range(RING_STEPS_MAX):
        if ask.lock.owner in found:
            return True
        fresh = sorted(found - seen)
        seen |= found
        found = set()
        if not fresh:
            return False
        for owner, inos in _waiting(txn, fresh).items():
            for ino in inos:
                there = state if ino == ask.ino else _State(txn, ino, Kind.POSIX)
                for at, wait in enumerate(there.queue):
                    if wait.lock.owner == owner:
                        found |= _holders_before(there.held, there.queue[:at], wait.lock)
    return False


def _waiting(txn: Txn, owners: Sequence[Owner]) -> Mapping[Owner, list[Ino]]:
    """At which inodes each of them may be waiting."""
    keys = [(rows.grant_row(owner.session), rows.waits_field(owner.id)) for owner in owners]
    values = txn.get_many(keys)
    places = {
        owner: rows.unpack_places(key, value)
        for owner, key, value in zip(owners, keys, values, strict=True)
    }
    inos = {ino for found in places.values() for ino in found}
    txn.get_many([key(ino, Kind.POSIX) for ino in inos for key in (rows.held_key, rows.queue_key)])
    return places


def _holders_before(
    held: Iterable[LockRecord], queue: Iterable[LockWait], want: LockRecord
) -> set[Owner]:
    """Owners of what `want` has to wait for, directly or behind others of the same queue."""
    held = list(held)
    found: set[Owner] = set()
    left, todo = list(queue), [want]
    while todo:
        lock = todo.pop()
        found |= {each.owner for each in held if each.bars(lock)}
        if any(each.owner == lock.owner for each in held):
            continue
        todo += [each.lock for each in left if each.lock.bars(lock)]
        left = [each for each in left if not each.lock.bars(lock)]
    return found


def unlock(txn: Txn, ino: Ino, kind: Kind, owner: Owner, begin: int, end: int, first: bool) -> bool:
    """Give up a range; whether the owner still has locks of the inode. `first`: as in `setlk`."""
    if first and txn.is_cached(*rows.held_key(ino, kind)):
        txn.assume(*rows.queue_key(ino, kind), None)
    state = _State(txn, ino, kind)
    held = locks.without(state.held, owner, begin, end)
    if held != state.held:
        state.change(held, state.queue)
    return any(lock.owner == owner for lock in held)


def cancel(txn: Txn, ino: Ino, kind: Kind, session: SessionId, tickets: Sequence[int]) -> set[int]:
    """Wait no more; those of `tickets` that have their lock already."""
    state = _State(txn, ino, kind)
    keys = [(rows.grant_row(session), rows.ticket_field(ticket)) for ticket in tickets]
    told = dict(zip(tickets, txn.get_many(keys), strict=True))
    gone = {(session, ticket) for ticket in tickets}
    queue = [each for each in state.queue if (each.lock.owner.session, each.ticket) not in gone]
    if len(queue) != len(state.queue):
        state.change(state.held, queue)
    return {ticket for ticket, value in told.items() if value is not None}


def getlk(txn: Txn, ino: Ino, want: LockRecord) -> LockRecord | None:
    """What keeps `want` from being held, now."""
    state = _State(txn, ino, Kind.POSIX)
    return locks.first_bar(state.held, want)


def granted(
    txn: Txn, session: SessionId, tickets: Sequence[int], inos: Sequence[Ino]
) -> tuple[set[int], dict[Ino, Attr]]:
    """Those of `tickets` whose wait is over, and the attributes of `inos`; one request."""
    keys = [(rows.grant_row(session), rows.ticket_field(ticket)) for ticket in tickets]
    records = [key for ino in inos for key in inode.attr_keys(ino)]
    values = txn.get_many([*keys, *records])
    over = {ticket for ticket, value in zip(tickets, values, strict=False) if value is not None}
    pairs = zip(inos, values[len(keys) :: 2], values[len(keys) + 1 :: 2], strict=True)
    return over, {ino: inode.unpack_inode(ino, a, v) for ino, a, v in pairs if a and v}


def tidy(
    txn: Txn,
    session: SessionId,
    tickets: Iterable[int],
    owners: Sequence[int],
    waits: Callable[[int], bool],
) -> None:
    """Forget waits that are over, and places of those `owners` that wait no more."""
    row = rows.grant_row(session)
    for ticket in tickets:
        txn.delete(row, rows.ticket_field(ticket))
    fields = [rows.waits_field(owner) for owner in owners]
    txn.get_many([(row, field) for field in fields])
    for owner, field in zip(owners, fields, strict=True):
        # asked after the read: a new wait has changed the value, or will, and the commit sees that
        if not waits(owner):
            txn.delete(row, field)


def places(txn: Txn, session: SessionId) -> list[tuple[Ino, Kind]]:
    """Where a session has locks, or waits for some."""
    return rows.places_in(txn.get_row(rows.grant_row(session)))


def release_session(txn: Txn, session: SessionId, ino: Ino, kind: Kind) -> None:
    """Give up all that a session has of an inode, and its place in the line."""
    state = _State(txn, ino, kind)
    held = [lock for lock in state.held if lock.owner.session != session]
    queue = [wait for wait in state.queue if wait.lock.owner.session != session]
    if held == state.held and queue == state.queue:
        txn.delete(rows.grant_row(session), rows.place_field(ino, kind))
    else:
        state.change(held, queue)


def locks_of(txn: Txn, ino: Ino, kind: Kind) -> tuple[list[LockRecord], list[LockWait]]:
    """The locks of an inode that are held, and the waits: for `check` and `status`."""
    state = _State(txn, ino, kind)
    return state.held, state.queue

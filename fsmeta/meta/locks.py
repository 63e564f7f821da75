"""The lock verbs of `Meta`: `ops/sessions/lock` with this client's session and assumptions.

Called by fsclient's `locks`, by the end of sessions and by tests, as `meta.locks`. Threading: any
method from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

from fsmeta.errors import Fenced
from fsmeta.ops.sessions import lock, session as sessions
from fsmeta.ops.sessions.lock import Ask, LockAnswer, LockOutcome
from fsmeta.rules.context import get_attr
from fsmeta.schema import locks as rows
from fsmeta.schema.keys import inode_row
from fsmeta.schema.locks import Kind, LockRecord, LockWait, Owner
from fsmeta.schema.sessions import SessionRecord
from fsmeta.store.contract import COMMIT_OPS_ENOUGH
from fsmeta.txn.retry import Transactor
from fsmeta.txn.txn import Txn
from fsmeta.types import Attr, Ino, SessionId

ATTRS_MAX: Final = 7  # files whose attributes come with grants; more rows are not of one moment


class Range(NamedTuple):
    """What a program asks for: which bytes, and to write them or only to read."""

    write: bool
    begin: int = 0
    end: int = rows.LOCK_END


class LockTicket(NamedTuple):
    """A place in the line for a lock: `number` is the client's own, 0 for one that does not wait.

    `waits_at` says where else the owner may be waiting.
    """

    number: int
    waits_at: Callable[[], Collection[Ino]] = tuple


NO_TICKET: Final = LockTicket(0)


class LockVerbs:
    """See the module.

    What this client takes, gives up or cancels may hand a lock to a wait of its own: a store does
    not report own commits, so the caller looks at its waits then.
    """

    def __init__(
        self,
        run: Transactor,
        session: Callable[[], SessionRecord | None],
        changed: Callable[[Sequence[bytes]], None],
    ) -> None:
        """`changed` is told of rows that the end of another session may have changed."""
        self._run = run
        self._session = session
        self._changed = changed

    def _sid(self) -> SessionId:
        session = self._session()
        if session is None:
            raise Fenced("there is no session")
        return session.id

    def setlk(
        self,
        ino: Ino,
        kind: Kind,
        owner: int,
        want: Range,
        pid: int = 0,
        ticket: LockTicket = NO_TICKET,
        guess: bool = False,
    ) -> LockAnswer:
        """Take a lock; with a `ticket`, wait for it where it can't be had.

        `guess`: as far as this client knows, no other session has held or awaited locks of this
        file.
        Raises: EDEADLK, ENOLCK, ESTALE, Fenced.
        """
        row = rows.lock_row(ino)
        if not self._run.store.has_leases():
            self._run.cache.drop(
                [row, inode_row(ino)]
            )  # a commit that fails costs more than asking
            guess = False
        attempts = 0

        def verb(txn: Txn) -> LockAnswer:
            nonlocal attempts
            attempts += 1
            if attempts > 1:
                self._run.cache.drop([row, inode_row(ino)])
            wanted = LockRecord(Owner(self._sid(), owner), pid, want.write, want.begin, want.end)
            ask = Ask(ino, kind, wanted, ticket.number, ticket.waits_at(), guess)
            return lock.setlk(txn, ask, attempts == 1)

        answer = self._run.run(verb)
        if answer.outcome is LockOutcome.GRANTED and answer.attr is None:
            try:
                answer = answer._replace(attr=self._read_attr(ino))
            except OSError:
                self.unlock(ino, kind, owner, want.begin, want.end)
                raise
        if answer.session != self._sid():  # last: what came before may have taken long
            raise Fenced(f"session {answer.session} has ended, and its locks are gone")
        return answer

    def _read_attr(self, ino: Ino) -> Attr:
        """What a file is now. Raises: ESTALE."""
        self._run.cache.drop([inode_row(ino)])
        return self._run.view(partial(get_attr, ino=ino))

    def unlock(
        self, ino: Ino, kind: Kind, owner: int, begin: int = 0, end: int = rows.LOCK_END
    ) -> bool:
        """Give up a range; whether the owner still has locks of the file."""
        attempts = 0

        def verb(txn: Txn) -> bool:
            nonlocal attempts
            attempts += 1
            mine = Owner(self._sid(), owner)
            return lock.unlock(txn, ino, kind, mine, begin, end, attempts == 1)

        return self._run.run(verb)

    def cancel(self, ino: Ino, kind: Kind, tickets: Sequence[int]) -> set[int]:
        """Wait no more; those of `tickets` that have got their lock."""
        return self._run.run(lambda txn: lock.cancel(txn, ino, kind, self._sid(), tickets))

    def getlk(self, ino: Ino, owner: int, want: Range) -> LockRecord | None:
        """What keeps an fcntl lock from being had."""
        self._run.cache.drop([rows.lock_row(ino)])  # not what an invalidation may yet take back
        return self._run.view(
            lambda txn: lock.getlk(txn, ino, LockRecord(Owner(self._sid(), owner), 0, *want))
        )

    def session_info(self, session: int) -> dict[str, object]:
        """What a session says of itself; empty where it has ended."""
        found = self._run.view(lambda txn: sessions.get_session(txn, SessionId(session)))
        return {} if found is None else found.info

    def granted(self, waits: Mapping[int, Ino]) -> dict[int, Attr | None]:
        """Those of our waits (ticket → inode) that are over, with the file as it is now.

        One request, or none: attributes come along where the store has to be asked anyhow.
        """
        inos = [] if self.is_told() else list(dict.fromkeys(waits.values()))[:ATTRS_MAX]
        over, attrs = self._granted(list(waits), inos)
        left = list({waits[ticket] for ticket in over} - set(inos))
        for begin in range(0, len(left), ATTRS_MAX):
            attrs.update(self._granted([], left[begin : begin + ATTRS_MAX])[1])
        return {ticket: attrs.get(waits[ticket]) for ticket in over}

    def _granted(
        self, tickets: Sequence[int], inos: Sequence[Ino]
    ) -> tuple[set[int], dict[Ino, Attr]]:
        self._run.cache.drop([inode_row(ino) for ino in inos])
        sid = self._sid()
        return self._run.view(lambda txn: lock.granted(txn, sid, tickets, inos))

    def is_told(self) -> bool:
        """Whether the store reports the end of a wait at once, since `granted` was last asked."""
        return self._run.cache.is_leased(rows.grant_row(self._sid()))

    def news_row(self) -> bytes:
        """The row that changes when a wait ends."""
        return rows.grant_row(self._sid())

    def tidy(
        self, tickets: Sequence[int], owners: Sequence[int], waits: Callable[[int], bool]
    ) -> None:
        """Remove waits that are over, and owners that wait no more, from the store."""
        for begin in range(0, max(len(tickets), len(owners)), COMMIT_OPS_ENOUGH // 2):
            part = slice(begin, begin + COMMIT_OPS_ENOUGH // 2)

            def verb(txn: Txn, part: slice = part) -> None:
                lock.tidy(txn, self._sid(), tickets[part], owners[part], waits)

            self._run.run(verb)

    def release_session(self, sid: SessionId, run: Transactor) -> None:
        """Give up all locks of a session that can't take any more; some may go to our own waits."""
        for ino, kind in run.view(lambda txn: lock.places(txn, sid)):
            run.run(partial(lock.release_session, session=sid, ino=ino, kind=kind))
            own = self._session()
            if own is not None:
                self._changed([rows.grant_row(own.id)])

    def locks_of(self, ino: Ino, kind: Kind) -> tuple[list[LockRecord], list[LockWait]]:
        """The locks of a file that are held, and those that are awaited."""
        self._run.cache.drop([rows.lock_row(ino)])
        return self._run.view(lambda txn: lock.locks_of(txn, ino, kind))

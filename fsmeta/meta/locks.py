"""The lock verbs of `Meta`: who we are, and what we suppose, around `ops/sessions/lock`.

Called by fsclient's `locks`, by the end of sessions and by tests, as `meta.locks`. Threading: any
method from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

from fsmeta.errors import Fenced
from fsmeta.ops.sessions import lock, session as sessions
from fsmeta.ops.sessions.lock import Ask, LockAnswer
from fsmeta.schema import locks as rows
from fsmeta.schema.keys import inode_row
from fsmeta.schema.locks import Kind, LockRecord, LockWait, Owner
from fsmeta.schema.sessions import SessionRecord
from fsmeta.store.contract import COMMIT_OPS_ENOUGH
from fsmeta.txn.retry import Transactor
from fsmeta.txn.txn import Txn
from fsmeta.types import Attr, Ino, SessionId

ATTRS_MAX: Final = 7  # files whose attributes come with the news; more rows are not of one moment


class Range(NamedTuple):
    """What a program asks for: which bytes, and to write them or only to read."""

    write: bool
    begin: int = 0
    end: int = rows.LOCK_END


class LockVerbs:
    """See the module."""

    def __init__(self, run: Transactor, session: Callable[[], SessionRecord | None]) -> None:
        self._run = run
        self._session = session
        # called after what may have handed locks to waits of our own: no store tells of own commits
        self.on_handed: Callable[[], None] = _nothing

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
        ticket: int = 0,
        waits_at: Callable[[], Collection[Ino]] = tuple,
        guess: bool = False,
    ) -> LockAnswer:
        """Take a lock; with a `ticket`, wait for it where it can't be had.

        `waits_at`: where else the owner may be waiting. `guess`: nobody else has had to do with
        this file's locks, as far as we know.
        Raises: EDEADLK, ENOLCK, ESTALE, Fenced.
        """
        row = rows.lock_row(ino)
        if not self._run.store.vouches():
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
            ask = Ask(ino, kind, wanted, ticket, waits_at(), guess)
            return lock.setlk(txn, ask, attempts == 1)

        answer = self._run.run(verb)
        if answer.session != self._sid():  # the answer was lost, and then the session
            raise Fenced(f"session {answer.session} has ended, and its locks are gone")
        self.on_handed()
        return answer

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

        left = self._run.run(verb)
        self.on_handed()
        return left

    def cancel(self, ino: Ino, kind: Kind, tickets: Sequence[int]) -> set[int]:
        """Wait no more; those of `tickets` that have got their lock."""
        had = self._run.run(lambda txn: lock.cancel(txn, ino, kind, self._sid(), tickets))
        self.on_handed()
        return had

    def getlk(self, ino: Ino, owner: int, want: Range) -> LockRecord | None:
        """What keeps an fcntl lock from being had."""
        self._run.cache.drop([rows.lock_row(ino)])  # not what news may yet take back
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
        """Whether we hear of it at once when a wait ends, since `granted` was last asked."""
        return self._run.cache.is_vouched(rows.grant_row(self._sid()))

    def news_row(self) -> bytes:
        """The row that changes when a wait ends."""
        return rows.grant_row(self._sid())

    def tidy(
        self, tickets: Sequence[int], owners: Sequence[int], waits: Callable[[int], bool]
    ) -> None:
        """Waits that are over, and owners that wait no more, need not stand in the store."""
        for begin in range(0, max(len(tickets), len(owners)), COMMIT_OPS_ENOUGH // 2):
            part = slice(begin, begin + COMMIT_OPS_ENOUGH // 2)

            def verb(txn: Txn, part: slice = part) -> None:
                lock.tidy(txn, self._sid(), tickets[part], owners[part], waits)

            self._run.run(verb)

    def release_session(self, sid: SessionId, run: Transactor) -> None:
        """Give up all locks of a session that can't take any more."""
        for ino, kind in run.view(lambda txn: lock.places(txn, sid)):
            run.run(partial(lock.release_session, session=sid, ino=ino, kind=kind))
            self.on_handed()

    def locks_of(self, ino: Ino, kind: Kind) -> tuple[list[LockRecord], list[LockWait]]:
        """Who holds locks of a file, and who waits."""
        self._run.cache.drop([rows.lock_row(ino)])
        return self._run.view(lambda txn: lock.locks_of(txn, ino, kind))


def _nothing() -> None:
    """Nobody here waits."""

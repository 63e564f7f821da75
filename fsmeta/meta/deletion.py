"""The verbs of `Meta` for background work: its leader, and what is to be deleted.

Called by fsclient's `leader`, `background` and `backup`, and by tests, as `meta.deletion`.
Threading: any method from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Final

from fsmeta.ops.data import deletion
from fsmeta.ops.sessions import session as sessions
from fsmeta.schema import keys, slices
from fsmeta.schema.sessions import SessionRecord
from fsmeta.store.contract import Page
from fsmeta.txn.retry import Transactor
from fsmeta.txn.txn import Txn
from fsmeta.types import Ino, SessionId, SliceId

_PURGE_BATCH: Final = 100  # inodes a commit; their rows are read in one request
HOLD_BATCH: Final = 1000  # open files a commit: a check and a write each


class DeletionVerbs:
    """See the module."""

    def __init__(self, run: Transactor, session: Callable[[], SessionRecord | None]) -> None:
        self._run = run
        self._session = session

    def _sid(self) -> SessionId:
        session = self._session()
        assert session is not None
        return session.id

    def take_lead(self, believed_dead: SessionId | None = None) -> bool:
        """Become the leader of the background work, unless a live client is."""
        sid = self._sid()
        return self._run.run(lambda txn: deletion.take_lead(txn, sid, believed_dead))

    def leader(self, guess: SessionId | None = None) -> SessionRecord | None:
        """The session that does the background work, as far as it is alive."""
        return self._run.view(lambda txn: deletion.leader(txn, guess))

    def next_round(self) -> int | None:
        """Ask for a new deletion round; None where we no longer lead."""
        sid = self._sid()
        return self._run.run(lambda txn: deletion.next_round(txn, sid))

    def store_epoch(self) -> bytes:
        """A name for the past of the store; another one where it may have gone back."""
        return self._run.view(lambda _txn: self._run.store.history.store_epoch())

    def orphans(self, at_most: int) -> list[Ino]:
        """Inodes without names that wait to be purged."""
        entries = fields_of(self._run, keys.ORPHANS, at_most)
        return [Ino(keys.id_of(field)) for field, _ in entries]

    def dead_slices(self, at_most: int) -> dict[bytes, list[tuple[SliceId, int]]]:
        """Slices that chunks have dropped, (id, size), by field of X."""
        entries = fields_of(self._run, keys.DEAD_SLICES, at_most)
        return {field: slices.unpack_dead(field, value) for field, value in entries}

    def held_orphans(self, among: Iterable[SessionId]) -> set[Ino]:
        """Orphans that one of these sessions holds open."""
        return self._run.view(partial(_held, sids=list(among)))

    def hold_orphans(self, opened: Iterable[Ino]) -> list[Ino]:
        """Those of `opened` that have lost their last name, now recorded as held by this client."""
        hold, held = partial(sessions.hold_orphans, sid=self._sid()), []
        for batch in _batches(list(opened), HOLD_BATCH):
            held += self._run.run(partial(hold, opened=batch))
        return held

    def release_orphans(self, inos: Sequence[Ino]) -> None:
        """These orphans are open here no more."""
        release = partial(sessions.release_orphans, sid=self._sid())
        for batch in _batches(inos, HOLD_BATCH):
            self._run.run(partial(release, inos=batch))

    def purge(self, inos: Sequence[Ino]) -> None:
        """Remove orphans for good; the caller has made sure that no client holds them."""
        for batch in _batches(inos, _PURGE_BATCH):
            while self._run.run(partial(deletion.purge, inos=batch)):
                pass

    def last_uses(self, number: int, noted: deletion.Drops) -> deletion.LastUses | None:
        """Which of these dropped slices are unused now; None where round `number` is not ours."""
        sid = self._sid()
        return self._run.view(lambda txn: deletion.last_uses(txn, sid, number, noted))

    def forget_dead(self, noted: deletion.Drops, shared: Sequence[SliceId] = ()) -> None:
        """These drops are dealt with, see `data/deletion.forget_dead`."""
        self._run.run(lambda txn: deletion.forget_dead(txn, noted, shared))


def _held(txn: Txn, sids: list[SessionId]) -> set[Ino]:
    return sessions.held_orphans(txn, sids)


def _batches(inos: Sequence[Ino], size: int) -> Iterator[Sequence[Ino]]:
    for begin in range(0, len(inos), size):
        yield inos[begin : begin + size]


def fields_of(run: Transactor, row: bytes, at_most: int) -> Iterator[tuple[bytes, bytes]]:
    """About `at_most` fields of a large row, each once."""
    cursor: bytes | None = b""
    seen: set[bytes] = set()
    while cursor is not None and len(seen) < at_most:
        page = _page(run, row, cursor)
        for field, value in page.items:
            if field not in seen:
                seen.add(field)
                yield field, value
        cursor = page.cursor


def _page(run: Transactor, row: bytes, cursor: bytes) -> Page:
    return run.view(lambda _txn: run.store.scan(row, cursor))

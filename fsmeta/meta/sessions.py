"""The verbs of `Meta` for sessions: its own, in whose name it commits, and other clients'.

Called by fsclient's `background`, `leader` and commands, and by tests, as `meta.sessions`;
`fence_for` says which new slices the caller may commit.

Threading: one thread at a time opens, beats for and closes the own session; the rest from any
thread.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, Final, NoReturn

from fsmeta.errors import Ambiguous, Fenced, StoreError, StoreRolledBack, Voided
from fsmeta.meta.ids.slice_allocator import SliceAllocator
from fsmeta.meta.locks import LockVerbs
from fsmeta.ops.data import deletion
from fsmeta.ops.sessions import session as sessions, takeover
from fsmeta.ops.sessions.session import Belongings
from fsmeta.rules import settings as volume
from fsmeta.rules.settings import VolumeFormat
from fsmeta.schema import keys
from fsmeta.schema.sessions import SessionRecord, pack_session
from fsmeta.store.contract import EDITION
from fsmeta.txn.retry import Transactor
from fsmeta.txn.txn import Txn
from fsmeta.types import SessionId

log = logging.getLogger(__name__)

_KNOWS: Final = "metadata_version"  # in what a session says of itself; earlier clients say none
DOUBTFUL_MAX: Final = 20  # beats while the store is away; the last few may yet arrive


class SessionVerbs:
    """See the module."""

    def __init__(
        self,
        run: Transactor,
        slices: SliceAllocator,
        locks: LockVerbs,
        now_ns: Callable[[], int],
        obey: Callable[[VolumeFormat], None],
    ) -> None:
        """`obey` is called with the settings that our session follows."""
        self.own: SessionRecord | None = None
        self._run = run
        self._slices = slices
        self._locks = locks
        self._now_ns = now_ns
        self._obey = obey
        self._void = 0  # slices below it may have lost their objects to gc
        self._beats = _Beats()
        self._uuid = ""  # of the volume that we have joined

    def open(self, info: dict[str, Any], ended: SessionId | None = None) -> SessionRecord:
        """Join the volume; from here on every commit carries this session.

        Not for the first time where another client has `ended` ours. Raises: Rewound.
        """
        info = {**info, _KNOWS: keys.METADATA_VERSION}
        # a transactor of its own: threads may still be committing in the name of an ended session:
        # without a fence they would be let through
        proven, floor, now = self._run.store.history.is_proven, self._slices.floor, self._now_ns()
        try:
            settings, (record, void) = self._run.unfenced().run(
                lambda txn: _join(txn, self._uuid, info, ended, proven, floor, now)
            )
        except StoreRolledBack as error:
            self._run.stop_writing(error)
            raise
        if void > self._void:
            self._void = void
            self._slices.let_go()  # what is left of the batch could not be committed
        self._beats.clear()
        self.own = record
        self._uuid = settings.uuid
        self._obey(settings)
        self._run.fence = keys.session_row(record.id)
        if ended is not None:
            self._take_leave_of(ended)
        return record

    def take_over(
        self, sid: SessionId, uuid: str, info: dict[str, Any], asked: Collection[bytes] = ()
    ) -> dict[bytes, int]:
        """Go on in the session of a process that has died; the last sequence of each worker.

        Those of `asked` are the same for the next process, where this one dies as well.

        No commit of that process is applied any more. Raises: Fenced where another client has ended
        the session; then `open` comes next.
        """
        info = {**info, _KNOWS: keys.METADATA_VERSION}
        self._uuid = uuid
        self._run.fence = keys.session_row(sid)
        sealed, now = self._run.next_sequence(), self._now_ns()
        record, workers = self._run.run(
            lambda txn: takeover.take_over(txn, sid, info, now, sealed, asked)
        )
        self._beats.clear()
        self.own = record
        return workers

    def _take_leave_of(self, ended: SessionId) -> None:
        """Remember what our session had committed last, which the store then need not."""
        row = keys.session_row(ended)
        try:
            self._run.remember_ended(row, self._run.view(lambda txn: txn.get_row(row)))
            self._run.run(lambda txn: sessions.forget_ended(txn, ended))
        except StoreError as error:
            log.info("session %d stays in the table of those that have ended: %s", ended, error)

    def fence_for(self, ids: Iterable[int], session: SessionId | None = None) -> bytes | None:
        """The session in whose name new slices may be committed; no other than `session`.

        `open` sets `_void` before the fence: with an older fence the store says no.
        Raises: Voided where gc may have deleted their objects; Fenced.
        """
        fence = self._run.fence
        if session is not None and fence != keys.session_row(session):
            raise Fenced(f"session {session} has ended")
        if self._void and min(ids, default=self._void) < self._void:
            raise Voided("written before another client ended this session: gc has run since")
        return fence

    def all_know(self, version: int) -> bool:
        """Whether each client that is there knows volumes of this version."""
        return all(each.info.get(_KNOWS, 0) >= version for each in self.all())

    def follow(self, sid: SessionId) -> VolumeFormat:
        """The settings, which our session is to follow from now on. Raises: Fenced."""
        return self._run.unfenced().run(partial(_follow, uuid=self._uuid, sid=sid))

    def close(self) -> None:
        """Leave: nothing can be committed any more."""
        session = self.own
        if session is None:
            return
        try:
            _close_own(self._run, self._locks, session.id)
        except Fenced:
            pass  # another client ended it first
        except Ambiguous as error:
            if not isinstance(error.__cause__, Voided):
                raise
            # its row is gone, and with it what we did last: which was that, or others were first
        finally:
            self.own = None  # not before: the last commits may have to follow new settings
        self._run.fence = None

    def end(self, sid: SessionId) -> None:
        """End another client's session that has stopped beating."""
        _end_dead(self._run, self._locks, sid)

    def beat(self, confirmed: int, floor: int | None = None) -> None:
        """Write a heartbeat, with the deletion round that this client confirms, and its floor.

        Raises: Fenced, also where another client uses this session; then it is ended for both.
        """
        last = self.own
        assert last is not None
        record = last._replace(beat=last.beat + 1, confirmed=confirmed, at_ns=self._now_ns())
        if floor is not None:
            record = record._replace(floor=floor)
        if not self._beats.show(self._run, record, last):
            self._end_for_all(last.id)
        self.own = record

    def _end_for_all(self, sid: SessionId) -> NoReturn:
        """Two clients use one session: a commit of one may pass for a repeat of the other's."""
        _end_dead(self._run.unfenced(), self._locks, sid)
        raise Fenced(f"another client, perhaps a copy of this one, lives as session {sid}")

    def all(self) -> list[SessionRecord]:
        """Every session that has not been ended."""
        return self._run.view(sessions.list_sessions)

    def belongings(self, among: Sequence[SessionId]) -> dict[SessionId, Belongings]:
        """What each of these sessions holds: for `status`."""
        return self._run.view(lambda txn: sessions.belongings(txn, among))

    def round_and_floor(self) -> tuple[int, int]:
        """The deletion round that sessions are asked to confirm, and our floor to show.

        Raises: Fenced where another client uses this session; then it is ended for both.
        """
        self._slices.let_go_if_idle()
        session = self.own
        sid = None if session is None else session.id
        current, following, ours = self._run.view(lambda txn: deletion.round_and_ids(txn, sid))
        if session is not None and not self._beats.is_ours(ours, session):
            self._end_for_all(session.id)
        return current, self._slices.floor(following)


class _Beats:
    """What this client has written of itself, so that another one in its name is noticed."""

    def __init__(self) -> None:
        self._doubtful: list[SessionRecord] = []  # of these we don't know whether they arrived

    def clear(self) -> None:
        """There is a new session."""
        self._doubtful.clear()

    def show(self, run: Transactor, record: SessionRecord, last: SessionRecord) -> bool:
        """Put `record` in place of `last`; False where neither that nor a doubtful one is there."""
        before = [pack_session(each) for each in (last, *self._doubtful)]
        self._doubtful = [*self._doubtful[-DOUBTFUL_MAX:], record]
        attempts = 0

        def verb(txn: Txn) -> bool:
            nonlocal attempts
            attempts += 1
            return sessions.beat(txn, record, before, attempts == 1)

        if not run.run(verb):
            return False
        self._doubtful.clear()
        return True

    def is_ours(self, value: bytes | None, last: SessionRecord) -> bool:
        """Whether `value` is what we have written; None, an ended session, is decided elsewhere."""
        known = [pack_session(each) for each in (last, *self._doubtful)]
        return value is None or value in known


def _end_dead(run: Transactor, locks: LockVerbs, sid: SessionId) -> None:
    """End another client's session; in steps where it has locks, which any client may take."""
    try:
        run.run(lambda txn: sessions.end_dead_session(txn, sid))
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
        run.run(lambda txn: sessions.fence_off(txn, sid))
        locks.release_session(sid, run)
        run.run(lambda txn: sessions.bury_session(txn, sid))


def _close_own(run: Transactor, locks: LockVerbs, sid: SessionId) -> None:
    """End our own session, and give up its locks. Raises: Fenced where it was ended before."""
    try:
        run.run(lambda txn: sessions.close_session(txn, sid))
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
        locks.release_session(sid, run)
        run.run(lambda txn: sessions.erase_session(txn, sid))
    run.unfenced().run(lambda txn: sessions.forget_last_commit(txn, sid))


def _join(
    txn: Txn,
    uuid: str,
    info: dict[str, Any],
    ended: SessionId | None,
    is_proven: Callable[[bytes, bytes | None], bool],
    floor: Callable[[int], int],
    now_ns: int,
) -> tuple[VolumeFormat, sessions.Joined]:
    """The settings of the volume `uuid`, if that is known, and a session that follows them.

    Raises: NoVolume, Rewound, also where another volume was made in its place.
    """
    stored = txn.get_many(((keys.FORMAT, keys.FORMAT_FIELD), *sessions.JOINING))[0]
    edition = EDITION if stored is None else volume.unpack_format(stored).edition
    # first: a store that has lost everything is one that has gone back
    joined = sessions.open_session(txn, info, ended, is_proven, floor, now_ns, edition)
    settings = volume.require(stored)
    if uuid and settings.uuid != uuid:
        raise StoreRolledBack(
            f"there is another volume now, {settings.uuid}; this mount is of {uuid}"
        )
    return settings, joined


def _follow(txn: Txn, uuid: str, sid: SessionId) -> VolumeFormat:
    """The settings, which our session is to follow from now on. Raises: Fenced."""
    settings = volume.load_format(txn)
    if settings.uuid != uuid or not sessions.raise_fence(txn, sid, settings.edition):
        raise Fenced(f"session {sid} has ended")
    return settings

"""How `Meta` shows that it lives, and how sessions end: the longer halves of its session verbs.

Called by `engine` alone. `Beats` is used by one thread at a time, as beats are.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any, Final

from fsmeta import schema, volume
from fsmeta.engine_locks import LockVerbs
from fsmeta.errors import Fenced, Rewound
from fsmeta.ops import session as sessions
from fsmeta.schema_sessions import SessionRecord, pack_session
from fsmeta.store import EDITION
from fsmeta.transact import Transactor, Txn
from fsmeta.types import SessionId
from fsmeta.volume import VolumeFormat

DOUBTFUL_MAX: Final = 20  # beats while the store is away; the last few may yet arrive


class Beats:
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
        """Whether `value` is what we have written; None, an ended session, is for others to say."""
        known = [pack_session(each) for each in (last, *self._doubtful)]
        return value is None or value in known


def end_dead(run: Transactor, locks: LockVerbs, sid: SessionId) -> None:
    """End somebody's session; in steps where it has locks, each of which others may do, too."""
    try:
        run.run(lambda txn: sessions.end_dead_session(txn, sid))
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
        run.run(lambda txn: sessions.fence_off(txn, sid))
        locks.release_session(sid, run)
        run.run(lambda txn: sessions.bury_session(txn, sid))


def close_own(run: Transactor, unfenced: Transactor, locks: LockVerbs, sid: SessionId) -> None:
    """End our own session, and give up its locks. Raises: Fenced where others were first."""
    try:
        run.run(lambda txn: sessions.close_session(txn, sid))
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
        locks.release_session(sid, run)
        run.run(lambda txn: sessions.bury_session(txn, sid))
    unfenced.run(lambda txn: sessions.forget_last_commit(txn, sid))


def join(
    txn: Txn,
    uuid: str,
    info: dict[str, Any],
    ended: SessionId | None,
    is_proven: Callable[[bytes, bytes | None], bool],
    floor: Callable[[int], int],
    now_ns: int,
) -> tuple[VolumeFormat, sessions.Joined]:
    """The settings of the volume `uuid`, and a session that follows them.

    Raises: NoVolume, Rewound, also where another volume was made in its place.
    """
    stored = txn.get_many(((schema.FORMAT, schema.FORMAT_FIELD), *sessions.JOINING))[0]
    edition = EDITION if stored is None else volume.unpack_format(stored).edition
    # first: a store that has lost everything is one that has gone back
    joined = sessions.open_session(txn, info, ended, is_proven, floor, now_ns, edition)
    settings = volume.require(stored)
    if settings.uuid != uuid:
        raise Rewound(f"there is another volume now, {settings.uuid}; this mount is of {uuid}")
    return settings, joined


def follow_settings(txn: Txn, uuid: str, sid: SessionId) -> VolumeFormat:
    """The settings, which our session is to follow from now on. Raises: Fenced."""
    settings = volume.load_format(txn)
    if settings.uuid != uuid or not sessions.raise_fence(txn, sid, settings.edition):
        raise Fenced(f"session {sid} has ended")
    return settings

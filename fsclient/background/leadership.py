"""Elects the client that leads the background work, and finds dead sessions; the leader ends them.

Deleting and emptying the trash may take long, and stores may hang meanwhile. So this has a thread
of its own: the locks of a dead mount are given up when its lease is over, whatever else goes on.

Threading: `Background`'s watch thread calls `turn`; its worker, or the thread that has ended it,
asks `leads`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from math import inf
from typing import Final

from fsmeta.meta.meta import Meta
from fsmeta.runtime import Runtime
from fsmeta.schema.sessions import SessionRecord
from fsmeta.types import SessionId

log = logging.getLogger(__name__)

LEASE_S: Final = 60.0  # a session whose beat stood still for so long is ended
LOOK_S: Final = 5.0  # how often clients look for the leader, and it at all sessions
BLIND_S: Final = 10.0  # after such a gap we can't know that a beat stood still


class Watch:
    """Which sessions have not moved for a whole lease, on our own clock.

    Time in which we did not look does not count: when the store was away, or we ourselves were
    stopped, no beat can be seen, and every session would seem dead.
    """

    def __init__(self, clock: Callable[[], float], lease_s: float) -> None:
        self._clock = clock
        self._lease_s = lease_s
        self._looked = clock()
        self._seen: dict[SessionId, tuple[int, float]] = {}

    def dead(self, sessions: list[SessionRecord]) -> list[SessionId]:
        """Note the beats of `sessions`; those that stood still too long."""
        now = self._clock()
        if now - self._looked > BLIND_S:
            self._seen = {}
        self._looked = now
        before, self._seen = self._seen, {}
        for each in sessions:
            beat, since = before.get(each.id, (each.beat, now))
            self._seen[each.id] = (each.beat, since if beat == each.beat else now)
        return [sid for sid, (_, since) in self._seen.items() if now - since > self._lease_s]


class Leadership:
    """See the module."""

    def __init__(self, meta: Meta, runtime: Runtime) -> None:
        self._meta = meta
        self._clock = runtime.monotonic
        self._lock = runtime.lock()  # held while the store is asked for the leader
        self._leaders = Watch(runtime.monotonic, LEASE_S)  # guarded by _lock: at the leader
        self._known: SessionId | None = None  # guarded by _lock: the leader when we looked
        self._look_at = -inf  # when to look for the leader again
        self._all = Watch(runtime.monotonic, LEASE_S)  # of the thread that watches
        self.term = 0  # grows whenever another client may have led

    def turn(self) -> None:
        """Lead if no client does; if we lead, end dead sessions. Raises: StoreError."""
        if self.leads():
            self._end_dead_sessions()

    def leads(self) -> bool:
        """Whether it is for us to lead; take the lead if no live client has it.

        One request in LOOK_S. A client that assumes for too long that it leads does no harm: it
        asks for no round (`next_round`), and ends only dead sessions.
        """
        session = self._meta.session
        assert session is not None, "call it between start and stop"
        with self._lock:
            now = self._clock()
            if now < self._look_at:
                return self._known == session.id
            leader = self._meta.deletion.leader(self._known)
            self._look_at = now + LOOK_S
            self._known = None if leader is None else leader.id
            leads = leader is not None and leader.id == session.id
            if not leads:
                leads = self._take(leader)
                self._known = session.id if leads else self._known
            return leads

    def look_again(self) -> None:
        """Let `leads` ask for the leader the next time."""
        self._look_at = -inf

    def _take(self, leader: SessionRecord | None) -> bool:
        """Lead, unless `leader` or a quicker client does."""
        self.term += 1
        if leader is None:
            return self._meta.deletion.take_lead()
        if self._leaders.dead([leader]):
            return self._meta.deletion.take_lead(believed_dead=leader.id)
        return False

    def _end_dead_sessions(self) -> None:
        session = self._meta.session
        assert session is not None, "call it between start and stop"
        for sid in self._all.dead(self._meta.sessions.all()):
            if sid != session.id:
                log.warning("session %d sent no heartbeat for %.0f s: it is ended", sid, LEASE_S)
                self._meta.sessions.end(sid)

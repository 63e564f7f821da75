"""What the leading client does for all: end dead sessions, delete what nobody can see any more.

A deletion round (`fsmeta.ops.reclaim` says what its confirmation means) goes through three turns at
least. First what could be deleted is noted. NEWS_S later every session is asked; by then each has
heard that those files lost their names and those slices their place, so none opens or reads them
from memory. When all have confirmed, what was noted and nobody holds is deleted.

Files' slices join the dead ones when the file is purged, so data goes one round after its file.

Threading: the worker of `Background` calls `turn`, or whoever has ended it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from fsdata.blocks import BlockStore
from fsmeta.engine import Meta
from fsmeta.runtime import Runtime
from fsmeta.schema import SessionRecord
from fsmeta.types import Ino, SessionId, SliceId

log = logging.getLogger(__name__)

LEASE_S: Final = 60.0  # a session whose beat stood still for so long is ended
BLIND_S: Final = 10.0  # who has not looked for so long has not seen that a beat stood still
NEWS_S: Final = 3.0  # a link for news that is silent for 2 s is taken for lost, and what it vouched
ROUND_MAX: Final = 50_000  # orphans and dead chunks of one round: bounds the leader's memory
FORGET_BATCH: Final = 500  # dead chunks whose deletion is recorded together: what a crash repeats


class Watch:
    """Which sessions have not moved for a whole lease, on our own clock.

    Time in which we did not look does not count: when the store was away, or we ourselves were
    stopped, nobody's beat can be seen, and everybody would seem dead.
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


class _Round:
    """What was noted at `noted`; it may go when all sessions have confirmed `number`."""

    def __init__(
        self, noted: float, orphans: list[Ino], dead: dict[bytes, list[tuple[SliceId, int]]]
    ) -> None:
        self.noted = noted
        self.orphans = orphans
        self.dead = dead
        self.number: int | None = None  # None: nobody has been asked yet


class Leader:
    """Leads, where nobody else does."""

    def __init__(
        self,
        meta: Meta,
        blocks: BlockStore,
        runtime: Runtime,
        confirm: Callable[[], None],
        stopping: Callable[[], bool],
    ) -> None:
        """`confirm` lets our own session agree to the current round."""
        self._meta = meta
        self._blocks = blocks
        self._clock = runtime.monotonic
        self._confirm = confirm
        self._stopping = stopping
        self._watch = Watch(runtime.monotonic, LEASE_S)
        self._round: _Round | None = None
        self.purged = 0  # inodes
        self.deleted = 0  # slices

    def leads(self) -> bool:
        """Whether it is for us to lead; take the lead if nobody alive has it."""
        assert self._meta.session is not None, "call it between start and stop"
        leader = self._meta.leader()
        if leader is not None and leader.id == self._meta.session.id:
            return True
        self._round = None  # whoever led in between has notes of his own
        if leader is None:
            return self._meta.take_lead()
        if self._watch.dead([leader]):
            return self._meta.take_lead(believed_dead=leader.id)
        return False

    def turn(self, alone: bool = False) -> None:
        """End dead sessions, and move the deletion round on by a step.

        `alone`: nobody opens or reads anything here any more, so there is no news to wait for.
        """
        self._end_dead_sessions()
        if self._round is None:
            self._round = self._note()
        if self._round is None:
            return
        if self._round.number is None:
            if not alone and self._clock() - self._round.noted < NEWS_S:
                return
            self._round.number = self._meta.next_round()
        number = self._round.number
        if number is None:
            self._round = None  # we lead no longer
            return
        self._confirm()
        if all(each.confirmed >= number for each in self._meta.sessions()):
            self._finish(self._round)
            self._round = None

    def _end_dead_sessions(self) -> None:
        assert self._meta.session is not None, "call it between start and stop"
        for sid in self._watch.dead(self._meta.sessions()):
            if sid != self._meta.session.id:
                log.warning("session %d has not been heard of for %.0f s: ended", sid, LEASE_S)
                self._meta.end_session(sid)

    def _note(self) -> _Round | None:
        """What may be deleted once everybody knows of it; None where there is nothing."""
        now = self._clock()
        orphans = self._meta.orphans(ROUND_MAX)
        if orphans:
            held = self._held()
            if held:  # they may be more than a round takes
                orphans = self._meta.orphans(ROUND_MAX + len(held))
                orphans = [ino for ino in orphans if ino not in held]
        dead = self._meta.dead_slices(ROUND_MAX)
        return _Round(now, orphans, dead) if orphans or dead else None

    def _held(self) -> set[Ino]:
        return self._meta.held_orphans(each.id for each in self._meta.sessions())

    def _finish(self, agreed: _Round) -> None:
        """Delete; where it fails half way the next turn does all of it again."""
        if agreed.orphans:
            held = self._held()
            free = [ino for ino in agreed.orphans if ino not in held]
            self._meta.purge(free)
            self.purged += len(free)
            agreed.orphans = []
        keys = list(agreed.dead)
        for begin in range(0, len(keys), FORGET_BATCH):
            batch = keys[begin : begin + FORGET_BATCH]
            for key in batch:
                if self._stopping():
                    return  # the next leader begins anew
                self._delete(agreed.dead[key])
            self._meta.forget_dead(batch)

    def _delete(self, slices: list[tuple[SliceId, int]]) -> None:
        for sid, size in slices:
            self._blocks.delete_slice(sid, size)
            self.deleted += 1

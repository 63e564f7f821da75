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
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import inf
from typing import Final

from fsclient.trash_keeper import TrashKeeper
from fsdata.blocks import BlockStore
from fsdata.pool import WorkerPool
from fsmeta import clones
from fsmeta.engine import Meta
from fsmeta.ops.packing import Small
from fsmeta.ops.reclaim import Drops
from fsmeta.runtime import Runtime
from fsmeta.schema_sessions import SessionRecord
from fsmeta.types import Ino, SessionId, SliceId

log = logging.getLogger(__name__)

LEASE_S: Final = 60.0  # a session whose beat stood still for so long is ended
LOOK_S: Final = 5.0  # how often everybody looks for the leader, and the leader at everybody
BLIND_S: Final = 10.0  # who has not looked for so long has not seen that a beat stood still
NEWS_S: Final = 3.0  # a link for news that is silent for 2 s is taken for lost, and what it vouched
ROUND_MAX: Final = 50_000  # orphans and dead chunks of one round: bounds the leader's memory
CLONES_EVERY_S: Final = 15.0  # what a dead builder has left takes space, and harms nobody
TIDY_EVERY_S: Final = 3600.0  # a third of what TiKV keeps, at least
DISCARD_S: Final = 2.0  # of one turn, for clones and snapshots that go; the rest comes later
FORGET_BATCH: Final = 1000  # dropped slices dealt with together: what a crash repeats


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
        self,
        noted: float,
        lineage: bytes,
        orphans: list[Ino],
        dead: dict[bytes, list[tuple[SliceId, int]]],
    ) -> None:
        self.noted = noted
        self.lineage = lineage  # of the store where that was so
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
        pool: WorkerPool,
        confirm: Callable[[], None],
        stopping: Callable[[], bool],
    ) -> None:
        """`confirm` lets our own session agree to the current round; `pool` deletes."""
        self._meta = meta
        self._blocks = blocks
        self._clock = runtime.monotonic
        self._confirm = confirm
        self._stopping = stopping
        self._pool = pool
        self.on_thin: Callable[[list[Small]], None] = _nobody  # has what is left of a segment
        self._watch = Watch(runtime.monotonic, LEASE_S)
        self._trash = TrashKeeper(meta, runtime, stopping)
        self._clones_at = 0.0  # when to look for abandoned clones
        self._tidy_at = 0.0  # when the metadata store is to tidy up
        self._round: _Round | None = None
        self._known: SessionId | None = None  # who led when we looked
        self._look_at = -inf  # when to look for the leader again
        self._watch_at = -inf  # and at the others
        self.purged = 0  # inodes
        self.deleted = 0  # slices

    @property
    def expired(self) -> int:
        """Inodes that have left the trash for good."""
        return self._trash.expired

    def leads(self) -> bool:
        """Whether it is for us to lead; take the lead if nobody alive has it.

        One request in LOOK_S. Who believes too long that it leads does no harm: it asks for no
        round (`next_round`), and ends only who is dead.
        """
        session = self._meta.session
        assert session is not None, "call it between start and stop"
        now = self._clock()
        if now < self._look_at:
            return self._known == session.id
        leader = self._meta.deletion.leader(self._known)
        self._look_at = now + LOOK_S
        self._known = None if leader is None else leader.id
        leads = leader is not None and leader.id == session.id
        if not leads:
            leads = self._take_lead(leader)
            self._known = session.id if leads else self._known
        return leads

    def look_again(self) -> None:
        """Let `leads` ask who leads the next time."""
        self._look_at = -inf

    def _take_lead(self, leader: SessionRecord | None) -> bool:
        """Lead, unless `leader` or somebody quicker does."""
        self._round = None  # whoever led in between has notes of his own
        if leader is None:
            return self._meta.deletion.take_lead()
        if self._watch.dead([leader]):
            return self._meta.deletion.take_lead(believed_dead=leader.id)
        return False

    def turn(self, alone: bool = False) -> None:
        """End dead sessions, empty the trash, and move the deletion round on by a step.

        `alone`: nobody opens or reads anything here any more, so there is no news to wait for.
        """
        if self._clock() >= self._watch_at:
            self._watch_at = self._clock() + LOOK_S
            self._end_dead_sessions()
        self._trash.turn()
        self._discard_clones()
        self._tidy()
        if self._round is None:
            self._round = self._note()
        if self._round is None:
            return
        if self._round.number is None:
            if not alone and self._clock() - self._round.noted < NEWS_S:
                return
            self._round.number = self._meta.deletion.next_round()
        number = self._round.number
        if number is None:
            self._round = None  # we lead no longer
            self.look_again()
            return
        self._confirm()
        if all(each.confirmed >= number for each in self._meta.sessions.all()):
            # in an older state what was dead may live
            if self._round.lineage == self._meta.deletion.lineage():
                self._finish(self._round)
            self._round = None

    def _end_dead_sessions(self) -> None:
        assert self._meta.session is not None, "call it between start and stop"
        for sid in self._watch.dead(self._meta.sessions.all()):
            if sid != self._meta.session.id:
                log.warning("session %d has not been heard of for %.0f s: ended", sid, LEASE_S)
                self._meta.sessions.end(sid)

    def _discard_clones(self) -> None:
        """Remove deleted snapshots, and what died with its builder or is filled by nobody."""
        now = self._clock()
        if now < self._clones_at:
            return
        self._clones_at = now + CLONES_EVERY_S

        def enough() -> bool:
            return self._stopping() or self._clock() > now + DISCARD_S

        for building in clones.abandoned(self._meta):
            try:
                if not clones.discard(self._meta, building, enough):
                    self._clones_at = now
                    return
            except OSError as error:  # somebody else is about it
                log.debug("clone %d: %s", building.root, error)
        self._meta.packing.close_abandoned()

    def _tidy(self) -> None:
        now = self._clock()
        if now >= self._tidy_at:
            self._tidy_at = now + TIDY_EVERY_S
            self._meta.store.tidy()

    def _note(self) -> _Round | None:
        """What may be deleted once everybody knows of it; None where there is nothing."""
        now = self._clock()
        lineage = self._meta.deletion.lineage()
        orphans = self._meta.deletion.orphans(ROUND_MAX)
        if orphans:
            held = self._held()
            if held:  # they may be more than a round takes
                orphans = self._meta.deletion.orphans(ROUND_MAX + len(held))
                orphans = [ino for ino in orphans if ino not in held]
        dead = self._meta.deletion.dead_slices(ROUND_MAX)
        return _Round(now, lineage, orphans, dead) if orphans or dead else None

    def _held(self) -> set[Ino]:
        return self._meta.deletion.held_orphans(each.id for each in self._meta.sessions.all())

    def _finish(self, agreed: _Round) -> None:
        """Delete; where it fails half way the next turn does all of it again."""
        if agreed.orphans:
            held = self._held()
            free = [ino for ino in agreed.orphans if ino not in held]
            self._meta.deletion.purge(free)
            self.purged += len(free)
            agreed.orphans = []
        assert agreed.number is not None, "all have confirmed it"
        for batch in _batches(agreed.dead):
            uses = self._meta.deletion.last_uses(agreed.number, batch)
            if uses is None:
                return  # somebody else leads by now
            thin = self._meta.packing.thin(batch, uses.shared) if uses.shared else []
            parts = self._pool.parts(uses.gone)
            self._pool.run_all([partial(self._delete, part) for part in parts])
            if self._stopping():
                return  # the next leader begins anew
            self.deleted += len(uses.gone)
            self._meta.deletion.forget_dead(batch, uses.shared)
            for segment in thin:
                self.on_thin(self._meta.packing.still_in(segment))

    def _delete(self, slices: Sequence[tuple[SliceId, int]]) -> None:
        """Runs on a thread of the pool."""
        if not self._stopping():
            self._blocks.delete(slices)


def _batches(drops: Drops) -> Iterator[Drops]:
    """`drops` in parts whose deletion is recorded together.

    A field that has more comes in several, the first of which has what was dropped first.
    """
    batch: dict[bytes, list[tuple[SliceId, int]]] = {}
    size = 0
    for field, all_dead in drops.items():
        for begin in range(0, len(all_dead), FORGET_BATCH):
            dead = all_dead[begin : begin + FORGET_BATCH]
            if batch and size + 1 + len(dead) > FORGET_BATCH:
                yield batch
                batch, size = {}, 0
            batch[field] = dead
            size += 1 + len(dead)
    if batch:
        yield batch


def _nobody(_: list[Small]) -> None:
    """Nobody packs."""

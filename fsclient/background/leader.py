"""What the leading client does for all: delete what no client can see any more.

A deletion round (`fsmeta.ops.data.deletion` says what its confirmation means) goes through three
turns at least. First the leader notes what could be deleted. NEWS_S later it asks every session; by
then each has received the invalidations for those files and slices, so none opens or reads them
from memory. When all have confirmed, the leader deletes what was noted and no client holds.

Files' slices join the dead ones when the file is purged, so data goes one round after its file.

A turn takes about TURN_S for each kind of work, and leaves the rest to the next one.

Threading: the worker of `Background` calls `turn`, or the thread that has ended it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

from fsclient.background.leadership import Leadership
from fsclient.background.trash_expiry import TURN_S, TrashExpiry
from fsdata.blocks.blocks import BlockStore
from fsdata.resources.worker_pool import WorkerPool
from fsmeta.admin import clones
from fsmeta.meta.meta import Meta
from fsmeta.ops.data.deletion import Drops
from fsmeta.ops.data.packing import Small
from fsmeta.runtime import Runtime
from fsmeta.types import Ino, SliceId

log = logging.getLogger(__name__)

NEWS_S: Final = 3.0  # after 2 s of silence an invalidation link is lost, and its leases
ROUND_MAX: Final = 50_000  # orphans and dead chunks of one round: bounds the leader's memory
CLONES_EVERY_S: Final = 15.0  # what a dead builder has left takes space and does no other harm
TIDY_EVERY_S: Final = 3600.0  # a third of what TiKV keeps, at least
PURGE_STEP: Final = 1000  # inodes, between two looks at the clock
FORGET_BATCH: Final = 1000  # dropped slices dealt with together: what a crash repeats


class _Round:
    """What was noted at `noted`; it may go when all sessions have confirmed `number`."""

    def __init__(
        self,
        noted: float,
        store_epoch: bytes,
        orphans: list[Ino],
        dead: Drops,
    ) -> None:
        self.noted = noted
        self.store_epoch = store_epoch  # of the store where that was so
        self.orphans = orphans
        self.dead = dead
        self.number: int | None = None  # None: no session has been asked yet


class LeaderPorts(NamedTuple):
    """What a leader asks and tells other parts of its client."""

    confirm: Callable[[], None]  # lets our own session agree to the current round
    stopping: Callable[[], bool]
    thin: Callable[[list[Small]], None]  # told what is left of a segment of which most is gone


class Leader:
    """Leads, where no other client does."""

    def __init__(
        self,
        meta: Meta,
        lead: Leadership,
        blocks: BlockStore,
        runtime: Runtime,
        pool: WorkerPool,
        ports: LeaderPorts,
    ) -> None:
        """`pool` deletes."""
        self._meta = meta
        self._blocks = blocks
        self._clock = runtime.monotonic
        self._confirm, self._stopping, self._thin = ports
        self._pool = pool
        self._lead = lead
        self._term = lead.term  # in which the round was begun
        self._trash = TrashExpiry(meta, runtime, ports.stopping)
        self._clones_at = 0.0  # when to look for abandoned clones
        self._tidy_at = 0.0  # when the metadata store is to tidy up
        self._round: _Round | None = None
        self.unfinished = False  # the turn was over before the round was
        self.purged = 0  # inodes
        self.deleted = 0  # slices

    @property
    def expired(self) -> int:
        """Inodes that have left the trash for good."""
        return self._trash.expired

    def waiting(self) -> bool:
        """Whether a turn could go on at once."""
        return self.unfinished or self._trash.unfinished

    def turn(self, alone: bool = False) -> None:
        """Empty the trash, and move the deletion round on by a step.

        `alone`: no process opens or reads anything here any more, so no invalidations are awaited.
        """
        if self._term != self._lead.term:  # the leader in between has its own notes
            self._term, self._round = self._lead.term, None
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
            self._lead.look_again()
            return
        self._confirm()
        if all(each.confirmed >= number for each in self._meta.sessions.all()):
            # in an older state what was dead may live
            same = self._round.store_epoch == self._meta.deletion.store_epoch()
            self.unfinished = same and not self._finish(self._round)
            if not self.unfinished:
                self._round = None

    def _discard_clones(self) -> None:
        """Remove deleted snapshots, and what died with its builder or is no longer filled."""
        now = self._clock()
        if now < self._clones_at:
            return
        self._clones_at = now + CLONES_EVERY_S

        def enough() -> bool:
            return self._stopping() or self._clock() > now + TURN_S

        for building in clones.abandoned(self._meta):
            try:
                if not clones.discard(self._meta, building, enough):
                    self._clones_at = now
                    return
            except OSError as error:  # another client is at it
                log.debug("clone %d: %s", building.root, error)
        self._meta.packing.close_abandoned()

    def _tidy(self) -> None:
        now = self._clock()
        if now >= self._tidy_at:
            self._tidy_at = now + TIDY_EVERY_S
            self._meta.store.tidy()

    def _note(self) -> _Round | None:
        """What may be deleted once every client knows of it; None where there is nothing."""
        now = self._clock()
        store_epoch = self._meta.deletion.store_epoch()
        orphans = self._meta.deletion.orphans(ROUND_MAX)
        if orphans:
            held = self._held()
            if held:  # they may be more than a round takes
                orphans = self._meta.deletion.orphans(ROUND_MAX + len(held))
                orphans = [ino for ino in orphans if ino not in held]
        dead = self._meta.deletion.dead_slices(ROUND_MAX)
        return _Round(now, store_epoch, orphans, dead) if orphans or dead else None

    def _held(self) -> set[Ino]:
        return self._meta.deletion.held_orphans(each.id for each in self._meta.sessions.all())

    def _finish(self, agreed: _Round) -> bool:
        """Delete; False where something is left for the next turn. Raises: StoreError; what was
        not done by then the next turn does again."""
        until = self._clock() + TURN_S
        if agreed.orphans:
            held = self._held()
            agreed.orphans = [ino for ino in agreed.orphans if ino not in held]
        while agreed.orphans:
            if self._stopping() or self._clock() > until:
                return False
            step = agreed.orphans[:PURGE_STEP]
            self._meta.deletion.purge(step)
            self.purged += len(step)
            del agreed.orphans[:PURGE_STEP]
        assert agreed.number is not None, "all have confirmed it"
        while agreed.dead:
            if self._stopping() or self._clock() > until:
                return False
            batch, agreed.dead = first_of(agreed.dead)
            if not self._drop(agreed.number, batch):
                return True
        return True

    def _drop(self, number: int, batch: Drops) -> bool:
        """Delete the unused ones of dropped slices; False where another client is to do it."""
        uses = self._meta.deletion.last_uses(number, batch)
        if uses is None:
            return False  # another client leads by now
        thin = self._meta.packing.thin(batch, uses.shared) if uses.shared else []
        parts = self._pool.parts(uses.gone)
        self._pool.run_all([partial(self._delete, part) for part in parts])
        if self._stopping():
            return False  # the next leader begins anew
        self.deleted += len(uses.gone)
        self._meta.deletion.forget_dead(batch, uses.shared)
        for segment in thin:
            self._thin(self._meta.packing.still_in(segment))
        return True

    def _delete(self, slices: Sequence[tuple[SliceId, int]]) -> None:
        """Runs on a thread of the pool."""
        if not self._stopping():
            self._blocks.delete(slices)


def first_of(drops: Drops) -> tuple[Drops, Drops]:
    """`drops` in two: what is dealt with together, and the rest.

    Of a field that has more it is what was dropped first.
    """
    first: dict[bytes, list[tuple[SliceId, int]]] = {}
    rest = dict(drops)
    room = FORGET_BATCH
    for field, dead in drops.items():
        if room <= 1:
            break
        first[field] = dead[: room - 1]
        room -= 1 + len(first[field])
        if len(first[field]) == len(dead):
            del rest[field]
        else:
            rest[field] = dead[len(first[field]) :]
    return first, rest

"""What a client does unasked: show that it lives, delete what is dead, rewrite what is scattered.

Every client beats and confirms deletion rounds; one leads (`leader`); each compacts what it wrote
(`compactor`). A client whose session was ended by another client joins anew: what it has written
and not committed still can be, but files that it held open without a name may be gone.

Threading: one thread beats, so that slow work never looks like death; one watches the beats of
others, so that slow work keeps no dead session alive; another works. `_beating` is held across
store I/O and taken before any other lock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from math import inf
from typing import Any, Final, NamedTuple

from fsclient.background.compactor import Compactor
from fsclient.background.leader import NEWS_S, Leader, LeaderPorts
from fsclient.background.leadership import LEASE_S, LOOK_S, Leadership
from fsclient.background.packer import LEAVE_S, Packer, pass_over
from fsclient.background.quota_alerts import QuotaAlerts
from fsclient.background.tidy_queue import TidyQueue
from fsclient.files.data_services import DataServices
from fsclient.files.handles.open_files import OpenFiles
from fsclient.survival.kept import KeptRecords
from fsdata.resources.worker_pool import WorkerPool
from fsmeta.errors import Fenced, StoreError, StoreRolledBack
from fsmeta.meta.meta import Meta
from fsmeta.runtime import Runtime, Thread, spawn_lasting
from fsmeta.types import Ino, SessionId

log = logging.getLogger(__name__)

HEARTBEAT_S: Final = 5.0
WORK_EVERY_S: Final = 1.0
TIDY_THREADS: Final = 8  # small objects are read one request each
READS_END_S: Final = 20.0  # a round waits so long for reads under way, then for the next beat

assert HEARTBEAT_S + READS_END_S < LEASE_S / 2, "a slow read must not look like death"


def do_nothing() -> None:
    """No part of the client wants to know."""


class SessionPorts(NamedTuple):
    """What `Background` says of the client's session, and to which other parts of the client."""

    info: Mapping[str, Any]  # for people
    heartbeat_s: float = HEARTBEAT_S
    kept: KeptRecords | None = None  # told of each session
    lost: Callable[[], None] = do_nothing  # told that it was ended, before there is a new one
    joined: Callable[[], None] = do_nothing  # and when there is, and it has beaten
    in_use: Callable[[], Sequence[Ino]] = list  # not open, and not to be deleted either


class Background:
    """The unasked work of one mount."""

    def __init__(
        self,
        meta: Meta,
        data: DataServices,
        files: OpenFiles,
        runtime: Runtime,
        queue: TidyQueue,
        ports: SessionPorts,
    ) -> None:
        """`queue` has what commits left to be tidied."""
        self._meta = meta
        self._data = data
        self._files = files
        self._runtime = runtime
        self._info = dict(ports.info)
        self._heartbeat_s = ports.heartbeat_s
        self._ports = ports
        self._beating = runtime.lock()  # one beat at a time: the leader confirms its own rounds
        self._held: set[Ino] = set()  # guarded by _beating: orphans we hold open
        self._confirmed = 0  # guarded by _beating
        self._beaten = 0.0  # guarded by _beating: when the last beat ended
        self._heard = 0.0  # the same of the last beat that the store has answered
        self._quiet = runtime.event()  # set: the heart stops
        self._cond = queue.cond
        self._leaving = False  # guarded by _cond: the worker is to end
        self._until = inf  # when `drain` is to end
        self._pool = WorkerPool(runtime, "tidy", TIDY_THREADS)
        self._lead = Leadership(meta, runtime)
        asks = LeaderPorts(self.beat, self._is_late, queue.again)
        self._leader = Leader(meta, self._lead, data.blocks, runtime, self._pool, asks)
        self._compactor = Compactor(meta, data.blocks, files, queue)
        self.compact = self._compactor.compact
        self.packer = Packer(meta, data, files, runtime, self._pool, queue, pass_over)
        self.quotas = QuotaAlerts(meta, runtime)
        self._heart: Thread | None = None
        self._watcher: Thread | None = None
        self._worker: Thread | None = None

    @property
    def purged(self) -> int:
        """Inodes deleted for good."""
        return self._leader.purged

    @property
    def expired(self) -> int:
        """Inodes that have left the trash for good."""
        return self._leader.expired

    @property
    def deleted(self) -> int:
        """Slices deleted."""
        return self._leader.deleted

    @property
    def compacted(self) -> int:
        """Chunks rewritten."""
        return self._compactor.compacted

    def packer_for(
        self,
        below: int,
        pool: WorkerPool,
        unreadable: Callable[[Ino, Exception], None] = pass_over,
    ) -> Packer:
        """One more packer, for one thread that walks over files."""
        meta, data, files = self._meta, self._data, self._files
        queue = TidyQueue(self._runtime, below, data.blocks.block_bytes)
        return Packer(meta, data, files, self._runtime, pool, queue, unreadable)

    # --- coming and going ------------------------------------------------------------------------

    def start(self) -> None:
        """Join the volume and start working."""
        if self._meta.session is None:
            self._join(None)
        self._beaten = self._heard = self._runtime.monotonic()
        self._heart = spawn_lasting(self._runtime, "heartbeat", self._beat_loop)
        self._watcher = spawn_lasting(self._runtime, "watch", self._watch_loop)
        self._worker = spawn_lasting(self._runtime, "background", self._work_loop)

    def take_over(
        self, session: SessionId, uuid: str, asked: Collection[bytes]
    ) -> dict[bytes, int]:
        """Before `start`: go on in the session of a process that has died; the last sequence of
        each of its workers, and none where another client has ended the session.

        `asked`: see `SessionVerbs.take_over`.

        Raises: StoreError.
        """
        try:
            workers = self._meta.sessions.take_over(session, uuid, self._info, asked)
        except Fenced as error:
            log.warning("another client has ended session %d; joining again: %s", session, error)
            self._ports.lost()
            self._join(session)
            return {}
        own = self._meta.session
        assert own is not None, "it was just taken over"
        self._confirmed = own.confirmed
        self._held.update(self._meta.sessions.belongings([session])[session].orphans)
        return workers

    def _join(self, ended: SessionId | None) -> None:
        """A session of our own, perhaps after another client ended the last one. Raises:
        StoreError."""
        session = self._meta.sessions.open(self._info, ended)
        self._confirmed = session.confirmed
        if self._ports.kept is not None:
            self._ports.kept.joined(session.id, self._meta.format.uuid)

    def drain(self, deadline: float) -> None:
        """End the worker; pack what waits, for some seconds; then delete what is dead, if this
        client does it alone and quickly.

        Raises: StoreError; the next leader deletes.
        """
        self._end_worker()
        try:
            self.packer.finish(min(deadline, self._runtime.monotonic() + LEAVE_S))
        except (OSError, StoreError) as error:
            log.info("small files stay as they are: %s", error)
        self._until = deadline
        self._lead.look_again()
        while self._runtime.monotonic() < deadline:
            if not self._meta.deletion.orphans(1) and not self._meta.deletion.dead_slices(1):
                return
            if self._files.all() or len(self._meta.sessions.all()) > 1 or not self._lead.leads():
                return
            self._leader.turn(alone=True)

    def stop(self) -> None:
        """Stop working and leave the volume. Everything is flushed by now."""
        self._end_worker()
        self._quiet.set()
        for thread in (self._heart, self._watcher):
            if thread is not None:
                thread.join()
        self._pool.close()
        try:
            self._meta.sessions.close()
        except StoreError as error:
            log.warning("could not end the session: %s", error)

    def _end_worker(self) -> None:
        with self._cond:
            self._leaving = True
            self._cond.notify_all()
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.join()
        self._leaving = False  # what it was in the midst of, `drain` may do

    def _is_late(self) -> bool:
        """Whether deleting has to be left to others."""
        return self._leaving or self._runtime.monotonic() > self._until

    # --- the beat --------------------------------------------------------------------------------

    def _beat_loop(self) -> None:
        while not self._quiet.wait(self._heartbeat_s):
            session = self._session_id()
            try:
                self.beat()
            except Fenced as error:
                self._rejoin(session, error)
            except StoreRolledBack:
                return  # logged where it was found; other clients take us for dead
            except (StoreError, OSError) as error:
                log.warning("heartbeat: %s", error)

    def _session_id(self) -> SessionId:
        session = self._meta.session
        assert session is not None, "call it between start and stop"
        return session.id

    def _rejoin(self, ended: SessionId, why: Fenced) -> None:
        """Another client took us for dead. Our caches are void; what is not committed still may
        be."""
        with self._beating:
            if self._session_id() != ended:
                return  # the other thread was quicker
            log.warning("another client has ended session %d; joining again: %s", ended, why)
            self._ports.lost()
            self._forget_everything()
            self._held.clear()
            try:
                self._join(ended)
            except StoreRolledBack:
                return
            except (StoreError, OSError) as error:
                log.warning("joining again: %s", error)
                return
        try:
            self.beat()  # at once: what we hold open and is still there is not to be deleted now
            self._ports.joined()
        except (StoreError, OSError) as error:
            log.warning("heartbeat: %s", error)

    def _forget_everything(self) -> None:
        self._meta.transactor.drop(None)
        for file in self._files.all():
            file.forget_chunks()

    def beat(self) -> None:
        """Show that we live; agree to the current deletion round if there is a new one.

        Raises: Fenced, Unavailable, Ambiguous.
        """
        with self._beating:
            try:
                self._beat()
                self._heard = self._runtime.monotonic()
            finally:
                self._beaten = self._runtime.monotonic()

    def silent_s(self) -> float:
        """Seconds since the metadata store has answered a beat."""
        return self._runtime.monotonic() - self._heard

    def _beat(self) -> None:
        if self._runtime.monotonic() - self._beaten > self._heartbeat_s + NEWS_S:
            # we were stopped, or cut off: invalidations may be late, and a round relies on them
            self._forget_everything()
        self._meta.refresh_settings()
        number, floor = self._meta.sessions.round_and_floor()
        if number > self._confirmed:
            self._meta.sessions.beat(self._confirmed)  # what follows may take a while
            if self._ready_for_round():
                self._confirmed = number
        self._release_closed()
        self._meta.sessions.beat(self._confirmed, floor)

    def _ready_for_round(self) -> bool:
        """Hold what is open, drop old slice lists, wait for reads that use them."""
        files = self._files.all()
        inos = [*(file.ino for file in files), *self._ports.in_use()]
        if inos:
            self._held.update(self._meta.deletion.hold_orphans(inos))
            self._meta.forget_chunks(inos)
        for file in files:
            file.forget_chunks()
        return self._data.epoch.advance(READS_END_S)

    def _release_closed(self) -> None:
        used = self._ports.in_use() if self._held else ()
        closed = [ino for ino in self._held if self._files.get(ino) is None and ino not in used]
        if closed:
            self._meta.deletion.release_orphans(closed)
            self._held.difference_update(closed)

    def _watch_loop(self) -> None:
        while not self._quiet.wait(LOOK_S):
            session = self._session_id()
            try:
                self._lead.turn()
            except Fenced as error:
                self._rejoin(session, error)
            except StoreRolledBack:
                return
            except (StoreError, OSError) as error:
                log.warning("watch: %s", error)

    # --- the work --------------------------------------------------------------------------------

    def _work_loop(self) -> None:
        while not self._leaving:
            session = self._session_id()
            try:
                self.work()
            except Fenced as error:
                self._rejoin(session, error)
            except StoreRolledBack:
                return
            except (StoreError, OSError) as error:
                log.warning("background work: %s", error)
            with self._cond:
                busy = self._compactor.waiting() or self.packer.waiting() or self._leader.waiting()
                if not busy and not self._leaving:
                    self._cond.wait(WORK_EVERY_S)

    def work(self) -> None:
        """One turn: lead if no client does, compact a chunk, pack a segment, settle doubts."""
        if self._lead.leads():
            self._leader.turn()
            self.quotas.turn()
        self._compactor.turn()
        self.packer.turn()
        self._meta.settle_doubts()

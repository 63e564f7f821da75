"""What a client does unasked: show that it lives, delete what is dead, rewrite what is scattered.

Every client beats and confirms deletion rounds. One leads: it ends dead sessions and runs the
rounds (see `fsmeta.ops.reclaim` for what a confirmation says). Compaction is done by whoever wrote.

Threading: one thread beats, so that slow work never looks like death; another works.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from fsclient.file_io import DataSide
from fsclient.open_files import OpenFiles
from fsdata.compact import rewrite
from fsdata.geometry import should_compact
from fsmeta.engine import Meta
from fsmeta.errors import Fenced, StoreError
from fsmeta.runtime import Runtime, Thread
from fsmeta.schema import SessionRecord
from fsmeta.types import Ino, SessionId, SliceId

log = logging.getLogger(__name__)

HEARTBEAT_S: Final = 5.0
LEASE_S: Final = 60.0  # a session whose beat stood still for so long is ended
WORK_EVERY_S: Final = 1.0
ROUND_MAX: Final = 50_000  # orphans and dead chunks of one round: bounds the leader's memory
READS_END_S: Final = 30.0  # a round waits so long for reads under way, then for the next beat
COMMITS_BEFORE_LOOK: Final = 16  # commits to one chunk before its slices are counted
WATCHED_CHUNKS_MAX: Final = 20_000
COMPACT_QUEUE_MAX: Final = 1_000


class _Round(NamedTuple):
    """A deletion round that waits for confirmations."""

    number: int
    orphans: list[Ino]
    dead: dict[bytes, list[tuple[SliceId, int]]]


class _Watch:
    """Which sessions have not moved for a whole lease, on our own clock."""

    def __init__(self, clock: Callable[[], float], lease_s: float) -> None:
        self._clock = clock
        self._lease_s = lease_s
        self._seen: dict[SessionId, tuple[int, float]] = {}

    def dead(self, sessions: list[SessionRecord]) -> list[SessionId]:
        """Note the beats of `sessions`; those that stood still too long."""
        now = self._clock()
        before, self._seen = self._seen, {}
        for each in sessions:
            beat, since = before.get(each.id, (each.beat, now))
            self._seen[each.id] = (each.beat, since if beat == each.beat else now)
        return [sid for sid, (_, since) in self._seen.items() if now - since > self._lease_s]


class Background:
    """The unasked work of one mount."""

    def __init__(
        self,
        meta: Meta,
        data: DataSide,
        files: OpenFiles,
        runtime: Runtime,
        info: Mapping[str, Any],
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self._meta = meta
        self._data = data
        self._files = files
        self._runtime = runtime
        self._info = dict(info)
        self._heartbeat_s = heartbeat_s
        self._stop = runtime.event()
        self._beating = runtime.lock()  # one beat at a time: the worker confirms its own rounds
        self._held: set[Ino] = set()  # guarded by _beating: orphans we hold open
        self._confirmed = 0  # guarded by _beating
        self._watch = _Watch(runtime.monotonic, LEASE_S)
        self._round: _Round | None = None  # the worker's own
        self._cond = runtime.condition()
        self._commits: dict[tuple[Ino, int], int] = {}  # guarded by _cond
        self._scattered: deque[tuple[Ino, int]] = deque(maxlen=COMPACT_QUEUE_MAX)  # by _cond
        self._threads: list[Thread] = []
        self.purged = 0  # inodes; written by the worker only, as all below
        self.deleted = 0  # slices
        self.compacted = 0  # chunks

    def start(self) -> None:
        """Join the volume and start working."""
        self._confirmed = self._meta.open_session(self._info).confirmed
        self._threads = [
            self._runtime.spawn("heartbeat", self._beat_loop),
            self._runtime.spawn("background", self._work_loop),
        ]

    def stop(self) -> None:
        """Stop working and leave the volume. Everything is flushed by now."""
        self._stop.set()
        with self._cond:
            self._cond.notify_all()
        for thread in self._threads:
            thread.join()
        try:
            self._meta.close_session()
        except StoreError as error:
            log.warning("could not end the session: %s", error)

    # --- the beat --------------------------------------------------------------------------------

    def _beat_loop(self) -> None:
        while not self._stop.wait(self._heartbeat_s):
            try:
                self.beat()
            except Fenced:
                self._rejoin()
            except StoreError as error:
                log.warning("heartbeat: %s", error)

    def _rejoin(self) -> None:
        """Others took us for dead. What we believed is void; what is not committed still may be."""
        log.warning("this client's session was ended by others; joining anew")
        self._meta.transactor.drop(None)
        with self._beating:
            self._held.clear()
            try:
                self._confirmed = self._meta.open_session(self._info).confirmed
            except StoreError as error:
                log.warning("joining anew: %s", error)

    def beat(self) -> None:
        """Show that we live; agree to the current deletion round if there is a new one."""
        with self._beating:
            number = self._meta.current_round()
            if number > self._confirmed and self._ready_for_round():
                self._confirmed = number
            self._release_closed()
            self._meta.beat(self._confirmed)

    def _ready_for_round(self) -> bool:
        """Hold what is open, drop old slice lists, wait for reads that use them."""
        files = self._files.all()
        inos = [file.ino for file in files]
        if inos:
            self._held.update(self._meta.hold_orphans(inos))
            self._meta.forget_chunks(inos)
        for file in files:
            file.forget_chunks()
        return self._data.epoch.advance(READS_END_S)

    def _release_closed(self) -> None:
        closed = [ino for ino in self._held if self._files.get(ino) is None]
        if closed:
            self._meta.release_orphans(closed)
            self._held.difference_update(closed)

    # --- the work --------------------------------------------------------------------------------

    def _work_loop(self) -> None:
        while not self._stop.is_set():
            try:
                self.work()
            except (StoreError, OSError) as error:
                log.warning("background work: %s", error)
            with self._cond:
                if not self._scattered and not self._stop.is_set():
                    self._cond.wait(WORK_EVERY_S)

    def work(self) -> None:
        """One turn: lead if nobody does, move the deletion round on, compact."""
        if self._lead():
            self._reclaim()
        self._compact_some()

    def _lead(self) -> bool:
        assert self._meta.session is not None
        leader = self._meta.leader()
        if leader is None:
            return self._meta.take_lead()
        if leader.id == self._meta.session.id:
            return True
        if self._watch.dead([leader]):
            return self._meta.take_lead(believed_dead=leader.id)
        return False

    def _reclaim(self) -> None:
        """The leader's turn: end dead sessions, then begin or finish a deletion round."""
        sessions = self._meta.sessions()
        for sid in self._watch.dead(sessions):
            log.warning("session %d has not been heard of for %.0f s: ended", sid, LEASE_S)
            self._meta.end_session(sid)
        if self._round is None:
            self._begin_round()
        if self._round is not None:
            self.beat()
            waiting = [
                each for each in self._meta.sessions() if each.confirmed < self._round.number
            ]
            if not waiting:
                self._finish_round(self._round)
                self._round = None

    def _begin_round(self) -> None:
        orphans = self._meta.orphans(ROUND_MAX)
        dead = self._meta.dead_slices(ROUND_MAX)
        orphans = [ino for ino in orphans if ino not in self._held]
        if orphans or dead:
            number = self._meta.next_round()
            self._round = None if number is None else _Round(number, orphans, dead)

    def _finish_round(self, agreed: _Round) -> None:
        held = self._meta.held_orphans(each.id for each in self._meta.sessions())
        free = [ino for ino in agreed.orphans if ino not in held]
        self._meta.purge(free)
        self.purged += len(free)
        for slices in agreed.dead.values():
            for sid, size in slices:
                self._data.blocks.delete_slice(sid, size)
                self.deleted += 1
        self._meta.forget_dead(list(agreed.dead))

    def drain(self, deadline: float) -> None:
        """Before leaving: delete what is dead, if that takes nobody else and little time."""
        while self._runtime.monotonic() < deadline:
            if not self._meta.orphans(1) and not self._meta.dead_slices(1):
                return
            if len(self._meta.sessions()) > 1 or not self._lead():
                return
            self._reclaim()
            if self._held:
                return

    # --- compaction ------------------------------------------------------------------------------

    def committed(self, ino: Ino, index: int) -> None:
        """A chunk has got new slices; when it has often, they are counted and perhaps merged."""
        key = (ino, index)
        with self._cond:
            count = self._commits.get(key, 0) + 1
            if count < COMMITS_BEFORE_LOOK:
                if len(self._commits) >= WATCHED_CHUNKS_MAX:
                    self._commits.clear()
                self._commits[key] = count
                return
            self._commits.pop(key, None)
            if key not in self._scattered:
                self._scattered.append(key)
                self._cond.notify()

    def _compact_some(self) -> None:
        while not self._stop.is_set():
            with self._cond:
                if not self._scattered:
                    return
                ino, index = self._scattered.popleft()
            self.compact(ino, index)

    def compact(self, ino: Ino, index: int) -> None:
        """Rewrite a chunk as one slice, if that pays."""
        old = self._meta.read_chunk(ino, index)
        if not should_compact(old):
            return
        new_id = self._meta.new_slice_id()
        # where this fails half way, the new slice's objects are left to gc: a commit whose answer
        # was lost may have made them part of the file
        new = rewrite(self._data.blocks, old, new_id)
        if not self._meta.compact_chunk(ino, index, old, new):
            self._data.blocks.delete_slice(new_id, max((each.size for each in new), default=0))
            return
        self.compacted += 1
        file = self._files.get(ino)
        if file is not None:
            file.forget_chunks()

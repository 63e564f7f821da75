"""Write-back of one mount: journal, staged objects, held-back metadata and their publisher.

`Client` makes it where a mount writes back, lets it stand between its parts and the stores, has it
take up what an earlier process left before it serves, and drains it before it leaves.

Threading: any method from any thread, but for `recover`, `start` and `stop`.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple, TypeVar

from fsclient.files.data_services import DataServices
from fsclient.files.open_files import OpenFiles
from fsclient.files.slice_committer import ignore_slices
from fsclient.writeback.journal_dir import take_slot
from fsclient.writeback.packer import StagedPacker
from fsclient.writeback.publisher import Publisher
from fsclient.writeback.recovery import Left, Recovery
from fsdata.format.geometry import block_count, block_length
from fsdata.format.object_keys import object_key
from fsdata.objects.contract import ObjectStore
from fsdata.resources.block_cache import BlockCache
from fsdata.staging.data_segments import DataSegments
from fsdata.staging.disk import DirectoryDisk, StagingDisk
from fsdata.staging.journal import Journal
from fsdata.staging.staged_objects import STAGING_BYTES, StagedObjects
from fsmeta.errors import StoreError
from fsmeta.meta.meta import Meta
from fsmeta.runtime import Runtime, Thread, spawn_lasting
from fsmeta.schema.journal import JournalHolder
from fsmeta.store.contract import Store
from fsmeta.txn.retry import Transactor
from fsmeta.txn.row_cache import RowCache
from fsmeta.types import CHUNK_BYTES, Ino, Slice, SliceId
from fsmeta.writeback import replay
from fsmeta.writeback.log_entry import VERBS, LogEntry, Need, Rules
from fsmeta.writeback.publish_queue import Goal
from fsmeta.writeback.published_view import Published
from fsmeta.writeback.staged_store import StagedStore

log = logging.getLogger(__name__)

T = TypeVar("T")

SYNC_S: Final = 1.0  # what is in the journal survives a loss of power so much later, unasked
DRAIN_S: Final = 50.0  # the default of `--drain-timeout`: `umount` waits 60 s for the client


def open_disk(runtime: Runtime, root: str, volume: str, others: Sequence[str] = ()) -> StagingDisk:
    """The directory for the journal of one mount, see `take_slot`. Raises: ConfigError."""
    slot = take_slot(runtime, root, volume, others)
    return DirectoryDisk(runtime, slot.path, slot.lock)


class WriteBackOptions(NamedTuple):
    """What a mount that writes back can be told."""

    limit_bytes: int = STAGING_BYTES
    fsync_waits: bool = False  # `--fsync store`
    domain_depth: int = 1
    drain_s: float = DRAIN_S
    direct_writes: bool = False  # files written from their begin bypass the kernel's pages


class Staging(NamedTuple):
    """What was asked for; no directory and no options where the mount does not write back."""

    directory: str = ""
    options: WriteBackOptions | None = None
    others: tuple[str, ...] = ()  # directories where an earlier mount may have left a journal


class WriteBack:
    """What stands between a mount and its stores."""

    def __init__(
        self,
        runtime: Runtime,
        disk: StagingDisk,
        store: StagedStore,
        inner: Store,
        objects: ObjectStore,
        options: WriteBackOptions,
        streams: int,
    ) -> None:
        self._runtime = runtime
        self._disk = disk
        self._store = store
        self._inner = inner
        self._options = options
        self._data = DataSegments(runtime, disk)
        self.objects = StagedObjects(runtime, objects, self._data, options.limit_bytes, streams)
        self.objects.sync_waits = store.sync_waits = options.fsync_waits
        self._recovery = Recovery(runtime, disk, inner, self.objects)
        self._left: Left
        self._failed = False  # the disk; said once
        self._doubtful = False  # a sync of it failed; said once
        self._ended = runtime.event()
        self._dirty = runtime.event()
        self._syncer: Thread | None = None
        self._block_bytes = 0
        self._meta: Meta
        self._journal: int
        self._log: Journal
        self._publisher: Publisher
        self._published: Published
        self._started = False
        self.on_write = ignore_slices  # slices were published
        self.on_published: Callable[[], object] = bool
        self.packer: StagedPacker | None = None

    def pack(
        self, meta: Meta, data: DataServices, files: OpenFiles, memory: BlockCache, below: int
    ) -> None:
        """Files of at most `below` bytes are to go to the store together; before `recover`."""
        store, inner, objects = self._store, self._inner, self.objects
        runtime = self._runtime
        packer = StagedPacker(meta, data, files, store, inner, objects, runtime, memory, below)
        objects.pack_with(packer, data.blocks.block_bytes)
        store.on_held = packer.held
        packer.on_finished = self._dirty.set
        self.packer = packer

    # --- beginning and end -----------------------------------------------------------------------

    def read_journal(self, meta: Meta) -> None:
        """Learn what an earlier process left, before this client takes numbers of its own.

        Raises: StoreError, OSError.
        """
        self._meta = meta
        self._block_bytes = meta.format.block_bytes
        self._published = Published(meta, self._inner, self._store, self._runtime)
        self._left = left = self._recovery.read(meta.format.uuid)
        self._log = Journal(self._runtime, self._disk, meta.format.uuid, left.journal)
        self._journal = left.journal
        self._publisher = Publisher(
            meta, self._store, self._inner, self.objects, self._runtime, left.journal
        )

    def recover(self) -> None:
        """Take up what was read; from here on changes are held back.

        Raises: StoreError, OSError.
        """
        left = self._left
        if left.found is not None:
            self._log.keep(left.found, left.last)
        lost = self._publisher.left_out = self._recovery.take_up(left.waiting)
        self._data.sweep()
        self._store.attach(self, self._options.domain_depth, left.last)
        self.objects.on_unreadable = self._refuse_behind
        for entry in left.waiting:
            if entry.sequence in lost:
                self._store.add_unshown(entry)
            else:
                self._replay(self._meta, entry)
        if left.waiting:
            count, size = self.objects.left()
            log.info("staging journal: %d changes, %d objects of %d bytes are taken up",
                     len(left.waiting), count, size)  # fmt: skip
        self._left = left._replace(found=None, waiting=[])

    def _refuse_behind(self, key: str, error: OSError) -> None:
        """The disk has failed to read an object for long: what it is of stays in the journal."""
        for entry in self._store.refuse_behind(key):
            log.error(
                "%s: the staging disk can't be read: %s; it and what came after it in its "
                "directory waits for that, and changes there are refused until the volume is "
                "mounted anew: mend the disk, and leave %s as it is",
                entry,
                error.strerror,
                self.place,
            )

    def _replay(self, meta: Meta, entry: LogEntry) -> None:
        """Show this mount what an entry leads to, and queue it."""
        verb = VERBS[entry.name]
        env = entry.env(Rules.of(meta.format))
        try:
            with self._store.replaying(entry):
                meta.transactor.run(
                    lambda txn: verb(txn, env, *entry.args),
                    (verb, entry.caller, entry.now_ns, entry.args),
                )
        except OSError as error:
            log.info("staging journal: %s does not fit any more: %s", entry, error)
        if not self._store.backlog.has(entry.sequence):
            self._store.add_unshown(entry)

    def announce(self, host: str) -> None:
        """Say that our session has the journal, after it has shown its floor. Raises: StoreError.

        What the journal names is not collected as long as somebody may still publish it.
        """
        session = self._meta.session
        assert session is not None, "call it between start and stop"
        place = os.fsencode(self.place).decode(errors="replace")  # for people
        holder = JournalHolder(session.id, host, place)
        # of its own, because the publisher may be busy in the name of a session that has ended
        run = Transactor(self._inner, self._runtime, RowCache(self._runtime))
        run.run(partial(replay.announce, journal=self._journal, holder=holder))

    def start(self) -> None:
        """Begin to publish. Raises: StoreError, OSError."""
        self._recovery.patiently(
            self._inner.sync
        )  # no loss of power leaves the journal without its row
        self._started = True
        self._dirty.set()  # what an earlier process has written may not have reached the disk
        self.objects.on_stored = self._store.wake
        self._publisher.on_published = self._after_publication
        if self.packer is not None:
            self._publisher.last_ones = self.packer.last_ones
            self._publisher.on_voided = self.packer.voided
            self.objects.begin_packing()
        self._publisher.start()
        self._syncer = spawn_lasting(self._runtime, "journal-sync", self._sync_loop)

    def stop(self) -> bool:
        """Drain in the time there is; what is left stays in the journal. False where it does."""
        if not self._started:
            return True  # what was found on the disk stays there
        deadline = self._runtime.monotonic() + self._options.drain_s
        drained = self.settle(None, self._options.drain_s)
        self._publisher.stop()
        self._reap()
        drained = drained and self.objects.await_empty(deadline)
        self._ended.set()
        self._dirty.set()
        if self._syncer is not None:
            self._syncer.join()
        if drained:
            self._clear()
        else:
            self.objects.end_uploads()
            try:
                self.sync()
            except StoreError as error:
                log.warning("staging journal: it is not synced: %s", error)
            log.warning("%s", self.left())
        return drained

    def _clear(self) -> None:
        try:
            self._inner.sync()
            self._log.clear()  # for good: once the marks are gone it would be published anew
            self._data.clear()
            self._publisher.forget_journal()
        except (OSError, StoreError) as error:  # the marks say that there is nothing to do
            log.info("staging journal: %s", error)

    def left(self) -> str:
        """What is not published, in one line."""
        changes, _ = self._store.held()
        count, size = self.objects.left()
        return (
            f"{changes} changes, {count} objects of {size} bytes are not in the store yet: "
            f"mount the volume here again to publish them from {self.place}"
        )

    def close(self) -> None:
        """Let go of the disk."""
        self._disk.close()

    # --- what the store wants of a log -----------------------------------------------------------

    @property
    def place(self) -> str:
        """Where the journal is, for people."""
        return self._disk.place

    def needs(self, slices: Sequence[tuple[SliceId, int]]) -> tuple[Need, ...]:
        """See `Log`."""
        found = []
        for slice_id, size in slices:
            for block in range(block_count(size, self._block_bytes)):
                length = block_length(size, block, self._block_bytes)
                key = object_key(slice_id, block, length)
                spot = self.objects.spot(key)
                if spot is not None:
                    found.append(Need(key, *spot))
        return tuple(found)

    def append(self, sequence: int, payload: bytes) -> int:
        """See `Log`."""
        return self._log.append(sequence, payload)

    def flush(self, position: int) -> bool:
        """See `Log`."""
        try:
            self._log.flush(position)
        except OSError as error:
            self._complain(error)
            return False
        self._failed = False
        if not self._dirty.is_set():
            self._dirty.set()
        return True

    def sync(self) -> bool:
        """See `Log`. An entry that survives finds what it follows in the store, and its blocks."""
        self._inner.sync()
        try:
            self._data.sync()
            self._log.sync()
        except OSError as error:
            if not self._doubtful:
                self._doubtful = True
                log.warning("staging journal: %s; fsync waits for the store", error)
            return False
        self._doubtful = False
        return True

    def _complain(self, error: OSError) -> None:
        if not self._failed:
            self._failed = True
            log.warning("staging journal: %s; changes wait for the store", error)

    def _sync_loop(self) -> None:
        while not self._ended.is_set():
            self._dirty.wait()
            self._dirty.clear()
            self._ended.wait(SYNC_S)
            try:
                self.sync()
            except StoreError as error:  # with the next second, then
                log.info("staging journal: %s", error)
                self._dirty.set()
            self._reap()

    def _reap(self) -> None:
        if self.packer is not None:
            self.packer.reap()

    def _after_publication(self, outcomes: Sequence[tuple[LogEntry, bool]]) -> None:
        """Remove files of the log that only hold what the store has."""
        self.on_published()
        for entry, as_meant in outcomes:
            if self.packer is not None:
                self.packer.published(entry, as_meant)
            if entry.name == "write":
                ino, batch, length, *_ = entry.verb_args
                for index in _chunks_of(batch, length):
                    self.on_write(ino, index, batch)
        first = self._store.first_waiting()
        if self._failed:
            self._log.forget(first)
        if self._log.can_trim(first):
            try:
                self._inner.sync()
                self._log.trim(first)
            except (OSError, StoreError) as error:  # with the next entry, then
                log.info("staging journal: %s", error)

    # --- what users ask --------------------------------------------------------------------------

    def settle(self, ino: Ino | None, wait_s: float) -> bool:
        """Wait until what is accepted by now is published; of a file's or directory's domain."""
        self.objects.hurry()
        return self._store.settle(ino, self._runtime.monotonic() + wait_s)

    def mark(self) -> int:
        """The number of the last change that was accepted."""
        return self._store.sequence

    def await_written(self, ino: Ino, since: int, upto: int, wait_s: float) -> bool:
        """See `Publishing`."""
        self.objects.hurry()
        return self._store.await_written(ino, since, upto, self._runtime.monotonic() + wait_s)

    def goal(self, ino: Ino | None) -> Goal:
        """What is accepted by now, of a file's or directory's domain; it is hurried up."""
        self.objects.hurry()
        return self._store.goal(ino)

    def has_reached(self, goal: Goal) -> bool:
        """Whether all of it is published."""
        return self._store.has_reached(goal)

    def published(self, ino: Ino, stopped: Callable[[], bool]) -> Published:
        """The volume as others see it, when that has all that is accepted by now.

        Raises: ECANCELED once `stopped`, EIO where something in the domain of `ino` is lost.
        """
        upto = self._store.sequence
        self.objects.hurry()
        while not self._store.settle(None, self._runtime.monotonic() + SYNC_S, upto):
            if stopped():
                raise OSError(errno.ECANCELED, "stopped")
        # refuses where what was accepted is lost
        self._published.transactor.view(lambda _txn: self._store.is_held(ino))
        return self._published

    def held_inodes(self) -> list[Ino]:
        """Inodes about which changes wait: as good as open."""
        return [Ino(ino) for ino in self._store.held_inodes()]

    def require_whole(self, ino: Ino) -> None:
        """Raises: EIO where what was accepted in the domain of `ino` is lost."""
        self._store.require_whole(ino)

    def is_durable(self, ino: Ino) -> bool:
        """Whether no change of a file waits; of a directory, none in its domain."""
        return not self._store.is_held(ino)

    def numbers(self) -> dict[str, float]:
        """What `.stats` says of it."""
        changes, since = self._store.held()
        count, size = self.objects.left()
        lag = self._runtime.monotonic() - since if changes else 0.0
        return {
            "staging_changes": changes,
            "staging_objects": count,
            "staging_bytes": size,
            "staging_disk_bytes": self.objects.used(),
            "staging_lag_seconds": lag,
            "staging_durable_through_seconds": self._runtime.now_ns() / 1e9 - lag,
            "staging_published_total": self._publisher.published,
            "staging_conflicts_total": self._publisher.conflicts,
            "staging_written_through_total": self.objects.through,
            **({} if self.packer is None else self.packer.numbers()),
        }


def _chunks_of(batch: Sequence[tuple[int, Slice]], length: int) -> set[int]:
    """Where slices went of a write that left `length` bytes; appends, as far as this mount knew."""
    return {index if index >= 0 else max(length - 1, 0) // CHUNK_BYTES for index, _ in batch}

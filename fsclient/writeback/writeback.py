"""Write-back of one mount: journal, staged objects, held-back metadata and their publisher.

`Client` makes it where a mount writes back, lets it stand between its parts and the stores, has it
take up what an earlier process left before it serves, and drains it before it leaves.

Threading: any method from any thread, but for `recover`, `start` and `stop`.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple, TypeVar

from fsclient.files.data_services import DataServices
from fsclient.files.handles.open_files import OpenFiles
from fsclient.survival.kept import KeptRecords
from fsclient.writeback.journal_dir import take_slot
from fsclient.writeback.packer import PackedLayers, SmallFiles, StagedPacker
from fsclient.writeback.publisher import Publisher, PublisherPorts
from fsclient.writeback.recovery import Left, Recovery, shown_place
from fsclient.writeback.staging_log import SYNC_S, StagingLog
from fsdata.objects.contract import ObjectStore
from fsdata.resources.block_cache import BlockCache
from fsdata.staging.data_segments import DataSegments
from fsdata.staging.disk import DirectoryDisk, StagingDisk
from fsdata.staging.staged_objects import STAGING_BYTES, StagedObjects
from fsmeta.errors import StoreError
from fsmeta.meta.meta import Meta
from fsmeta.runtime import Runtime
from fsmeta.schema.journal import JournalHolder
from fsmeta.store.contract import Call, Store
from fsmeta.txn.retry import Transactor
from fsmeta.txn.row_cache import RowCache
from fsmeta.types import CHUNK_BYTES, Ino, Slice
from fsmeta.writeback import replay
from fsmeta.writeback.backlog.publish_queue import Goal, HoldingPorts
from fsmeta.writeback.entries.intents import FallocateIntent, WriteIntent
from fsmeta.writeback.entries.log_entry import VERBS, LogEntry, VerbRules
from fsmeta.writeback.published_view import Published
from fsmeta.writeback.staged_store import StagedStore

log = logging.getLogger(__name__)

T = TypeVar("T")

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


class StagingRequest(NamedTuple):
    """What was asked for; no directory and no options where the mount does not write back."""

    directory: str = ""
    options: WriteBackOptions | None = None
    others: tuple[str, ...] = ()  # directories where an earlier mount may have left a journal


class StagedLayers(NamedTuple):
    """The stores, and what stands before the one of metadata."""

    store: StagedStore
    inner: Store
    objects: ObjectStore


class WriteBackPorts(NamedTuple):
    """Other parts of the client."""

    committed: Callable[[Ino, int, Sequence[tuple[int, Slice]]], None]  # told of published slices
    kept: KeptRecords | None = None  # told of each entry of the journal


class WriteBack:
    """The layer between a mount and its stores."""

    def __init__(
        self,
        runtime: Runtime,
        disk: StagingDisk,
        layers: StagedLayers,
        options: WriteBackOptions,
        streams: int,
        ports: WriteBackPorts,
    ) -> None:
        """At most `streams` large objects are uploaded at once."""
        self._runtime = runtime
        self._disk = disk
        self._store = store = layers.store
        self._held = held = store.held
        self._inner = inner = layers.inner
        self._options = options
        self._committed = ports.committed
        self._data = DataSegments(runtime, disk)
        self.objects = StagedObjects(
            runtime,
            layers.objects,
            self._data,
            options.limit_bytes,
            streams,
            held.wake,
            self._refuse_behind,
        )
        self.objects.sync_waits = store.sync_waits = options.fsync_waits
        self._recovery = Recovery(runtime, disk, inner, self.objects)
        self._left: Left
        self._log = StagingLog(runtime, disk, self._data, self.objects, inner, ports.kept)
        self._meta: Meta
        self._publisher: Publisher
        self._published: Published
        self._started = False
        self.publications = runtime.condition()  # notified when something was published
        self.packer: StagedPacker | None = None

    def pack(
        self, meta: Meta, data: DataServices, files: OpenFiles, memory: BlockCache, below: int
    ) -> None:
        """Files of at most `below` bytes are to go to the store together; before `recover`."""
        layers = PackedLayers(self._held, self._inner, self.objects)
        small = SmallFiles(memory, below)
        self.packer = StagedPacker(meta, data, files, layers, self._runtime, small, self._log.wake)
        self.objects.pack_with(self.packer, data.blocks.block_bytes)

    # --- beginning and end -----------------------------------------------------------------------

    def read_journal(self, meta: Meta) -> None:
        """Learn what an earlier process left, before this client takes numbers of its own.

        Raises: StoreError, OSError; ConfigError where a running mount has it, and this is a copy.
        """
        self._meta = meta
        self._published = Published(meta, self._inner, self._store, self._runtime)
        self._left = left = self._recovery.read(meta.format.uuid)
        self._log.open(meta.format, left)
        packer, told = self.packer, self._after_publication
        ports = PublisherPorts(told)
        if packer is not None:
            ports = PublisherPorts(told, packer.last_ones, packer.voided)
        self._publisher = Publisher(
            meta, self._store, self._inner, self.objects, self._runtime, left.journal, ports
        )

    def recover(self) -> None:
        """Take up what was read; from here on changes are held back.

        Raises: StoreError, OSError.
        """
        left = self._left
        self._log.keep(left)
        lost = self._publisher.left_out = self._recovery.take_up(left.waiting)
        self._data.sweep()
        held = _ignore if self.packer is None else self.packer.held
        ports = HoldingPorts(held, self._meta.slices.keep)
        self._store.attach(self._log, self._options.domain_depth, left.last, ports)
        for entry in left.waiting:
            if entry.sequence in lost:
                self._held.add_unshown(entry)
            else:
                self._replay(self._meta, entry)
        if left.waiting:
            count, size = self.objects.left()
            log.info("staging journal: %d changes, %d objects of %d bytes are taken up",
                     len(left.waiting), count, size)  # fmt: skip
        self._left = left._replace(found=None, waiting=[])

    def _refuse_behind(self, key: str, error: OSError) -> None:
        """The disk has failed to read an object for long: what it is of stays in the journal."""
        for entry in self._held.refuse_behind(key):
            log.error(
                "%s: the staging disk can't be read: %s; it and what came after it in its "
                "directory waits for that, and changes there are refused until the volume is "
                "mounted again: repair the disk, and leave %s as it is",
                entry,
                error.strerror,
                self.place,
            )

    def _replay(self, meta: Meta, entry: LogEntry) -> None:
        """Show this mount what an entry leads to, and queue it."""
        verb = VERBS[entry.name]
        env = entry.env(VerbRules.of(meta.format))
        try:
            with self._store.replaying(entry):
                meta.transactor.run(
                    lambda txn: verb(txn, env, *entry.intent),
                    Call(verb, entry.caller, entry.now_ns, entry.intent),
                )
        except OSError as error:
            log.info("staging journal: %s does not fit any more: %s", entry, error)
        if not self._held.backlog.has(entry.sequence):
            self._held.add_unshown(entry)

    def announce(self, host: str) -> None:
        """Say that our session has the journal, after it has shown its floor. Raises: StoreError.

        gc keeps what the journal names as long as a mount may still publish it.
        """
        session = self._meta.session
        assert session is not None, "call it between start and stop"
        holder = JournalHolder(session.id, host, shown_place(self._disk))
        # of its own, because the publisher may be busy in the name of a session that has ended
        run = Transactor(self._inner, self._runtime, RowCache(self._runtime))
        run.run(partial(replay.announce, journal=self._left.journal, holder=holder))

    def start(self) -> None:
        """Begin to publish. Raises: StoreError, OSError."""
        self._recovery.patiently(
            self._inner.sync
        )  # no loss of power leaves the journal without its row
        self._started = True
        if self.packer is not None:
            self.objects.begin_packing()
        self._publisher.start()
        self._log.start(self._reap)

    def stop(self) -> bool:
        """Drain in the time there is; what is left stays in the journal. False where it does."""
        if not self._started:
            return True  # what was found on the disk stays there
        deadline = self._runtime.monotonic() + self._options.drain_s
        drained = self.settle(None, self._options.drain_s)
        self._publisher.stop()
        self._reap()
        drained = drained and self.objects.await_empty(deadline)
        self._log.stop()
        if drained:
            self._clear()
        else:
            self.objects.end_uploads()
            try:
                self._log.sync()
            except StoreError as error:
                log.warning("staging journal: it is not synced: %s", error)
            log.warning("%s", self.left())
        return drained

    def _clear(self) -> None:
        try:
            self._inner.sync()
            self._log.clear()
            self._publisher.forget_journal()
        except (OSError, StoreError) as error:  # the marks say that there is nothing to do
            log.info("staging journal: %s", error)

    def left(self) -> str:
        """What is not published, in one line."""
        changes, _ = self._held.tally()
        count, size = self.objects.left()
        return (
            f"{changes} changes, {count} objects of {size} bytes are not in the store yet: "
            f"mount the volume here again to publish them from {self.place}"
        )

    def close(self) -> None:
        """Let go of the disk."""
        self._disk.close()

    # --- what users ask --------------------------------------------------------------------------

    @property
    def last_found(self) -> int:
        """The last change that an earlier process may have written into the journal."""
        return self._left.last

    @property
    def place(self) -> str:
        """Where the journal is, for people."""
        return self._disk.place

    def _reap(self) -> None:
        if self.packer is not None:
            self.packer.reap()

    def _after_publication(self, outcomes: Sequence[tuple[LogEntry, bool]]) -> None:
        """Tell those that wait for it, and have the log hold only what the store does not."""
        with self.publications:
            self.publications.notify_all()
        for entry, as_meant in outcomes:
            if self.packer is not None:
                self.packer.published(entry, as_meant)
            intent = entry.published
            if isinstance(intent, WriteIntent):
                for index in _chunks_of(intent.batch, intent.length):
                    self._committed(intent.ino, index, intent.batch)
            elif isinstance(intent, FallocateIntent):
                _, begin, end = intent.span
                for index in {begin // CHUNK_BYTES, (end - 1) // CHUNK_BYTES}:
                    self._committed(intent.span.ino, index, ())
        self._log.cut(self._held)

    def settle(self, ino: Ino | None, wait_s: float) -> bool:
        """Wait until what is accepted by now is published; of a file's or directory's domain."""
        self.objects.flush_now()
        return self._held.settle(ino, self._runtime.monotonic() + wait_s)

    def mark(self) -> int:
        """The number of the last change that was accepted."""
        return self._held.sequence

    def await_written(self, ino: Ino, since: int, upto: int, wait_s: float) -> bool:
        """See `Publishing`."""
        self.objects.flush_now()
        return self._held.await_written(ino, since, upto, self._runtime.monotonic() + wait_s)

    def goal(self, ino: Ino | None) -> Goal:
        """What is accepted by now, of a file's or directory's domain; it is hurried up."""
        self.objects.flush_now()
        return self._held.goal(ino)

    def has_reached(self, goal: Goal) -> bool:
        """Whether all of it is published."""
        return self._held.has_reached(goal)

    def published(self, ino: Ino, stopped: Callable[[], bool]) -> Published:
        """The volume as other clients see it, when that has all that is accepted by now.

        Raises: ECANCELED once `stopped`, EIO where something in the domain of `ino` is lost.
        """
        upto = self._held.sequence
        self.objects.flush_now()
        while not self._held.settle(None, self._runtime.monotonic() + SYNC_S, upto):
            if stopped():
                raise OSError(errno.ECANCELED, "stopped")
        # refuses where what was accepted is lost
        self._published.transactor.view(lambda _txn: self._held.concerns(ino))
        return self._published

    def held_inodes(self) -> list[Ino]:
        """Inodes about which changes wait: as good as open."""
        return [Ino(ino) for ino in self._held.inodes()]

    def require_whole(self, ino: Ino) -> None:
        """Raises: EIO where what was accepted in the domain of `ino` is lost."""
        self._held.require_whole(ino)

    def is_durable(self, ino: Ino) -> bool:
        """Whether no change of a file waits; of a directory, none in its domain."""
        return not self._held.concerns(ino)

    def numbers(self) -> dict[str, float]:
        """What `.stats` says of it."""
        changes, since = self._held.tally()
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


def _ignore(entry: LogEntry) -> None:
    """No packing."""


def _chunks_of(batch: Sequence[tuple[int, Slice]], length: int) -> set[int]:
    """Where slices went of a write that left `length` bytes; appends, as far as this mount knew."""
    return {index if index >= 0 else max(length - 1, 0) // CHUNK_BYTES for index, _ in batch}

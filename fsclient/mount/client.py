"""A mount without the kernel: every part of a client, made and taken down in the right order.

Called by the mount command, and by tests and benchmarks that need the whole client in one process.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from fsclient.background.background import HEARTBEAT_S, Background
from fsclient.background.backup import Backups
from fsclient.background.packer import PACK_BELOW, PACKED_STORAGES
from fsclient.control.warmup_server import Warmer
from fsclient.files.data_services import DataServices
from fsclient.files.slice_committer import ignore_slices
from fsclient.files.write_errors import WriteError
from fsclient.kernel.virtual import VirtualFiles
from fsclient.mount.process_limits import find_limits
from fsclient.observe.observer import Observer
from fsclient.observe.options import ObserveOptions
from fsclient.observe.sources import (
    cache_levels,
    data_numbers,
    metadata_numbers,
    request_latencies,
)
from fsclient.vfs.vfs import VFS
from fsclient.volume.cache_options import CacheOptions, open_cache
from fsclient.volume.metadata_url import CODECS
from fsclient.volume.object_options import parse_options
from fsclient.volume.object_stores import Pacing, Stack, disk_room, open_objects, place_of, stacked
from fsclient.volume.volume_key import KeyOffer, sealer_of
from fsclient.writeback.writeback import WriteBack, WriteBackOptions, open_disk
from fsdata.blocks.blocks import BlockStore
from fsdata.blocks.promote import WholeBlocks
from fsdata.blocks.warmup import Warming
from fsdata.disk_cache.file_io import CacheFiles
from fsdata.files.prefetch import Prefetcher
from fsdata.files.upload_pool import FAR_UPLOADS, UPLOAD_THREADS, UploadPool
from fsdata.objects.contract import ObjectStore
from fsdata.resources.block_cache import BlockCache
from fsdata.resources.memory_budget import BUFFER_BYTES, MemoryBudget
from fsdata.resources.read_epoch import ReadEpoch
from fsdata.resources.worker_pool import WorkerPool
from fsdata.staging.disk import StagingDisk
from fsmeta.errors import StoreError
from fsmeta.meta.meta import Meta
from fsmeta.runtime import Runtime, Thread
from fsmeta.store.contract import Store
from fsmeta.txn.retry import DEADLINE_S
from fsmeta.types import BLOCK_BYTES_MAX
from fsmeta.writeback.staged_store import StagedStore

if TYPE_CHECKING:
    from fsdata.format.encryption import Sealer

log = logging.getLogger(__name__)

PREFETCH_THREADS: Final = 4
STAGED_UPLOADS: Final = 2  # for each of `upload_threads`: while the store thinks, others send
STREAM_SHARE: Final = 4 * BLOCK_BYTES_MAX  # uploads of write-back take at most 1/4 of the memory
SILENT_BEATS: Final = 2  # of the heartbeat that may fail before a mount counts as unhealthy
SILENT_S: Final = 5.0  # and this much besides, for a store that is slow
DRAIN_S: Final = 10.0  # how long leaving may take to delete what is dead


class ClientOptions(NamedTuple):
    """What a mount can be told; the command line and the tests fill it in."""

    buffer_bytes: int = BUFFER_BYTES
    upload_threads: int | None = None  # None: UPLOAD_THREADS, and more where the store is far
    prefetch_threads: int = PREFETCH_THREADS
    heartbeat_s: float = HEARTBEAT_S
    meta_timeout_s: float = DEADLINE_S
    mountpoint: str = ""
    pacing: Pacing = Pacing()
    store_options: tuple[str, ...] = ()
    backup_meta_s: float = 0.0  # between backups of the metadata; 0: none
    cache: CacheOptions = CacheOptions()
    staging_dir: str = ""  # where a mount that writes back keeps its journal
    staging_others: tuple[str, ...] = ()  # where it may have kept one before
    writeback: WriteBackOptions | None = None  # None: it does not
    subdir: str = ""  # what is mounted, as it is shown; `VFS.root` decides
    snapshot: str = ""
    pack_below: int | None = None  # files of so many bytes are packed; None: where that pays

    def pack_below_for(self, storage: str) -> int:
        """`pack_below` on a volume of this storage; 0: nothing is packed."""
        if self.pack_below is not None:
            return self.pack_below
        return PACK_BELOW if storage in PACKED_STORAGES else 0


def _plain(options: ClientOptions) -> dict[str, Any]:
    """Options as JSON has them."""
    shown = {
        **options._asdict(),
        "pacing": options.pacing._asdict(),
        "cache": options.cache._asdict(),
    }
    if options.writeback is not None:
        shown["writeback"] = options.writeback._asdict()
    return shown


class Client:
    """One client of a volume."""

    lost: WriteError | None = None  # what could not be stored; known once it has stopped
    drained = True  # whether others see all that was accepted; the same

    def __init__(
        self,
        store: Store,
        runtime: Runtime,
        options: ClientOptions | None = None,
        objects: ObjectStore | None = None,
        staging: StagingDisk | None = None,
        offer: KeyOffer | None = None,
        cache_files: CacheFiles | None = None,
        step: Callable[[str], object] = bool,
        observer: Observer | None = None,
    ) -> None:
        """`objects` stands in for the store that the volume's settings name, `staging` for the
        directory of a journal; `offer` opens the volume; `cache_files` stands in for the disks of
        the cache; `step` is told what is waited for next.

        Raises: ConfigError.
        """
        self.options = options or ClientOptions()
        self._runtime = runtime
        staged = None if self.options.writeback is None else StagedStore(store, runtime)
        self.meta = Meta(staged or store, runtime, self.options.meta_timeout_s)
        settings = self.meta.format
        sealer = sealer_of(settings, runtime, offer)
        self.overrides = parse_options(settings.storage, self.options.store_options)
        step(f"the object store, {place_of(settings)}")
        raw = objects or open_objects(settings, runtime, self.overrides)
        stack = stacked(raw, settings.storage, runtime, self.options.pacing)
        self.objects: ObjectStore = stack.store
        self.budget = MemoryBudget(runtime, self.options.buffer_bytes)
        self.writeback: WriteBack | None = None
        if staged is not None:
            self.writeback = self._open_writeback(staged, store, stack.store, staging, step)
            self.objects = self.writeback.objects
        small = self.options.pack_below_for(settings.storage)
        self.cache = BlockCache(runtime, self.budget, settings.block_bytes, small)
        self.disk_cache = open_cache(
            runtime, settings, self.options.cache, self.objects, self.budget, cache_files
        )
        if self.disk_cache is not None:
            self.objects = self.disk_cache
        self.blocks = self._make_blocks(sealer)
        far = self._far_uploads(settings.storage) if self.blocks.plain else 0
        self._uploads = UploadPool(runtime, self.budget, self._upload_threads, most=far)
        self._prefetch_pool = WorkerPool(runtime, "prefetch", self.options.prefetch_threads)
        prefetcher = Prefetcher(self._prefetch_pool, self.budget, self.blocks)
        data = DataServices(self.blocks, self.budget, self._uploads, prefetcher, ReadEpoch(runtime))
        self.observer = observer or Observer(ObserveOptions(), runtime)
        self.metrics = self.observer.metrics
        virtual = self._virtual_files()
        self.vfs = VFS(self.meta, data, virtual, runtime)
        if objects is None and settings.storage == "file":
            self.vfs.io.room.disks = self._disks(disk_room(settings))
        warming = Warming(runtime, self.blocks, self.cache, self.disk_cache, self.budget)
        self.vfs.questions.warmer = Warmer(runtime, self.meta, data.epoch, warming, self.disk_cache)
        self.metrics.add(warming.numbers)
        self.background = self._make_background(data)
        self.vfs.io.commits.on_many_slices = self.background.committed
        self.background.on_lost = self.vfs.locks.lost
        self.backups = Backups(self.meta, stack.store, runtime, self.options.backup_meta_s, sealer)
        self._backup_thread: Thread | None = None
        self._backup_stop = runtime.event()
        self._wire(stack, data)

    def _virtual_files(self) -> VirtualFiles:
        """The files at the root; `.config` is never hidden: `umount` and the notifier open it."""
        if self.observer.options.hide:
            return VirtualFiles(self._runtime, {b".config": self._config_text})
        return VirtualFiles(
            self._runtime,
            {b".stats": self.metrics.text, b".config": self._config_text},
            {b".accesslog": self.observer.access.open},
        )

    def _make_blocks(self, sealer: Sealer | None) -> BlockStore:
        """The blocks of the volume, through the caches there are."""
        settings = self.meta.format
        return BlockStore(
            self._runtime,
            self.objects,
            self.cache,
            CODECS[settings.compression],
            settings.block_bytes,
            sealer,
            self.disk_cache,
            fills=settings.storage != "rados",  # librados' binding makes bytes of its own
            frame_bytes=lambda: self.meta.format.frame_bytes,
        )

    def _disks(self, room: Callable[[], float]) -> Callable[[], float]:
        """What the store's disks have room for, besides what waits to be stored there."""
        if self.writeback is None:
            return room
        staged = self.writeback.objects
        # in this order: what is stored in between counts twice, and not nowhere
        return lambda: -staged.left()[1] + room()

    @property
    def _upload_threads(self) -> int:
        return self.options.upload_threads or UPLOAD_THREADS

    def _far_uploads(self, storage: str) -> int:
        """How many uploads a store may get that is far; 0 where their number stays.

        Only where an upload needs no memory but the block's: RADOS joins blocks to their heads.
        """
        if self.options.upload_threads is not None or storage != "s3" or self.writeback is not None:
            return 0
        return min(FAR_UPLOADS, self.options.buffer_bytes // STREAM_SHARE)

    def _whole_blocks(self, stack: Stack) -> WholeBlocks | None:
        """What fetches more than readers ask for; nothing does where the download is limited."""
        threads = self.options.cache.prefetch
        if not threads or self.options.pacing.download_bytes_s:
            return None
        made = WholeBlocks(self._runtime, self.blocks, self.budget, threads, stack.throttled)
        self.blocks.on_range = made.ask
        self.metrics.add(made.numbers)
        return made

    def _make_background(self, data: DataServices) -> Background:
        """What works for this client unasked."""
        return Background(
            self.meta,
            data,
            self.vfs.files,
            self._runtime,
            self._info(),
            self.options.heartbeat_s,
            self.options.pack_below_for(self.meta.format.storage),
        )

    def _open_writeback(
        self,
        staged: StagedStore,
        store: Store,
        objects: ObjectStore,
        disk: StagingDisk | None,
        step: Callable[[str], object],
    ) -> WriteBack:
        """What stands between this client and its stores. Raises: ConfigError."""
        options = self.options
        step(f"the journal in {options.staging_dir}")
        assert options.writeback is not None, "else nothing is staged"
        runtime = self._runtime
        disk = disk or open_disk(
            runtime, options.staging_dir, self.meta.format.uuid, options.staging_others
        )
        # each block on its way from the disk to the store is one in memory
        uploads = STAGED_UPLOADS * self._upload_threads
        streams = min(uploads, options.buffer_bytes // STREAM_SHARE)
        self.budget.charge(streams * BLOCK_BYTES_MAX)
        return WriteBack(runtime, disk, staged, store, objects, options.writeback, streams)

    def _wire(self, stack: Stack, data: DataServices) -> None:
        """Let parts that are made know of each other, and metrics of all."""
        if self.writeback is not None:
            below = self.options.pack_below_for(self.meta.format.storage)
            if below:
                self.writeback.pack(self.meta, data, self.vfs.files, self.cache, below)
            self.vfs.io.commits.on_many_slices = ignore_slices  # tidying comes after publication
            self.writeback.on_write = self.background.committed
            self.blocks.let_through = self.writeback.objects.let_through
            self.background.in_use = self.writeback.held_inodes
            self.vfs.durable = self.writeback
            self.vfs.locks.wait_for(self.writeback)
            self.writeback.on_published = self.vfs.questions.durable.nudge
            self.vfs.questions.cloner.tree = self.writeback.published
            self.metrics.add(self.writeback.numbers)
        self.metrics.add(lambda: metadata_numbers(self.meta))
        self.metrics.add(lambda: data_numbers(self.budget, self.cache, self.blocks))
        self.metrics.add(stack.numbers)
        timed = stack.metered
        self.metrics.add_latencies(
            lambda: request_latencies("object_request_duration_seconds", timed.readings())
        )
        disk = {}.copy if self.disk_cache is None else self.disk_cache.numbers
        self.metrics.add(lambda: cache_levels(self.cache, disk(), timed.snapshot()))
        self._leaving = stack.leaving
        self._retrying = stack.retrying
        if self.disk_cache is not None:
            self.metrics.add(self.disk_cache.numbers)
        self.whole_blocks = self._whole_blocks(stack)
        self.metrics.add(self._own_numbers)
        self.metrics.add(self.vfs.locks.numbers)
        self.metrics.add(self.background.quotas.numbers)

    def _own_numbers(self) -> dict[str, float]:
        return {
            "upload_threads": self._uploads.threads(),
            "meta_silent_seconds": self.background.silent_s(),
            "open_handles": self.vfs.files.handle_count(),
            **self.vfs.coherence.numbers(),
            "inodes_purged_total": self.background.purged,
            "trash_expired_total": self.background.expired,
            "slices_deleted_total": self.background.deleted,
            "atimes_moved_total": self.vfs.atimes.moved,
            "chunks_compacted_total": self.background.compacted,
            "files_packed_total": self.background.packer.packed,
            "segments_made_total": self.background.packer.segments,
            "meta_backups_total": self.backups.made,
            "meta_backups_failed_total": self.backups.failed,
        }

    def _config_text(self) -> bytes:
        """The content of `.config`: the volume's settings and this mount's options."""
        shown = {
            "volume": self.meta.format.shown(),
            "mount": {"pid": os.getpid(), **_plain(self.options)},
        }
        if self.writeback is not None:
            shown["mount"]["staging"] = self.writeback.place
        return json.dumps(shown, indent=2).encode() + b"\n"

    def _info(self) -> dict[str, Any]:
        return {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "mountpoint": self.options.mountpoint,
            "started": self._runtime.now_ns() // 10**9,
            "python": sys.version.split()[0],
            "limits": find_limits()._asdict(),
        }

    def start(self) -> None:
        """Join the volume; take up what an earlier process left to be published.

        Raises: StoreError, OSError.
        """
        if self.disk_cache is not None:
            self.disk_cache.start()
        if self.writeback is not None:
            self.writeback.read_journal(self.meta)
        self.background.start()
        if self.options.backup_meta_s:
            self._backup_thread = self._runtime.spawn(
                "backup", lambda: self.backups.run(self._backup_stop)
            )
        if self.writeback is not None:
            self.writeback.recover()
            self.background.beat()  # the floor is that of what was taken up
            self._announce()
            self.background.on_joined = self._announce
            self.writeback.start()

    def _announce(self) -> None:
        assert self.writeback is not None, "called where it is there"
        self.writeback.announce(socket.gethostname())

    def trouble(self) -> str:
        """What is wrong with the mount, for `/healthz`; nothing where all is well."""
        if self.vfs.is_frozen():
            return "read-only: its metadata are corrupt, or have gone back; see the log"
        silent = self.background.silent_s()
        if silent > SILENT_BEATS * self.options.heartbeat_s + SILENT_S:
            return f"the metadata store has not answered for {silent:.0f} s"
        return ""

    def unstored_bytes(self) -> int:
        """What is written and not in the object store yet."""
        staged = 0 if self.writeback is None else self.writeback.objects.left()[1]
        return self.budget.gauges().writing + staged

    def stop(self) -> bool:
        """Store everything and leave; False where something could not be stored (it is logged)."""
        self.vfs.questions.close()
        if self.writeback is None:  # else a journal takes what a store that is away does not
            self._retrying.give_up_together()
        losses = self.vfs.io.losses
        failed = self.vfs.io.flush_all()
        for ino, error in failed:
            losses.add(ino, error)
        self.lost = losses.told(self.meta.store)
        self.vfs.locks.stop()
        self.drained = self.writeback is None or self.writeback.stop()
        if failed or not self.drained:  # there has been time enough for a store that is away
            self._leaving.set()
        self.vfs.atimes.stop()
        self.vfs.coherence.stop()
        self._backup_stop.set()
        if self._backup_thread is not None:
            self._backup_thread.join()
        try:
            self.background.drain(self._runtime.monotonic() + DRAIN_S)
        except (OSError, StoreError) as error:  # the next leader deletes
            log.warning("deleting what is dead: %s", error)
        self.background.stop()
        self._leaving.set()
        self._uploads.close()
        self._prefetch_pool.close()
        if self.whole_blocks is not None:
            self.whole_blocks.close()
        self.observer.close()
        self.meta.store.close()
        self.objects.close()
        if self.writeback is not None:
            self.writeback.close()
        return not failed

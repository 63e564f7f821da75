"""A mount without the kernel: every part of a client, made and taken down in the right order.

Called by the mount command, and by tests and benchmarks that need the whole client in one process.
"""

from __future__ import annotations

import logging
import socket
from typing import Final

from fsclient.background.background import Background, SessionPorts
from fsclient.background.backup import Backups
from fsclient.client.client_options import ClientOptions
from fsclient.client.data_layers import DataLayers, MetadataStores
from fsclient.client.given_parts import NOTHING_GIVEN, GivenParts
from fsclient.client.health import MountHealth
from fsclient.client.shown import config_text, session_info
from fsclient.control.warmup_server import Warmer
from fsclient.files.slice_committer import CommitPorts
from fsclient.files.write_errors import WriteError
from fsclient.kernel.virtual import VirtualFiles
from fsclient.observe.observer import Observer
from fsclient.observe.options import ObserveOptions
from fsclient.observe.sources import (
    cache_levels,
    data_numbers,
    metadata_numbers,
    request_latencies,
)
from fsclient.qos.qos import Qos
from fsclient.survival.kept_store import KeptStore
from fsclient.vfs.surviving import SurvivingVFS
from fsclient.vfs.takeover import Takeover
from fsclient.vfs.vfs import VFS
from fsclient.volume.object_stores import disk_room
from fsclient.writeback.writeback import WriteBack
from fsdata.blocks.warmup import Warming
from fsmeta.errors import StoreError, StoreRolledBack
from fsmeta.meta.meta import Meta
from fsmeta.runtime import Runtime, Thread
from fsmeta.store.contract import Store
from fsmeta.types import Ino
from fsmeta.writeback.staged_store import StagedStore

log = logging.getLogger(__name__)

DRAIN_S: Final = 10.0  # how long leaving may take to delete what is dead


class MountClient:
    """One client of a volume."""

    lost: WriteError | None = None  # what could not be stored; known once it has stopped
    drained = True  # whether other clients see all that was accepted; the same

    def __init__(
        self,
        store: Store,
        runtime: Runtime,
        options: ClientOptions | None = None,
        given: GivenParts = NOTHING_GIVEN,
    ) -> None:
        """Raises: ConfigError."""
        self.options = options or ClientOptions()
        self._runtime = runtime
        self.survival = given.survival
        self.observer = given.observer or Observer(ObserveOptions(), runtime)
        self.metrics = self.observer.metrics
        staged = None if self.options.writeback is None else StagedStore(store, runtime)
        self.meta = self._make_meta(staged or store)
        stores = MetadataStores(store, staged)
        layers = DataLayers(runtime, self.options, given, self.observer, self.meta, stores)
        self.layers = layers
        self.objects, self.overrides, self.budget = layers.objects, layers.overrides, layers.budget
        self.writeback, self.cache = layers.writeback, layers.cache
        self.disk_cache, self.blocks, self.data = layers.disk_cache, layers.blocks, layers.services
        self.vfs = self._make_vfs(self._virtual_files())
        settings = self.meta.format
        if given.objects is None and settings.storage == "file":
            self.vfs.io.room.disks = layers.room_left(disk_room(settings))
        warming = Warming(runtime, self.blocks, self.cache, self.disk_cache, self.budget)
        self.vfs.questions.warmer = Warmer(
            runtime, self.meta, self.data.epoch, warming, self.disk_cache, self.vfs.io.attached
        )
        self.metrics.add(warming.numbers)
        self._announced = False  # that our session has the journal
        self.background = self._make_background()
        stored, every_s = layers.stack.store, self.options.backup_meta_s
        self.backups = Backups(self.meta, stored, runtime, every_s, layers.sealer)
        self._backup_thread: Thread | None = None
        self.qos = Qos(self.meta, runtime, self.options.rate_limits, self._is_direct)
        self._backup_stop = runtime.event()
        retrying, beat_s = layers.stack.retrying, self.options.heartbeat_s
        health = MountHealth(runtime, self.vfs, self.background, self.objects, retrying, beat_s)
        self.trouble = health.trouble  # for `/healthz`
        if self.writeback is not None:
            self._hold_back(self.writeback)
        self._show()

    def _is_direct(self, ino: int) -> bool:
        """Whether some handle of an open file goes past the kernel's pages."""
        file = self.vfs.files.get(Ino(ino))
        return file is not None and file.direct > 0

    def _make_meta(self, store: Store) -> Meta:
        """The metadata, as this client changes them."""
        make, wait_s = self.observer.tracing.layers.meta, self.options.meta_timeout_s
        survival = self.survival
        if survival is None:
            return make(store, self._runtime, wait_s, rolled_back=self.freeze)
        noted, generation = KeptStore(store, survival.kept), survival.generation
        return make(noted, self._runtime, wait_s, generation, rolled_back=self.freeze)

    def _make_vfs(self, virtual: VirtualFiles) -> VFS:
        """The file system, which outlives this process where there is a supervisor."""
        tidy = self.layers.queue.committed
        ports = CommitPorts(tidy, tidy)
        if self.writeback is not None:  # tidying comes after publication
            ports = CommitPorts(ranges=tidy)
        runtime, writeback, survival = self._runtime, self.writeback, self.survival
        if survival is None:
            return VFS(self.meta, self.data, virtual, runtime, ports=ports, durable=writeback)
        return SurvivingVFS(self.meta, self.data, virtual, runtime, survival, ports, writeback)

    def _virtual_files(self) -> VirtualFiles:
        """The files at the root; `.config` is never hidden: `umount` and the notifier open it."""
        if self.observer.options.hide:
            return VirtualFiles(self._runtime, {b".config": self._config_text})
        return VirtualFiles(
            self._runtime,
            {b".stats": self.metrics.text, b".config": self._config_text},
            {} if self.options.zero_message else self.observer.streams(),
        )

    def _make_background(self) -> Background:
        """What works for this client unasked."""
        return Background(
            self.meta,
            self.data,
            self.vfs.files,
            self._runtime,
            self.layers.queue,
            SessionPorts(
                session_info(self.options, self._runtime),
                self.options.heartbeat_s,
                None if self.survival is None else self.survival.kept,
                lost=self.vfs.locks.lost,
                joined=self._joined,
                in_use=list if self.writeback is None else self.writeback.held_inodes,
            ),
        )

    def _hold_back(self, writeback: WriteBack) -> None:
        """Let write-back know of the files that it packs, and locks of what they wait for."""
        below = self.options.pack_below_for(self.meta.format.storage)
        if below:
            writeback.pack(self.meta, self.data, self.vfs.files, self.cache, below)
        self.vfs.locks.wait_for(writeback)

    def _show(self) -> None:
        """Let metrics know of all parts."""
        stack = self.layers.stack
        if self.writeback is not None:
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
        if self.disk_cache is not None:
            self.metrics.add(self.disk_cache.numbers)
        self.metrics.add(self._own_numbers)
        self.metrics.add(self.vfs.locks.numbers)
        self.metrics.add(self.background.quotas.numbers)
        self.metrics.add(self.qos.throttle.numbers)
        if self.survival is not None:
            self.metrics.add(self.survival.kept.numbers)

    def _own_numbers(self) -> dict[str, float]:
        return {
            "upload_threads": self.layers.uploads.threads(),
            "meta_silent_seconds": self.background.silent_s(),
            "open_handles": self.vfs.files.handle_count(),
            "read_only": self.vfs.is_frozen(),
            **self.vfs.coherence.numbers(),
            **self.vfs.io.passthrough.numbers(),
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

    def start(self) -> None:
        """Join the volume; take up what an earlier process left to be published.

        Raises: StoreError, OSError, ConfigError.
        """
        if self.disk_cache is not None:
            self.disk_cache.start()
        if self.writeback is not None:
            self.writeback.read_journal(self.meta)
        takeover: Takeover | None = None
        if self.survival is not None and self.survival.takes_over:
            journal = 0 if self.writeback is None else self.writeback.last_found
            takeover = Takeover(self.survival, self.vfs, self.meta)
            takeover.restore_handles()
            takeover.join(self.background, journal)
        self.background.start()
        if self.options.backup_meta_s:
            self._backup_thread = self._runtime.spawn(
                "backup", lambda: self.backups.run(self._backup_stop)
            )
        if self.writeback is not None:
            self.writeback.recover()
            self.background.beat()  # the floor is that of what was taken up
            self._announced = True
            self._joined()
            self.writeback.start()
        if takeover is not None:
            takeover.restore_rest()

    def drop_kernel_caches(self) -> None:
        """An earlier process has served this mount: other clients may have changed what it
        showed."""
        for file in self.vfs.files.all():
            self.vfs.coherence.notices.stale(file.ino)
            self.vfs.coherence.notices.stale_pages(file.ino)

    def _joined(self) -> None:
        """Our session has shown its floor: say that it has the journal. Raises: StoreError."""
        if self.writeback is not None and self._announced:
            self.writeback.announce(socket.gethostname())

    def freeze(self, error: StoreError) -> None:
        """Metadata are corrupt, or have gone back: change nothing more, and say so once."""
        if self.vfs.is_frozen():
            return
        self.vfs.freeze(error)
        remedy = "unmount and run `slicefs fsck`"
        if isinstance(error, StoreRolledBack):
            remedy += ", then mount again"
        log.error("%s; read-only from now on: %s", error, remedy)

    def _config_text(self) -> bytes:
        """The content of `.config`."""
        staging = None if self.writeback is None else self.writeback.place
        return config_text(self.meta.format, self.options, self.survival, staging)

    def unstored_bytes(self) -> int:
        """What is written and not in the object store yet."""
        staged = 0 if self.writeback is None else self.writeback.objects.left()[1]
        return self.budget.gauges().writing + staged

    def stop(self) -> bool:
        """Store everything and leave; False where something could not be stored (it is logged)."""
        self.qos.stop()  # what waits for a limit must not begin any more
        self.vfs.questions.close()
        if self.writeback is None:  # else a journal takes what a store that is away does not
            self.layers.stack.retrying.give_up_together()
        losses = self.vfs.io.losses
        failed = self.vfs.io.flush_all()
        for ino, error in failed:
            losses.add(ino, error)
        self.lost = losses.told(self.meta.store)
        self.vfs.locks.stop()
        self.drained = self.writeback is None or self.writeback.stop()
        if failed or not self.drained:  # there has been time enough for a store that is away
            self.layers.stack.leaving.set()
        self.vfs.atimes.stop()
        self.vfs.coherence.notices.stop()
        self._backup_stop.set()
        if self._backup_thread is not None:
            self._backup_thread.join()
        try:
            self.background.drain(self._runtime.monotonic() + DRAIN_S)
        except (OSError, StoreError) as error:  # the next leader deletes
            log.warning("deletion of unused data: %s", error)
        self.background.stop()
        self.layers.stack.leaving.set()
        self.layers.stop_threads()
        self.vfs.io.passthrough.close()
        self.observer.close()
        self.meta.store.close()
        self.objects.close()
        if self.writeback is not None:
            self.writeback.close()
        return not failed

"""The data half of a client: what the bytes of files pass on their way to the store and back.

`MountClient` owns one, made when the volume's settings are known: the object store and its
wrappers, write-back, caches on disks and in memory, blocks, and the threads that move them.
Threading: made and stopped by one thread; the parts say the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from fsclient.background.tidy_queue import TidyQueue
from fsclient.client.client_options import STAGED_UPLOADS, ClientOptions
from fsclient.client.given_parts import GivenParts
from fsclient.files.data_services import DataServices
from fsclient.observe.observer import Observer
from fsclient.volume.cache_options import open_cache
from fsclient.volume.metadata_url import CODECS
from fsclient.volume.object_options import parse_options
from fsclient.volume.object_stores import open_objects, place_of, stacked
from fsclient.volume.volume_key import sealer_of
from fsclient.writeback.writeback import StagedLayers, WriteBack, WriteBackPorts, open_disk
from fsdata.attached.object_blocks import ObjectBlocks
from fsdata.attached.objects import AttachedCaches, attached_caches
from fsdata.blocks.blocks import BlockStore
from fsdata.blocks.layout import BlockLayout
from fsdata.blocks.promote import WholeBlocks
from fsdata.disk_cache.directory.file_io import CacheFiles
from fsdata.disk_cache.whole_files import WholeFiles
from fsdata.files.prefetch import Prefetcher
from fsdata.files.upload_pool import FAR_UPLOADS, UPLOAD_THREADS, UploadPool
from fsdata.objects.contract import ObjectStore
from fsdata.resources.block_cache import BlockCache
from fsdata.resources.memory_budget import MemoryBudget
from fsdata.resources.read_epoch import ReadEpoch
from fsdata.staging.disk import StagingDisk
from fsmeta.meta.meta import Meta
from fsmeta.runtime import Runtime
from fsmeta.store.contract import Store
from fsmeta.types import BLOCK_BYTES_MAX
from fsmeta.writeback.staged_store import StagedStore

if TYPE_CHECKING:
    from fsdata.format.encryption import Sealer

STREAM_SHARE: Final = 4 * BLOCK_BYTES_MAX  # uploads of write-back take at most 1/4 of the memory


class MetadataStores(NamedTuple):
    """The metadata engine, and what holds commits back before it where the mount writes back."""

    store: Store
    staged: StagedStore | None


class DataLayers:
    """See the module."""

    def __init__(
        self,
        runtime: Runtime,
        options: ClientOptions,
        given: GivenParts,
        observer: Observer,
        meta: Meta,
        stores: MetadataStores,
    ) -> None:
        """Raises: ConfigError."""
        self._runtime = runtime
        self._options = options
        self._meta = meta
        self._settings = settings = meta.format
        self._metrics = observer.metrics
        self._kept = None if given.survival is None else given.survival.kept
        self.sealer = sealer = sealer_of(settings, runtime, given.offer)
        self.overrides = parse_options(settings.storage, options.store_options)
        given.step(f"the object store, {place_of(settings)}")
        raw = given.objects or open_objects(settings, runtime, self.overrides)
        layers = observer.tracing.layers
        self.stack = stacked(raw, settings.storage, runtime, options.pacing, layers.objects)
        self.objects: ObjectStore = self.stack.store
        self.budget = MemoryBudget(runtime, options.buffer_bytes)
        small = options.pack_below_for(settings.storage)
        self.queue = TidyQueue(runtime, small, settings.block_bytes)
        self.writeback: WriteBack | None = None
        if stores.staged is not None:
            below = StagedLayers(stores.staged, stores.store, self.stack.store)
            self.writeback = self._open_writeback(below, given.staging, given.step)
            self.objects = self.writeback.objects
        self.cache = BlockCache(runtime, self.budget, settings.block_bytes, small)
        attached = self._open_caches(sealer, given.cache_files)
        self.blocks = self._make_blocks(sealer)
        far = self._far_uploads(settings.storage) if self.blocks.plain else 0
        threads, pool = self._upload_threads, layers.pool
        self.uploads = UploadPool(
            runtime, self.budget, threads, most=far, pool=pool, file_bytes_max=options.file_bytes
        )
        self._prefetch_pool = pool(runtime, "prefetch", options.prefetch_threads)
        prefetcher = Prefetcher(self._prefetch_pool, self.budget, self.blocks)
        epoch, whole = ReadEpoch(runtime), self._whole_files(sealer)
        self.services = DataServices(
            self.blocks, self.budget, self.uploads, prefetcher, epoch, attached, whole
        )

    def _open_caches(self, sealer: Sealer | None, files: CacheFiles | None) -> AttachedCaches:
        """Have the disk cache before the object store; what attached files are read through.

        Raises: ConfigError.
        """
        runtime, settings = self._runtime, self._settings
        shown = ObjectBlocks(runtime, self.objects)
        disks = open_cache(runtime, settings, self._options.cache, shown, self.budget, files)
        self.disk_cache = disks
        if disks is not None:
            self.objects = disks
        # Disks have nothing of encrypted volumes in the clear.
        return attached_caches(runtime, shown, self.cache, None if sealer else disks)

    def _whole_files(self, sealer: Sealer | None) -> WholeFiles | None:
        """Files on the cache disks that the kernel may read by itself."""
        if self._options.passthrough and self.disk_cache is not None and sealer is None:
            return WholeFiles(self._runtime, self.disk_cache)
        return None

    def _make_blocks(self, sealer: Sealer | None) -> BlockStore:
        """The blocks of the volume, through the caches there are."""
        settings = self._settings
        layout = BlockLayout(
            CODECS[settings.compression],
            settings.block_bytes,
            sealer,
            lambda: self._meta.format.frame_bytes,
            fills=settings.storage != "rados",  # librados' binding makes bytes of its own
        )
        through = None if self.writeback is None else self.writeback.objects.let_through
        disks, promoter = self.disk_cache, self._make_whole_blocks()
        self._whole_blocks = promoter
        return BlockStore(self._runtime, self.objects, self.cache, layout, disks, promoter, through)

    def _make_whole_blocks(self) -> WholeBlocks | None:
        """What fetches more than readers ask for; nothing does where the download is limited."""
        threads = self._options.cache.prefetch
        if not threads or self._options.pacing.download_bytes_s:
            return None
        made = WholeBlocks(self._runtime, self.budget, threads, self.stack.throttled)
        self._metrics.add(made.numbers)
        return made

    def _open_writeback(
        self, layers: StagedLayers, disk: StagingDisk | None, step: Callable[[str], object]
    ) -> WriteBack:
        """The wrappers between this client and its stores. Raises: ConfigError."""
        options = self._options
        step(f"the journal in {options.staging_dir}")
        assert options.writeback is not None, "else nothing is staged"
        runtime = self._runtime
        disk = disk or open_disk(
            runtime, options.staging_dir, self._settings.uuid, options.staging_others
        )
        # each block on its way from the disk to the store is one in memory
        uploads = STAGED_UPLOADS * self._upload_threads
        streams = min(uploads, options.buffer_bytes // STREAM_SHARE)
        self.budget.charge(streams * BLOCK_BYTES_MAX)
        ports = WriteBackPorts(self.queue.committed, self._kept)
        return WriteBack(runtime, disk, layers, options.writeback, streams, ports)

    @property
    def _upload_threads(self) -> int:
        return self._options.upload_threads or UPLOAD_THREADS

    def _far_uploads(self, storage: str) -> int:
        """How many uploads a store may get that is far; 0 where their number stays.

        Only where an upload needs no memory but the block's: RADOS joins blocks to their heads.
        """
        options = self._options
        if options.upload_threads is not None or storage != "s3" or self.writeback is not None:
            return 0
        return min(FAR_UPLOADS, options.buffer_bytes // STREAM_SHARE)

    def room_left(self, room: Callable[[], float]) -> Callable[[], float]:
        """What the store's disks have `room` for, besides what waits to be stored there."""
        if self.writeback is None:
            return room
        staged = self.writeback.objects
        # in this order: what is stored in between counts twice, and not nowhere
        return lambda: -staged.left()[1] + room()

    def stop_threads(self) -> None:
        """Nothing is read or written any more."""
        self.uploads.close()
        self._prefetch_pool.close()
        if self._whole_blocks is not None:
            self._whole_blocks.close()

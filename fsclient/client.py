"""A mount without the kernel: every part of a client, made and taken down in the right order.

Called by the mount command, and by tests and benchmarks that need the whole client in one process.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
from typing import Any, Final, NamedTuple

from fsclient.background import HEARTBEAT_S, Background
from fsclient.config import CODECS
from fsclient.file_io import DataSide
from fsclient.metrics import Metrics, data_numbers, metadata_numbers
from fsclient.object_options import parse_options
from fsclient.object_stores import Pacing, open_objects, stacked
from fsclient.vfs import VFS
from fsclient.virtual import VirtualFiles
from fsdata.blocks import BlockStore
from fsdata.budget import BUFFER_BYTES, Budget
from fsdata.epoch import ReadEpoch
from fsdata.mem_cache import MemCache
from fsdata.objects import ObjectStore
from fsdata.pool import WorkerPool
from fsdata.prefetch import Prefetcher
from fsdata.uploads import UPLOAD_THREADS, UploadPool
from fsmeta.engine import Meta
from fsmeta.errors import StoreError
from fsmeta.runtime import Runtime
from fsmeta.store import Store
from fsmeta.transact import DEADLINE_S

log = logging.getLogger(__name__)

PREFETCH_THREADS: Final = 4
DRAIN_S: Final = 10.0  # how long leaving may take to delete what is dead


class ClientOptions(NamedTuple):
    """What a mount can be told; the command line and the tests fill it in."""

    buffer_bytes: int = BUFFER_BYTES
    upload_threads: int = UPLOAD_THREADS
    prefetch_threads: int = PREFETCH_THREADS
    heartbeat_s: float = HEARTBEAT_S
    meta_timeout_s: float = DEADLINE_S
    mountpoint: str = ""
    pacing: Pacing = Pacing()
    store_options: tuple[str, ...] = ()


def _plain(options: ClientOptions) -> dict[str, Any]:
    """Options as JSON has them."""
    return {**options._asdict(), "pacing": options.pacing._asdict()}


class Client:
    """One client of a volume."""

    def __init__(
        self,
        store: Store,
        runtime: Runtime,
        options: ClientOptions | None = None,
        objects: ObjectStore | None = None,
    ) -> None:
        """`objects` stands in for the store that the volume's settings name.

        Raises: ConfigError.
        """
        self.options = options or ClientOptions()
        self._runtime = runtime
        self.meta = Meta(store, runtime, self.options.meta_timeout_s)
        settings = self.meta.format
        raw = objects
        if raw is None:
            overrides = parse_options(settings.storage, self.options.store_options)
            raw = open_objects(settings, runtime, overrides)
        stack = stacked(raw, settings.storage, runtime, self.options.pacing)
        self.objects = stack.store
        self.budget = Budget(runtime, self.options.buffer_bytes)
        self.cache = MemCache(runtime, self.budget)
        codec = CODECS[settings.compression]
        self.blocks = BlockStore(runtime, self.objects, self.cache, codec, settings.block_bytes)
        self._uploads = UploadPool(runtime, self.budget, self.options.upload_threads)
        self._prefetch_pool = WorkerPool(runtime, "prefetch", self.options.prefetch_threads)
        prefetcher = Prefetcher(self._prefetch_pool, self.budget, self.blocks)
        data = DataSide(self.blocks, self.budget, self._uploads, prefetcher, ReadEpoch(runtime))
        self.metrics = Metrics()
        virtual = VirtualFiles(
            runtime, {b".stats": self.metrics.text, b".config": self._config_text}
        )
        self.vfs = VFS(self.meta, data, virtual, runtime)
        self.background = Background(
            self.meta, data, self.vfs.files, runtime, self._info(), self.options.heartbeat_s
        )
        self.vfs.io.on_many_slices = self.background.committed
        self.metrics.add(lambda: metadata_numbers(self.meta))
        self.metrics.add(lambda: data_numbers(self.budget, self.cache, self.blocks))
        self.metrics.add(stack.numbers)
        self.metrics.add(self._own_numbers)

    def _own_numbers(self) -> dict[str, float]:
        return {
            "open_handles": self.vfs.files.handle_count(),
            "kernel_notifications_total": self.vfs.coherence.notifications,
            "inodes_purged_total": self.background.purged,
            "slices_deleted_total": self.background.deleted,
            "chunks_compacted_total": self.background.compacted,
        }

    def _config_text(self) -> bytes:
        """The content of `.config`: the volume's settings and this mount's options."""
        settings = {k: v for k, v in self.meta.format._asdict().items() if k != "unknown"}
        shown = {"volume": settings, "mount": {"pid": os.getpid(), **_plain(self.options)}}
        return json.dumps(shown, indent=2).encode() + b"\n"

    def _info(self) -> dict[str, Any]:
        return {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "mountpoint": self.options.mountpoint,
            "started": self._runtime.now_ns() // 10**9,
            "python": sys.version.split()[0],
        }

    def start(self) -> None:
        """Join the volume."""
        self.background.start()

    def stop(self) -> bool:
        """Store everything and leave; False where something could not be stored (it is logged)."""
        failed = self.vfs.io.flush_all()
        for ino, error in failed:
            log.error("inode %d: data written and not stored is lost: %s", ino, error)
        self.vfs.coherence.stop()
        try:
            self.background.drain(self._runtime.monotonic() + DRAIN_S)
        except (OSError, StoreError) as error:  # the next leader deletes
            log.warning("deleting what is dead: %s", error)
        self.background.stop()
        self._uploads.close()
        self._prefetch_pool.close()
        self.meta.store.close()
        self.objects.close()
        return not failed

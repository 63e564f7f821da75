"""What a mount can be told. The command line and the tests fill it in; `MountClient` obeys."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from fsclient.background.background import HEARTBEAT_S
from fsclient.background.packer import PACK_BELOW, PACKED_STORAGES
from fsclient.fuse.session.transport import NATIVE
from fsclient.volume.cache_options import CacheOptions
from fsclient.volume.object_stores import Pacing
from fsclient.writeback.writeback import WriteBackOptions
from fsdata.resources.memory_budget import BUFFER_BYTES
from fsmeta.rules.rate_limits import NO_LIMITS, RateLimits
from fsmeta.txn.retry import DEADLINE_S

STAGED_UPLOADS: Final = 2  # for each of `upload_threads`: while the store works, other threads send
PREFETCH_THREADS: Final = 4


class ClientOptions(NamedTuple):
    """See the module."""

    buffer_bytes: int = BUFFER_BYTES
    file_bytes: int | None = None  # of one file that are not stored yet; None: any
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
    zero_message: bool = False  # the kernel opens files without asking
    passthrough: bool = False  # it reads whole files of snapshots from cache disks by itself
    transport: str = NATIVE
    rate_limits: RateLimits = NO_LIMITS  # of this mount alone

    def pack_below_for(self, storage: str) -> int:
        """`pack_below` on a volume of this storage; 0: nothing is packed."""
        if self.pack_below is not None:
            return self.pack_below
        return PACK_BELOW if storage in PACKED_STORAGES else 0

    def shown(self) -> dict[str, Any]:
        """Options as JSON has them."""
        shown = {**self._asdict(), "pacing": self.pacing._asdict(), "cache": self.cache._asdict()}
        shown["rate_limits"] = self.rate_limits._asdict()
        if self.writeback is not None:
            shown["writeback"] = self.writeback._asdict()
        return shown

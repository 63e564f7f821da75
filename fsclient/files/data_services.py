"""`DataServices`: the parts of `fsdata` that all movers of file data in a mount share.

Put together by `Client`; used by `FileIO`, and by what packs and compacts.
"""

from __future__ import annotations

from typing import NamedTuple

from fsdata.attached.objects import AttachedCaches
from fsdata.blocks.blocks import BlockStore
from fsdata.disk_cache.whole_files import WholeFiles
from fsdata.files.prefetch import Prefetcher
from fsdata.files.upload_pool import UploadPool
from fsdata.resources.memory_budget import MemoryBudget
from fsdata.resources.read_epoch import ReadEpoch


class DataServices(NamedTuple):
    """What file data passes through; one of each for a mount."""

    blocks: BlockStore
    budget: MemoryBudget
    uploads: UploadPool
    prefetcher: Prefetcher
    epoch: ReadEpoch
    attached: AttachedCaches
    whole: WholeFiles | None = None  # where files are passed through

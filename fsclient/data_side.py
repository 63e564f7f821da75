"""`DataSide`: the parts of `fsdata` that all who move file data in a mount share.

Put together by `Client`; used by `FileIO`, and by what packs and compacts.
"""

from __future__ import annotations

from typing import NamedTuple

from fsdata.blocks import BlockStore
from fsdata.budget import Budget
from fsdata.epoch import ReadEpoch
from fsdata.prefetch import Prefetcher
from fsdata.uploads import UploadPool


class DataSide(NamedTuple):
    """What file data passes through; one of each for a mount."""

    blocks: BlockStore
    budget: Budget
    uploads: UploadPool
    prefetcher: Prefetcher
    epoch: ReadEpoch

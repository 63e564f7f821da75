"""Parts of a client that its caller has already, or wants to be others than the volume names.

Called by `MountClient` and the callers that make one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from fsclient.observe.observer import Observer
from fsclient.survival.survival import Survival
from fsclient.volume.volume_key import KeyOffer
from fsdata.disk_cache.directory.file_io import CacheFiles
from fsdata.objects.contract import ObjectStore
from fsdata.staging.disk import StagingDisk


class GivenParts(NamedTuple):
    """See the module."""

    objects: ObjectStore | None = None  # replaces the store that the volume's settings name
    staging: StagingDisk | None = None  # replaces the directory of a journal
    offer: KeyOffer | None = None  # opens the volume
    cache_files: CacheFiles | None = None  # replaces the disks of the cache
    step: Callable[[str], object] = bool  # told what is waited for next
    observer: Observer | None = None  # None: one that shows nothing by itself
    survival: Survival | None = None  # there is a supervisor


NOTHING_GIVEN = GivenParts()

"""What is wrong with a mount, for `/healthz`.

`MountClient` owns one. Threading: `trouble` from the threads of the web page; one probe at a time
has a thread of its own.
"""

from __future__ import annotations

import logging
from typing import Final

from fsclient.background.background import Background
from fsclient.vfs.vfs import VFS
from fsclient.volume.object_stores import OWNER_KEY
from fsdata.objects.contract import ObjectStore
from fsdata.objects.wrappers import Retrying
from fsmeta.errors import StoreError
from fsmeta.runtime import Runtime

log = logging.getLogger(__name__)

SILENT_BEATS: Final = 2  # of the heartbeat that may fail before a mount counts as unhealthy
SILENT_S: Final = 5.0  # and this much besides, for a store that is slow
STORE_SILENT_S: Final = 10.0  # an object store that throttles lets some request pass sooner


class MountHealth:
    """See the module."""

    def __init__(
        self,
        runtime: Runtime,
        vfs: VFS,
        background: Background,
        objects: ObjectStore,
        retrying: Retrying,
        heartbeat_s: float,
    ) -> None:
        """`retrying` is the wrapper of the object store by which a probe is noticed."""
        self._runtime = runtime
        self._vfs = vfs
        self._background = background
        self._objects = objects
        self._retrying = retrying
        self._silent_s_max = SILENT_BEATS * heartbeat_s + SILENT_S
        self._probing = runtime.lock()

    def trouble(self) -> str:
        """What is wrong with the mount; nothing where all is well."""
        if self._vfs.is_frozen():
            return "read-only: its metadata are corrupt, or have gone back; see the log"
        silent = self._background.silent_s()
        if silent > self._silent_s_max:
            return f"the metadata store has not answered for {silent:.0f} s"
        self._probe_store()
        silent = self._retrying.silent_s()
        if silent > STORE_SILENT_S:
            return f"the object store has not answered for {silent:.0f} s"
        return ""

    def _probe_store(self) -> None:
        """Ask the object store for something, unless that is under way; `trouble` learns of it."""
        if self._probing.acquire(blocking=False):
            self._runtime.spawn("health", self._probe)

    def _probe(self) -> None:
        try:
            self._objects.head(OWNER_KEY)
        except (StoreError, OSError) as error:
            log.debug("the object store, asked for /healthz: %s", error)
        finally:
            self._probing.release()

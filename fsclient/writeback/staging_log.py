"""The log of a mount that writes back: its journal, synced every second and cut where it can be.

`StagedStore` writes entries here, as `Log` says, and `WriteBack` opens it when it has read what an
earlier process left.

Threading: any method from any thread, but for `open`, `start` and `stop`. The thread `journal-sync`
makes what was written survive a loss of power.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

from fsclient.survival.kept import KeptRecords
from fsclient.survival.kept_store import journalled
from fsclient.writeback.recovery import Left
from fsdata.format.geometry import block_count, block_length
from fsdata.format.object_keys import object_key
from fsdata.staging.data_segments import DataSegments
from fsdata.staging.disk import StagingDisk
from fsdata.staging.journal import Journal
from fsdata.staging.staged_objects import StagedObjects
from fsmeta.errors import StoreError
from fsmeta.rules.settings import VolumeFormat
from fsmeta.runtime import Runtime, Thread, spawn_lasting
from fsmeta.store.contract import Store
from fsmeta.types import SliceId
from fsmeta.writeback.entries.log_entry import Log, Need
from fsmeta.writeback.held_commits import HeldCommits

log = logging.getLogger(__name__)

SYNC_S: Final = 1.0  # what is in the journal survives a loss of power so much later, unasked


class StagingLog:
    """See the module."""

    def __init__(
        self,
        runtime: Runtime,
        disk: StagingDisk,
        data: DataSegments,
        objects: StagedObjects,
        inner: Store,
        kept: KeptRecords | None,
    ) -> None:
        """`inner` is synced before the journal, so that entries find what they follow."""
        self._runtime = runtime
        self._disk = disk
        self._data = data
        self._objects = objects
        self._inner = inner
        self._kept = kept
        self._failed = False  # the disk; said once
        self._doubtful = False  # a sync of it failed; said once
        self._ended = runtime.event()
        self._dirty = runtime.event()
        self._syncer: Thread | None = None
        self._block_bytes = 0
        self._journal: Journal

    def open(self, settings: VolumeFormat, left: Left) -> None:
        """Go on behind what was found on the disk."""
        self._block_bytes = settings.block_bytes
        self._journal = Journal(self._runtime, self._disk, settings.uuid, left.journal)

    def keep(self, left: Left) -> None:
        """What was found is taken up. Raises: OSError."""
        if left.found is not None:
            self._journal.keep(left.found, left.last)

    def start(self, reap: Callable[[], None]) -> None:
        """Sync from now on; `reap` is called after each time."""
        self._dirty.set()  # what an earlier process has written may not have reached the disk
        self._syncer = spawn_lasting(self._runtime, "journal-sync", lambda: self._sync_loop(reap))

    def stop(self) -> None:
        """End the thread."""
        self._ended.set()
        self._dirty.set()
        if self._syncer is not None:
            self._syncer.join()

    def clear(self) -> None:
        """All of it is published. Raises: OSError."""
        self._journal.clear()  # for good: once the marks are gone it would be published anew
        self._data.clear()

    def wake(self) -> None:
        """There is something to sync, or to reap."""
        self._dirty.set()

    # --- what the store wants of a log -----------------------------------------------------------

    def needs(self, slices: Sequence[tuple[SliceId, int]]) -> tuple[Need, ...]:
        """See `Log`."""
        found = []
        for slice_id, size in slices:
            for block in range(block_count(size, self._block_bytes)):
                length = block_length(size, block, self._block_bytes)
                key = object_key(slice_id, block, length)
                spot = self._objects.spot(key)
                if spot is not None:
                    found.append(Need(key, *spot))
        return tuple(found)

    def append(self, sequence: int, payload: bytes) -> int:
        """See `Log`."""
        if self._kept is not None:
            journalled(self._kept, sequence)
        return self._journal.append(sequence, payload)

    def flush(self, position: int) -> bool:
        """See `Log`."""
        try:
            self._journal.flush(position)
        except OSError as error:
            self._complain(error)
            return False
        self._failed = False
        self._data.log_bytes = self._journal.size
        if not self._dirty.is_set():
            self._dirty.set()
        return True

    def sync(self) -> bool:
        """See `Log`. An entry that survives finds what it follows in the store, and its blocks."""
        self._inner.sync()
        try:
            self._data.sync()
            self._journal.sync()
        except OSError as error:
            if not self._doubtful:
                self._doubtful = True
                log.warning("staging journal: %s; fsync waits for the store", error)
            return False
        self._doubtful = False
        return True

    def _complain(self, error: OSError) -> None:
        if not self._failed:
            self._failed = True
            log.warning("staging journal: %s; changes wait for the store", error)

    def _sync_loop(self, reap: Callable[[], None]) -> None:
        while not self._ended.is_set():
            self._dirty.wait()
            self._dirty.clear()
            self._ended.wait(SYNC_S)
            try:
                self.sync()
            except StoreError as error:  # with the next second, then
                log.info("staging journal: %s", error)
                self._dirty.set()
            reap()

    # --- after publication -----------------------------------------------------------------------

    def cut(self, held: HeldCommits) -> None:
        """Remove files of the journal that only hold what is published."""
        first = held.first_waiting()
        if self._failed:
            self._journal.forget(first)
        if self._journal.can_trim(first) or self._journal.is_long():
            try:
                waiting, upto = held.waiting()
                self._inner.sync()
                self._journal.trim(first)
                if self._journal.is_long():
                    self._journal.trim_between(waiting, upto)
            except (OSError, StoreError) as error:  # with the next entry, then
                log.info("staging journal: %s", error)
        self._data.log_bytes = self._journal.size


def _conforms(made: StagingLog) -> Log:
    return made

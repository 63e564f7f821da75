"""What this mount changes in files becomes part of them, and all who have a copy hear of it.

Writers commit their slices here, and ranges that were changed otherwise are told to it: open files
learn their size and slices, the kernel what it may not believe any more, and `on_many_slices` which
chunks have got more.

Called by the writers of open files, from the threads of requests and of uploads, and by
`FileRanges`. It holds no state of its own.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Sequence

from fsclient.files.open_files import OpenFiles
from fsclient.files.page_cache_validity import PageCacheValidity
from fsclient.kernel.cache_leases import CacheLeases
from fsdata.files.write_services import SliceSink
from fsmeta.meta.meta import Meta
from fsmeta.rules.context import Changed
from fsmeta.types import AT_END, CHUNK_BYTES, Ino, Slice, SliceId


def ignore_slices(ino: Ino, index: int, batch: Sequence[tuple[int, Slice]]) -> None:
    """Nobody tidies up. `batch` is what was committed, of which some went to this chunk."""


class SliceCommitter:
    """Where the slices of a mount go."""

    def __init__(
        self,
        meta: Meta,
        files: OpenFiles,
        coherence: CacheLeases,
        versions: PageCacheValidity,
        locked: PageCacheValidity,
    ) -> None:
        """`versions` and `locked` as `FileIO` has them."""
        self._meta = meta
        self._files = files
        self._coherence = coherence
        self._versions = versions
        self._locked = locked
        self.on_many_slices = ignore_slices  # told after each commit, see `ignore_slices`

    def new_slice_id(self) -> SliceId:
        return self._meta.new_slice_id()

    def give_up_slices(self, ids: Iterable[SliceId]) -> None:
        self._meta.give_up_slices(ids)

    def fitting(self, ino: Ino, batch: Sequence[tuple[int, Slice]]) -> int:
        return self._meta.fitting(ino, batch)

    def commit(
        self, ino: Ino, batch: Sequence[tuple[int, Slice]], length: int, mtime_ns: int
    ) -> None:
        """Slices are stored: make them part of the file, and show them to its readers.

        The file gets the time of its last write, which stat(2) has been showing since.
        """
        session = None
        if ino in self._files.locked and self._meta.session is not None:
            session = self._meta.session.id  # a lock under which this was written is of this one
        file = self._files.get(ino)
        unprivileged = commits = None
        if file is not None:
            if file.lost:
                raise OSError(errno.EIO, f"inode {ino}: written under a lock that was lost")
            mtime_ns, unprivileged, commits = file.mtime_ns, file.unprivileged, file.commits
        before, after = self._meta.write_slices(ino, batch, length, mtime_ns, unprivileged, session)
        self._versions.moved(before, after)
        if self._files.locked:
            self._locked.moved(before, after)
        if file is not None:
            file.committed(after, commits)
        if after.mode != before.mode:
            self._coherence.stale(ino)
        indexes = dict.fromkeys(index for index, _ in batch)
        if AT_END in indexes:
            if file is not None and file.writer is not None and after.size != length:
                file.writer.relocated(after.size)
                self._coherence.stale_pages(ino)
            indexes = {max(after.size - 1, 0) // CHUNK_BYTES: None}
        for index in indexes:
            self.on_many_slices(ino, index, batch)

    def changed(self, ino: Ino, changed: Changed) -> None:
        """We changed what is in `ino` without a writer, and the kernel's pages show it."""
        before, after = changed
        self._versions.moved(before, after)
        for index in {
            max(before.size - 1, 0) // CHUNK_BYTES,
            max(after.size - 1, 0) // CHUNK_BYTES,
        }:
            self.on_many_slices(ino, index, ())


def _conforms(commits: SliceCommitter) -> SliceSink:
    return commits

"""Commits what this mount changes in files, and informs all holders of a copy.

Writers commit their slices here, and `FileRanges` reports ranges that were changed otherwise: open
files learn their size and slices, the kernel what it may not cache any more, and `CommitPorts`
which chunks have got more slices.

Called by the writers of open files, from the threads of requests and of uploads, and by
`FileRanges`. It holds no state of its own.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from fsclient.files.handles.open_files import OpenFiles
from fsclient.files.handles.page_cache_validity import PageCacheValidity
from fsclient.kernel.cache_leases import CacheLeases
from fsclient.survival.records import NOT_KEPT, Keeper
from fsdata.files.write_services import SliceSink
from fsmeta.meta.meta import Meta
from fsmeta.rules.context import Changed
from fsmeta.types import AT_END, CHUNK_BYTES, Ino, Slice, SliceId


def ignore_slices(ino: Ino, index: int, batch: Sequence[tuple[int, Slice]]) -> None:
    """No compaction. `batch` is what was committed, of which some went to this chunk."""


class CommitPorts(NamedTuple):
    """Told of chunks that have got more slices, see `ignore_slices`."""

    committed: Callable[[Ino, int, Sequence[tuple[int, Slice]]], None] = ignore_slices
    ranges: Callable[[Ino, int, Sequence[tuple[int, Slice]]], None] = (
        ignore_slices  # after changes without a writer, which wait for nothing
    )


IGNORED: Final = CommitPorts()


class SliceCommitter:
    """Where the slices of a mount go."""

    def __init__(
        self,
        meta: Meta,
        files: OpenFiles,
        coherence: CacheLeases,
        versions: PageCacheValidity,
        locked: PageCacheValidity,
        keeper: Keeper = NOT_KEPT,
        ports: CommitPorts = IGNORED,
    ) -> None:
        """`versions` and `locked` as `FileIO` has them."""
        self._meta = meta
        self._files = files
        self._coherence = coherence
        self._versions = versions
        self._locked = locked
        self._keeper = keeper
        self._committed, self._ranges = ports

    def new_slice_id(self) -> SliceId:
        return self._meta.new_slice_id()

    def give_up_slices(self, ids: Iterable[SliceId]) -> None:
        self._keeper.saved(ids)
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
        if self._keeper is not NOT_KEPT:
            self._keeper.saved([piece.id for _, piece in batch])
        self._versions.moved(before, after)
        if self._files.locked:
            self._locked.moved(before, after)
        if file is not None:
            file.committed(after, commits)
        if after.mode != before.mode:
            self._coherence.notices.stale(ino)
        indexes = dict.fromkeys(index for index, _ in batch)
        if AT_END in indexes:
            if file is not None and file.writer is not None and after.size != length:
                file.writer.slices.relocated(after.size)
                self._coherence.notices.stale_pages(ino)
            indexes = {max(after.size - 1, 0) // CHUNK_BYTES: None}
        for index in indexes:
            self._committed(ino, index, batch)

    def changed(self, ino: Ino, changed: Changed, ends: Sequence[int] = ()) -> None:
        """We changed what is in `ino` without a writer, and the kernel's pages show it.

        `ends`: the first and the last byte that were changed. Between their chunks are those that
        were changed as a whole, which does not scatter them.
        """
        before, after = changed
        self._versions.moved(before, after)
        for index in {max(at, 0) // CHUNK_BYTES for at in (before.size - 1, after.size - 1, *ends)}:
            self._ranges(ino, index, ())


def _conforms(commits: SliceCommitter) -> SliceSink:
    return commits

"""Slices that this mount has committed and not synced, of files that are closed by now.

fsync(2) is of a file, not of what came through one descriptor: `cp a b; sync b` opens anew. What a
`FileWriter` knows goes with its file's last close, and is kept here where objects are files of a
directory; other stores have on disk what they have taken.

What is dropped because there is too much is not forgotten: whichever file it may have been of is
synced slice by slice.

Threading: any method from any thread; one lock, a leaf.
"""

from __future__ import annotations

import errno
from collections import OrderedDict
from typing import Final, TypeAlias

from fsdata.blocks.blocks import BlockStore
from fsdata.files.writer import FileWriter
from fsmeta.meta.meta import Meta
from fsmeta.runtime import Runtime
from fsmeta.types import Ino, SliceId

STORAGE: Final = "file"
FILES_MAX: Final = 20_000  # about 6 MB
SLICES_MAX: Final = 4096  # of one file
LAST_INO: Final = Ino((1 << 64) - 1)

Slices: TypeAlias = tuple[tuple[SliceId, int], ...]  # ids and sizes


class _Left:
    """What is to be synced of a file; None: all it has. Another one each time that it changes."""

    __slots__ = ("slices",)

    def __init__(self, slices: Slices | None) -> None:
        self.slices = slices


_NOTHING: Final = _Left(())


class UnsyncedSlices:
    """What fsync(2) has yet to sync of files that were closed."""

    def __init__(self, meta: Meta, blocks: BlockStore, runtime: Runtime) -> None:
        self._meta = meta
        self._blocks = blocks
        self._lock = runtime.lock()
        self._files: OrderedDict[Ino, _Left] = OrderedDict()  # guarded by _lock, as below
        self._dropped = Ino(0)  # the highest of those that there was no room for

    def closed(self, ino: Ino, writer: FileWriter | None) -> None:
        """The last handle of a file is about to go, and what its writer knows with it."""
        if writer is not None and writer.unsynced:
            self._add(ino, tuple(writer.unsynced))

    def shared(self, ino: Ino) -> None:
        """A file has got slices of another one, of which it is not known whether they are
        synced."""
        self._add(ino, None)

    def know_nothing(self) -> None:
        """An earlier process has served this mount: it may have left any file to be synced."""
        with self._lock:
            self._dropped = LAST_INO

    def _add(self, ino: Ino, slices: Slices | None) -> None:
        if self._meta.format.storage != STORAGE:
            return
        with self._lock:
            known = self._files.get(ino, _NOTHING).slices
            both = None if known is None or slices is None else (*known, *slices)
            self._files[ino] = _Left(None if both is None or len(both) > SLICES_MAX else both)
            self._files.move_to_end(ino)
            if len(self._files) > FILES_MAX:
                oldest, _ = self._files.popitem(last=False)
                self._dropped = max(self._dropped, oldest)

    def sync_all(self) -> None:
        """`sync` for all files that were closed, but those that there was no room for.

        Raises: StoreError.
        """
        with self._lock:
            inos = list(self._files)
        for ino in inos:
            try:
                self.sync(ino)
            except OSError as error:
                if error.errno != errno.ESTALE:  # it was deleted
                    raise

    def sync(self, ino: Ino) -> None:
        """Make what was written before this open survive a loss of power. Raises: StoreError."""
        with self._lock:
            left = self._files.get(ino)
            if left is None and ino <= self._dropped:
                left = self._files[ino] = _Left(None)
        if left is None or left.slices == ():
            return
        self._blocks.sync(self._all(ino) if left.slices is None else left.slices)
        with self._lock:
            if self._files.get(ino) is not left:
                return  # more have come since
            if ino <= self._dropped:
                self._files[ino] = _NOTHING  # not once more
            else:
                del self._files[ino]

    def _all(self, ino: Ino) -> Slices:
        """What a file lists."""
        found: dict[SliceId, int] = {}
        for index in self._meta.ranges.chunks(ino):
            found.update((each.id, each.size) for each in self._meta.read_chunk(ino, index))
        found.pop(SliceId(0), None)  # holes
        return tuple(found.items())

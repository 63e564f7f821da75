"""Rewriting chunks of many slices as one; the client that wrote them does it.

`SliceCommitter` reports each of them; a chunk that got many is looked at, and rewritten if that
pays. The metadata exchanges the records only if nobody changed them meanwhile, so any client may
compact any chunk at any time; the old slices go through a deletion round, which waits for their
readers.

Threading: `committed` from any thread, the rest from the worker of `Background`.
"""

from __future__ import annotations

import errno
from collections import deque
from typing import Final

from fsclient.files.open_files import OpenFiles
from fsdata.blocks.blocks import BlockStore
from fsdata.files.compact import rewrite
from fsdata.format.geometry import should_compact
from fsmeta.errors import ObjectMissing, StoreError
from fsmeta.meta.meta import Meta
from fsmeta.runtime import Condition
from fsmeta.types import Ino, Slice

COMMITS_BEFORE_LOOK: Final = 16  # commits to one chunk before its slices are counted
WATCHED_CHUNKS_MAX: Final = 20_000
QUEUE_MAX: Final = 1_000  # chunks that wait; those beyond are looked at after later commits


class Compactor:
    """Knows which chunks are scattered, and rewrites them."""

    def __init__(
        self, meta: Meta, blocks: BlockStore, files: OpenFiles, changed: Condition
    ) -> None:
        """`changed` is notified when there is something to do."""
        self._meta = meta
        self._blocks = blocks
        self._files = files
        self._cond = changed
        self._commits: dict[tuple[Ino, int], int] = {}  # guarded by _cond
        self._scattered: deque[tuple[Ino, int]] = deque(maxlen=QUEUE_MAX)  # guarded by _cond
        self.compacted = 0  # chunks

    def committed(self, ino: Ino, index: int) -> None:
        """A chunk has got new slices."""
        key = (ino, index)
        with self._cond:
            count = self._commits.get(key, 0) + 1
            if count < COMMITS_BEFORE_LOOK:
                if len(self._commits) >= WATCHED_CHUNKS_MAX:
                    self._commits.clear()
                self._commits[key] = count
                return
            self._commits.pop(key, None)
            if key not in self._scattered:
                self._scattered.append(key)
                self._cond.notify()

    def waiting(self) -> bool:
        """Whether a chunk is to be looked at. The caller holds the condition's lock."""
        return bool(self._scattered)

    def turn(self) -> None:
        """Look at one of the chunks that wait."""
        with self._cond:
            if not self._scattered:
                return
            ino, index = self._scattered.popleft()
        self.compact(ino, index)

    def compact(self, ino: Ino, index: int) -> None:
        """Rewrite a chunk as one slice, if that pays."""
        old = self._meta.read_chunk(ino, index)
        if not should_compact(old):
            self._look_again(ino, index, len(old) // 4)
            return
        new_id = self._meta.new_slice_id()
        try:
            new = rewrite(self._blocks, old, new_id)
        except (OSError, StoreError) as error:
            self._meta.give_up_slices((new_id,))
            if not isinstance(error, ObjectMissing) or self._meta.read_chunk(ino, index) == old:
                raise
            return  # others have replaced those slices meanwhile, and deleted them
        # where this raises, the new slice's objects are left to gc: a commit whose answer was lost
        # may have made them part of the file
        try:
            exchanged = self._exchange(ino, index, old, new)
        finally:
            self._meta.give_up_slices((new_id,))
        if not exchanged:
            self._blocks.delete([(new_id, max((each.size for each in new), default=0))])
            return
        self.compacted += 1
        file = self._files.get(ino)
        if file is not None:
            file.forget_chunks()

    def _look_again(self, ino: Ino, index: int, commits: int) -> None:
        """Looking takes longer the more slices there are: do so after as many more commits."""
        if commits > COMMITS_BEFORE_LOOK:
            with self._cond:
                if len(self._commits) < WATCHED_CHUNKS_MAX:
                    self._commits[ino, index] = COMMITS_BEFORE_LOOK - commits

    def _exchange(self, ino: Ino, index: int, old: list[Slice], new: list[Slice]) -> bool:
        """Put `new` in place of `old`; False where others were first, or a write is held back."""
        try:
            return self._meta.compact_chunk(ino, index, old, new)
        except OSError as error:
            if error.errno == errno.EBUSY:
                return False
            raise

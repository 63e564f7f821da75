"""Rewriting chunks of many slices as one; the client that wrote them does it.

A chunk that got many (`TidyQueue` counts them) is looked at, and rewritten if that pays. The
metadata exchanges the records only if no client changed them meanwhile, so any client may compact
any chunk at any time; the old slices go through a deletion round, which waits for their readers.

Threading: called by the worker of `Background`.
"""

from __future__ import annotations

import errno

from fsclient.background.tidy_queue import TidyQueue
from fsclient.files.handles.open_files import OpenFiles
from fsdata.blocks.blocks import BlockStore
from fsdata.files.compact import rewrite
from fsdata.format.geometry import should_compact
from fsmeta.errors import ObjectMissing, StoreError
from fsmeta.meta.meta import Meta
from fsmeta.types import Ino, Slice


class Compactor:
    """Rewrites chunks that are scattered."""

    def __init__(self, meta: Meta, blocks: BlockStore, files: OpenFiles, queue: TidyQueue) -> None:
        """`queue` knows which chunks wait."""
        self._meta = meta
        self._blocks = blocks
        self._files = files
        self._queue = queue
        self.compacted = 0  # chunks

    def waiting(self) -> bool:
        """Whether a chunk is to be looked at. The caller holds the condition's lock."""
        return bool(self._queue.scattered)

    def turn(self) -> None:
        """Look at one of the chunks that wait."""
        with self._queue.cond:
            if not self._queue.scattered:
                return
            ino, index = self._queue.scattered.popleft()
        self.compact(ino, index)

    def compact(self, ino: Ino, index: int) -> None:
        """Rewrite a chunk as one slice, if that pays."""
        old = self._meta.read_chunk(ino, index)
        if not should_compact(old):
            self._queue.look_again(ino, index, len(old) // 4)
            return
        new_id = self._meta.new_slice_id()
        try:
            new = rewrite(self._blocks, old, new_id)
        except (OSError, StoreError) as error:
            self._meta.give_up_slices((new_id,))
            if not isinstance(error, ObjectMissing) or self._meta.read_chunk(ino, index) == old:
                raise
            return  # another client has replaced those slices and deleted them
        # where this raises, the new slice's objects are left to gc: a commit whose answer was lost
        # may have made them part of the file
        try:
            exchanged = self._exchange(ino, index, old, new)
        finally:
            self._meta.give_up_slices((new_id,))
        if not exchanged:
            sizes = (each.size for each in new if each.stored)
            self._blocks.delete([(new_id, max(sizes, default=0))])
            return
        self.compacted += 1
        file = self._files.get(ino)
        if file is not None:
            file.forget_chunks()

    def _exchange(self, ino: Ino, index: int, old: list[Slice], new: list[Slice]) -> bool:
        """Put `new` in place of `old`; False where others were first, or a write is held back."""
        try:
            return self._meta.compact_chunk(ino, index, old, new)
        except OSError as error:
            if error.errno == errno.EBUSY:
                return False
            raise

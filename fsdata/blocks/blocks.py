"""Blocks of slices: their names, and reads and writes through memory cache and object store.

Reader, writer, compaction, deletion and fsck call it. A block is named by slice id and index and is
written once, so a cached copy can never be stale. Every byte that comes from the store has passed
its CRC; wrong bytes are `ObjectDamaged` and counted, never data.

Reads follow a plan (`read_plan`), which `ReadExecutor` carries out for all callers.

Threading: any method from any thread. No lock is held across store I/O.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

from fsdata.blocks.cache_contract import Copies
from fsdata.blocks.layout import BlockLayout
from fsdata.blocks.read_executor import BlockStats, ReadExecutor
from fsdata.blocks.read_plan import RANDOM, RANGE, STREAM, BlockRead
from fsdata.format.block_v1 import Opener, decode, encode
from fsdata.format.geometry import block_count, block_length
from fsdata.format.object_keys import object_key
from fsdata.objects.contract import ObjectStore
from fsdata.resources.block_cache import Block, BlockCache, BlockKey
from fsmeta.errors import ObjectMissing
from fsmeta.runtime import Runtime
from fsmeta.types import SliceId

log = logging.getLogger(__name__)

T = TypeVar("T")


class Promoter(Protocol):
    """What fetches more than readers ask for: `WholeBlocks`."""

    def ask(self, blocks: BlockStore, read: BlockRead) -> None:
        """A reader had a range of a block fetched."""


class BlockStore:
    """Blocks by slice id and index."""

    def __init__(
        self,
        runtime: Runtime,
        objects: ObjectStore,
        cache: BlockCache,
        layout: BlockLayout | None = None,
        copies: Copies | None = None,
        promoter: Promoter | None = None,
        let_through: Callable[[str], None] | None = None,
    ) -> None:
        """`copies`: where some of what `objects` answers comes from; `let_through` is told of
        objects that are not to be staged.
        """
        self._objects = objects
        self._cache = cache
        self._layout = layout = layout or BlockLayout()
        self.plain = layout.plain  # blocks are stored as they are
        self.block_bytes = layout.block_bytes
        self._promoter = promoter
        self._let_through = let_through or _let_all_through
        self._reads = ReadExecutor(runtime, objects, cache, layout, copies)

    def stats(self) -> BlockStats:
        """What was fetched, and what was found bad."""
        return self._reads.stats()

    def put_block(
        self,
        slice_id: SliceId,
        block: int,
        buffer: Block,
        reserved: bool = False,
        rewritten: bool = False,
    ) -> None:
        """Store a block.

        `reserved`: the buffer is counted as a write buffer in the budget; on return it is the
        memory cache's. `rewritten`: its bytes are in the store already, under another name, and the
        metadata that change it are not held back.
        Raises: OSError ENOSPC EDQUOT, Unavailable; then the buffer is the caller's still.
        """
        key = object_key(slice_id, block, len(buffer))
        sealer = self._layout.sealer
        lock = None if sealer is None else sealer.fresh(slice_id, block)
        if rewritten:
            self._let_through(key)
        self._objects.put(
            key, encode((buffer,), self._layout.codec, lock, self._layout.frame_bytes())
        )
        if reserved:
            self._cache.put_behind((slice_id, block), buffer)

    def take_spare(self) -> bytearray | None:
        """A used buffer of a full block for the next one, if there is any."""
        return self._cache.take_spare()

    def read(self, read: BlockRead) -> memoryview:
        """The bytes of a read. Raises: ObjectMissing, ObjectDamaged, Unavailable."""
        key, length, begin, end, access, _ = read
        view = self._cache.get(key, begin, end)
        if view is None:
            assert 0 <= begin <= end <= length, read
            view, source = self._reads.read(read)
            if self._promoter is not None and source is RANGE and access is RANDOM:
                self._promoter.ask(self, read)
        if access is STREAM and end == length:
            self._cache.leave_behind(key)
        return view

    def fetch(self, read: BlockRead, wanted: Callable[[], bool] = lambda: True) -> None:
        """Bring what a read is for to where reads find it, without a reader that waits.

        Where the fetch is to begin, it is `wanted` or not. Raises: as `read`.
        """
        self._reads.fetch(read, wanted)

    def length_of(self, size: int, block: int) -> int:
        """Bytes of a block of a slice of `size` bytes."""
        return block_length(size, block, self.block_bytes)

    def is_in_memory(self, key: BlockKey) -> bool:
        """Whether reading a block waits for nothing."""
        return self._cache.has(key)

    def lacks(self, read: BlockRead) -> bool | None:
        """Where a block that is fetched now would be found later: in memory, else on its disk.

        None: it is there already.
        """
        if self._cache.has(read.key):
            return None
        on_disk = self._reads.keeps_block(read)
        return None if on_disk is None else not on_disk

    def opener(self, slice_id: SliceId, block: int) -> Opener | None:
        """What opens a block that is encrypted; None where the volume is not."""
        return self._layout.opener(slice_id, block)

    def counted(self, name: str, fetch: Callable[[], T]) -> T:
        """What `fetch` brings of the block `name`; only what says that it is bad is counted."""
        return self._reads.counted(name, fetch)

    def delete(self, slices: Iterable[tuple[SliceId, int]]) -> None:
        """Remove every block of slices (id, size); blocks that are gone already are fine.

        Raises: Unavailable; then call it again.
        """
        names = self._names(slices)
        for key in names:
            self._reads.forget(key)
        self._objects.delete(*names.values())

    def delete_blocks(self, slice_id: SliceId, blocks: Iterable[tuple[int, int]]) -> None:
        """Remove some blocks (index, length) of a slice. Raises: Unavailable."""
        names = {(slice_id, block): object_key(slice_id, block, size) for block, size in blocks}
        for key in names:
            self._reads.forget(key)
        self._objects.delete(*names.values())

    def sync(self, slices: Iterable[tuple[SliceId, int]]) -> None:
        """Make the blocks of slices (id, size) survive a loss of power.

        Those that could not be synced are stored anew, as what was written to a disk before an
        error may be lost. Raises: Unavailable, ObjectDamaged, OSError.
        """
        names = self._names(slices)
        try:
            self._objects.sync(names.values())
        except OSError as error:
            log.warning(
                "%d blocks are stored again because one could not be synced: %s", len(names), error
            )
            for key, name in names.items():
                self._store_anew(key, name)
            self._objects.sync(names.values())

    def _names(self, slices: Iterable[tuple[SliceId, int]]) -> dict[BlockKey, str]:
        """The objects of slices."""
        return {
            (sid, block): object_key(sid, block, block_length(size, block, self.block_bytes))
            for sid, size in slices
            for block in range(block_count(size, self.block_bytes))
        }

    def _store_anew(self, key: BlockKey, name: str) -> None:
        """Put the bytes of an object once more, if they are right; one that is gone is fine."""
        try:
            data = self._objects.get(name)
        except ObjectMissing:
            return
        decode(data, self.opener(*key))
        self._objects.put(name, (data,))


def _let_all_through(_: str) -> None:
    """Nothing is staged."""

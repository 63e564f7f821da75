"""Blocks in memory: an LRU of decoded blocks, bounded by the `MemoryBudget`.

`BlockStore` puts and gets. What has been written, or read to its end, the kernel's page cache has
as well: such blocks are *behind*, few are kept, and their buffers, still warm, serve the next ones.

The cache owns the buffers it is given: they do not change any more, readers get views. Full-size
buffers of blocks that left are kept as spares for the next block: faulting in fresh pages costs
more than copying into old ones. A bytearray can't be resized while a view of it lives: that proves
that a spare has no reader before it is used again. Of blocks of which pages are read the *pieces*
around them are kept for a while: neighbouring pages are asked for next.

Threading: one lock. Lock order: cache, then budget.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sized
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from fsdata.resources.memory_budget import MemoryBudget
from fsmeta.runtime import Runtime
from fsmeta.types import BLOCK_BYTES_MAX, FRAME_BYTES, SliceId

Block: TypeAlias = bytes | bytearray | memoryview
BlockKey: TypeAlias = tuple[SliceId, int]
_Place: TypeAlias = tuple[BlockKey, int]
"""Of a piece: its number in the block."""

K = TypeVar("K")
V = TypeVar("V", bound=Sized)

SPARES_MAX = 4  # buffers kept for reuse: one for each block that is filled or fetched at a time
SPARES_SHARE = 16  # and no more than 1/16 of the budget
BEHIND_BYTES_MAX = 32 << 20  # blocks behind: a few full ones for each of a few streams
PIECE_BYTES = FRAME_BYTES  # no piece goes beyond a multiple of it
PIECES_BYTES_MAX = 32 << 20  # pieces: those of a few hundred records that are being read
PIECES_SHARE = 8  # and no more than 1/8 of the budget
SMALL_SHARE = 4  # blocks that small files were written to may take 1/4 of the budget until packed


class CacheStats(NamedTuple):
    """Counters since the start, and what is here now."""

    hits: int
    misses: int
    bytes: int
    blocks: int


class _Piece:
    """Where in its block it begins, and its bytes."""

    __slots__ = ("begin", "data")

    def __init__(self, begin: int, data: memoryview) -> None:
        self.begin = begin
        self.data = data

    def __len__(self) -> int:
        return len(self.data)


class _Leaving(Generic[K, V]):
    """Blocks, or pieces, of which the first go when they are too many bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.blocks: OrderedDict[K, V] = OrderedDict()
        self._bytes = 0

    def add(self, key: K, block: V) -> None:
        self.blocks[key] = block
        self._bytes += len(block)

    def pop(self, key: K) -> V | None:
        block = self.blocks.pop(key, None)
        if block is not None:
            self._bytes -= len(block)
        return block

    def is_full(self) -> bool:
        return self._bytes > self.limit

    def pop_oldest(self) -> V:
        _, block = self.blocks.popitem(last=False)
        self._bytes -= len(block)
        return block


class BlockCache:
    """Least recently used blocks go first. The room for spares is charged from the start."""

    def __init__(
        self,
        runtime: Runtime,
        budget: MemoryBudget,
        block_bytes: int = BLOCK_BYTES_MAX,
        small: int = 0,
    ) -> None:
        """Written blocks of at most `small` bytes are wanted again soon, to be packed."""
        self._budget = budget
        self._block_bytes = block_bytes
        self._lock = runtime.lock()
        self._blocks: OrderedDict[BlockKey, Block] = OrderedDict()  # guarded by _lock, as all below
        limit = budget.gauges().limit
        self._behind = _Leaving[BlockKey, Block](BEHIND_BYTES_MAX)  # no key is in two of them
        self._small = _Leaving[BlockKey, Block](limit // SMALL_SHARE)
        self._small_max = small
        self._spares: list[bytearray] = []  # the last is the warmest; views of them may live
        self._bytes = self._hits = self._misses = 0
        self._pieces = _Leaving[_Place, _Piece](min(PIECES_BYTES_MAX, limit // PIECES_SHARE))
        self._spares_max = min(SPARES_MAX, limit // (SPARES_SHARE * block_bytes))
        budget.charge(self._spares_max * block_bytes)
        budget.on_shrink(self.shrink)

    def stats(self) -> CacheStats:
        """How well it does, and what it holds."""
        with self._lock:
            count = sum(map(len, (self._blocks, self._behind.blocks, self._small.blocks)))
            return CacheStats(self._hits, self._misses, self._bytes, count)

    def get(self, key: BlockKey, begin: int, end: int) -> memoryview | None:
        """Bytes `begin..end` of a block, if it is here."""
        with self._lock:
            block = self._blocks.get(key)
            if block is not None:
                self._blocks.move_to_end(key)
            else:
                block = self._behind.blocks.get(key) or self._small.blocks.get(key)
                if block is None:
                    self._misses += 1
                    return None
            self._hits += 1
            # Under the lock: from here on the view keeps the buffer from being used again.
            return memoryview(block)[begin:end]

    def get_piece(self, key: BlockKey, begin: int, end: int) -> memoryview | None:
        """Bytes `begin..end` of a block that is not here, if a piece of it has them all."""
        pieces = self._pieces.blocks
        if not pieces:
            return None
        with self._lock:
            piece = pieces.get((key, begin // PIECE_BYTES))
            if piece is None or begin < piece.begin or end > piece.begin + len(piece):
                return None
            pieces.move_to_end((key, begin // PIECE_BYTES))
            return piece.data[begin - piece.begin : end - piece.begin]

    def put_pieces(self, key: BlockKey, at: int, data: memoryview, begin: int, end: int) -> None:
        """Keep of `data`, a block's bytes from `at` on, what is around `begin..end`, if there is
        room. That itself the kernel has from now on.
        """
        for low in range(at, at + len(data), PIECE_BYTES):
            high = min(low + PIECE_BYTES, at + len(data))
            if begin <= low and high <= end:
                continue
            piece = _Piece(low, data[low - at : high - at])
            if self._budget.keep(len(piece)):
                self._put_piece((key, low // PIECE_BYTES), piece)

    def _put_piece(self, place: _Place, piece: _Piece) -> None:
        """Of a piece that is charged."""
        with self._lock:
            self._forget_piece(place)
            self._pieces.add(place, piece)
            self._bytes += len(piece)
            while self._pieces.is_full():
                self._dropped(len(self._pieces.pop_oldest()))

    def _forget_piece(self, place: _Place) -> None:
        """The caller holds the lock."""
        piece = self._pieces.pop(place)
        if piece is not None:
            self._dropped(len(piece))

    def has(self, key: BlockKey) -> bool:
        """Whether a block is here; counts nothing."""
        with self._lock:
            return any(
                key in each for each in (self._blocks, self._behind.blocks, self._small.blocks)
            )

    def put(self, key: BlockKey, block: Block) -> None:
        """Take over a block that was fetched, if there is room."""
        size = len(block)
        if not self._budget.charge(size):
            self.shrink(size)
            if not self._budget.charge(size):
                self.pass_by(block)
                return
        with self._lock:
            self._remove(key)
            self._blocks[key] = block
            self._bytes += size

    def put_behind(self, key: BlockKey, block: Block) -> None:
        """Take over a block that was written: a write buffer's bytes in the budget until now."""
        self._budget.retire(len(block))
        with self._lock:
            self._remove(key)
            self._bytes += len(block)
            self._leave(self._small if len(block) <= self._small_max else self._behind, key, block)

    def pass_by(self, block: Block) -> None:
        """Take over a block that is not to be cached: its buffer is a spare once no view lives."""
        with self._lock:
            self._keep_spare(block)

    def leave_behind(self, key: BlockKey) -> None:
        """A sequential reader has passed the block: it is among the first to go."""
        with self._lock:
            block = self._blocks.pop(key, None)
            if block is not None:
                self._leave(self._behind, key, block)

    def _leave(self, way: _Leaving[BlockKey, Block], key: BlockKey, block: Block) -> None:
        """The caller holds the lock; the block is in no map."""
        way.add(key, block)
        while way.is_full():
            self._dropped(self._pop_oldest(way))

    def _pop_oldest(self, way: _Leaving[BlockKey, Block]) -> int:
        """Let go of the oldest block there; its size. The caller holds the lock."""
        block = way.pop_oldest()
        self._keep_spare(block)
        return len(block)

    def drop(self, key: BlockKey) -> None:
        """Forget a block, and pieces of it."""
        with self._lock:
            self._remove(key)
            for number in range(self._block_bytes // PIECE_BYTES if self._pieces.blocks else 0):
                self._forget_piece((key, number))

    def _remove(self, key: BlockKey) -> None:
        """The caller holds the lock."""
        block = self._blocks.pop(key, None) or self._behind.pop(key) or self._small.pop(key)
        if block is not None:
            self._dropped(len(block))

    def shrink(self, want: int) -> None:
        """Drop the oldest blocks until `want` bytes are free or no block is left."""
        with self._lock:
            freed = 0
            while self._pieces.blocks and freed < want:
                freed += len(self._pieces.pop_oldest())
            for way in (self._behind, self._small):
                while way.blocks and freed < want:
                    freed += self._pop_oldest(way)
            while self._blocks and freed < want:
                _, block = self._blocks.popitem(last=False)
                freed += len(block)
                self._keep_spare(block)
            if freed:
                self._dropped(freed)

    def _dropped(self, size: int) -> None:
        """Account for `size` bytes that left. The caller holds the lock."""
        self._bytes -= size
        self._budget.uncharge(size)

    def _keep_spare(self, block: Block) -> None:
        """Keep the buffer of a block that left if it is a full one. The caller holds the lock."""
        if not isinstance(block, bytearray) or len(block) != self._block_bytes:
            return
        # One that is still read comes to use last, and goes first where there are too many.
        self._spares.insert(len(self._spares) if _unshared(block) else 0, block)
        if len(self._spares) > self._spares_max:
            del self._spares[0]

    def take_spare(self) -> bytearray | None:
        """A buffer of a full block with arbitrary bytes in it, the caller's from now on."""
        with self._lock:
            for index in reversed(range(len(self._spares))):
                if _unshared(self._spares[index]):
                    return self._spares.pop(index)
            return None


def _unshared(buffer: bytearray) -> bool:
    """Whether no view of `buffer` lives. The buffer is not empty, and no one else may know it."""
    try:
        buffer.append(buffer.pop())
    except BufferError:
        return False
    return True

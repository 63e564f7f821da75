"""A slice that is being written: its blocks' buffers until they are stored.

Pure bookkeeping for `FileWriter`, which holds its lock around every call. A block fills at its end
or is overwritten in place while it is OPEN; it is READY once nothing may change it any more, BUSY
while a thread uploads it and STORED when its bytes are in the store (and its buffer in the cache).
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import TypeAlias

from fsmeta.types import AT_END, CHUNK_BYTES, Slice, SliceId

Buffer: TypeAlias = bytes | bytearray | memoryview
TakeSpare: TypeAlias = Callable[[], bytearray | None]

SPARE_MIN_BYTES = 1 << 20  # a block that grows past this will probably be a full one


class BlockState(IntEnum):
    """Where a block is on its way."""

    OPEN = 0
    READY = 1
    BUSY = 2
    STORED = 3


class PendingBlock:
    """One block: `fill` bytes in `data`, which may be longer."""

    __slots__ = ("data", "error", "fill", "index", "owner", "queued", "state")

    def __init__(self, owner: PendingSlice, index: int) -> None:
        self.owner = owner
        self.index = index
        self.state = BlockState.OPEN
        self.queued = False  # READY and submitted to the upload pool
        self.error: Exception | None = None  # why it is not STORED after all
        self.data = bytearray()
        self.fill = 0

    @property
    def is_sent(self) -> bool:
        """Whether it is on its way to the store; one that was refused is not."""
        return self.queued and self.state is not BlockState.STORED

    def write(self, at: int, piece: memoryview, take_spare: TakeSpare) -> None:
        """Put `piece` at `at`, which is at most `fill`."""
        end = at + len(piece)
        if end > len(self.data):
            self._make_room(end, take_spare)
        if end <= len(self.data):
            memoryview(self.data)[at:end] = piece
        elif at == len(self.data):
            self.data += piece  # no view of an OPEN block is ever given away: it may be resized
        else:
            inside = len(self.data) - at
            memoryview(self.data)[at:] = piece[:inside]
            self.data += piece[inside:]
        self.fill = max(self.fill, end)

    def _make_room(self, end: int, take_spare: TakeSpare) -> None:
        """Move to a used full-size buffer if the block looks like filling one.

        It costs a copy of what is there and saves faulting in the pages of the rest. The budget
        counts only what is filled, so a stream that ends early has up to a block uncounted.
        """
        if self.index == 0 and (not self.fill or end < SPARE_MIN_BYTES):
            return
        spare = take_spare()
        if spare is not None and len(spare) >= end:
            memoryview(spare)[: self.fill] = memoryview(self.data)[: self.fill]
            self.data = spare

    def freeze(self) -> None:
        """Nothing changes it from here on; a buffer that is mostly air is left behind."""
        self.state = BlockState.READY
        if self.fill < len(self.data):
            self.data = self.data[: self.fill]

    def view(self, begin: int, end: int) -> Buffer | None:
        """Bytes of the block; a copy while they may still change; None once they are stored."""
        if self.state is BlockState.STORED:
            return None
        if self.state is BlockState.OPEN:
            return bytes(memoryview(self.data)[begin:end])
        return memoryview(self.data)[begin:end]

    def restore(self, data: bytearray) -> None:
        """A block that was STORED is to be stored under another name."""
        assert self.state is BlockState.STORED, self.state
        self.state, self.data, self.queued = BlockState.READY, data, False
        self.owner.unstored += 1

    def stored(self) -> None:
        """The buffer is the cache's from here on."""
        self.state = BlockState.STORED
        self.data = bytearray()
        self.owner.unstored -= 1


class PendingSlice:
    """A contiguous run of written bytes of one chunk, not yet in the metadata."""

    __slots__ = (
        "_block_bytes",
        "_frozen",
        "append",
        "blocks",
        "chunk",
        "held",
        "id",
        "length",
        "mtime_ns",
        "pos",
        "sealed",
        "skipped",
        "unstored",
    )

    def __init__(
        self, slice_id: SliceId, chunk: int, pos: int, block_bytes: int, append: bool = False
    ) -> None:
        self.id = slice_id
        self.append = append  # the commit decides where it goes; `chunk` and `pos` are a guess
        self.chunk = chunk
        self.pos = pos
        self.length = 0
        self.held = 0  # bytes of the budget for the slice itself
        self.skipped = 0  # bytes at its begin that became a slice of their own, see `cut_copied`
        self.mtime_ns = 0
        self.sealed = False
        self.blocks: list[PendingBlock] = []
        self.unstored = 0  # blocks not STORED
        self._frozen = 0  # bytes in blocks that are not OPEN
        self._block_bytes = block_bytes

    @property
    def end(self) -> int:
        """Where in the chunk it ends."""
        return self.pos + self.length

    @property
    def file_end(self) -> int:
        """Where in the file it ends."""
        return self.chunk * CHUNK_BYTES + self.end

    @property
    def left(self) -> int:
        """How many bytes it adds to the file."""
        return self.length - self.skipped

    @property
    def file_begin(self) -> int:
        """Where in the file it begins."""
        return self.chunk * CHUNK_BYTES + self.pos + self.skipped

    def accepts(self, pos: int) -> bool:
        """Whether a write that begins at `pos` of the chunk can go into the buffers."""
        if self.append:  # to append once more where others have, is no overwriting
            return not self.sealed and pos == self.pos + self.length
        return not self.sealed and self.pos + self._frozen <= pos <= self.pos + self.length

    def write(self, pos: int, data: memoryview, take_spare: TakeSpare) -> list[PendingBlock]:
        """Put `data` at `pos` of the chunk; the blocks that became full and thereby READY."""
        full: list[PendingBlock] = []
        off = pos - self.pos
        while len(data):
            index, at = divmod(off, self._block_bytes)
            piece = data[: self._block_bytes - at]
            if index == len(self.blocks):
                self.blocks.append(PendingBlock(self, index))
                self.unstored += 1
            block = self.blocks[index]
            block.write(at, piece, take_spare)
            if block.fill == self._block_bytes:
                block.freeze()
                full.append(block)
            off += len(piece)
            data = data[len(piece) :]
        self.length = max(self.length, off)
        self._frozen += len(full) * self._block_bytes
        return full

    def seal(self) -> list[PendingBlock]:
        """Accept no more; the block that became READY by it, if any."""
        self.sealed = True
        if self.blocks and self.blocks[-1].state is BlockState.OPEN:
            self.blocks[-1].freeze()
            self._frozen = self.length
            return self.blocks[-1:]
        return []

    def record(self) -> Slice:
        """The slice as metadata has it, or will."""
        return Slice(self.pos + self.skipped, self.id, self.length, self.skipped, self.left)

    def offer(self) -> tuple[int, Slice]:
        """The chunk it goes to, or AT_END, and the slice, as a commit takes them."""
        return AT_END if self.append else self.chunk, self.record()

    def cut_copied(self, slice_id: SliceId, size: int) -> PendingSlice:
        """Its first `size` bytes, which are stored under `slice_id` as well, as a slice."""
        head = PendingSlice(slice_id, self.chunk, self.pos + self.skipped, 1, self.append)
        head.length, head.mtime_ns, head.sealed = size, self.mtime_ns, True
        self.skipped += size
        return head

    def cut_unstored(self, slice_id: SliceId, count: int) -> PendingSlice:
        """All behind its first `count` blocks, none of which is being stored, as a slice."""
        size = count * self._block_bytes
        tail = PendingSlice(slice_id, self.chunk, self.pos + size, self._block_bytes, self.append)
        tail.length, tail.mtime_ns, tail.sealed = self.length - size, self.mtime_ns, True
        self.length = self._frozen = size
        tail._frozen = tail.length
        tail.blocks, self.blocks = self.blocks[count:], self.blocks[:count]
        for index, block in enumerate(tail.blocks):
            block.owner, block.index = tail, index
        tail.unstored, self.unstored = self.unstored, 0
        return tail

    def view(self, off: int, length: int) -> Buffer | None:
        """Bytes within one block; None where they are stored or were never here."""
        index, begin = divmod(off, self._block_bytes)
        if index >= len(self.blocks) or off + length > self.length:
            return None
        return self.blocks[index].view(begin, begin + length)

"""Cuts a slice in two where there is room for its begin alone: a limit or the store is full.

What is committed and what is still pending never share a slice id: other clients may replace and
delete a slice as soon as it is part of a file. Where a limit refuses a slice that is stored, its
begin is copied to a slice of its own (`cut_copied`); where the store refuses blocks, those that
follow the stored ones become a slice of their own (`cut_unstored`).

Called by `OrderedCommits`, which has one thread at a time here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from errno import EDQUOT, ENOSPC
from typing import Final

from fsdata.blocks.blocks import BlockStore
from fsdata.blocks.read_plan import Access, BlockRead, reads_of
from fsdata.files.pending_slices import PendingSlices
from fsdata.files.write_buffer import BlockState, PendingBlock, PendingSlice
from fsdata.files.write_services import WriteServices
from fsdata.format.geometry import block_count, block_length
from fsmeta.errors import Unavailable
from fsmeta.runtime import Condition
from fsmeta.types import Slice, SliceId

FULL: Final = frozenset({ENOSPC, EDQUOT})


def is_full(error: Exception | None) -> bool:
    """Whether a limit or a store that is full has refused something."""
    return isinstance(error, OSError) and error.errno in FULL


def copy_begin(blocks: BlockStore, piece: Slice, slice_id: SliceId, size: int) -> None:
    """Store the first `size` bytes of a slice under another id. Raises: OSError, StoreError."""
    step = blocks.block_bytes
    for index in range(block_count(size, step)):
        begin = piece.off + index * step
        copy = bytearray()
        length = block_length(size, index, step)
        for read in reads_of(piece, begin, length, Access.RANDOM, step):
            copy += blocks.read(read)
        blocks.put_block(slice_id, index, copy)


class Cutter:
    """Cuts the slices that a file has pending."""

    def __init__(self, side: WriteServices, cond: Condition, slices: PendingSlices) -> None:
        """`cond` guards `slices`; both are the writer's."""
        self._blocks, self._budget, self._sink = side.blocks, side.budget, side.sink
        self._cond = cond
        self._slices = slices

    def cut_copied(self, batch: Sequence[PendingSlice], room: int) -> list[PendingSlice]:
        """The first `room` bytes of slices that are stored, as whole slices.

        The caller holds the lock of commits. Raises: OSError, StoreError.
        """
        fits: list[PendingSlice] = []
        for piece in batch:
            if piece.left > room:
                if room:
                    fits += self._cut_copied(piece, room)
                break
            fits.append(piece)
            room -= piece.left
        return fits

    def _cut_copied(self, piece: PendingSlice, size: int) -> list[PendingSlice]:
        """The first `size` bytes of a slice; nothing where it was discarded meanwhile."""
        with self._new_id() as slice_id:
            copy_begin(self._blocks, piece.record(), slice_id, size)
            with self._cond:
                if self._slices.by_id.get(piece.id) is not piece:
                    return []
                head = piece.cut_copied(slice_id, size)
                self._slices.insert(self._slices.all.index(piece), head)
        return [head]

    @contextmanager
    def _new_id(self) -> Iterator[SliceId]:
        """An id for a slice, which is given up unless the slice is pending afterwards."""
        slice_id = self._sink.new_slice_id()
        try:
            yield slice_id
        finally:
            if slice_id not in self._slices.by_id:
                self._sink.give_up_slices([slice_id])

    def cut_unstored(self) -> bool:
        """Whether the stored blocks that the file goes on with are a slice of their own now.

        The caller holds the lock of commits. Raises: OSError, StoreError.
        """
        with self._cond:
            pending = self._slices.all
            piece = pending[0] if pending else None
            states = [] if piece is None else [block.state for block in piece.blocks]
        if piece is None or not _is_refused(piece, states):
            return False
        count = next(at for at, state in enumerate(states) if state is not BlockState.STORED)
        strays = [block for block in piece.blocks[count:] if block.state is BlockState.STORED]
        copies: list[bytearray] = []
        with self._new_id() as tail_id:
            try:
                for block in strays:
                    copies.append(self._read_back(piece.record(), block))
                with self._cond:
                    if [b.state for b in piece.blocks] != states or pending[:1] != [piece]:
                        return False  # the pool has begun with one once more, or all is discarded
                    tail = piece.cut_unstored(tail_id, count)
                    for block, copy in zip(strays, copies, strict=True):
                        block.restore(copy)
                    copies = []
                    self._slices.insert(1, tail)
            finally:
                self._budget.release(sum(map(len, copies)))
        self._blocks.delete_blocks(piece.id, [(b.index + count, b.fill) for b in strays])
        return True

    def _read_back(self, piece: Slice, block: PendingBlock) -> bytearray:
        """A block that is stored, as a write buffer."""
        self._budget.reserve(block.fill, _no_memory)
        try:
            length = self._blocks.length_of(piece.size, block.index)
            key = piece.id, block.index
            return bytearray(self._blocks.read(BlockRead(key, length, 0, block.fill)))
        except BaseException:
            self._budget.release(block.fill)
            raise


def _is_refused(piece: PendingSlice, states: Sequence[BlockState]) -> bool:
    """Whether the store has taken the first blocks of a slice and refused another one.

    While one is being stored nothing is decided.
    """
    if not states or states[0] is not BlockState.STORED or BlockState.BUSY in states:
        return False
    return any(is_full(block.error) for block in piece.blocks if block.state is BlockState.READY)


def unstored(pieces: Sequence[PendingSlice]) -> list[PendingBlock]:
    """The blocks of slices that are not stored."""
    return [
        block
        for piece in pieces
        if piece.unstored
        for block in piece.blocks
        if block.state is not BlockState.STORED
    ]


def _no_memory() -> None:
    raise Unavailable("no memory to read a block back")

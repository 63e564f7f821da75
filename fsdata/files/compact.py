"""Rewriting a chunk's many slices as one: the data half of compaction.

The background worker reads a chunk's slice list, calls `rewrite`, and exchanges the records in one
metadata transaction; the old slices are deleted only after a `ReadEpoch` has passed. If that
transaction fails the new slice is garbage, which the caller deletes.

The visible bytes are read and written in order, a block at a time, so memory is two blocks whatever
the chunk holds. Pure over its arguments; any thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fsdata.blocks.blocks import BlockStore
from fsdata.blocks.read_plan import Access, reads_of
from fsdata.format.geometry import reservations, runs_of
from fsmeta.errors import StoreError
from fsmeta.slices import ChunkView, Extent
from fsmeta.types import Slice, SliceId, SliceKind


def rewrite(blocks: BlockStore, slices: Sequence[Slice], new_id: SliceId) -> list[Slice]:
    """The records that show what `slices` show, with all data in the new slice `new_id`.

    Holes at both ends are left out and large inner ones become gaps between records; they read
    as zeros because the records replace the whole list. Nothing is written where all is a hole.
    What is reserved stays so.
    Raises: ObjectMissing, ObjectDamaged, Unavailable, OSError ENOSPC; then nothing is left of
    `new_id`, as far as the store can be reached.
    """
    view = ChunkView(slices)
    runs = runs_of(view.segments())
    size = sum(run[-1].end - run[0].pos for run in runs)
    try:
        _write(blocks, runs, new_id)
        blocks.sync([(new_id, size)])  # as safe as fsync(2) has made those that are deleted next
    except (OSError, StoreError):
        _delete(blocks, new_id, size)
        raise
    return [*reservations(view, runs), *_records(runs, new_id, size)]


def _write(blocks: BlockStore, runs: list[list[Extent]], new_id: SliceId) -> None:
    """Put the bytes of all runs into the new slice, one after another."""
    index, fill = 0, bytearray()
    for piece in _bytes(blocks, runs):
        while len(piece):
            part = piece[: blocks.block_bytes - len(fill)]
            fill += part
            piece = piece[len(part) :]
            if len(fill) == blocks.block_bytes:
                blocks.put_block(new_id, index, fill, rewritten=True)
                index, fill = index + 1, bytearray()
    if fill:
        blocks.put_block(new_id, index, fill, rewritten=True)


def _delete(blocks: BlockStore, new_id: SliceId, size: int) -> None:
    try:
        blocks.delete([(new_id, size)])
    except (OSError, StoreError):
        pass  # gc will: nothing refers to them


def _bytes(blocks: BlockStore, runs: list[list[Extent]]) -> Iterator[memoryview]:
    """The bytes of all runs in order."""
    for run in runs:
        for part in run:
            if part.slice is None:
                yield memoryview(bytes(part.length))
                continue
            piece = part.slice
            reads = reads_of(piece, part.off, part.length, Access.STREAM, blocks.block_bytes)
            yield from map(blocks.read, reads)


def _records(runs: list[list[Extent]], new_id: SliceId, size: int) -> list[Slice]:
    """One record a run, in the order in which the new slice has them."""
    records: list[Slice] = []
    off = 0
    for run in runs:
        pos, length = run[0].pos, run[-1].end - run[0].pos
        records.append(Slice(pos, new_id, size, off, length, SliceKind.BLOCKS))
        off += length
    return records

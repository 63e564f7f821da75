"""Reads of a block of a slice, for the tests of block stores."""

from __future__ import annotations

from fsdata.blocks.blocks import BlockStore
from fsdata.blocks.read_plan import Access, BlockRead
from fsmeta.types import SliceId


def read_block(
    blocks: BlockStore,
    slice_id: SliceId,
    size: int,
    block: int,
    begin: int,
    end: int,
    whole: bool = False,
    more: int = 0,
) -> memoryview:
    """Bytes `begin..end` of a block of a slice of `size` bytes, as readers of files ask for it."""
    access = Access.STREAM if whole else Access.RANDOM
    length = blocks.length_of(size, block)
    return blocks.read(BlockRead((slice_id, block), length, begin, end, access, more))


def read_packed(
    blocks: BlockStore, slice_id: SliceId, size: int, block: int, begin: int, end: int
) -> memoryview:
    """The same of a segment."""
    length = blocks.length_of(size, block)
    return blocks.read(BlockRead((slice_id, block), length, begin, end, Access.SEGMENT))


def fetch_ahead(blocks: BlockStore, slice_id: SliceId, size: int, block: int) -> None:
    """Fetch a block as the read-ahead of a stream does."""
    length = blocks.length_of(size, block)
    blocks.fetch(BlockRead((slice_id, block), length, 0, length, Access.AHEAD))

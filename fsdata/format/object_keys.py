"""The keys of blocks: a block is named by slice id, index and length. `BlockStore` uses it."""

from __future__ import annotations

from typing import NamedTuple

from fsmeta.types import SliceId

CHUNKS = "chunks"  # the first word of every key
SHARD = 1000  # slices per directory, and directories per directory above


class BlockName(NamedTuple):
    """What an object's key says."""

    slice_id: SliceId
    block: int
    length: int


def object_key(slice_id: SliceId, block: int, length: int) -> str:
    """The key of a block; `length` lets fsck check an object by its listing alone."""
    thousands = slice_id // SHARD
    return f"{CHUNKS}/{thousands // SHARD}/{thousands}/{slice_id}_{block}_{length}"


def parse_key(key: str) -> BlockName | None:
    """The block a key names, or None if it is not a key that `object_key` gives."""
    parts = key.rpartition("/")[2].split("_")
    digits = "".join(parts)
    if len(parts) != 3 or not all(parts) or not (digits.isascii() and digits.isdigit()):
        return None
    name = BlockName(SliceId(int(parts[0])), int(parts[1]), int(parts[2]))
    return name if object_key(*name) == key else None

"""Whole blocks out of the object store, into buffers that were used before where that is possible.

`ReadExecutor` calls it, one thread for a block at a time. Threading: any method from any thread.
"""

from __future__ import annotations

from fsdata.blocks.fetch_range import Usual
from fsdata.blocks.layout import BlockLayout
from fsdata.format.block_v1 import (
    Head,
    Opener,
    decode,
    decode_payload,
    head_bytes,
    head_need,
    parse_head,
)
from fsdata.objects.contract import ObjectStore
from fsdata.resources.block_cache import Block, BlockCache
from fsmeta.errors import ObjectDamaged
from fsmeta.types import FRAME_BYTES_MIN


class BlockFetch:
    """Verified blocks."""

    def __init__(
        self, objects: ObjectStore, cache: BlockCache, layout: BlockLayout, usual: Usual
    ) -> None:
        self._objects = objects
        self._cache = cache
        self._block_bytes = layout.block_bytes
        self._plain = layout.plain
        self._fills = layout.fills and layout.plain
        self._usual = usual

    def fetch(self, name: str, length: int, opener: Opener | None) -> Block:
        """A whole block. Raises: ObjectMissing, ObjectDamaged, Unavailable."""
        if length == self._block_bytes and self._fills:
            block = self._fetch_into(name, length)
        elif length == self._block_bytes and not self._plain:
            block = self._fetch_units(name, length, opener)
        else:
            block = decode(self._objects.get(name), opener)
        if len(block) != length:
            raise ObjectDamaged(f"block of {len(block)} bytes instead of {length}")
        return block

    def _fetch_units(self, name: str, length: int, opener: Opener | None) -> Block:
        """A full-size block that is packed or sealed, made in a buffer that can be used again."""
        data = self._objects.get(name)
        head = parse_head(data)
        if head.raw_bytes != length:
            raise ObjectDamaged(f"block of {head.raw_bytes} bytes instead of {length}")
        payload = memoryview(data)[head.size :]
        buffer = self._cache.take_spare() or bytearray(length)
        with memoryview(buffer) as into:
            made = decode_payload(head, payload, opener, into)
            return buffer if made.obj is buffer else made

    def _fetch_into(self, name: str, length: int) -> Block:
        """A full-size block, read straight into a buffer that can be used again later.

        Behind it is room for what another head than the expected one would push out of it. Such a
        block is copied: a cache of objects may have views of what was read.
        """
        front = bytearray(head_bytes(length, self._usual.frame_bytes))
        rest = bytearray(head_bytes(length, FRAME_BYTES_MIN) - len(front) + 1)
        buffer = self._cache.take_spare() or bytearray(length)
        with memoryview(front) as begin, memoryview(buffer) as view, memoryview(rest) as end:
            got = self._objects.get_into(name, (begin, view, end))
            if head_need(front) == len(front):
                head = parse_head(begin[:got])
                if isinstance(head, Head) and head.stored_bytes == length == got - head.size:
                    decode_payload(head, view)
                    return buffer
        data = (front + buffer + rest)[:got]
        self._usual.met(parse_head(data))
        return decode(data)

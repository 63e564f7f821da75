"""Ranges of blocks: the bytes, and the head that verifies them, in one round trip.

`ReadExecutor` calls it. A range is verified by the checksums in its object's head. Heads that are
known are kept; one that is not is fetched together with the range: in one request where that
begins near the front, else in two at once, because the place of a range is known before the head
is, where blocks are not compressed. If the head says otherwise, the range is asked for again.

Threading: any method from any thread. `_lock` is a leaf, and not held across store I/O.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from fsdata.blocks.cache_contract import Copies
from fsdata.blocks.layout import BlockLayout
from fsdata.format.block_v1 import (
    Codec,
    Head,
    Opener,
    UnitHead,
    decode_range,
    frame_range,
    head_bytes,
    head_need,
    parse_head,
)
from fsdata.format.block_v2 import UNIT_BYTES, units_front_bytes
from fsdata.objects.contract import ObjectStore
from fsdata.resources.block_cache import BlockCache, BlockKey
from fsmeta.errors import ObjectDamaged
from fsmeta.runtime import Runtime

HEAD_BYTES = 16 << 10  # a range that begins no further in is fetched together with the head
PAGES_BYTES = 32 << 10  # a reader that asks for no more than this goes through a frame in steps
HEADS_BYTES_MAX = 8 << 20  # heads kept for ranged reads: 1 KiB for each full block as it comes

_Piece: TypeAlias = tuple[int, bytes]
"""Where in the object bytes begin, and the bytes."""


class RangeRequest(NamedTuple):
    """Bytes `begin..end` of a block of `length` bytes, in the object `name`.

    What is fetched reaches to `upto`, as the next ones are wanted soon.
    """

    name: str
    key: BlockKey
    length: int
    begin: int
    end: int
    upto: int


class Usual:
    """The frames of the blocks that were met last: where a range is, is guessed from them.

    Threads may miss each other's.
    """

    __slots__ = ("frame_bytes",)

    def __init__(self, frame_bytes: int) -> None:
        self.frame_bytes = frame_bytes

    def met(self, head: Head | UnitHead) -> None:
        """The head of a block was read."""
        if isinstance(head, Head):
            self.frame_bytes = 1 << head.log2


class _Known:
    """The head of a block of which ranges were read, how many bytes, and up to where of late."""

    __slots__ = ("head", "last", "read")

    def __init__(self, head: Head | UnitHead) -> None:
        self.head = head
        self.read = 0
        self.last = -1  # threads may miss each other's


class Ranges:
    """Verified ranges of blocks that are fetched now."""

    def __init__(
        self,
        runtime: Runtime,
        objects: ObjectStore,
        cache: BlockCache,
        layout: BlockLayout,
        alone: bool,
        usual: Usual,
    ) -> None:
        """What is verified and was not asked for goes to the `cache`, soon if it is `alone`,
        because no disk has it. `usual`: what blocks have been like of late.
        """
        self._objects = objects
        self._cache = cache
        self._as_is = layout.is_as_is
        self._sealed = layout.sealer is not None
        self._alone = alone
        self._usual = usual
        self._lock = runtime.lock()
        self._heads: OrderedDict[BlockKey, _Known] = OrderedDict()  # guarded by _lock
        self._heads_bytes = 0  # guarded by _lock
        self.fetched = 0  # guarded by _lock

    def read_of(self, key: BlockKey) -> int:
        """How many bytes of a block were fetched in ranges, as far as is known."""
        with self._lock:
            known = self._heads.get(key)
            return 0 if known is None else known.read

    def forget(self, key: BlockKey) -> None:
        """A block is deleted."""
        with self._lock:
            self._drop(key)

    def fetch(self, wanted: RangeRequest, opener: Opener | None) -> memoryview | None:
        """A verified range; None where it can't be had by itself. Raises: ObjectDamaged."""
        name, key, _, begin, _, upto = wanted
        with self._lock:
            known = self._heads.get(key)
        pieces: Sequence[_Piece] = ()
        if known is None:
            pieces = self._front(wanted)
            known = self._learn(wanted, pieces[0][1])
        head = known.head
        if isinstance(head, Head) and head.codec is not Codec.NONE:
            return None
        first, skip, stop = head.span(begin, upto)
        data = _within(pieces, head.size + skip, head.size + stop)
        if data is None:
            data = memoryview(self._objects.get(name, head.size + skip, head.size + stop))
        if len(data) != stop - skip:
            raise ObjectDamaged(f"{len(data)} bytes instead of {stop - skip} at {skip}")
        verified = decode_range(head, first, data, opener)
        with self._lock:
            known.read += verified.nbytes
            self.fetched += 1
        return self._cut(wanted, known, first, verified)

    def fetch_here(
        self, wanted: RangeRequest, opener: Opener | None, copies: Copies
    ) -> memoryview | None:
        """A verified range that a cache disk has at hand; None where it has not, or not right."""
        name, key, length, begin, end, _ = wanted
        with self._lock:
            known = self._heads.get(key)
        try:
            if known is None:
                front = copies.read(name, 0, self._front_bytes(length, 0))
                if front is None:
                    return None
                known = self._learn(wanted, front)
            head = known.head
            if isinstance(head, Head) and head.codec is not Codec.NONE:
                return None
            first, skip, stop = head.span(begin, end)
            data = copies.read(name, head.size + skip, head.size + stop)
            if data is None or len(data) != stop - skip:
                return None
            verified = decode_range(head, first, data, opener)
            return self._cut(wanted, known, first, verified)
        except ObjectDamaged:
            return None

    def _cut(
        self, wanted: RangeRequest, known: _Known, first: int, verified: memoryview
    ) -> memoryview:
        """What was asked for; the rest is kept for a reader that goes, or may go, through it in
        pages.

        Where a disk has it the second page decides: to keep what is not wanted costs more memory,
        and so time, than to read a few frames of the disk twice.
        """
        _, key, _, begin, end, upto = wanted
        pages = end - begin <= PAGES_BYTES and (self._alone or begin == known.last)
        if end - begin < len(verified) and (pages or end < upto):
            self._cache.put_pieces(key, first, verified, begin, end)
        known.last = end
        return verified[begin - first : end - first]

    def _front_bytes(self, length: int, upto: int) -> int:
        """How much of a new object has its head and the first `upto` bytes of its block."""
        if self._as_is and not self._sealed:
            return head_bytes(length, self._usual.frame_bytes) + upto
        return units_front_bytes(length, upto)

    def _front(self, wanted: RangeRequest) -> Sequence[_Piece]:
        """The head of an object, and what is wanted of it, as far as its place is known."""
        name, _, length, begin, _, upto = wanted
        frame_bytes = self._usual.frame_bytes if self._as_is and not self._sealed else UNIT_BYTES
        first, last = frame_range(begin, upto, length, frame_bytes)
        if first <= HEAD_BYTES or not self._as_is:
            stop = last if first <= HEAD_BYTES else 0
            return ((0, self._objects.get(name, 0, self._front_bytes(length, stop))),)
        head, at, stop = (self._front_bytes(length, each) for each in (0, first, last))
        found = self._objects.get_ranges(name, ((0, head), (at, stop)))
        return tuple(zip((0, at), found, strict=True))

    def _learn(self, wanted: RangeRequest, front: bytes) -> _Known:
        """Remember the head that `front` begins with. Raises: ObjectDamaged."""
        need = head_need(front)
        if len(front) < need:  # stored when the volume was another kind
            front = self._objects.get(wanted.name, 0, need)
        head = parse_head(front)
        if head.raw_bytes != wanted.length:
            raise ObjectDamaged(f"block of {head.raw_bytes} bytes instead of {wanted.length}")
        self._usual.met(head)
        known = _Known(head)
        with self._lock:
            self._drop(wanted.key)  # another thread may have learnt it meanwhile
            self._heads[wanted.key] = known
            self._heads_bytes += head.size
            while self._heads_bytes > HEADS_BYTES_MAX:
                self._drop(next(iter(self._heads)))
        return known

    def _drop(self, key: BlockKey) -> None:
        """Forget a head, if it is known. The caller holds the lock."""
        known = self._heads.pop(key, None)
        if known is not None:
            self._heads_bytes -= known.head.size


def _within(pieces: Sequence[_Piece], begin: int, end: int) -> memoryview | None:
    """Bytes `begin..end` of an object, if one piece has all of them."""
    for at, data in pieces:
        if at <= begin and end <= at + len(data):
            return memoryview(data)[begin - at : end - at]
    return None

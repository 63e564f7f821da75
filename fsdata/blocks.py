"""Blocks of slices: their names, and the way to them through memory cache and object store.

Reader, writer, compaction, deletion and fsck call it. A block is named by slice id and index and is
written once, so a cached copy can never be stale. Every byte that comes from the store has passed
its CRC; wrong bytes are `ObjectDamaged` and counted, never data.

Threading: any method from any thread. One thread fetches a whole block, others that want it wait
for that fetch (single flight). No lock is held across store I/O.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from fsdata.codec import (
    Codec,
    Head,
    decode,
    decode_payload,
    decode_range,
    encode,
    frame_range,
    head_bytes,
    parse_head,
)
from fsdata.geometry import block_count, block_length
from fsdata.mem_cache import Block, BlockKey, MemCache
from fsdata.objects import ObjectStore
from fsmeta.errors import ObjectDamaged, ObjectMissing, StoreError
from fsmeta.runtime import Event, Runtime
from fsmeta.types import BLOCK_BYTES_MAX, SliceId

CHUNKS = "chunks"  # the first word of every key
SHARD = 1000  # slices per directory, and directories per directory above
WHOLE_BYTES = 256 << 10  # a block no longer than this costs as much as a range of it
HEAD_BYTES = 64 << 10  # a range that begins no further in is fetched together with the head
HEADS_MAX = 4096  # heads kept for ranged reads: 300 bytes each


class BlockName(NamedTuple):
    """What an object's key says."""

    slice_id: SliceId
    block: int
    length: int


def object_key(slice_id: SliceId, block: int, length: int) -> str:
    """The key of a block; `length` lets fsck judge an object by its listing alone."""
    thousands = slice_id // SHARD
    return f"{CHUNKS}/{thousands // SHARD}/{thousands}/{slice_id}_{block}_{length}"


def parse_key(key: str) -> BlockName | None:
    """The block a key names, or None if it is not a key that `object_key` gives."""
    parts = key.rpartition("/")[2].split("_")
    if len(parts) != 3 or not all(part.isascii() and part.isdigit() for part in parts):
        return None
    name = BlockName(SliceId(int(parts[0])), int(parts[1]), int(parts[2]))
    return name if object_key(*name) == key else None


class BlockStats(NamedTuple):
    """Counters since the start."""

    damaged: int
    missing: int
    whole: int  # blocks fetched
    ranges: int  # ranges fetched instead


class _Flight:
    """A fetch that others may wait for. `landed` exists only once somebody does."""

    __slots__ = ("error", "landed", "result")

    def __init__(self) -> None:
        self.landed: Event | None = None
        self.result: memoryview | None = None
        self.error: OSError | StoreError | None = None


class _Known:
    """The head of a block of which ranges were read, and how many bytes."""

    __slots__ = ("head", "read")

    def __init__(self, head: Head) -> None:
        self.head = head
        self.read = 0


class BlockStore:
    """Blocks by slice id and index."""

    def __init__(
        self,
        runtime: Runtime,
        objects: ObjectStore,
        cache: MemCache,
        codec: Codec = Codec.NONE,
        block_bytes: int = BLOCK_BYTES_MAX,
    ) -> None:
        self._runtime = runtime
        self._objects = objects
        self._cache = cache
        self._codec = codec
        self.block_bytes = block_bytes
        self._lock = runtime.lock()
        self._flights: dict[BlockKey, _Flight] = {}  # guarded by _lock, as all below
        self._heads: OrderedDict[BlockKey, _Known] = OrderedDict()
        self._damaged = self._missing = self._whole = self._ranges = 0

    def stats(self) -> BlockStats:
        """What was fetched, and what was found bad."""
        with self._lock:
            return BlockStats(self._damaged, self._missing, self._whole, self._ranges)

    def put_block(
        self, slice_id: SliceId, block: int, buffer: Block, reserved: bool = False
    ) -> None:
        """Store a block.

        `reserved`: the buffer is counted as a write buffer in the budget; on return it is the
        memory cache's.
        Raises: OSError ENOSPC EDQUOT, Unavailable; then the buffer is the caller's still.
        """
        key = object_key(slice_id, block, len(buffer))
        self._objects.put(key, encode((buffer,), self._codec))
        if reserved:
            self._cache.put_behind((slice_id, block), buffer)

    def take_spare(self) -> bytearray | None:
        """A used buffer of a full block for the next one, if there is any."""
        return self._cache.take_spare()

    def read(
        self,
        slice_id: SliceId,
        size: int,
        block: int,
        begin: int,
        end: int,
        whole: bool = False,
    ) -> memoryview:
        """Bytes `begin..end` of a block of a slice of `size` bytes.

        `whole`: the rest of the block will be wanted, so fetch all of it.
        Raises: ObjectMissing, ObjectDamaged, Unavailable.
        """
        key = (slice_id, block)
        view = self._cache.get(key, begin, end)
        length = block_length(size, block, self.block_bytes)
        if view is None:
            assert 0 <= begin <= end <= length, (slice_id, size, block, begin, end)
            if not (whole or length <= WHOLE_BYTES or 2 * (end - begin) >= length):
                found = self._read_range(key, length, begin, end)
                if found is not None:
                    return found
            # What one read takes as a whole the kernel's page cache has from then on.
            view = self._fetch(key, length, end - begin < length)[begin:end]
        if whole and end == length:
            self._cache.leave_behind(key)
        return view

    def fetch(self, slice_id: SliceId, size: int, block: int, wanted: Callable[[], bool]) -> None:
        """Bring a block into the memory cache, as read-ahead does. Raises: as `read`.

        `wanted` is asked when nobody else is fetching it: a reader that has come to the block
        since, and did not leave it in the cache, would have it fetched a second time.
        """
        key = (slice_id, block)
        if self._cache.has(key):
            return
        with self._lock:
            if key in self._flights or not wanted():
                return
            flight = self._flights[key] = _Flight()
        self._fly(flight, key, block_length(size, block, self.block_bytes), keep=True)

    def _fetch(self, key: BlockKey, length: int, keep: bool) -> memoryview:
        """A whole block, fetched by one thread at a time; with `keep` it is cached."""
        with self._lock:
            flight = self._flights.get(key)
            mine = flight is None
            if flight is None:
                flight = self._flights[key] = _Flight()
            elif flight.landed is None:
                flight.landed = self._runtime.event()
        return self._fly(flight, key, length, keep) if mine else _join(flight)

    def _fly(self, flight: _Flight, key: BlockKey, length: int, keep: bool) -> memoryview:
        """Fetch a block, for this thread and whoever joins."""
        try:
            if self._cache.has(key):  # another flight landed after the caller had looked
                flight.result = self._cache.get(key, 0, length)
                if flight.result is not None:
                    return flight.result
            block = self._fetch_now(key, length)
            # A view before the cache owns the buffer, or it could be used again under us.
            flight.result = memoryview(block)
            if keep:
                self._cache.put(key, block)
            else:
                self._cache.pass_by(block)
            return flight.result
        except (OSError, StoreError) as error:
            flight.error = error
            raise
        finally:
            with self._lock:
                del self._flights[key]
            if flight.landed is not None:
                flight.landed.set()

    def _fetch_now(self, key: BlockKey, length: int) -> Block:
        """A whole block from the store, verified."""
        name = object_key(*key, length)
        with self._judging(name):
            if length == self.block_bytes and self._codec is Codec.NONE:
                block = self._fetch_into(name, length)
            else:
                block = decode(self._objects.get(name))
            if len(block) != length:
                raise ObjectDamaged(f"block of {len(block)} bytes instead of {length}")
        with self._lock:
            self._whole += 1
        return block

    def _fetch_into(self, name: str, length: int) -> Block:
        """A full-size block, read straight into a buffer that can be used again later."""
        front = bytearray(head_bytes(length))
        buffer = self._cache.take_spare() or bytearray(length)
        with memoryview(front) as head_view, memoryview(buffer) as view:
            got = self._objects.get_into(name, (head_view, view))
            head = parse_head(head_view[:got])
            if head.stored_bytes == length:
                decode_payload(head, view[: max(0, got - len(front))])
                return buffer
        return decode((front + buffer)[:got])  # compressed, though new blocks are not

    def _read_range(self, key: BlockKey, length: int, begin: int, end: int) -> memoryview | None:
        """A verified range; None where the whole block is the better (or only) thing to fetch."""
        name = object_key(*key, length)
        with self._lock:
            known = self._heads.get(key)
            if key in self._flights or (known is not None and 2 * known.read >= length):
                return None
        first, last = frame_range(begin, end, length)
        with self._judging(name):
            if known is None and first <= HEAD_BYTES:
                front = self._objects.get(name, 0, head_bytes(length) + last)
                known = self._learn(key, length, front)
                data = memoryview(front)[known.head.size + first :]
            else:
                if known is None:
                    front = self._objects.get(name, 0, head_bytes(length))
                    known = self._learn(key, length, front)
                skip = known.head.size
                data = memoryview(self._objects.get(name, skip + first, skip + last))
            if known.head.codec is not Codec.NONE:
                return None
            if len(data) != last - first:
                raise ObjectDamaged(f"{len(data)} bytes instead of {last - first} at {first}")
            verified = decode_range(known.head, first, data)
        with self._lock:
            known.read += last - first
            self._ranges += 1
        return verified[begin - first : end - first]

    def _learn(self, key: BlockKey, length: int, front: bytes) -> _Known:
        """Remember the head that `front` begins with."""
        head = parse_head(front)
        if head.raw_bytes != length:
            raise ObjectDamaged(f"block of {head.raw_bytes} bytes instead of {length}")
        known = _Known(head)
        with self._lock:
            self._heads[key] = known
            if len(self._heads) > HEADS_MAX:
                self._heads.popitem(last=False)
        return known

    @contextmanager
    def _judging(self, name: str) -> Iterator[None]:
        """Count errors that say the block `name` is bad."""
        try:
            yield
        except ObjectMissing:
            with self._lock:
                self._missing += 1
            raise
        except ObjectDamaged as error:
            with self._lock:
                self._damaged += 1
            raise ObjectDamaged(f"object {name}: {error}") from error

    def delete_slice(self, slice_id: SliceId, size: int) -> None:
        """Remove every block of a slice; blocks that are gone already are fine.

        Raises: Unavailable; then call it again.
        """
        for block in range(block_count(size, self.block_bytes)):
            self._cache.drop((slice_id, block))
            with self._lock:
                self._heads.pop((slice_id, block), None)
            length = block_length(size, block, self.block_bytes)
            self._objects.delete(object_key(slice_id, block, length))

    def sync(self, slices: Iterable[tuple[SliceId, int]]) -> None:
        """Make the blocks of slices (id, size) survive a loss of power. Raises: Unavailable."""
        self._objects.sync(
            object_key(slice_id, block, block_length(size, block, self.block_bytes))
            for slice_id, size in slices
            for block in range(block_count(size, self.block_bytes))
        )


def _join(flight: _Flight) -> memoryview:
    """What another thread's fetch brings."""
    assert flight.landed is not None, "made before the lock was released"
    flight.landed.wait()
    if flight.error is not None:
        raise flight.error
    assert flight.result is not None, "the fetching thread ended without a word"
    return flight.result

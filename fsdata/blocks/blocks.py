"""Blocks of slices: their names, and the way to them through memory cache and object store.

Reader, writer, compaction, deletion and fsck call it. A block is named by slice id and index and is
written once, so a cached copy can never be stale. Every byte that comes from the store has passed
its CRC; wrong bytes are `ObjectDamaged` and counted, never data.

Threading: any method from any thread. One thread fetches a whole block, others that want it wait
for that fetch (single flight). No lock is held across store I/O.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from fsdata.blocks.cache_contract import Copies
from fsdata.blocks.fetch_block import WHOLE_BYTES, BlockFetch
from fsdata.blocks.fetch_range import RangeRequest, Ranges, Usual
from fsdata.blocks.single_flight import SingleFlight, join
from fsdata.format.block_v1 import Codec, Opener, decode, encode
from fsdata.format.geometry import block_count, block_length
from fsdata.format.object_keys import object_key
from fsdata.objects.contract import ObjectStore
from fsdata.resources.block_cache import Block, BlockCache, BlockKey
from fsmeta.errors import ObjectDamaged, ObjectMissing, StoreError
from fsmeta.runtime import Runtime
from fsmeta.types import BLOCK_BYTES_MAX, FRAME_BYTES, SliceId

if TYPE_CHECKING:
    from fsdata.format.encryption import Sealer

log = logging.getLogger(__name__)

T = TypeVar("T")

STEP_BYTES = 512 << 10  # who streams in smaller steps is served faster from memory than from files
FETCHED_MAX = 4096  # blocks of segments that are remembered as fetched: 200 bytes each


class BlockStats(NamedTuple):
    """Counters since the start."""

    damaged: int
    missing: int
    whole: int  # blocks fetched
    ranges: int  # ranges fetched instead
    repeated: int  # fetches that brought damage and were made once more


class BlockStore:
    """Blocks by slice id and index."""

    def __init__(
        self,
        runtime: Runtime,
        objects: ObjectStore,
        cache: BlockCache,
        codec: Codec = Codec.NONE,
        block_bytes: int = BLOCK_BYTES_MAX,
        sealer: Sealer | None = None,
        copies: Copies | None = None,
        fills: bool = True,
        frame_bytes: Callable[[], int] = lambda: FRAME_BYTES,
    ) -> None:
        """`copies`: where some of what `objects` answers comes from; `fills`: it spares a copy to
        let `objects` fill buffers of ours; `frame_bytes`: those of blocks that are put now.
        """
        self._runtime = runtime
        self._objects = objects
        self._copies = copies
        self._cache = cache
        self._codec = codec
        self._sealer = sealer
        self.plain = codec is Codec.NONE and sealer is None  # blocks are stored as they are
        self.block_bytes = block_bytes
        self._frame_bytes = frame_bytes
        self.let_through: Callable[[str], None] = _nobody  # told of objects that must not be staged
        self.on_range: Callable[[SliceId, int, int], None] = _ignore_range  # id, size, block
        self._lock = runtime.lock()
        self._flights: dict[BlockKey, SingleFlight] = {}  # guarded by _lock, as all below
        self._fetched: OrderedDict[BlockKey, None] = OrderedDict()  # see `read_packed`
        self._damaged = self._missing = self._whole = self._repeated = 0
        usual = Usual(frame_bytes())
        self._ranges = Ranges(
            runtime,
            objects,
            cache,
            as_is=codec is Codec.NONE,
            sealed=sealer is not None,
            alone=copies is None,
            usual=usual,
        )
        self._wholes = BlockFetch(objects, cache, block_bytes, self.plain, fills, usual)

    def stats(self) -> BlockStats:
        """What was fetched, and what was found bad."""
        with self._lock:
            numbers = self._damaged, self._missing, self._whole, self._ranges.fetched
            return BlockStats(*numbers, self._repeated)

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
        metadata that change it are not held back by anybody.
        Raises: OSError ENOSPC EDQUOT, Unavailable; then the buffer is the caller's still.
        """
        key = object_key(slice_id, block, len(buffer))
        lock = None if self._sealer is None else self._sealer.fresh(slice_id, block)
        if rewritten:
            self.let_through(key)
        self._objects.put(key, encode((buffer,), self._codec, lock, self._frame_bytes()))
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
        more: int = 0,
    ) -> memoryview:
        """Bytes `begin..end` of a block of a slice of `size` bytes.

        `whole`: the rest of the block will be wanted, so fetch all of it; `more`: so many bytes
        behind `end` will be, so fetch them as well, where the block is not fetched whole.
        Raises: ObjectMissing, ObjectDamaged, Unavailable.
        """
        key = (slice_id, block)
        view = self._cache.get(key, begin, end)
        length = block_length(size, block, self.block_bytes)
        if view is None:
            assert 0 <= begin <= end <= length, (slice_id, size, block, begin, end)
            found = self._in_part(key, size, length, begin, end, whole, more)
            if found is not None:
                return found
            # What one read takes as a whole the kernel's page cache has from then on.
            view = self._fetch(key, length, end - begin < length)[begin:end]
        if whole and end == length:
            self._cache.leave_behind(key)
        return view

    def _in_part(
        self, key: BlockKey, size: int, length: int, begin: int, end: int, whole: bool, more: int
    ) -> memoryview | None:
        """A range by itself, looked for once in each place; None where the block is to be had."""
        if length <= WHOLE_BYTES:
            return None
        if not whole and 2 * (end - begin) < length:
            found = self._cache.get_piece(key, begin, end)
            if found is None:
                found = self._read_range(key, length, begin, end, more)
                if found is not None:
                    self.on_range(key[0], size, key[1])
            if found is not None:
                return found
        elif whole and end - begin < STEP_BYTES:
            return None
        return self._here(key, length, begin, end)

    def read_packed(
        self, slice_id: SliceId, size: int, block: int, begin: int, end: int
    ) -> memoryview:
        """As `read`, of a block of a segment: its neighbours will be wanted as well.

        So the whole block is fetched and kept, once. Where it was lost since and there is no disk
        to keep it, more is read than memory holds, and a range is all that is fetched.
        """
        key = (slice_id, block)
        view = self._cache.get(key, begin, end)
        if view is not None:
            return view
        length = block_length(size, block, self.block_bytes)
        assert 0 <= begin <= end <= length, (slice_id, size, block, begin, end)
        found = self._here(key, length, begin, end)
        if found is not None:
            return found
        name = object_key(*key, length)
        here = self._copies is not None and self._copies.has(name, begin)
        if here or (key in self._fetched and not self._keeps(name)):
            found = self._part(name, key, length, begin, end)
            if found is not None:
                return found
        view = self._fetch(key, length, keep=True)[begin:end]
        with self._lock:
            self._fetched[key] = None
            if len(self._fetched) > FETCHED_MAX:
                self._fetched.popitem(last=False)
        return view

    def fetch(self, slice_id: SliceId, size: int, block: int, wanted: Callable[[], bool]) -> None:
        """Bring a block to where reads find it soon, as read-ahead does. Raises: as `read`.

        `wanted` is asked when nobody else is fetching it: a reader that has come to the block
        since, and did not leave it in the cache, would have it fetched a second time.
        """
        key = (slice_id, block)
        length = block_length(size, block, self.block_bytes)
        if self._cache.has(key):
            return
        copies = self._copies if length > WHOLE_BYTES else None
        if copies is not None and copies.is_near(object_key(*key, length)):
            return
        with self._lock:
            if key in self._flights or not wanted():
                return
            flight = self._flights[key] = SingleFlight()
        self._fly(flight, key, length, keep=True)

    def bring(self, slice_id: SliceId, size: int, block: int) -> bool:
        """Have a block in the memory cache, if there is room for it. Raises: as `read`."""
        key = (slice_id, block)
        if not self._cache.has(key):
            self._fetch(key, block_length(size, block, self.block_bytes), keep=True)
        return self._cache.has(key)

    def lacks(self, slice_id: SliceId, block: int, size: int) -> bool | None:
        """Where a block that is fetched now would be found later: in memory, else on its disk.

        None: it is there already.
        """
        key = (slice_id, block)
        if self._cache.has(key):
            return None
        if self._copies is None:
            return True
        length = block_length(size, block, self.block_bytes)
        on_disk = self._copies.lacks(object_key(*key, length), length)
        return None if on_disk is None else not on_disk

    def bring_aside(self, slice_id: SliceId, block: int, size: int, keep: bool) -> None:
        """Fetch a block unless somebody does; with `keep` to memory. Raises: as `read`."""
        key = (slice_id, block)
        with self._lock:
            if key in self._flights:
                return
            flight = self._flights[key] = SingleFlight(aside=True)
        self._fly(flight, key, block_length(size, block, self.block_bytes), keep)

    def fetch_part(
        self,
        slice_id: SliceId,
        size: int,
        block: int,
        part: tuple[int, int],
        wanted: Callable[[], bool],
    ) -> None:
        """Bring a part of a block where a read will find it, if there is such a place.

        Raises: as `read`.
        """
        key = (slice_id, block)
        length = block_length(size, block, self.block_bytes)
        begin, end = part
        if length <= WHOLE_BYTES or 2 * (end - begin) >= length:
            self.fetch(slice_id, size, block, wanted)
        elif wanted() and self._keeps(object_key(*key, length)) and not self._cache.has(key):
            self._read_range(key, length, begin, end, 0)

    def _fetch(self, key: BlockKey, length: int, keep: bool) -> memoryview:
        """A whole block, fetched by one thread at a time; with `keep` it is cached."""
        with self._lock:
            flight = self._flights.get(key)
            mine = flight is None
            if flight is None:
                flight = self._flights[key] = SingleFlight()
            elif flight.landed is None:
                flight.landed = self._runtime.event()
        return self._fly(flight, key, length, keep) if mine else join(flight)

    def _fly(self, flight: SingleFlight, key: BlockKey, length: int, keep: bool) -> memoryview:
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

    def opener(self, slice_id: SliceId, block: int) -> Opener | None:
        """What opens a block that is encrypted; None where the volume is not."""
        return None if self._sealer is None else partial(self._sealer.cipher, slice_id, block)

    def _fetch_now(self, key: BlockKey, length: int) -> Block:
        """A whole block from the store, verified."""
        name = object_key(*key, length)
        fetch = partial(self._wholes.fetch, name, length, self.opener(*key))
        block = self._judged(name, key, fetch)
        with self._lock:
            self._whole += 1
        return block

    def _read_range(
        self, key: BlockKey, length: int, begin: int, end: int, more: int
    ) -> memoryview | None:
        """A verified range; None where the whole block is the better (or only) thing to fetch."""
        name = object_key(*key, length)
        with self._lock:
            flight = self._flights.get(key)
        flies = flight is not None and not flight.aside
        if flies or (2 * self._ranges.read_of(key) >= length and not self._keeps(name)):
            return None
        return self._part(name, key, length, begin, end, more)

    def _here(self, key: BlockKey, length: int, begin: int, end: int) -> memoryview | None:
        """A verified range of a block that is on a cache disk, if the kernel has its pages: then it
        need not be in our memory, too.
        """
        if self._copies is None:
            return None
        wanted = RangeRequest(object_key(*key, length), key, length, begin, end, end)
        return self._ranges.fetch_here(wanted, self.opener(*key), self._copies)

    def _part(
        self, name: str, key: BlockKey, length: int, begin: int, end: int, more: int = 0
    ) -> memoryview | None:
        """A verified range from the store; None where it can't be had by itself."""
        wanted = RangeRequest(name, key, length, begin, end, min(length, end + more))
        return self._judged(name, key, partial(self._ranges.fetch, wanted, self.opener(*key)))

    def _keeps(self, name: str) -> bool:
        """Whether ranges are kept somewhere: then none is fetched twice, nor with the block."""
        return self._copies is not None and self._copies.keeps(name)

    def _judged(self, name: str, key: BlockKey, fetch: Callable[[], T]) -> T:
        """What `fetch` brings of the block `name`. Damage may have happened on the way, or the
        object was put once more, sealed with another salt, since its head was read: the head is
        forgotten, and all is asked for once more.
        """
        try:
            try:
                return fetch()
            except ObjectDamaged as error:
                self._ranges.forget(key)
                return self._once_more(name, fetch, error)
        except ObjectMissing:
            self._count_missing()
            raise
        except ObjectDamaged as error:
            raise self._count_damaged(name, error) from error

    def counted(self, name: str, fetch: Callable[[], T]) -> T:
        """What `fetch` brings of the block `name`; only what says that it is bad is counted."""
        try:
            return fetch()
        except ObjectMissing:
            self._count_missing()
            raise
        except ObjectDamaged as error:
            raise self._count_damaged(name, error) from error

    def _count_missing(self) -> None:
        with self._lock:
            self._missing += 1

    def _count_damaged(self, name: str, error: ObjectDamaged) -> ObjectDamaged:
        with self._lock:
            self._damaged += 1
        return ObjectDamaged(f"object {name}: {error}")

    def _once_more(self, name: str, fetch: Callable[[], T], error: ObjectDamaged) -> T:
        """`fetch` again what has arrived damaged."""
        log.info("object %s has arrived damaged, asking once more: %s", name, error)
        with self._lock:
            self._repeated += 1
        if self._copies is None:
            return fetch()
        self._copies.suspect(name)
        right = False
        try:
            found = fetch()
            right = True
            return found
        finally:
            self._copies.settle(name, right)

    def delete(self, slices: Iterable[tuple[SliceId, int]]) -> None:
        """Remove every block of slices (id, size); blocks that are gone already are fine.

        Raises: Unavailable; then call it again.
        """
        names = self._names(slices)
        for key in names:
            self._cache.drop(key)
            self._ranges.forget(key)
        self._objects.delete(*names.values())

    def delete_blocks(self, slice_id: SliceId, blocks: Iterable[tuple[int, int]]) -> None:
        """Remove some blocks (index, length) of a slice. Raises: Unavailable."""
        names = {(slice_id, block): object_key(slice_id, block, size) for block, size in blocks}
        for key in names:
            self._cache.drop(key)
            self._ranges.forget(key)
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
            log.warning("%d blocks are stored anew, one could not be synced: %s", len(names), error)
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


def _nobody(_: str) -> None:
    """Nothing is staged."""


def _ignore_range(_id: SliceId, _size: int, _block: int) -> None:
    """Nothing is fetched but what is asked for."""

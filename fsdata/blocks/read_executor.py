"""Carries out the plans of reads: bytes from disks and the object store, each verified.

`BlockStore` calls it for readers and read-ahead. Wrong bytes are asked for once more, then they are
`ObjectDamaged` and counted, never data.

Threading: any method from any thread. One thread fetches a whole block, other threads that want it
wait for that fetch (single flight). No lock is held across store I/O.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple, TypeVar

from fsdata.blocks.cache_contract import Copies
from fsdata.blocks.fetch_block import BlockFetch
from fsdata.blocks.fetch_range import RangeRequest, Ranges, Usual
from fsdata.blocks.layout import BlockLayout
from fsdata.blocks.read_plan import (
    DISK,
    PIECE,
    RANGE,
    SEGMENT,
    BlockRead,
    ReadStep,
    Residency,
    Sharing,
    Source,
    plan,
)
from fsdata.blocks.single_flight import SingleFlight
from fsdata.format.block_v1 import Opener
from fsdata.format.object_keys import object_key
from fsdata.objects.contract import ObjectStore
from fsdata.resources.block_cache import Block, BlockCache, BlockKey
from fsmeta.errors import ObjectDamaged, ObjectMissing
from fsmeta.runtime import Runtime

log = logging.getLogger(__name__)

T = TypeVar("T")

FETCHED_MAX: Final = 4096  # blocks of segments that are remembered as fetched: 200 bytes each


class BlockStats(NamedTuple):
    """Counters since the start."""

    damaged: int
    missing: int
    whole: int  # blocks fetched
    ranges: int  # ranges fetched instead
    repeated: int  # fetches that brought damage and were made once more


class ReadExecutor:
    """Reads of blocks that the memory cache does not have. It is the `Residency` of their plans."""

    def __init__(
        self,
        runtime: Runtime,
        objects: ObjectStore,
        cache: BlockCache,
        layout: BlockLayout,
        copies: Copies | None,
    ) -> None:
        """`copies`: where some of what `objects` answers comes from."""
        self.has_disks = copies is not None
        self._copies = copies
        self._cache = cache
        self._layout = layout
        self._flights = SingleFlight[BlockKey](runtime)
        self._lock = runtime.lock()
        self._fetched: OrderedDict[BlockKey, None] = OrderedDict()  # guarded by _lock, as all below
        self._damaged = self._missing = self._whole = self._repeated = 0
        usual = Usual(layout.frame_bytes())
        alone = copies is None
        self._ranges = Ranges(runtime, objects, cache, layout, alone, usual)
        self._wholes = BlockFetch(objects, cache, layout, usual)

    def stats(self) -> BlockStats:
        """What was fetched, and what was found bad."""
        with self._lock:
            numbers = self._damaged, self._missing, self._whole, self._ranges.fetched
            return BlockStats(*numbers, self._repeated)

    # --- carrying out ----------------------------------------------------------------------------

    def read(self, read: BlockRead) -> tuple[memoryview, Source]:
        """The bytes of a read that the memory cache has no block for, and where they were.

        Raises: ObjectMissing, ObjectDamaged, Unavailable.
        """
        key, _, begin, end, _, _ = read
        for step in plan(read, self):
            source = step.source
            if source is RANGE:
                found = self._range(read, step)
            elif source is PIECE:
                found = self._cache.get_piece(key, begin, end)
            elif source is DISK:
                found = self._near(read)
            else:
                found = self._joined(read, step)[begin:end]
            if found is not None:
                return found, source
        raise AssertionError(f"no step of the plan brings bytes: {read}")

    def fetch(self, read: BlockRead, wanted: Callable[[], bool]) -> None:
        """Have bytes where readers will find them, if their plan says so. Raises: as `read`.

        `wanted` is asked when no other thread is fetching the block: if a reader has read it since
        and did not leave it in the cache, it would be fetched a second time.
        """
        for step in plan(read, self):
            if step.source is RANGE:
                if wanted():
                    self._range(read, step)
            elif step.sharing is Sharing.JOIN:
                self._joined(read, step)
            else:
                make = partial(self._brought, read, step.keep)
                aside = step.sharing is Sharing.ASIDE
                self._flights.fetch_alone(read.key, make, wanted, aside)

    def _near(self, read: BlockRead) -> memoryview | None:
        """A verified range that a cache disk has at hand."""
        assert self._copies is not None, "planned without a disk"
        return self._ranges.fetch_here(_request(read, read.end), self._opener(read), self._copies)

    def _range(self, read: BlockRead, step: ReadStep) -> memoryview | None:
        """A verified range from the store; None where it can't be had by itself."""
        request = _request(read, step.end)
        fetch = partial(self._ranges.fetch, request, self._opener(read))
        return self._judged(request.name, read.key, fetch)

    def _joined(self, read: BlockRead, step: ReadStep) -> memoryview:
        """A whole block, fetched by one thread at a time."""
        found = self._flights.fetch(read.key, partial(self._brought, read, step.keep))
        if read.access is SEGMENT:
            self._remember(read.key)
        return found

    def _brought(self, read: BlockRead, keep: bool) -> memoryview:
        """A whole block, verified; with `keep` it is cached."""
        key = read.key
        if self._cache.has(key):  # another flight landed after the caller had looked
            found = self._cache.get(key, 0, read.length)
            if found is not None:
                return found
        block = self._whole_block(read)
        # A view before the cache owns the buffer, or it could be used again under us.
        view = memoryview(block)
        if keep:
            self._cache.put(key, block)
        else:
            self._cache.pass_by(block)
        return view

    def _whole_block(self, read: BlockRead) -> Block:
        """A whole block from the store, verified."""
        name = _name(read)
        fetch = partial(self._wholes.fetch, name, read.length, self._opener(read))
        block = self._judged(name, read.key, fetch)
        with self._lock:
            self._whole += 1
        return block

    def _opener(self, read: BlockRead) -> Opener | None:
        return self._layout.opener(*read.key)

    def _remember(self, key: BlockKey) -> None:
        """A block of a segment was fetched whole."""
        with self._lock:
            self._fetched[key] = None
            if len(self._fetched) > FETCHED_MAX:
                self._fetched.popitem(last=False)

    def forget(self, key: BlockKey) -> None:
        """A block is deleted."""
        self._cache.drop(key)
        self._ranges.forget(key)

    # --- residency -------------------------------------------------------------------------------

    def in_memory(self, read: BlockRead) -> bool:
        return self._cache.has(read.key)

    def near(self, read: BlockRead) -> bool:
        return self._copies is not None and self._copies.is_near(_name(read))

    def begins_on_disk(self, read: BlockRead) -> bool:
        return self._copies is not None and self._copies.has(_name(read), read.begin)

    def keeps_ranges(self, read: BlockRead) -> bool:
        return self._copies is not None and self._copies.keeps(_name(read))

    def keeps_block(self, read: BlockRead) -> bool | None:
        return False if self._copies is None else self._copies.lacks(_name(read), read.length)

    def is_fetched(self, read: BlockRead) -> bool:
        return self._flights.is_awaited(read.key)

    def ranged_bytes(self, read: BlockRead) -> int:
        return self._ranges.read_of(read.key)

    def was_fetched(self, read: BlockRead) -> bool:
        return read.key in self._fetched

    # --- damage ----------------------------------------------------------------------------------

    def counted(self, name: str, fetch: Callable[[], T]) -> T:
        """What `fetch` brings of the block `name`; only what says that it is bad is counted."""
        try:
            return fetch()
        except ObjectMissing:
            with self._lock:
                self._missing += 1
            raise
        except ObjectDamaged as error:
            with self._lock:
                self._damaged += 1
            raise ObjectDamaged(f"object {name}: {error}") from error

    def _judged(self, name: str, key: BlockKey, fetch: Callable[[], T]) -> T:
        """What `fetch` brings of the block `name`. Damage may have happened on the way, or the
        object was put once more, sealed with another salt, since its head was read: the head is
        forgotten, and all is asked for once more.
        """
        return self.counted(name, partial(self._repeated_once, name, key, fetch))

    def _repeated_once(self, name: str, key: BlockKey, fetch: Callable[[], T]) -> T:
        try:
            return fetch()
        except ObjectDamaged as error:
            log.info("object %s has arrived damaged, asking once more: %s", name, error)
        self._ranges.forget(key)
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


def _name(read: BlockRead) -> str:
    return object_key(*read.key, read.length)


def _request(read: BlockRead, upto: int) -> RangeRequest:
    key, length, begin, end, _, _ = read
    return RangeRequest(_name(read), key, length, begin, end, upto)


def _conforms(executor: ReadExecutor) -> Residency:
    return executor

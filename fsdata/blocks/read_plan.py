"""The plan of a read: which bytes of which blocks, from where, and what is kept of them.

`reads_of` and `range_reads` say which blocks a range of a file is in. `plan` says of one of these
reads from where its bytes come: the steps in the order in which they are tried, until one of them
brings bytes. All readers and all read-ahead follow it, and `ReadExecutor` carries it out.

Pure functions. A plan is a generator: what a step depends on is looked up when the steps before it
have brought nothing, so a read looks at no disk that it does not need.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum, auto
from typing import Final, NamedTuple, Protocol

from fsdata.format.geometry import block_ranges
from fsdata.resources.block_cache import BlockKey
from fsmeta.slices import Extent
from fsmeta.types import Slice, SliceKind

WHOLE_BYTES: Final = 256 << 10  # a block no longer than this costs as much as a range of it
STEP_BYTES: Final = 512 << 10  # for streams in smaller steps memory is faster than files


class Access(Enum):
    """For what a block is read. The first three have a reader that waits for bytes."""

    RANDOM = auto()  # little more than what is asked for will be wanted
    STREAM = auto()  # the rest of the block will be wanted, in order
    SEGMENT = auto()  # its neighbours will be wanted, in any order
    AHEAD = auto()  # a stream will come to the block
    STRIDE = auto()  # a reader will come to this range of the block
    WARM = auto()  # the user wants the block in memory
    PROMOTE = auto()  # a range was read: the rest goes where there is room


class BlockRead(NamedTuple):
    """Bytes `begin..end` of a block of `length` bytes."""

    key: BlockKey
    length: int
    begin: int
    end: int
    access: Access = Access.RANDOM
    more: int = 0  # bytes behind `end` that will be wanted soon


class Source(Enum):
    """Where bytes come from, behind the blocks in memory."""

    PIECE = auto()  # what earlier ranges have left in memory
    DISK = auto()  # a cache disk, if the kernel has its pages: then memory need not have them too
    RANGE = auto()  # the object store, through the cache disks: a range of the object
    BLOCK = auto()  # the same: the whole object


# The members as names: Python 3.11 takes 0.2 µs to look one up, much for a read from memory.
RANDOM, STREAM, SEGMENT, AHEAD, STRIDE, WARM, PROMOTE = Access
PIECE, DISK, RANGE, BLOCK = Source
PACKED: Final = SliceKind.SEGMENT


class Sharing(Enum):
    """What becomes of a fetch of a block that another thread fetches already."""

    JOIN = auto()  # wait for the other thread
    LEAVE = auto()  # the other fetch is enough
    ASIDE = auto()  # the same; readers of no more than a range do not wait for this fetch


class ReadStep(NamedTuple):
    """Bytes `begin..end` of a block, at least, from `source`."""

    source: Source
    begin: int
    end: int
    keep: bool = False  # the block stays in the memory cache
    sharing: Sharing = Sharing.JOIN


class Residency(Protocol):
    """What is known of the block of a read."""

    @property
    def has_disks(self) -> bool:
        """Whether there are cache disks."""

    def in_memory(self, read: BlockRead) -> bool:
        """Whether the memory cache has the block."""

    def near(self, read: BlockRead) -> bool:
        """Whether a cache disk has the block, and the kernel its pages."""

    def begins_on_disk(self, read: BlockRead) -> bool:
        """Whether a cache disk has the first byte of the read."""

    def keeps_ranges(self, read: BlockRead) -> bool:
        """Whether a range that is fetched now is found on a disk later."""

    def keeps_block(self, read: BlockRead) -> bool | None:
        """Whether a block that is fetched now is found on a disk later; None: it is there."""

    def is_fetched(self, read: BlockRead) -> bool:
        """Whether another thread fetches the block, for readers to wait."""

    def ranged_bytes(self, read: BlockRead) -> int:
        """How much of the block was fetched in ranges."""

    def was_fetched(self, read: BlockRead) -> bool:
        """Whether the block was fetched for SEGMENT before."""


def reads_of(
    piece: Slice, off: int, size: int, access: Access, block_bytes: int
) -> Iterator[BlockRead]:
    """The reads that bring bytes `off..off + size` of a slice."""
    for block, begin, end, length in block_ranges(piece, off, size, block_bytes):
        yield BlockRead((piece.id, block), length, begin, end, access)


def range_reads(
    shown: Sequence[Extent], pos: int, size: int, access: Access, more: int, block_bytes: int
) -> Iterator[BlockRead | int]:
    """The reads that bring `size` bytes at `pos` of a chunk, in order; a number: so many zeros.

    `shown` has no gaps, and begins at `pos` or before. `more` bytes behind the range will be wanted
    soon, as far as its last slice has them.
    """
    end = pos + size
    # Read-ahead is for the stream that it was asked for, in segments too.
    in_segments = SEGMENT if access is RANDOM or access is STREAM else access
    for part in shown:
        stop = min(end, part.end)
        if stop <= pos:
            continue
        piece = part.slice
        if piece is None:
            yield stop - pos
        else:
            after = min(more, part.end - stop) if stop == end else 0
            how = in_segments if piece.kind is PACKED else access
            slice_id, whole = piece.id, piece.size
            off, until = part.off + pos - part.pos, part.off + stop - part.pos
            while off < until:  # as `block_ranges`, which would be half a µs more of each read
                block, first = divmod(off, block_bytes)
                begins = off - first
                last = min(block_bytes, until - begins)
                length = min(block_bytes, whole - begins)
                yield BlockRead((slice_id, block), length, first, last, how, after)
                off = begins + last
        pos = stop
    if pos < end:
        yield end - pos


def plan(read: BlockRead, held: Residency) -> Iterator[ReadStep]:
    """From where a read gets its bytes that the memory cache has no block for.

    The last step of a reader's plan always brings them. The plan of read-ahead is empty where
    nothing is to be fetched.
    """
    access = read.access
    if access is RANDOM:
        return _random(read, held)
    if access is STREAM:
        return _stream(read, held)
    if access is SEGMENT:
        return _segment(read, held)
    if access is STRIDE:
        return _stride(read, held)
    return _ahead(read, held)


def _is_small(read: BlockRead) -> bool:
    """Whether a range costs less than the block."""
    return read.length > WHOLE_BYTES and 2 * (read.end - read.begin) < read.length


def _random(read: BlockRead, held: Residency) -> Iterator[ReadStep]:
    _, length, begin, end, _, more = read
    disk = held.has_disks and length > WHOLE_BYTES
    if _is_small(read):
        yield ReadStep(PIECE, begin, end)
        half = 2 * held.ranged_bytes(read) >= length
        if not held.is_fetched(read) and (not half or held.keeps_ranges(read)):
            yield ReadStep(RANGE, begin, min(length, end + more))
            disk = False  # the disks were asked on the way to the store
    if disk:
        yield ReadStep(DISK, begin, end)
    # What one read takes as a whole the kernel's page cache has from then on.
    yield ReadStep(BLOCK, 0, length, keep=end - begin < length)


def _stream(read: BlockRead, held: Residency) -> Iterator[ReadStep]:
    _, length, begin, end, _, _ = read
    if held.has_disks and length > WHOLE_BYTES and end - begin >= STEP_BYTES:
        yield ReadStep(DISK, begin, end)
    yield ReadStep(BLOCK, 0, length, keep=end - begin < length)


def _segment(read: BlockRead, held: Residency) -> Iterator[ReadStep]:
    """The whole block is fetched and kept, once. If it was lost since and no disk keeps it, more is
    read than memory holds: then a range is all that is fetched.
    """
    _, length, begin, end, _, _ = read
    if held.has_disks:
        yield ReadStep(DISK, begin, end)
    lost = held.was_fetched(read) and not held.keeps_ranges(read)
    if lost or held.begins_on_disk(read):
        yield ReadStep(RANGE, begin, end)
    yield ReadStep(BLOCK, 0, length, keep=True)


def _stride(read: BlockRead, held: Residency) -> Iterator[ReadStep]:
    """A small range goes to the disks alone: memory has no place for it until it is read."""
    if not _is_small(read):
        yield from _ahead(read, held)
    elif held.keeps_ranges(read) and not held.in_memory(read) and not held.is_fetched(read):
        yield ReadStep(RANGE, read.begin, read.end)


def _ahead(read: BlockRead, held: Residency) -> Iterator[ReadStep]:
    """A block that no reader waits for."""
    access, keep, sharing = read.access, True, Sharing.LEAVE
    if held.in_memory(read):
        return
    if access is PROMOTE:
        on_disk = held.keeps_block(read)
        if on_disk is None:
            return
        keep, sharing = not on_disk, Sharing.ASIDE
    elif access is WARM:
        sharing = Sharing.JOIN
    elif read.length > WHOLE_BYTES and held.near(read):
        return
    yield ReadStep(BLOCK, 0, read.length, keep, sharing)

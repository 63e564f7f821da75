"""Read-ahead: one `Window` per open file finds the reader's pattern, one `Prefetcher` fetches.

Readers that go forwards, backwards or in equal strides are found; random ones fetch for themselves.
A stream is who has read STREAM_BYTES_MIN that lie together, or always goes on a little: programs
that look up a record in a mapped file read a few neighbouring pages as well, and whole blocks would
be fetched for them all (docs/design/0041).

`FileReader` asks its window what to fetch and hands blocks to the prefetcher. Everything is
bounded: the window by WINDOW_BYTES_MAX, all windows together by the budget's share for read-ahead.
A failed fetch is forgotten here: the read that needs the block will meet the error itself.

Threading: a Window belongs to its FileReader's lock; a Prefetcher may be used from any thread.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fsdata.blocks import BlockStore
from fsdata.budget import Budget
from fsdata.geometry import block_length
from fsdata.pool import WorkerPool
from fsmeta.errors import StoreError
from fsmeta.types import BLOCK_BYTES_MAX, SliceId

WINDOW_BYTES_MIN = 4 << 20  # the first step ahead: a block
WINDOW_BYTES_MAX = 16 << 20  # four blocks: hides 30 ms of latency at 500 MB/s
RUN_MIN = 2  # one read proves nothing; read-ahead begins with the second in sequence
STREAM_BYTES_MIN = 128 << 10  # that prove a stream: what the kernel asks for at a time in one
STREAM_BYTES_MAX = 1 << 20  # the same, where streams ended before what was fetched had been read
FROM_START_BYTES = 16 << 20  # who begins to read a file no longer than this reads all of it
LEAPS_MIN = 8  # near reads in a row, each behind the one before, that prove a stream with gaps
DENSE = 2  # of a stretch that is read as a stream one half at least has been asked for
FALLS_MIN = 3  # neighbours out of order come before each other twice, hardly thrice
STEPS_MIN = 3  # equal strides that prove a pattern
STRIDES_AHEAD = 4  # parts asked for ahead: as many as there are threads to fetch them
REORDER_BYTES = 1 << 20  # the kernel's own read-ahead sends neighbours out of order


class Ticket:
    """Says whether the read-ahead that was asked for is still wanted.

    Threading: written under the reader's lock, read without it.
    """

    __slots__ = ("live", "passed")

    def __init__(self, passed: int) -> None:
        self.live = True
        self.passed = passed  # where in the file the reader has come to

    def wants(self, end: int) -> bool:
        """Whether what ends at `end` of the file is still ahead of the reader."""
        return self.live and self.passed < end


class Window:
    """How far one handle reads ahead: forwards, backwards or in strides."""

    __slots__ = (
        "_asked",
        "_bytes",
        "_down",
        "_fallen",
        "_falls",
        "_last",
        "_leaps",
        "_next",
        "_proof",
        "_recent",
        "_run",
        "_size",
        "_start",
        "_steps",
        "_stream",
        "_stride",
        "_top",
        "_until",
        "_width",
        "ticket",
    )

    def __init__(self) -> None:
        self._next = 0  # where a sequential reader reads next; most begin at the start
        self._run = 0  # reads in sequence
        self._bytes = 0  # that they asked for
        self._start = self._recent = 0  # where the stretch begins that is judged, and its bytes
        self._stream = False  # whether what is read in sequence is a stream
        self._proof = STREAM_BYTES_MIN  # bytes in sequence that prove one
        self._until = 0  # asked for up to here; down to here where the reader goes backwards
        self._width = 0
        self._last = self._size = 0  # the read before
        self._leaps = 0  # reads in a row that each left out a little behind the one before
        self._falls = 0  # reads in a row that each came shortly before the one before
        self._top = self._fallen = 0  # where they began, and the bytes that they asked for
        self._down = False  # whether they are a stream
        self._stride = 0  # from the read before to this one
        self._steps = 0  # times in a row that it was the same
        self._asked = 0  # strides asked for ahead
        self.ticket = Ticket(0)

    def note(self, offset: int, size: int, length: int = 0) -> bool:
        """Take notice of a read of a file of `length` bytes; whether it is part of a stream."""
        delta = offset - self._last
        if delta == self._stride:
            self._steps += 1
            self._asked -= self._asked > 0
        else:
            self._stride, self._steps, self._asked = delta, 1, 0
        gap = delta - self._size
        self._leaps = self._leaps + (gap > 0) if 0 <= gap <= REORDER_BYTES else 0
        falls = self._fall(offset, size, delta)
        self._last, self._size = offset, size
        if falls:
            self._next, self._run = offset + size, 1
            return True
        if self._continues(offset, size):
            self._next = max(self._next, offset + size)
            self._run += 1
            self._bytes += size
            self.ticket.passed = self._next
            self._stream = self._stream or self._proved(length)
            return self._stream
        self._learn()
        self._next = offset + size
        self._run, self._bytes, self._stream = 1, size, False
        self._start, self._recent = offset, size
        if self._steps < STEPS_MIN:
            self._begin(0)
        return False

    def _fall(self, offset: int, size: int, delta: int) -> bool:
        """Whether a reader goes backwards, and has left out little."""
        if not -(size + REORDER_BYTES) <= delta < 0:
            self._falls, self._down = 0, False
            return False
        if not self._falls:
            self._top, self._fallen = self._last + self._size, self._size
        self._falls += 1
        self._fallen += size
        if DENSE * self._fallen < self._top - offset:
            self._falls, self._down = 0, False
        elif not self._down and self._falls >= FALLS_MIN and self._fallen >= self._proof:
            self._down = True
            self._begin(offset)
        return self._down

    def _continues(self, offset: int, size: int) -> bool:
        """Whether a read is near the one before, and little of what lies between was left out."""
        if not self._next - REORDER_BYTES <= offset <= self._next + REORDER_BYTES:
            return False
        start, end = min(self._start, offset), max(self._next, offset + size)
        if DENSE * (self._recent + size) < end - start and self._leaps < LEAPS_MIN:
            return False
        self._start, self._recent = start, self._recent + size
        if self._recent > DENSE * REORDER_BYTES:  # what was long ago excuses no gaps
            self._start, self._recent = end - REORDER_BYTES, REORDER_BYTES
        return True

    def _proved(self, length: int) -> bool:
        """Whether the reads in sequence are enough to call them a stream."""
        from_start = self._bytes == self._next
        if self._leaps >= LEAPS_MIN or (from_start and length <= FROM_START_BYTES):
            return True
        return self._bytes >= self._proof and (from_start or self._run >= RUN_MIN)

    def _learn(self) -> None:
        """A run has ended: one that was taken for a stream may have been too short for it."""
        if self._stream:
            if self._bytes >= 2 * BLOCK_BYTES_MAX:
                self._proof = STREAM_BYTES_MIN
            elif self._bytes < BLOCK_BYTES_MAX:
                self._proof = min(STREAM_BYTES_MAX, 2 * max(self._bytes, self._proof))

    def _begin(self, until: int) -> None:
        """What was asked for before is of no use."""
        self._until, self._width = until, 0
        self.ticket.live = False

    def advance(self, length: int) -> list[tuple[int, int]]:
        """The ranges of a file of `length` bytes to fetch now; windows double.

        Ranges are of whole blocks, if the slices are, but for strides; the block being read is not
        part of them.
        """
        if self._down:
            return self._downwards()
        if self.is_strided:
            return self._strides(length)
        if not self._stream or self._run < RUN_MIN or self._until - self._next > self._width // 2:
            return []
        begin = max(self._until, _block_up(self._next))
        if begin >= length:
            return []
        self._width = min(WINDOW_BYTES_MAX, 2 * self._width or WINDOW_BYTES_MIN)
        self._until = min(length, _block_up(self._next + self._width))
        self._revive(self._next)
        return [(begin, self._until)] if begin < self._until else []

    @property
    def is_strided(self) -> bool:
        """Whether the reader leaps from one small part to the next, always as far."""
        return self._steps >= STEPS_MIN and self._run < RUN_MIN and not self._falls

    def _revive(self, passed: int) -> None:
        if not self.ticket.live:
            self.ticket = Ticket(passed)

    def _downwards(self) -> list[tuple[int, int]]:
        """What comes before, for a reader that goes backwards."""
        if self._width and self._last - self._until > self._width // 2:
            return []
        end = min(self._until, _block_up(self._last + 1) - BLOCK_BYTES_MAX)
        self._width = min(WINDOW_BYTES_MAX, 2 * self._width or WINDOW_BYTES_MIN)
        self._until = max(0, _block_up(self._last - self._width))
        self._revive(-1)
        return [(self._until, end)] if self._until < end else []

    def _strides(self, length: int) -> list[tuple[int, int]]:
        """The next parts of a reader that leaps."""
        begins = [
            self._last + step * self._stride for step in range(self._asked + 1, STRIDES_AHEAD + 1)
        ]
        self._asked = STRIDES_AHEAD
        self._revive(-1)
        return [(at, min(length, at + self._size)) for at in begins if 0 <= at < length]


def _block_up(offset: int) -> int:
    return -(-offset // BLOCK_BYTES_MAX) * BLOCK_BYTES_MAX


class Prefetcher:
    """Fetches blocks into the memory cache, and parts of them into the disk cache."""

    def __init__(self, pool: WorkerPool, budget: Budget, blocks: BlockStore) -> None:
        self._pool = pool
        self._budget = budget
        self._blocks = blocks

    def submit(
        self,
        slice_id: SliceId,
        size: int,
        block: int,
        ticket: Ticket,
        end: int,
        part: tuple[int, int] | None = None,
    ) -> bool:
        """Ask for a block of a slice of `size` bytes, unless the reader is past `end` by then.

        `part`: only so much of it is wanted. False where there is no room for it.
        """
        length = block_length(size, block, self._blocks.block_bytes)
        if part is not None:
            length = part[1] - part[0]
        if not self._budget.hold(length):
            return False
        wanted = partial(ticket.wants, end)
        fetch = partial(self._blocks.fetch, slice_id, size, block, wanted)
        if part is not None:
            fetch = partial(self._blocks.fetch_part, slice_id, size, block, part, wanted)
        self._pool.submit(partial(self._run, fetch, length))
        return True

    def _run(self, fetch: Callable[[], None], length: int) -> None:
        """The job: fetch, unless nobody wants it any more."""
        try:
            fetch()
        except (OSError, StoreError):
            pass  # the read that wants it will fetch it again and say what is wrong
        finally:
            self._budget.unhold(length)

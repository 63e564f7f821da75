"""Read-ahead: whether a file is read as a stream, and how far ahead to fetch; one per open handle.

Readers that go forwards, backwards or in equal strides are found; random ones fetch for themselves.
A reader is a stream once it has read STREAM_BYTES_MIN without gaps, or always goes on a little.
Programs that look up a record in a mapped file read a few neighbouring pages as well, and whole
blocks would be fetched for them all (docs/design/random-reads). `runs` is for those.

`FileReader` asks its window what to fetch and hands blocks to the `Prefetcher`. A window is bounded
by WINDOW_BYTES_MAX. Pure logic; a `Readahead` belongs to its reader's lock.
"""

from __future__ import annotations

from fsmeta.types import BLOCK_BYTES_MAX

WINDOW_BYTES_MIN = 4 << 20  # the first step ahead: a block
WINDOW_BYTES_MAX = 16 << 20  # four blocks: hides 30 ms of latency at 500 MB/s
RUN_MIN = 2  # one read proves nothing; read-ahead begins with the second in sequence
STREAM_BYTES_MIN = 128 << 10  # that prove a stream: what the kernel asks for at a time in one
STREAM_BYTES_MAX = 1 << 20  # the same, where streams ended before what was fetched had been read
FROM_START_BYTES = 16 << 20  # a file no longer than this is read whole if its start is read
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


class _Forward:
    """A run of reads that go forwards, and whether they are a stream."""

    __slots__ = ("asked", "begin", "leaps", "next", "proof", "reads", "recent", "stream")

    def __init__(self) -> None:
        self.next = 0  # where it reads next; most begin at the start
        self.reads = self.asked = 0  # and the bytes they asked for
        self.begin = self.recent = 0  # of the stretch that is judged, and its bytes
        self.stream = False
        self.proof = STREAM_BYTES_MIN  # bytes in sequence that prove one
        self.leaps = 0  # reads in a row that each left out a little behind the one before

    def restart(self, offset: int, size: int) -> None:
        """A run has ended: one that was taken for a stream may have been too short for it."""
        if self.stream and self.asked >= 2 * BLOCK_BYTES_MAX:
            self.proof = STREAM_BYTES_MIN
        elif self.stream and self.asked < BLOCK_BYTES_MAX:
            self.proof = min(STREAM_BYTES_MAX, 2 * max(self.asked, self.proof))
        self.next = offset + size
        self.reads, self.asked, self.stream = 1, size, False
        self.begin, self.recent = offset, size

    def goes_on(self, offset: int, size: int, length: int) -> bool:
        """Whether a read of a file of `length` bytes goes on with the run, which has it then."""
        if not self._is_near(offset, size):
            return False
        self.next = max(self.next, offset + size)
        self.reads += 1
        self.asked += size
        self.stream = self.stream or self._is_proved(length)
        return True

    def _is_near(self, offset: int, size: int) -> bool:
        """Whether a read is near the one before, and little between the two was left out."""
        if not self.next - REORDER_BYTES <= offset <= self.next + REORDER_BYTES:
            return False
        begin, end = min(self.begin, offset), max(self.next, offset + size)
        if DENSE * (self.recent + size) < end - begin and self.leaps < LEAPS_MIN:
            return False
        self.begin, self.recent = begin, self.recent + size
        if self.recent > DENSE * REORDER_BYTES:  # what was long ago excuses no gaps
            self.begin, self.recent = end - REORDER_BYTES, REORDER_BYTES
        return True

    def _is_proved(self, length: int) -> bool:
        """Whether the reads in sequence are enough to call them a stream."""
        from_start = self.asked == self.next
        if self.leaps >= LEAPS_MIN or (from_start and length <= FROM_START_BYTES):
            return True
        return self.asked >= self.proof and (from_start or self.reads >= RUN_MIN)


class _Backward:
    """Reads that each come shortly before the one before."""

    __slots__ = ("asked", "reads", "stream", "top")

    def __init__(self) -> None:
        self.reads = self.asked = 0  # and the bytes they asked for
        self.top = 0  # where they began
        self.stream = False

    def note(self, offset: int, size: int, last: int, last_size: int, proof: int) -> None:
        """Take notice of a read, and of the one before; `proof`: bytes that prove a stream."""
        if not -(size + REORDER_BYTES) <= offset - last < 0:
            self.reads, self.stream = 0, False
            return
        if not self.reads:
            self.top, self.asked = last + last_size, last_size
        self.reads += 1
        self.asked += size
        if DENSE * self.asked < self.top - offset:
            self.reads, self.stream = 0, False
        elif self.reads >= FALLS_MIN and self.asked >= proof:
            self.stream = True


class _Strides:
    """Reads that are each as far from the one before."""

    __slots__ = ("ahead", "length", "times")

    def __init__(self) -> None:
        self.length = 0  # from the read before to this one
        self.times = 0  # in a row that it was the same
        self.ahead = 0  # strides asked for ahead

    def note(self, delta: int) -> None:
        """Take notice of how far a read is from the one before."""
        if delta == self.length:
            self.times += 1
            self.ahead -= self.ahead > 0
        else:
            self.length, self.times, self.ahead = delta, 1, 0

    def next(self, last: int) -> list[int]:
        """Where to read ahead, behind the read at `last`."""
        begins = [last + step * self.length for step in range(self.ahead + 1, STRIDES_AHEAD + 1)]
        self.ahead = STRIDES_AHEAD
        return begins


class Readahead:
    """How far one handle reads ahead: forwards, backwards or in strides."""

    __slots__ = (
        "_backward",
        "_forward",
        "_last",
        "_size",
        "_strides",
        "_until",
        "_width",
        "ticket",
    )

    def __init__(self) -> None:
        self._forward = _Forward()
        self._backward = _Backward()
        self._strides = _Strides()
        self._last = self._size = 0  # the read before
        self._until = 0  # asked for up to here; down to here where the reader goes backwards
        self._width = 0
        self.ticket = Ticket(0)

    def note(self, offset: int, size: int, length: int = 0) -> bool:
        """Take notice of a read of a file of `length` bytes; whether it is part of a stream."""
        forward, backward = self._forward, self._backward
        self._strides.note(offset - self._last)
        gap = offset - self._last - self._size
        forward.leaps = forward.leaps + (gap > 0) if 0 <= gap <= REORDER_BYTES else 0
        fell = backward.stream
        backward.note(offset, size, self._last, self._size, forward.proof)
        self._last, self._size = offset, size
        if backward.stream:
            if not fell:
                self._begin(offset)
            forward.next, forward.reads = offset + size, 1
            return True
        if forward.goes_on(offset, size, length):
            self.ticket.passed = forward.next
            return forward.stream
        forward.restart(offset, size)
        if self._strides.times < STEPS_MIN:
            self._begin(0)
        return False

    def _begin(self, until: int) -> None:
        """What was asked for before is of no use."""
        self._until, self._width = until, 0
        self.ticket.live = False

    def advance(self, length: int) -> list[tuple[int, int]]:
        """The ranges of a file of `length` bytes to fetch now; windows double.

        Ranges are of whole blocks, if the slices are, but for strides; the block being read is not
        part of them.
        """
        if self._backward.stream:
            return self._downwards()
        if self.is_strided:
            self._revive(-1)
            begins = self._strides.next(self._last)
            return [(at, min(length, at + self._size)) for at in begins if 0 <= at < length]
        forward = self._forward
        if not forward.stream or forward.reads < RUN_MIN:
            return []
        if self._until - forward.next > self._width // 2:
            return []
        begin = max(self._until, _block_up(forward.next))
        if begin >= length:
            return []
        self._width = min(WINDOW_BYTES_MAX, 2 * self._width or WINDOW_BYTES_MIN)
        self._until = min(length, _block_up(forward.next + self._width))
        self._revive(forward.next)
        return [(begin, self._until)] if begin < self._until else []

    @property
    def is_strided(self) -> bool:
        """Whether the reader leaps from one small part to the next, always as far."""
        few = self._forward.reads < RUN_MIN and not self._backward.reads
        return few and self._strides.times >= STEPS_MIN

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


def _block_up(offset: int) -> int:
    return -(-offset // BLOCK_BYTES_MAX) * BLOCK_BYTES_MAX

"""Read-ahead for random reads: how much to fetch at once where a run of reads begins.

A program that looks up records in a mapped file asks for a page, then for its neighbours, one after
the other: a value of 100 KiB is 25 reads, and with a distant store each frame of it would be a
round trip. `RandomReadahead` remembers how long the runs of a handle were, and says how much of a
new one to fetch with its first page: the length of earlier runs, where shorter ones cost little.

Its waste is bounded: what was fetched because of it and not asked for later is at most
1/VAIN_SHARE of all that was asked for, and VAIN_BYTES (docs/design/random-reads).

`FileReader` asks it of each read. Pure logic; a `RandomReadahead` belongs to its reader's lock.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, deque
from typing import Final

from fsmeta.types import FRAME_BYTES_MIN

RUNS_MAX: Final = 32  # that are remembered: enough to tell one in sixteen, soon forgotten
KNOWN_MIN: Final = 8  # runs of at least that length that prove anything
OPEN_MAX: Final = 4  # that go on at a time: threads that share a handle
VAIN_SHARE: Final = 16  # of what is asked for a sixteenth may be fetched in vain
GUESSES: Final = 3  # that may be made of a run: none of them uses up all of that
VAIN_BYTES: Final = 192 << 10  # and so much before anything was asked for
LEARNING_BYTES: Final = 64 << 10  # of those, as long as no runs are known
SPARE_BYTES_MAX: Final = 1 << 20  # that may have been saved up for a time of wrong guesses
MORE_BYTES_MAX: Final = 1 << 20  # fetched at once: a longer run is a stream


class _Run:
    """Reads that each begin where the one before has ended."""

    __slots__ = ("begin", "end", "fetched")

    def __init__(self, begin: int) -> None:
        self.begin = self.end = begin
        self.fetched = begin  # up to here, with what was promised


class RandomReadahead:
    """What is known of one handle's runs."""

    __slots__ = ("_block_bytes", "_lengths", "_open", "_order", "_spare")

    def __init__(self, block_bytes: int) -> None:
        """Nothing is promised beyond a multiple of `block_bytes` of the file."""
        self._block_bytes = block_bytes
        self._open: OrderedDict[int, _Run] = OrderedDict()  # by where they go on
        self._order: deque[int] = deque()  # lengths of runs that have ended, the oldest first
        self._lengths: list[int] = []  # the same, the shortest first
        self._spare = VAIN_BYTES  # that may still be fetched in vain

    def note(self, offset: int, size: int) -> int:
        """Take notice of a read; how many bytes behind it to fetch as well, if it is fetched."""
        run = self._open.pop(offset, None) or _Run(offset)
        end = offset + size
        came_true = max(0, min(end, run.fetched) - offset)
        self._spare = min(SPARE_BYTES_MAX, self._spare + came_true + size // VAIN_SHARE)
        if end >= run.fetched:
            more = self._promise(run, offset, end)
            run.fetched = end + more
            self._spare -= more
        run.end = end
        replaced = self._open.pop(end, None)
        self._open[end] = run
        if replaced is not None:
            self._ended(replaced)
        elif len(self._open) > OPEN_MAX:
            self._ended(self._open.popitem(last=False)[1])
        return run.fetched - end

    def _ended(self, run: _Run) -> None:
        length = run.end - run.begin
        self._order.append(length)
        insort(self._lengths, length)
        if len(self._order) > RUNS_MAX:
            del self._lengths[bisect_left(self._lengths, self._order.popleft())]

    def _promise(self, run: _Run, offset: int, end: int) -> int:
        """How much behind `end` is likely to be read of a run that has come to `offset`.

        As long as nothing is known: as much as was read, from the second read in a row on.
        """
        spare = self._spare
        if len(self._lengths) < KNOWN_MIN:
            likely = 2 * (end - run.begin) if run.begin < offset else 0
            spare = self._spare - (VAIN_BYTES - LEARNING_BYTES)
        elif self._lengths[-1] > end - run.begin:
            likely = self._likely(offset - run.begin)
        else:
            return 0
        border = -(-end // self._block_bytes) * self._block_bytes
        more = min(run.begin + likely, border) - end
        return max(0, min(more, spare & -FRAME_BYTES_MIN, MORE_BYTES_MAX))

    def _likely(self, read: int) -> int:
        """How long a run becomes of which `read` bytes were read.

        The longest for which those among the known runs that were shorter would have cost no more
        than a share of all of them.
        """
        known = self._lengths[bisect_right(self._lengths, read) :]
        if len(known) < KNOWN_MIN:
            return 0
        allowed = sum(known) // (VAIN_SHARE * GUESSES)
        likely, vain = known[0], 0
        for shorter, length in enumerate(known):
            vain += shorter * (length - likely)
            if vain > allowed:
                break
            likely = length
        return likely

"""Which reader gets which sample, and in what order: arithmetic, without torch and without I/O.

An epoch has one global order of all samples, whatever the number of readers: the seed and the epoch
decide it. Rank r of n takes positions r, r + n, r + 2n, … of it, counted from where the epoch was
resumed, and its workers take blocks of those in turn: a block is a batch, so that what a rank has
consumed is a beginning of its positions at each step, however many workers it has. So each sample
is given once, ranks differ by at most one sample, and a state is one number from which any number
of ranks and workers can go on.

Shuffling goes by windows: the list is cut into windows of consecutive samples, which lie together
in the store; windows come in random order, and so do the samples in each. A reader that fetches a
window ahead reads what lies together.

Called by `slicefs/torch/data`. Threading: an `SampleOrder` is immutable.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

_KEYS_KEPT: Final = 256  # windows that readers are in
_ROUNDS: Final = 4  # of the permutation's network: enough that neighbours part


class Reader(NamedTuple):
    """One of the readers that share an epoch: a worker process of a rank."""

    rank: int = 0
    world: int = 1
    worker: int = 0
    workers: int = 1
    block: int = 1  # samples that a worker takes in a row: the batch size

    def require_valid(self) -> None:
        """Raises: ValueError."""
        inside = 0 <= self.rank < self.world and 0 <= self.worker < self.workers
        if not inside or self.block < 1:
            raise ValueError(
                f"{self}: rank and worker are below their counts, a block is not empty"
            )


def windows_of(sizes: Sequence[int], window_bytes: int) -> list[int]:
    """Where windows of about `window_bytes` begin; the number of samples comes last."""
    begins, filled = [0], 0
    for index, size in enumerate(sizes):
        if filled and filled + size > window_bytes:
            begins.append(index)
            filled = 0
        filled += max(size, 1)
    if begins[-1] != len(sizes):
        begins.append(len(sizes))
    return begins


class SampleOrder:
    """The global order of `count` samples in one epoch."""

    def __init__(
        self, count: int, seed: int = 0, epoch: int = 0, windows: Sequence[int] | None = None
    ) -> None:
        """`windows`: where they begin and end, as `windows_of` has it; None: no shuffle."""
        assert windows is None or (windows[0] == 0 and windows[-1] == count), "windows cover all"
        self.count = count
        self._key = f"{seed}/{epoch}"
        self._windows = windows
        self._begins: list[int] = []  # positions in the global order at which windows begin
        self._which: list[int] = []  # and which windows those are
        if windows is not None and count:
            self._lay(windows)

    def _lay(self, windows: Sequence[int]) -> None:
        at = 0
        for place in range(len(windows) - 1):
            which = permuted(place, len(windows) - 1, self._key)
            self._begins.append(at)
            self._which.append(which)
            at += windows[which + 1] - windows[which]

    def sample(self, position: int) -> int:
        """The sample at a position of the global order."""
        if not 0 <= position < self.count:
            raise IndexError(f"position {position} of {self.count}")
        if self._windows is None:
            return position
        place = _last_at_most(self._begins, position)
        which = self._which[place]
        begin, end = self._windows[which], self._windows[which + 1]
        return begin + permuted(position - self._begins[place], end - begin, f"{self._key}/{which}")

    def share(self, reader: Reader, done: int = 0, drop_uneven: bool = False) -> int:
        """How many samples the rank of `reader` takes of those behind the first `done`."""
        left = max(0, self.count - done)
        if drop_uneven:
            return left // reader.world
        return max(0, -(-(left - reader.rank) // reader.world))

    def positions(
        self, reader: Reader, done: int = 0, drop_uneven: bool = False, taken: int = 0
    ) -> Iterator[int]:
        """The positions that a reader takes of those behind the first `done`, but for `taken`.

        `drop_uneven`: all ranks take the same number, and the last few samples go to none.
        """
        share, stride = self.share(reader, done, drop_uneven), reader.workers * reader.block
        for begin in range(reader.worker * reader.block, share, stride):
            end = min(begin + reader.block, share)
            if taken >= end - begin:
                taken -= end - begin
                continue
            for each in range(begin + taken, end):
                yield done + reader.rank + each * reader.world
            taken = 0

    def samples(
        self, reader: Reader, done: int = 0, drop_uneven: bool = False, taken: int = 0
    ) -> Iterator[int]:
        """The samples that a reader takes, in order."""
        return map(self.sample, self.positions(reader, done, drop_uneven, taken))


def permuted(value: int, count: int, key: str) -> int:
    """Where a random permutation of `0..count` puts `value`: a Feistel network with cycle walking.

    Nothing of the size of `count` is kept or computed, and every reader computes the same.
    """
    if count <= 1:
        return value
    half = max(1, (count - 1).bit_length() + 1 >> 1)
    rounds = _salts(key)
    mask = (1 << half) - 1
    while True:
        left, right = value >> half, value & mask
        for salt in rounds:
            left, right = right, left ^ (_mixed(right, salt) & mask)
        value = left << half | right
        if value < count:
            return value


@lru_cache(_KEYS_KEPT)
def _salts(key: str) -> tuple[int, ...]:
    """One number for each round."""
    keys = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8 * _ROUNDS).digest()
    return tuple(int.from_bytes(keys[8 * at : 8 * at + 8], "little") for at in range(_ROUNDS))


def _mixed(value: int, salt: int) -> int:
    """Sixty-four bits that depend on all bits of both (the finaliser of splitmix64)."""
    value = (value + salt) & 0xFFFFFFFFFFFFFFFF
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    value = (value ^ value >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return value ^ value >> 31


def _last_at_most(begins: Sequence[int], position: int) -> int:
    low, high = 0, len(begins) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if begins[middle] <= position:
            low = middle
        else:
            high = middle - 1
    return low

"""What locks mean: which bar each other, what a range becomes, which wait is next. Pure functions.

Called by `ops/sessions/lock` and `check/locks`. Sources: fs/locks.c of Linux, fcntl(2), flock(2). A
flock lock covers the whole file; so the two kinds differ only in what a request does to what its
owner holds already: fcntl locks change that range and flock locks are replaced.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Sequence
from itertools import chain, pairwise
from typing import Final

from fsmeta.schema.locks import LockRecord, LockWait, Owner

_BLOCK_MAX: Final = 128  # locks that are compared one by one; 4,096 are 64 blocks


def first_bar(held: Iterable[LockRecord], want: LockRecord) -> LockRecord | None:
    """What keeps `want` from being held, as the first of `held`."""
    for lock in held:
        if lock.bars(want):
            return lock
    return None


def without(held: Iterable[LockRecord], owner: Owner, begin: int, end: int) -> list[LockRecord]:
    """`held` when `owner` has given up a range: shortened, split or gone."""
    left: list[LockRecord] = []
    for lock in held:
        if lock.owner != owner or lock.end <= begin or end <= lock.begin:
            left.append(lock)
            continue
        if lock.begin < begin:
            left.append(lock._replace(end=begin))
        if end < lock.end:
            left.append(lock._replace(begin=end))
    return left


def taken(held: Iterable[LockRecord], want: LockRecord) -> list[LockRecord]:
    """`held` when nothing bars `want`: in place of what its owner had there, joined with what it
    has of the same type right beside it."""
    left = without(held, want.owner, want.begin, want.end)
    begin, end = want.begin, want.end
    apart: list[LockRecord] = []
    for lock in left:
        same = lock.owner == want.owner and lock.write == want.write
        if same and lock.end == begin:
            begin = lock.begin
        elif same and lock.begin == end:
            end = lock.end
        else:
            apart.append(lock)
    apart.append(want._replace(begin=begin, end=end))
    return sorted(apart, key=_place)


def _begin(lock: LockRecord) -> int:
    return lock.begin


def _first_begin(block: Sequence[LockRecord]) -> int:
    return block[0].begin


def _place(lock: LockRecord) -> tuple[Owner, int]:
    return lock.owner, lock.begin


class _Ranges:
    """Locks that are found by what they cover, in blocks by their begins.

    The locks of one inode and the waits for them may be 4,096 each: to compare each with each takes
    seconds, in which no client gets a lock of that inode.
    """

    def __init__(self, locks: Iterable[LockRecord] = ()) -> None:
        self._blocks: list[list[LockRecord]] = [[]]
        self._ends = [0]  # the furthest in each block
        self._writes = [False]  # whether there is one for writing in it
        self._of: dict[Owner, list[LockRecord]] = {}
        for lock in locks:
            self.add(lock)

    def add(self, lock: LockRecord) -> None:
        """Put a lock in; it may overlap others."""
        at = max(0, bisect_right(self._blocks, lock.begin, lo=1, key=_first_begin) - 1)
        insort(self._blocks[at], lock, key=_begin)
        self._of.setdefault(lock.owner, []).append(lock)
        self._ends[at] = max(self._ends[at], lock.end)
        self._writes[at] = self._writes[at] or lock.write
        if len(self._blocks[at]) > _BLOCK_MAX:
            half = self._blocks[at][_BLOCK_MAX // 2 :]
            del self._blocks[at][_BLOCK_MAX // 2 :]
            self._blocks.insert(at + 1, half)
            self._ends.insert(at + 1, 0)
            self._writes.insert(at + 1, False)
            self._sum_up(at)
            self._sum_up(at + 1)

    def _sum_up(self, at: int) -> None:
        block = self._blocks[at]
        self._ends[at] = max(lock.end for lock in block)
        self._writes[at] = any(lock.write for lock in block)

    def of(self, owner: Owner) -> list[LockRecord]:
        """What an owner has."""
        return self._of.get(owner, [])

    def bars(self, want: LockRecord) -> bool:
        """Whether anything keeps `want` from being held."""
        for block, end, writes in zip(self._blocks, self._ends, self._writes, strict=True):
            if block and block[0].begin >= want.end:
                return False
            if end > want.begin and (writes or want.write) and first_bar(block, want):
                return True
        return False

    def replace(self, owner: Owner, locks: Iterable[LockRecord]) -> None:
        """Give an owner other locks than it had."""
        gone = {*self._of.pop(owner, ())}
        if gone:
            begin, end = min(lock.begin for lock in gone), max(lock.begin for lock in gone)
            for block in self._blocks:
                if block and begin <= block[-1].begin and block[0].begin <= end:
                    block[:] = [lock for lock in block if lock not in gone]
            for at in range(len(self._blocks) - 1, 0, -1):  # none but the first may be empty
                if not self._blocks[at]:
                    del self._blocks[at], self._ends[at], self._writes[at]
        for lock in locks:
            self.add(lock)

    def all(self) -> list[LockRecord]:
        """All of them, in the order in which they are stored."""
        return sorted(chain.from_iterable(self._of.values()), key=_place)


def handed_over(
    held: Iterable[LockRecord], queue: Iterable[LockWait]
) -> tuple[list[LockRecord], list[LockWait], list[LockWait]]:
    """Grant waits, in order, that are no longer barred by a held lock or an earlier wait.

    Returns the locks that are held then, the waits that remain, and the waits that were granted.
    """
    before = list(held)
    holding, ahead = _Ranges(before), _Ranges()
    waiting, granted = list[LockWait](), list[LockWait]()
    for wait in queue:
        lock = wait.lock
        mine = holding.of(lock.owner)
        if holding.bars(lock) or (not mine and ahead.bars(lock)):
            ahead.add(lock)
            waiting.append(wait)
        else:
            holding.replace(lock.owner, taken(mine, lock))
            granted.append(wait)
    return holding.all() if granted else before, waiting, granted


def bars_of(
    held: Iterable[LockRecord], queue: Sequence[LockWait], want: LockRecord
) -> list[LockRecord]:
    """All that `want` has to wait for, with `queue` before it."""
    held = list(held)
    bars = [lock for lock in held if lock.bars(want)]
    if not any(lock.owner == want.owner for lock in held):
        bars += [each.lock for each in queue if each.lock.bars(want)]
    return bars


def is_sound(held: Sequence[LockRecord]) -> bool:
    """Whether all of `held` can be held at once, and none could have been joined or left out."""
    ranges = _Ranges()
    for lock in held:
        if ranges.bars(lock):
            return False
        ranges.add(lock)
    for owner in {lock.owner for lock in held}:
        mine = sorted(ranges.of(owner), key=_begin)
        for lock, following in pairwise(mine):
            joins = lock.end == following.begin and lock.write == following.write
            if joins or lock.overlaps(following):
                return False
    return True

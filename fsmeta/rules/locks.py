"""What locks mean: who bars whom, what a range becomes, who is next. Pure functions of lists.

Called by `ops/sessions/lock` and `check/locks`. Sources: fs/locks.c of Linux, fcntl(2), flock(2). A
flock lock covers the whole file; so the two kinds differ only in what a request does to what its
owner holds already: fcntl locks change that range and flock locks are replaced.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fsmeta.schema.locks import LockRecord, LockWait, Owner


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


def _place(lock: LockRecord) -> tuple[Owner, int]:
    return lock.owner, lock.begin


def handed_over(
    held: Iterable[LockRecord], queue: Iterable[LockWait]
) -> tuple[list[LockRecord], list[LockWait], list[LockWait]]:
    """Give those who wait, in order, what nothing bars any more, neither held nor awaited before.

    Returns who holds then, who still waits, and who got what it waited for.
    """
    holding, waiting, granted = list(held), list[LockWait](), list[LockWait]()
    for wait in queue:
        ahead = (each.lock for each in waiting)
        has_some = any(lock.owner == wait.lock.owner for lock in holding)
        if first_bar(holding, wait.lock) or (not has_some and first_bar(ahead, wait.lock)):
            waiting.append(wait)
        else:
            holding = taken(holding, wait.lock)
            granted.append(wait)
    return holding, waiting, granted


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
    for at, lock in enumerate(held):
        for other in held[at + 1 :]:
            if lock.bars(other):
                return False
            if lock.owner != other.owner:
                continue
            touching = lock.end == other.begin or other.end == lock.begin
            if lock.overlaps(other) or (touching and lock.write == other.write):
                return False
    return True

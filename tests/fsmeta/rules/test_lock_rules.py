"""P3: what locks mean where there are many of them: as if each were compared with each."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from fsmeta.rules import locks
from fsmeta.rules.locks import first_bar, taken
from fsmeta.schema.locks import LOCK_END, RECORDS_MAX, LockRecord, LockWait, Owner


def _wait(number: int, begin: int, end: int, write: bool = True) -> LockWait:
    return LockWait(LockRecord(Owner(2, number), number, write, begin, end), number)


def _one_by_one(
    held: Sequence[LockRecord], queue: Sequence[LockWait]
) -> tuple[list[LockRecord], list[LockWait]]:
    """Who holds and who waits, by the rules as fcntl(2) says them."""
    holding, waiting = list(held), list[LockWait]()
    for wait in queue:
        ahead = [each.lock for each in waiting]
        has_some = any(lock.owner == wait.lock.owner for lock in holding)
        if first_bar(holding, wait.lock) or (not has_some and first_bar(ahead, wait.lock)):
            waiting.append(wait)
        else:
            holding = taken(holding, wait.lock)
    return holding, waiting


@pytest.mark.parametrize("seed", range(60))
def test_many_are_handed_over_as_few_are(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "_BLOCK_MAX", 4)
    dice = random.Random(seed)
    span = dice.choice((40, 400))

    def some(ticket: int) -> LockWait:
        begin = dice.randrange(span)
        length = dice.choice((1, 5, 5, span, LOCK_END - begin))
        owner = Owner(1, dice.randrange(dice.choice((3, 30))))
        return LockWait(LockRecord(owner, 7, dice.random() < 0.6, begin, begin + length), ticket)

    held, _ = _one_by_one([], [some(0) for _ in range(40)])
    queue = [some(ticket) for ticket in range(1, 60)]
    holding, waiting = _one_by_one(held, queue)
    found = locks.handed_over(held, queue)
    assert (found[0], found[1]) == (holding, waiting)
    assert [*found[1], *found[2]] == sorted(
        queue, key=lambda wait: (wait not in waiting, wait.ticket)
    )
    assert locks.is_sound(holding)
    assert not locks.is_sound([*holding, holding[0]._replace(owner=Owner(9, 9), write=True)])


def test_a_whole_file_is_given_up_though_all_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with a range of its own: comparing each with each took Python 20 s."""
    compared = 0
    bars = LockRecord.bars

    def counted(self: LockRecord, other: LockRecord) -> bool:
        nonlocal compared
        compared += 1
        return bars(self, other)

    monkeypatch.setattr(LockRecord, "bars", counted)
    queue = [_wait(number, 10 * number, 10 * number + 5) for number in range(RECORDS_MAX)]
    holding, waiting, granted = locks.handed_over([], queue)
    assert (len(holding), waiting, granted) == (RECORDS_MAX, [], queue)
    assert locks.is_sound(holding)
    assert compared < 300 * RECORDS_MAX

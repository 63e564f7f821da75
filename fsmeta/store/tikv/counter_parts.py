"""Which part of the counters each transaction of a client adds to.

A counter has PARTS parts, so that transactions at the same time need not change the same key.

Used by `tikv/group_commit`. Threading: loop thread only.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from fsmeta.runtime import Runtime
from fsmeta.store.tikv.keys import PARTS

_PART_STEP: Final = 27  # odd and far: neighbouring clients don't share their first parts


class CounterParts:
    """Gives each transaction under way a part of its own, while there are any."""

    def __init__(self, runtime: Runtime) -> None:
        self._home = runtime.random_bits(16) % PARTS  # the part that we take first
        self._is_ours = False  # that one is of our session
        self._made = 0  # parts that we have used so far
        self._spare: deque[int] = deque()  # those that no transaction has, the one used last last

    def take(self, fence: bytes | None) -> int:
        """A part that no transaction under way has: the same ones again and again, in which there
        is room, and others than those of other clients, whose sessions (`fence`) are near ours.

        Not the one that was used last, which may be locked until its commit has quite ended.
        """
        if len(self._spare) > 1 or self._made == PARTS:
            return self._spare.popleft() if self._spare else self._home
        if fence is not None and not self._is_ours:
            self._home, self._is_ours = fence[-1] % PARTS, True
        self._made += 1
        return (self._home + self._made * _PART_STEP) % PARTS

    def give_back(self, part: int) -> None:
        """A transaction has ended."""
        if part not in self._spare and len(self._spare) < self._made:
            self._spare.append(part)

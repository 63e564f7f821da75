"""How mounts divide a limit: each gets what it needs, as far as no other one gets less for it.

Pure functions. All mounts know the same numbers, so they divide alike without asking each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

HEADROOM = 1.25  # a mount that needs less than its share may come to need more


def fair_share(limit: float, others: Sequence[float]) -> float:
    """The part of `limit` that a mount gets which takes whatever it gets.

    `others` is what the other mounts need, `inf` where they take whatever they get. The least
    parts come first: what such a mount leaves over is divided among the rest.
    """
    left = limit
    count = len(others) + 1
    for need in sorted(others):
        if need * count >= left:
            break
        left -= need
        count -= 1
    return left / count


def need_of(done: float, hungry: bool) -> float:
    """What a mount needs that has done so much in a second."""
    return inf if hungry else done * HEADROOM

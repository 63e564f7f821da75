"""Which lock is taken while which is held: a circle in that is a deadlock yet to happen.

A schedule has to be very unlucky for two threads to wait for each other, yet each order shows
itself whenever one thread alone takes both locks. So the simulation remembers for each pair where
it was taken, and fails when a wait would close a circle.

Attempts that do not wait, or not for ever, close none. Two orders under one further lock can't
meet, but are taken for a circle too: an order that needs a third lock to be right is worth mending.
"""

from __future__ import annotations

import sys
import traceback
from itertools import pairwise

_LOCKS = ("tests.sim.world.lock_order", "tests.sim.world.primitives")  # what takes them


class Inversion(AssertionError):
    """Two locks are taken in both orders."""


class LockOrder:
    """Orders seen in one run, by the locks themselves: objects that are compared by identity."""

    def __init__(self) -> None:
        self._after: dict[object, dict[object, str]] = {}  # held → taken then → where

    def take(self, held: list[object], lock: object) -> None:
        """A thread that holds `held` waits for `lock`. Raises: Inversion."""
        for outer in held:
            known = self._after.setdefault(outer, {})
            if lock in known or outer is lock:
                continue
            circle = self._path(lock, outer)
            if circle:
                raise Inversion(self._tell([*circle, lock]))
            known[lock] = _where()

    def _path(self, start: object, goal: object) -> list[object]:
        """How one comes from `start` to `goal`; nothing where one does not."""
        came: dict[object, object] = {}
        todo = [start]
        while todo:
            here = todo.pop()
            if here is goal:
                way = [here]
                while here is not start:
                    here = came[here]
                    way.insert(0, here)
                return way
            for following in self._after.get(here, ()):
                if following not in came and following is not start:
                    came[following] = here
                    todo.append(following)
        return []

    def _tell(self, circle: list[object]) -> str:
        steps = [self._after[outer].get(inner, "here") for outer, inner in pairwise(circle)]
        now = _where()
        told = "\n".join(f"--- held one, took the next\n{step}" for step in [*steps[:-1], now])
        return f"locks are taken in a circle of {len(steps)}\n{told}"


def _where() -> str:
    """The stack outside of the simulation's own locks."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals["__name__"] in _LOCKS:
        frame = frame.f_back
    return "".join(traceback.format_stack(frame, limit=12))

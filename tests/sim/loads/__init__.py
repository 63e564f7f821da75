"""What the clients of a simulated cluster do, each with its own way to know what is right.

A `Load` is shared by its actors on all nodes; it is Python state of the world, which sees at once
what every actor has done. An actor is a thread of its node and dies with it.
"""

from __future__ import annotations

import random
from typing import Protocol

from tests.sim.world.cluster import Node


class Load(Protocol):
    """One workload of a world. Actors that meet a `StoreError` don't know what became of a call."""

    def prepare(self, node: Node) -> None:
        """Make what the actors need; all is calm."""

    def act(self, node: Node, dice: random.Random, turns: int) -> None:
        """The body of one actor: `turns` random operations, each checked."""

    def check(self, node: Node) -> None:
        """The world has healed and all actors have ended: what must be there, seen from `node`."""

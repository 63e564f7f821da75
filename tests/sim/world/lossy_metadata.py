"""The metadata of a simulated host that may lose its power: commits that nobody has synced go then.

As SQLite's log does: commits are lost from the end, whole, and never one that was synced.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

from fsmeta.store.mem import MemBackend
from tests.sim.world.scheduler import SimRuntime


class LossyBackend(MemBackend):
    """A `MemBackend` that knows what is synced."""

    def __init__(self, sim: SimRuntime) -> None:
        super().__init__(sim)
        self._synced: dict[bytes, dict[bytes, bytes]] = {}  # guarded by lock, as below
        self._unsynced: list[dict[bytes, dict[bytes, bytes]]] = []  # rows as commits left them

    def apply(self, touched: Mapping[bytes, dict[bytes, bytes]]) -> None:
        super().apply(touched)
        self._unsynced.append(dict(touched))

    def sync(self) -> None:
        for touched in self._unsynced:
            self._synced.update(touched)
        self._unsynced.clear()

    def lose_power(self, dice: random.Random) -> int:
        """Lose some of the last commits; how many. No client may live."""
        kept = dice.randrange(len(self._unsynced) + 1)
        lost = len(self._unsynced) - kept
        del self._unsynced[kept:]
        self.sync()
        self.rows.clear()
        self.rows.update({row: fields for row, fields in self._synced.items() if fields})
        self.readers.clear()
        return lost

"""A redis-server of a test's own, which can be frozen, killed and started again."""

from __future__ import annotations

from pathlib import Path

from tests.support.redis_sets import Member


class DurableRedis(Member):
    """It has each write on disk before it answers; made, it runs."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "--appendonly", "yes", "--appendfsync", "always")
        self.start()

    def close(self) -> None:
        """End it, frozen or not."""
        if self.is_running():
            self.kill()

"""A redis-server of a test's own, which can be frozen, killed and started again."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.redis_server import RedisServer


class DurableRedis:
    """A redis-server that has each write on disk before it answers."""

    def __init__(self, folder: Path) -> None:
        self._server = RedisServer(folder, "--appendonly", "yes", "--appendfsync", "always")
        self.ask = self._server.ask
        self.url = self._server.url
        self._pid = 0
        self.start()

    def start(self) -> None:
        """Start it with the data it had; returns when it answers."""
        self._server.start()
        self._pid = self.ask("INFO", "server")["process_id"]

    def freeze(self) -> None:
        """SIGSTOP: connections stay and nothing answers."""
        os.kill(self._pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self._pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL: connections break, what was not on disk is gone."""
        os.kill(self._pid, signal.SIGKILL)
        self._server.stop()

    def close(self) -> None:
        """End it, frozen or not."""
        try:
            self.kill()
        except ProcessLookupError:
            self._server.stop()

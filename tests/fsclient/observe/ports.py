"""A port that is free; below the range that outgoing connections take theirs from."""

from __future__ import annotations

import os
import random
import socket


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nothing listens on."""
    chance = random.Random(os.urandom(8))
    while True:
        port = chance.randrange(12_000, 30_000)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port

"""A Redis of our own on a free loopback port, without persistence, for one benchmark."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tools.benchlib import procs

START_S = 10.0
STOP_S = 10.0


@dataclass(frozen=True)
class Redis:
    """A running server."""

    port: int

    def ask(self, *words: str, db: int = 0) -> str:
        """The answer to one command, as redis-cli prints it."""
        command = ["redis-cli", "-p", str(self.port), "-n", str(db), *words]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        return done.stdout.strip()

    def used_memory_bytes(self) -> int:
        """Bytes that Redis has allocated."""
        return parse_used_memory(self.ask("info", "memory"))


def parse_used_memory(info: str) -> int:
    """`used_memory` of INFO MEMORY."""
    for line in info.splitlines():
        if line.startswith("used_memory:"):
            return int(line.partition(":")[2])
    raise ValueError("INFO MEMORY has no used_memory")


@contextmanager
def running(log: Path) -> Iterator[Redis]:
    """Start a server and end it, whatever happens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    with log.open("wb") as output:
        server = subprocess.Popen(
            ["redis-server", *options, "--dir", str(log.parent)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        if not procs.wait_until(lambda: _listens(port) or server.poll() is not None, START_S):
            raise RuntimeError(f"redis-server does not answer on port {port}; see {log}")
        if server.poll() is not None:
            raise RuntimeError(f"redis-server ended:\n{log.read_text()}")
        yield Redis(port)
    finally:
        server.terminate()
        try:
            server.wait(STOP_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0

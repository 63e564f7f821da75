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
FORGET_PINGS = 500  # the n-th drops 100 n keys: a table of ten millions


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
        return parse_info(self.ask("info", "memory"), "used_memory")

    def cpu_seconds(self) -> float:
        """Processor time that Redis has used."""
        info = dict(
            line.split(":", 1) for line in self.ask("info", "cpu").splitlines() if ":" in line
        )
        return float(info["used_cpu_sys"]) + float(info["used_cpu_user"])

    def forget_tracking(self) -> None:
        """Empty the table of which client has read which key; it outlives the clients.

        Redis drops some keys with each command, ever more, while the table is larger than it may be
        and a client tracks.
        """
        (limit,) = self.ask("config", "get", "tracking-table-max-keys").splitlines()[1:]
        shrink = ["client tracking on", "config set tracking-table-max-keys 1"]
        script = "\n".join([*shrink, *["ping"] * FORGET_PINGS, "info stats"])
        if parse_info(self._script(script), "tracking_total_keys") > 1:
            raise RuntimeError("Redis still tracks readers of its keys")
        self.ask("config", "set", "tracking-table-max-keys", limit)

    def _script(self, lines: str) -> str:
        """What redis-cli prints for many commands on one connection."""
        command = ["redis-cli", "-p", str(self.port)]
        done = subprocess.run(
            command, input=lines, capture_output=True, text=True, check=True, timeout=120
        )
        return done.stdout


def parse_info(info: str, name: str) -> int:
    """The number `name` of a section of INFO."""
    for line in info.splitlines():
        if line.startswith(f"{name}:"):
            return int(line.partition(":")[2])
    raise ValueError(f"INFO has no {name}")


@contextmanager
def running(log: Path) -> Iterator[Redis]:
    """Start a server and end it, whatever happens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    command = ["redis-server", *options, "--dir", str(log.parent)]
    with procs.serving(command, port, log, START_S):
        yield Redis(port)

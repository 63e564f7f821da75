"""The client programs in C: compiled when first needed, run, and their lines read."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path
from typing import NamedTuple

SOURCES = Path(__file__).resolve().parent
RUN_S_MAX = 3600


class Timing(NamedTuple):
    """One line of a client program."""

    phase: str
    wall_ns: int
    ops: int
    bytes: int

    @property
    def us_per_op(self) -> float:
        """Microseconds of wall time per operation, all threads together."""
        return self.wall_ns / 1e3 / max(1, self.ops)

    @property
    def mb_per_s(self) -> float:
        """10^6 bytes per second."""
        return self.bytes * 1e3 / max(1, self.wall_ns)


def parse(output: str) -> list[Timing]:
    """The timings in what a client program printed."""
    timings: list[Timing] = []
    for line in output.splitlines():
        phase, wall_ns, ops, size = line.split()
        timings.append(Timing(phase, int(wall_ns), int(ops), int(size)))
    return timings


def program(name: str) -> Path:
    """The compiled `name`.c, in a cache directory named after its sources."""
    sources = [SOURCES / f"{name}.c", SOURCES / "parallel.h"]
    digest = hashlib.sha256(b"\0".join(file.read_bytes() for file in sources)).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slicefs-bench"
    binary = cache / f"{name}-{digest}"
    if not binary.exists():
        cache.mkdir(parents=True, exist_ok=True)
        fresh = cache / f"{name}-{digest}.{os.getpid()}"
        gcc = ["gcc", "-O2", "-Wall", "-Wextra", "-pthread", "-o", str(fresh), str(sources[0])]
        subprocess.run(gcc, check=True, stdin=subprocess.DEVNULL)
        fresh.rename(binary)
    return binary


def run(name: str, *arguments: str | int | Path) -> list[Timing]:
    """Run a client program to its end.

    Raises: RuntimeError with what it printed, if it failed.
    """
    command = [str(program(name)), *(str(argument) for argument in arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=RUN_S_MAX
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return parse(done.stdout)

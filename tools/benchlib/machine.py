"""What has to be known about a machine to judge a number measured on it."""

from __future__ import annotations

import mmap
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tools.benchlib.systems import System

REPOSITORY = Path(__file__).resolve().parent.parent.parent


def facts(systems: Sequence[System]) -> dict[str, object]:
    """Hardware, kernel and versions of all that takes part."""
    git = ["git", "-c", "safe.directory=*", "-C", str(REPOSITORY)]
    return {
        "cpu": _field("/proc/cpuinfo", "model name"),
        "cpus": len(os.sched_getaffinity(0)),
        "memory": _field("/proc/meminfo", "MemTotal"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": os.getloadavg(),
        "commit": _output([*git, "describe", "--always", "--dirty"]),
        "redis": _output(["redis-server", "--version"]),
        **{
            system.name: _output([*system.program, system.version]).partition("\n")[0]
            for system in systems
        },
    }


def stolen_ticks() -> tuple[int, int]:
    """Processor time that the host has given to others, and all there was, in ticks so far."""
    words = Path("/proc/stat").read_text().partition("\n")[0].split()[1:9]
    return int(words[7]), sum(map(int, words))


def memory_available_bytes() -> int:
    """What can be used without swapping."""
    return int(_field("/proc/meminfo", "MemAvailable").split()[0]) * 1024


def touch_memory(size: int) -> None:
    """Make the host back `size` bytes of free memory, right before they are needed.

    A virtual machine's free memory may belong to its host, which gives it back at 0.3 GB/s and
    takes it again after seconds (free page reporting; seen on Firecracker). Without this the
    first system to write would be measured against the hypervisor.
    """
    size = min(size, memory_available_bytes() // 2)
    mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE).close()


def room_bytes(directory: Path) -> int:
    """Bytes that fit in `directory`, where a tmpfs takes them from memory."""
    if not directory.is_dir():
        return 0
    free = shutil.disk_usage(directory).free
    in_memory = any(
        line.split()[1] == str(directory) and line.split()[2] == "tmpfs"
        for line in Path("/proc/mounts").read_text().splitlines()
    )
    return min(free, memory_available_bytes()) if in_memory else free


def _field(file: str, name: str) -> str:
    for line in Path(file).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return "unknown"


def _output(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return "missing"
    return done.stdout.strip() if done.returncode == 0 else "unknown"

"""The least that FUSE costs: the file system of `nothing.c`, mounted while it is measured.

Why is a mount slower than a disk? This takes away what a system does, and shows what is
left: a request for each MiB, through the kernel's pages or past them.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tools.benchlib import client
from tools.benchlib.procs import STOP_S

WAYS: Final = ("pages", "direct")


@contextmanager
def mounted(mountpoint: Path, way: str, redis_port: int = 0) -> Iterator[Path]:
    """A file system there that keeps nothing, or only names and inodes, in Redis.

    Raises: RuntimeError where it can't be mounted.
    """
    mountpoint.mkdir()
    command = [str(client.program("nothing")), str(mountpoint), way]
    if redis_port:
        command.append(str(redis_port))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            if server.stdout.readline() != "ready\n":
                raise RuntimeError(f"{' '.join(command)} did not mount: root may, with /dev/fuse")
            yield mountpoint
        finally:
            if os.path.ismount(mountpoint):
                subprocess.run(["umount", str(mountpoint)], check=False, timeout=STOP_S)
            try:
                server.wait(STOP_S)
            except subprocess.TimeoutExpired:
                server.kill()
    mountpoint.rmdir()

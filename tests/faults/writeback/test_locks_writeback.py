"""P3, W2: locks on mounts that write back: who gets one sees what was written under the last."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.program import COMMAND_S, Volume, needs_mounts, succeed, wait_until

pytestmark = needs_mounts

TIMES = 12
# a process that adds to a number so many times, each under a lock
ADDER = """
import fcntl, os, sys
how, lock, counter, times = sys.argv[1:]
take = fcntl.flock if how == "flock" else fcntl.lockf
for _ in range(int(times)):
    fd = os.open(lock, os.O_RDWR | os.O_CREAT)
    take(fd, fcntl.LOCK_EX)
    with open(counter, "r+b") as file:
        number = int(file.read() or b"0") + 1
        file.seek(0)
        file.write(b"%d" % number)
    if how == "close":
        os.close(fd)
    else:
        take(fd, fcntl.LOCK_UN)
        os.close(fd)
"""


def add(mounts: list[Path], how: str, lock: str, counter: str) -> None:
    """Have a process on each mount add at the same time; each must end well."""
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", ADDER, how, mount / lock, mount / counter, str(TIMES)]
        )
        for mount in mounts
    ]
    try:
        for worker in workers:
            assert worker.wait(COMMAND_S) == 0
    finally:
        for worker in workers:
            worker.kill()


@pytest.mark.parametrize("how", ["flock", "lockf", "close"])
def test_a_lock_is_handed_over_when_others_see_what_was_written(served: Volume, how: str) -> None:
    """10 and 10 were 11: the next holder read what was there before."""
    served.format()
    mounts = [
        served.mount(
            "--writeback", "--staging-dir", str(served.base / f"staging-{name}"), name=name
        )
        for name in ("one", "two")
    ]
    paths = [mount.path for mount in mounts]
    for name in ("d", "locks"):
        (paths[0] / name).mkdir()
    for lock in ("d/counter", "d/lock", "locks/lock"):  # the last is in another order domain
        (paths[0] / "d/counter").write_bytes(b"0")
        served_by_both(paths, "d/counter")
        add(paths, how, lock, "d/counter")
        numbers = [int((path / "d/counter").read_bytes()) for path in paths]
        assert numbers == [2 * TIMES] * 2, lock
    served.end()


def served_by_both(paths: list[Path], name: str) -> None:
    """Return when all mounts have a file as the first has it."""
    succeed("flush", "--wait", paths[0])
    wait_until("it is there", 60, lambda: (paths[1] / name).read_bytes() == b"0")

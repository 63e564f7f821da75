"""SIGKILL of the client under load: nothing lost that was closed, fsynced, renamed or unlinked."""

from __future__ import annotations

import errno
import random
import time

import pytest

from tests.faults.judge import Worker, await_operations, start
from tests.faults.program import Mount, Volume, needs_mounts

pytestmark = needs_mounts

WORKERS = 3
SOME = 2  # operations that each has done before, however slow the machine is
LOAD_S = (0.3, 1.5)  # how long the load runs before a kill; not a multiple of anything
# the first says that the connection was cut under a request, the second that there is none any more
GONE = (errno.ECONNABORTED, errno.ENOTCONN)


def killing(volume: Volume, kills: int, seed: int) -> None:
    """Mount, work, kill, mount again and judge, `kills` times."""
    chance = random.Random(seed)
    volume.format()
    mount = volume.mount("--no-supervisor")
    workers = [
        Worker(mount.path / f"w{n}", volume.base / f"journal{n}", seed + 1000 * n)
        for n in range(WORKERS)
    ]
    try:
        for _ in range(kills):
            mount = kill_once(volume, mount, workers, chance.uniform(*LOAD_S))
    finally:
        for worker in workers:
            worker.abandon()
    mount.umount()
    assert all(worker.done > kills for worker in workers), [worker.done for worker in workers]
    volume.end()


def kill_once(volume: Volume, mount: Mount, workers: list[Worker], load_s: float) -> Mount:
    """The next mount, whose contents are right."""
    start(workers)
    await_operations(workers, SOME)
    time.sleep(load_s)
    mount.kill()
    for worker in workers:
        worker.wait()
        assert worker.failure is None or worker.failure["errno"] in GONE, worker.failure
    volume.fsck("--data")
    mount = volume.mount("--no-supervisor")
    for worker in workers:
        worker.judge()
    return mount


def test_kill_with_redis(served: Volume) -> None:
    killing(served, 10, seed=1)


def test_kill_with_sqlite(embedded: Volume) -> None:
    killing(embedded, 8, seed=2)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_kill_often(served: Volume) -> None:
    killing(served, 200, seed=time.time_ns() % 1_000_000)

"""R3: object stores that go away under mounts: programs wait, nothing acknowledged is lost.

The load comes from processes of its own: whoever forks while it has files of a mount open must wait
for that mount, and the store that is to be started is what the mount waits for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.judge import Worker, await_operations, failing, start
from tests.faults.places import rados_place, s3_place
from tests.faults.program import Mount, Volume, needs_mounts, wait_until
from tests.fsdata.stores import POOL
from tests.support.ceph_cluster import CephCluster, short_directory
from tests.support.http_proxy import Fault, HttpProxy, Kind

pytestmark = needs_mounts

WORKERS = 3
SOME = 4  # operations: enough to need the store


@pytest.fixture
def workers(base: Path) -> Iterator[list[Worker]]:
    """Load processes, not started; the volume must be mounted on `mnt`."""
    made = [Worker(base / "mnt" / f"w{n}", base / f"journal{n}", n) for n in range(WORKERS)]
    yield made
    for worker in made:
        worker.abandon()


def through(
    volume: Volume,
    workers: list[Worker],
    trouble: Callable[[], None],
    look: Callable[[Mount], None] = lambda _: None,
) -> None:
    """Have trouble under load; then everything is there, in this mount and in a new one."""
    try:
        volume.format()
        mount = volume.mount()
        start(workers)
        await_operations(workers, SOME)
        trouble()
        await_operations(workers, SOME)
        for worker in workers:
            worker.stop()
        assert failing(workers) == []
        look(mount)
        mount.umount()
        volume.mount()
        for worker in workers:
            worker.judge()
        volume.end()
    finally:
        volume.clean_up()


@pytest.mark.parametrize("down_s", [3.0, pytest.param(60.0, marks=pytest.mark.soak)])
def test_a_bucket_that_is_away(
    base: Path, ceph: CephCluster, workers: list[Worker], down_s: float
) -> None:
    """Resets for a while, and then a storm of 503."""
    with HttpProxy(ceph.s3_port) as proxy:
        storm = Fault(Kind.STATUS, 60)

        def trouble() -> None:
            proxy.go_away()
            time.sleep(down_s)
            proxy.add(storm)
            proxy.come_back()
            await_operations(workers, SOME)

        def look(mount: Mount) -> None:
            proxy.heal()
            assert storm.hits > 0
            wait_until("the background has repeated its own", 60, lambda: is_over(mount))
            assert mount.numbers()["object_throttled_total"] == storm.hits

        def is_over(mount: Mount) -> bool:
            numbers = mount.numbers()
            repeats, now = numbers["object_repeats_total"], numbers["object_requests_now"]
            return repeats > storm.hits and now == 0

        through(Volume(base, place=s3_place(base, proxy.endpoint)), workers, trouble, look)


def test_a_killed_gateway(base: Path, workers: list[Worker]) -> None:
    """radosgw is killed and started again, twice."""
    missing = CephCluster.missing()
    if missing:
        pytest.skip(f"needs {missing}")
    with short_directory() as directory, CephCluster(directory) as ceph:

        def trouble() -> None:
            for _ in range(2):
                ceph.kill("rgw")
                time.sleep(1)
                ceph.start_gateway()
                await_operations(workers, SOME)

        through(Volume(base, place=s3_place(base, ceph.endpoint)), workers, trouble)


def test_a_killed_osd(base: Path, workers: list[Worker]) -> None:
    """On disk, killed twice in the middle of writes, and once more when all is quiet."""
    missing = CephCluster.missing(gateway=False)
    if missing:
        pytest.skip(f"needs {missing}")
    with short_directory() as directory, CephCluster(directory, "bluestore", False) as ceph:
        ceph.make_pool(POOL)

        def restart() -> None:
            ceph.kill_osd()
            time.sleep(0.5)
            ceph.start_osd()

        def trouble() -> None:
            for _ in range(2):
                restart()
                await_operations(workers, SOME)

        def look(_: Mount) -> None:
            restart()

        through(Volume(base, place=rados_place(ceph)), workers, trouble, look)

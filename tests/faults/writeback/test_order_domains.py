"""W2: `--order-domain 2` on a real mount: a job whose objects the store does not take.

The jobs are directories two levels below the root. What one of them has written gets no answer from
S3; the other's changes, and those directly in the directory above, are seen all the same.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.faults.checkpoint import Watcher, Writer
from tests.faults.places import s3_place
from tests.faults.program import Volume, needs_mounts, slicefs, succeed, wait_until
from tests.faults.redis_server import DurableRedis
from tests.support.ceph_cluster import CephCluster
from tests.support.http_proxy import Fault, HttpProxy, Kind

pytestmark = needs_mounts

SHARDS = 6
SHARD_BYTES = 150_000
HELD = b"the store takes no object with this in it"


@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_w2_jobs_below_one_directory(
    base: Path, ceph: CephCluster, durable_redis: DurableRedis, depth: int
) -> None:
    """They are two domains at depth 2; at depth 1 they are one, and wait for each other."""
    with HttpProxy(ceph.s3_port) as proxy:
        volume = Volume(base, durable_redis.url(), s3_place(base, proxy.endpoint))
        try:
            volume.format()
            hold_one_job(volume, proxy, depth)
            volume.end("uploads wait for the object store")
        finally:
            volume.clean_up()


def hold_one_job(volume: Volume, proxy: HttpProxy, depth: int) -> None:
    back = ("--writeback", "--staging-dir", str(volume.base / "staging"))
    mine = volume.mount(*back, "--order-domain", str(depth))
    other = volume.mount(name="other")
    team, seen = mine.path / "team", other.path / "team"
    for name in ("held", "free"):
        (team / name).mkdir(parents=True)
    stuck = proxy.add(Fault(Kind.STUCK, 1e9, "PUT", when=lambda request: HELD in request.body))
    (team / "held" / "first").write_bytes(HELD)
    wait_until("the store has been asked", 60, lambda: stuck.hits)

    held = Writer(team / "held" / "step", SHARDS, SHARD_BYTES, random.Random(1))
    free = Writer(team / "free" / "step", SHARDS, SHARD_BYTES, random.Random(2))
    watchers = [Watcher(each, seen / each.folder.parent.name / "step") for each in (held, free)]
    for writer in (held, free):
        writer.start()
    for writer in (held, free):
        writer.join()
        assert writer.failure is None
        assert writer.judge(writer.folder) == (SHARDS, True)  # this mount sees all at once
    (team / "note").write_bytes(b"directly in it")

    if depth == 1:
        assert slicefs("flush", "--wait", "--timeout", "2", team / "free").code == 1
        assert free.judge(seen / "free/step") == (0, False)
    else:
        succeed("flush", "--wait", "--timeout", "60", team / "free")
        _require_seen(free, seen)
        wait_until("others see the note", 60, (seen / "note").exists)
    assert (seen / "held/first").read_bytes() == b""  # its name had nothing to wait for
    assert held.judge(seen / "held/step") == (0, False)
    for path in (team / "held", team):
        assert os.getxattr(path, "user.slicefs.durable") == b"0"

    proxy.heal()
    succeed("flush", "--wait", "--timeout", "60", mine.path)
    for writer in (held, free):
        _require_seen(writer, seen)
    assert (seen / "held/first").read_bytes() == HELD
    for watcher in watchers:
        watcher.stop()
        assert watcher.looks
    assert mine.numbers()["staging_conflicts_total"] == 0


def _require_seen(writer: Writer, seen: Path) -> None:
    """Another mount sees all of a job, once the message of Redis has reached it."""
    step = seen / writer.folder.parent.name / "step"
    wait_until("others see the job", 10, lambda: writer.judge(step) == (SHARDS, True))

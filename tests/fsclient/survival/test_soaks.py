"""Programs of others on a supervised mount, whose client is killed or upgraded all the while.

SLICEFS_KILLS is how often, 100 where it is not set; upgrades are a fifth of it, and so are kills
with other stores than Redis and a directory. SLICEFS_PROGRAMS names the usual ones, by commas.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Final

import pytest

from tests.faults.fixtures import base, durable_redis, embedded, served
from tests.faults.places import s3_place
from tests.faults.program import Volume, needs_mounts
from tests.faults.redis_server import DurableRedis
from tests.fsclient.survival.killing import killing
from tests.support.ceph_cluster import CephCluster
from tests.support.tikv_server import TikvServer

__all__ = ["base", "durable_redis", "embedded", "served"]

pytestmark = [needs_mounts, pytest.mark.soak, pytest.mark.timeout(7200)]

KILLS: Final = int(os.environ.get("SLICEFS_KILLS", "100"))
_USUAL: Final = "fio,lmdb_writer,append,dataloader,git,database"
USUAL: Final = tuple(os.environ.get("SLICEFS_PROGRAMS", _USUAL).split(","))
NEEDS: Final = {"fio": "fio", "pgbench": "pgbench", "stress": "stress-ng"}
WAYS: Final = ("through", "writeback")


FEWER: Final = max(1, KILLS // 5)


def soak(
    volume: Volume,
    way: str,
    names: tuple[str, ...],
    upgrades: bool = False,
    count: int = KILLS,
) -> None:
    """Kill or upgrade the client of a mount that so many programs use."""
    for name in names:
        if name in NEEDS and shutil.which(NEEDS[name]) is None:
            pytest.skip(f"needs {NEEDS[name]}")
    options = ["-o", "allow_other"]
    if way == "writeback":
        options += ["--writeback", "--staging-dir", str(volume.base / "staging")]
    seed = time.time_ns() % 1_000_000
    killing(volume, count, seed, *options, names=names, upgrades=upgrades)


@pytest.mark.parametrize("way", WAYS)
def test_usual_programs(served: Volume, way: str) -> None:
    soak(served, way, USUAL)


@pytest.mark.parametrize("way", WAYS)
def test_upgrades(served: Volume, way: str) -> None:
    soak(served, way, USUAL, upgrades=True, count=FEWER)


@pytest.mark.parametrize("way", WAYS)
def test_usual_programs_on_tikv(base: Path, tikv_server: TikvServer, way: str) -> None:
    volume = Volume(base, tikv_server.empty_url())
    try:
        soak(volume, way, USUAL, count=FEWER)
    finally:
        volume.clean_up()


@pytest.mark.parametrize("way", WAYS)
def test_usual_programs_on_s3(
    base: Path, durable_redis: DurableRedis, ceph: CephCluster, way: str
) -> None:
    volume = Volume(base, durable_redis.url(), place=s3_place(base, ceph.endpoint))
    try:
        soak(volume, way, USUAL, count=FEWER)
    finally:
        volume.clean_up()


@pytest.mark.parametrize("way", WAYS)
def test_postgresql(embedded: Volume, way: str) -> None:
    soak(embedded, way, ("pgbench",))


@pytest.mark.parametrize("way", WAYS)
def test_stress(served: Volume, way: str) -> None:
    soak(served, way, ("stress",))

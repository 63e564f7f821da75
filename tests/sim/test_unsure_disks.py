"""W1, W3: staging disks that fail to sync now and then, and the power goes.

After such a failure the kernel takes for written what is not: the next sync succeeds. What fsync(2)
has returned for must be there all the same.
"""

from __future__ import annotations

import random

import pytest

from tests.conftest import LogWatch
from tests.sim.cluster import Weather
from tests.sim.harness import simulate
from tests.sim.scheduler import SimRuntime
from tests.sim.test_writeback import (
    CALM_DATA,
    DATA,
    LOST,
    META,
    TROUBLE,
    Verbs,
    World,
    _crash,
    _lose_power,
    live,
)

FSYNCS: Verbs = ("write", "fsync", "fsync", "fsync", "rename", "unlink")
UNSURE = "^WARNING fs(data.obj_staged|client.writeback): staging (disk|journal): .*not be synced"


def _unsure(world: World, dice: random.Random) -> None:
    for host in world.hosts:
        host.disk.flaky = 0.2
    _crash(world, dice, then=_lose_power)
    for host in world.hosts:
        host.disk.flaky = 0.0


@pytest.mark.sim_seeds(40)
def test_w3_a_failed_sync_is_not_forgotten(sim_seed: int, log_watch: LogWatch) -> None:
    log_watch.expect(f"{TROUBLE}|{LOST}|{UNSURE}")
    weather = Weather(data=CALM_DATA) if sim_seed % 2 else Weather(META, DATA)

    def body(sim: SimRuntime) -> None:
        live(sim, sim_seed, weather, _unsure, 1, FSYNCS)

    simulate(sim_seed, body)

"""W1, W3: staging disks that fail to sync or to be read now and then, and the power goes.

After a failure to sync the kernel takes for written what is not: the next sync succeeds. What
fsync(2) has returned for must be there all the same. After a failure to read nothing is lost.
"""

from __future__ import annotations

import random

import pytest

from tests.conftest import LogWatch
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
    _same_disk,
    live,
)
from tests.sim.world.cluster import Weather
from tests.sim.world.harness import simulate
from tests.sim.world.scheduler import SimRuntime

FSYNCS: Verbs = ("write", "fsync", "fsync", "fsync", "rename", "unlink")
UNSURE = (
    r"^WARNING fs(data.staging|client.writeback)\S*: staging (disk|journal): "
    ".*(not be synced|simulated: not written)"
)


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


UNREAD = r"^WARNING fs(data.staging|client.writeback)\S*: (staging disk|.* waits to be published): "


def _unreadable(world: World, dice: random.Random) -> None:
    """What fails is an EMFILE, an EIO or an ENOMEM that passes."""
    for host in world.hosts:
        host.disk.unreadable = 0.3
    _crash(world, dice, then=_same_disk)


@pytest.mark.sim_seeds(30)
def test_w1_what_can_not_be_read_for_a_moment_is_not_lost(
    sim_seed: int, log_watch: LogWatch
) -> None:
    """Each was taken for damage, and left out with all that came after it in its directory."""
    log_watch.expect(f"{TROUBLE}|{UNREAD}")
    weather = Weather(data=CALM_DATA) if sim_seed % 2 else Weather(META, DATA)
    simulate(sim_seed, lambda sim: live(sim, sim_seed, weather, _unreadable, 1 + sim_seed % 2))

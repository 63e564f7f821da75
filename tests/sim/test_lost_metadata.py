"""W1: a host loses its power, and with it what its metadata store had not synced, as SQLite does.

The journal is synced each second, and may be on the disk before that: it names inodes and slices
that the store has forgotten. Their numbers were given out twice then, and a file that fsync(2) had
returned for showed another one's bytes.
"""

from __future__ import annotations

import random

import pytest

from tests.conftest import LogWatch
from tests.sim.test_writeback import CALM_DATA, LOST, TROUBLE, Verbs, World, live
from tests.sim.world.cluster import Weather
from tests.sim.world.harness import simulate
from tests.sim.world.scheduler import SimRuntime
from tests.sim.world.stored import stored

VERBS: Verbs = ("write", "write", "fsync", "rename", "unlink", "link")


def _lose_host(world: World, dice: random.Random) -> None:
    """All clients are on one host, whose power goes."""
    (host,) = world.hosts
    with world.cluster.backend.lock:
        world.cluster.backend.sync()  # the directory stays
    for _ in range(dice.randrange(1, 4)):
        world.cluster.sim.sleep(dice.random() * 4)
        for node in world.cluster.living():
            node.crash()
        world.cluster.backend.lose_power(dice)
        host.disk.lose_power()
        host.line.seen = host.line.look(stored(world.cluster, host.line.path), 0)
        world.watcher = world.cluster.add()
        host.restart(host.line.safe)


@pytest.mark.sim_seeds(40)
def test_w1_lost_power_of_a_host_with_its_metadata(sim_seed: int, log_watch: LogWatch) -> None:
    log_watch.expect(f"{TROUBLE}|{LOST}")

    def body(sim: SimRuntime) -> None:
        live(sim, sim_seed, Weather(data=CALM_DATA), _lose_host, 1, VERBS)

    simulate(sim_seed, body)

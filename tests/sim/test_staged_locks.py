"""P3, W2: numbers under locks, by clients that write back and by one that does not."""

from __future__ import annotations

import random
from functools import partial

import pytest

from tests.sim.loads.counters import Counters
from tests.sim.test_writeback import CALM_DATA
from tests.sim.world.cluster import Cluster, Weather
from tests.sim.world.harness import simulate
from tests.sim.world.scheduler import SimRuntime
from tests.sim.world.staging import SimDisk

TURNS = 16


def _body(sim: SimRuntime, seed: int) -> None:
    dice = random.Random(seed)
    cluster = Cluster(sim, seed, Weather(data=CALM_DATA))
    cluster.leaks = True
    staged = [cluster.add(SimDisk(sim, dice.getrandbits(30))) for _ in range(2)]
    nodes = [*staged, cluster.add()]
    load = Counters()
    load.prepare(nodes[-1])
    for node in nodes:
        own = random.Random(dice.getrandbits(30))
        node.act("counter", partial(load.act, node, own, TURNS))
    for node in nodes:
        for actor in node.actors:
            actor.join()
    cluster.settle()
    for node in staged:
        assert node.client.writeback is not None
        assert node.client.writeback.settle(None, 300), "never published"
    load.check(nodes[-1])
    cluster.drain()
    cluster.stop()
    cluster.judge()


@pytest.mark.sim_seeds(15)
def test_p3_who_gets_a_lock_sees_what_was_held_back(sim_seed: int) -> None:
    """A lock was handed over before its data could be seen: a number was given twice."""
    simulate(sim_seed, lambda sim: _body(sim, sim_seed))

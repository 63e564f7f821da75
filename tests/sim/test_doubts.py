"""M6: clients that hear no answers for a while, and lose their sessions, while others go on.

`--meta-timeout` is short, usual, or about the lease: calls give up before the session ends, at that
moment, or never.
"""

from __future__ import annotations

import random
from functools import partial

import pytest

from fsclient.background import leadership
from tests.conftest import LogWatch
from tests.sim.loads.emptied import Emptied
from tests.sim.test_client import DATA, META, TROUBLE, crash, eager, live
from tests.sim.world.cluster import Cluster, Weather
from tests.sim.world.harness import simulate
from tests.sim.world.scheduler import SimRuntime

__all__ = ["eager"]
TIMEOUTS_S = (2.0, 3.0, 30.0, leadership.LEASE_S - 5, leadership.LEASE_S + 5)


def _hear_nothing(cluster: Cluster, dice: random.Random) -> None:
    """What a client asks for is done, and its answers are lost; then it may be cut off."""
    cluster.leaks = True
    while len(cluster.nodes) < 3:
        cluster.add()
    for _ in range(dice.randrange(3, 7)):
        cluster.sim.sleep(dice.random() * 4)
        victim = dice.choice(cluster.living())
        victim.shaken = True
        network = victim.store.network
        network.deaf = True
        cluster.sim.sleep((0.2 + dice.random()) * dice.choice((1, 3, cluster.meta_timeout_s)))
        network.cut = dice.random() < 0.7
        cluster.sim.sleep(leadership.LEASE_S * dice.choice((0, 0.1, 1, 2)) * dice.random())
        network.deaf = network.cut = False


def _live(sim: SimRuntime, seed: int, weather: Weather) -> None:
    dice = random.Random(seed + 4)
    calamity = (_hear_nothing, _hear_nothing, _hear_nothing, crash)[seed // 2 % 4]
    timeout_s = dice.choice(TIMEOUTS_S)
    live(sim, seed, weather, calamity, [Emptied(dice)], meta_timeout_s=timeout_s)


@pytest.mark.sim_seeds(60)
def test_answers_are_lost_while_others_empty_files(sim_seed: int, log_watch: LogWatch) -> None:
    log_watch.expect(TROUBLE)
    weather = Weather() if sim_seed % 2 else Weather(META, DATA)
    simulate(sim_seed, partial(_live, seed=sim_seed, weather=weather))

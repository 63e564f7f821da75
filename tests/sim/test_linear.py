"""Histories of simulated clients are linearizable, whatever networks lose and whoever dies."""

from __future__ import annotations

import random
from functools import partial

import pytest

from tests.conftest import LogWatch
from tests.linear.client import LinearClient, prepare
from tests.linear.history import require_linearizable
from tests.sim.world.cluster import Cluster, Weather
from tests.sim.world.faults import Faults
from tests.sim.world.harness import simulate
from tests.sim.world.scheduler import SimRuntime

TURNS = 12
CLIENTS = 3
META = Faults(refused=0.05, reply_lost=0.08, request_lost=0.05, late=0.05, news_lost=0.05)
TROUBLE = "^WARNING fsclient.(background.(background|leader(?:ship)?)|mount.client): "


def _live(sim: SimRuntime, seed: int, crashes: bool) -> None:
    dice = random.Random(seed)
    cluster = Cluster(sim, seed, Weather(META))
    cluster.leaks = True
    first = cluster.add()
    directory = prepare(first.client.meta, b"d")
    clients: list[LinearClient] = []
    for number in range(CLIENTS):
        node = cluster.add()
        client = LinearClient(number, node.client.meta, directory, sim.monotonic, seed + number)
        clients.append(client)
        node.act("linear", partial(client.run, TURNS))
    if crashes:
        sim.sleep(dice.random() * 5)
        cluster.nodes[1].crash()
        sim.sleep(dice.random() * 5)
        cluster.nodes[2].freeze()
        sim.sleep(100)  # its session ends meanwhile
        cluster.nodes[2].thaw()
    cluster.settle()
    require_linearizable([call for client in clients for call in client.history])
    cluster.drain()
    cluster.stop()
    cluster.judge()


@pytest.mark.sim_seeds(60)
def test_bad_networks_are_linearizable(sim_seed: int, log_watch: LogWatch) -> None:
    log_watch.expect(TROUBLE)
    simulate(sim_seed, lambda sim: _live(sim, sim_seed, crashes=False))


@pytest.mark.sim_seeds(60)
def test_crashes_and_lost_leases_are_linearizable(sim_seed: int, log_watch: LogWatch) -> None:
    log_watch.expect(TROUBLE)
    simulate(sim_seed, lambda sim: _live(sim, sim_seed, crashes=True))

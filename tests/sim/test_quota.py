"""Q1 in simulated worlds: volumes are counted, recounted and left uncounted while clients work,
lose their networks and leases, and crash; whoever counts may crash, too. `Cluster.judge` compares
every counter with a recount.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from fsmeta.admin import quota_admin
from fsmeta.admin.quota_admin import QuotaLimits
from fsmeta.errors import ConfigError, StoreError
from fsmeta.meta.meta import Meta
from fsmeta.rules import quota
from fsmeta.store.mem import MemStore
from tests.conftest import LogWatch
from tests.sim import test_client as worlds
from tests.sim.world.cluster import Cluster, Weather
from tests.sim.world.faults import FaultStore
from tests.sim.world.harness import simulate

eager = worlds.eager  # the fixture
AMPLE = QuotaLimits(1 << 50, 1 << 30)  # nobody is refused: the loads know nothing of quotas
PAUSE_S = 2.0
ADMINS = 4


def _administer(cluster: Cluster, dice: random.Random, weather: Weather, name: str) -> None:
    """Somebody who sets quotas, recounts and deletes them, until he fails."""
    process = cluster.sim.process(name)
    network = weather.meta if dice.random() < 0.5 else worlds.META
    store = FaultStore(
        MemStore(cluster.backend), cluster.sim, dice.getrandbits(30), network, process
    )

    def work() -> None:
        try:
            meta = Meta(store, process)
            for _ in range(dice.randrange(1, 4)):
                _one_act(meta, dice)
                process.sleep(dice.random() * PAUSE_S)
        except (StoreError, ConfigError):
            pass  # as if killed

    process.spawn("admin", work)
    if dice.random() < 0.5:
        cluster.sim.sleep(dice.random() * PAUSE_S)
        process.crash()


def _one_act(meta: Meta, dice: random.Random) -> None:
    node = dice.choice((quota.user_node(0), quota.group_node(0), quota.user_node(7)))
    match dice.randrange(4):
        case 0:
            quota_admin.delete_quota(meta, node)
        case 1 if quota_admin.has_limits(meta):
            quota_admin.recount(meta)
        case _:
            quota_admin.set_quota(meta, node, AMPLE)


def _with_quotas(calamity: worlds.Calamity | None, weather: Weather) -> worlds.Calamity:
    def happen(cluster: Cluster, dice: random.Random) -> None:
        _administer(cluster, dice, weather, "admin")
        if calamity is not None:
            calamity(cluster, dice)
        for number in range(dice.randrange(ADMINS)):
            cluster.sim.sleep(dice.random() * PAUSE_S)
            _administer(cluster, dice, weather, f"admin{number}")
        cluster.sim.sleep(dice.random() * PAUSE_S)
        last = Meta(MemStore(cluster.backend), cluster.sim.process("last"))
        if dice.random() < 0.8:
            quota_admin.set_quota(last, quota.user_node(0), AMPLE)

    return happen


def _live(seed: int, weather: Weather, calamity: worlds.Calamity | None) -> None:
    happen = _with_quotas(calamity, weather)
    simulate(seed, lambda sim: worlds.live(sim, seed, weather, happen))


@pytest.mark.sim_seeds(20)
def test_calm(sim_seed: int) -> None:
    _live(sim_seed, Weather(), None)


@pytest.mark.parametrize("calamity", ["crash", "_lose_leases", "_outages"])
@pytest.mark.sim_seeds(20)
def test_calamities(sim_seed: int, calamity: str, log_watch: LogWatch) -> None:
    log_watch.expect(worlds.TROUBLE)
    happen: Callable[[Cluster, random.Random], None] = getattr(worlds, calamity)
    _live(sim_seed, Weather() if sim_seed % 2 else Weather(worlds.META, worlds.DATA), happen)

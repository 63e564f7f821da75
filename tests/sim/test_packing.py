"""O6: small files are packed, packed anew and deleted all the time, while clients write and die.

gc runs besides, so that it takes nothing that is on its way into a segment, and leaves nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from fsclient.background import packer, tidy_queue
from fsclient.client.client_options import ClientOptions
from fsclient.upkeep import pack
from fsclient.upkeep.pack import PackWalk
from fsdata.resources.worker_pool import WorkerPool
from fsmeta.errors import StoreError
from tests.conftest import LogWatch
from tests.sim import test_writeback
from tests.sim.loads import Load
from tests.sim.loads.logs import Logs
from tests.sim.loads.shares import Shares
from tests.sim.loads.smalls import Smalls
from tests.sim.loads.trees import Trees
from tests.sim.test_client import (
    DATA,
    META,
    TROUBLE,
    Calamity,
    _lose_leases,
    _outages,
    crash,
    eager,
)
from tests.sim.test_collect import live, nothing, small_steps
from tests.sim.test_writeback import (
    CALM_DATA,
    TROUBLE as STAGING_TROUBLE,
    World,
    _crash,
    _lose_disk,
    live as write_back,
)
from tests.sim.world import cluster as cluster_module
from tests.sim.world.cluster import BLOCK, Cluster, Node, Weather
from tests.sim.world.harness import simulate
from tests.sim.world.scheduler import SimRuntime

__all__ = ["eager", "small_steps"]
QUIET_S = 10  # what waits for company waits no longer


def pack_at_once(patch: pytest.MonkeyPatch) -> None:
    """Clients pack what is smaller than a block, and wait a moment only."""

    def options(**settings: object) -> ClientOptions:
        return ClientOptions(**settings)._replace(pack_below=BLOCK)  # type: ignore[arg-type]

    patch.setattr(cluster_module, "ClientOptions", options)
    patch.setattr(packer, "QUIET_S", 0.2)
    patch.setattr(packer, "LINGER_S", 1.0)


@pytest.fixture(autouse=True)
def packing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small files are packed at once, few at a time."""
    pack_at_once(monkeypatch)
    monkeypatch.setattr(packer, "MEMBERS_MAX", 6)


def _live(sim: SimRuntime, seed: int, weather: Weather, calamity: Calamity, cursor: str) -> None:
    dice = random.Random(seed + 6)
    cluster = Cluster(sim, seed, weather, trash_days=int(seed % 3 == 1))
    makers: list[Callable[[], Load]] = [Trees, Shares, Logs]
    loads = [Smalls(), dice.choice(makers)()]
    live(cluster, loads, dice, calamity, cursor, QUIET_S)
    if calamity is nothing and not weather.data.refused:
        assert sum(node.client.background.packer.segments for node in cluster.nodes), "no packing"


@pytest.mark.sim_seeds(10)
@pytest.mark.parametrize("calamity", [nothing, _outages, crash, _lose_leases])
def test_o6_packed_while_clients_write_and_die(
    sim_seed: int, calamity: Calamity, log_watch: LogWatch, tmp_path: Path
) -> None:
    log_watch.expect(TROUBLE)
    weather = Weather() if sim_seed % 2 else Weather(META, DATA)
    cursor = str(tmp_path / "cursor")
    simulate(sim_seed, lambda sim: _live(sim, sim_seed, weather, calamity, cursor))


@pytest.mark.sim_seeds(10)
def test_o6_packed_behind_a_journal(
    sim_seed: int, log_watch: LogWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is packed is in the store before others see it, whatever disk is lost."""
    monkeypatch.setattr(tidy_queue, "MEMBERS_MIN", 2)
    monkeypatch.setattr(packer, "LINGER_S", 0.2)
    monkeypatch.setattr(test_writeback, "SIZES", (1, 300, 900, 4000))
    log_watch.expect(STAGING_TROUBLE)
    weather = Weather(data=CALM_DATA)
    calamity = partial(_crash, then=_lose_disk)
    simulate(sim_seed, lambda sim: write_back(sim, sim_seed, weather, calamity, 2))


class Walks:
    """Walks over all inodes and packs, again and again; what `gc --pack` does."""

    def __init__(self) -> None:
        self.packed = 0

    def prepare(self, node: Node) -> None:
        """Others make the files."""

    def act(self, node: Node, dice: random.Random, turns: int) -> None:
        client = node.client
        pool = WorkerPool(node.process, "pack", 2)
        by = client.background.packer_for(BLOCK, pool)
        for _ in range(turns):
            node.process.sleep(dice.random() * 2)
            before = by.packed
            try:
                work = PackWalk(client.meta, by, client.blocks.block_bytes)
                for _count, _cursor in pack.pages(client.meta, work):
                    node.process.sleep(dice.random() / 10)
            except StoreError:
                pass  # it is run again
            self.packed += by.packed - before
        pool.close()

    def check(self, node: Node) -> None:
        """Whoever made the files knows what is in them."""


def _conforms(load: Walks) -> Load:
    return load


@pytest.fixture
def walking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody packs what was written but who walks; `packing` has been asked for before."""

    def options(**settings: object) -> ClientOptions:
        return ClientOptions(**settings)._replace(pack_below=0)  # type: ignore[arg-type]

    monkeypatch.setattr(cluster_module, "ClientOptions", options)
    monkeypatch.setattr(tidy_queue, "MEMBERS_MIN", 2)
    monkeypatch.setattr(pack, "MEMBERS_MAX", 6)
    monkeypatch.setattr(pack, "WINDOW", 10)


def _walk(sim: SimRuntime, seed: int, weather: Weather, calamity: Calamity, cursor: str) -> None:
    dice = random.Random(seed + 7)
    cluster = Cluster(sim, seed, weather, trash_days=int(seed % 3 == 1))
    makers: list[Callable[[], Load]] = [Trees, Shares, Logs]
    walks = Walks()
    live(cluster, [Smalls(), walks, dice.choice(makers)()], dice, calamity, cursor)
    if calamity is nothing and not weather.data.refused:
        assert walks.packed, "no packing"


@pytest.mark.sim_seeds(4)
@pytest.mark.parametrize("calamity", [nothing, _outages, crash, _lose_leases])
@pytest.mark.usefixtures("walking")
def test_o6_packed_by_a_walk_while_clients_write_and_die(
    sim_seed: int, calamity: Calamity, log_watch: LogWatch, tmp_path: Path
) -> None:
    log_watch.expect(TROUBLE)
    weather = Weather() if sim_seed % 2 else Weather(META, DATA)
    cursor = str(tmp_path / "cursor")
    simulate(sim_seed, lambda sim: _walk(sim, sim_seed, weather, calamity, cursor))


@pytest.mark.sim_seeds(4)
@pytest.mark.usefixtures("walking")
def test_o6_packed_by_a_walk_beside_a_journal(
    sim_seed: int, log_watch: LogWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another client packs what a mount has published, and has further changes of."""
    monkeypatch.setattr(test_writeback, "SIZES", (1, 300, 900, 4000))
    log_watch.expect(STAGING_TROUBLE)

    def then_crash(world: World, dice: random.Random) -> None:
        world.watcher.act("packs", partial(Walks().act, world.watcher, dice, 8))
        if sim_seed % 2:
            _crash(world, dice, _lose_disk)

    simulate(
        sim_seed, lambda sim: write_back(sim, sim_seed, Weather(data=CALM_DATA), then_crash, 2)
    )

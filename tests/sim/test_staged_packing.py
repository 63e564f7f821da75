"""O6, W2: small files go from a journal into segments, while clients die, sleep and lose disks.

The judge of `test_writeback` reads the stores all the time: what others see is in order, and every
byte of it is there. At the end each use of a segment is counted, and nobody has one open.
"""

from __future__ import annotations

import random
from functools import partial

import pytest

from fsclient.background import tidy_queue
from fsclient.background.leadership import LEASE_S
from fsclient.writeback import packer as staged_packer
from fsdata.staging import coalesce
from tests.conftest import LogWatch
from tests.sim import test_writeback
from tests.sim.test_packing import pack_at_once
from tests.sim.test_writeback import (
    CALM_DATA,
    DATA,
    LOST,
    META,
    RANGES,
    TROUBLE,
    Calamity,
    World,
    _crash,
    _lose_disk,
    _lose_power,
    _same_disk,
    live,
)
from tests.sim.world.cluster import BLOCK, Weather
from tests.sim.world.harness import simulate
from tests.sim.world.scheduler import SimRuntime

WAITS = "^WARNING fsclient.writeback.publisher: .* waits to be published"


@pytest.fixture(autouse=True)
def packing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two files are company; what went alone is packed later, at once."""
    pack_at_once(monkeypatch)
    monkeypatch.setattr(tidy_queue, "MEMBERS_MIN", 2)
    monkeypatch.setattr(staged_packer, "MEMBERS_MIN", 2)
    monkeypatch.setattr(coalesce, "LINGER_S", 1.0)
    monkeypatch.setattr(test_writeback, "SIZES", (1, 300, 900, 4000, 3 * BLOCK + 5))


def _packed(world: World) -> int:
    """Segments that were made from journals."""
    backs = [host.node.client.writeback for host in world.hosts]
    return sum(back.packer.segments for back in backs if back is not None and back.packer)


def _world(sim: SimRuntime, seed: int, calamity: Calamity, calm: bool) -> None:
    """One world; where all is well, something was packed."""
    worlds: list[World] = []

    def note(world: World, dice: random.Random) -> None:
        worlds.append(world)
        calamity(world, dice)

    weather = Weather(data=CALM_DATA) if calm else Weather(META, DATA)
    verbs = test_writeback.NAMES_AND_BYTES
    if seed % 4 == 1 and calamity is not _oversleep:  # that takes files without names
        verbs = RANGES
    live(sim, seed, weather, note, 1 + seed % 2, verbs)
    assert _packed(worlds[0]) or not calm or calamity is not _nothing, "nothing was packed"


def _nothing(world: World, dice: random.Random) -> None:
    """All is well."""


def _oversleep(world: World, dice: random.Random) -> None:
    """A writer stands still for longer than its lease, and its segments are left to the leader."""
    world.cluster.sim.sleep(dice.random() * 3)
    host = dice.choice(world.hosts)
    host.node.freeze()
    world.cluster.sim.sleep(LEASE_S + 30 + dice.random() * 30)
    host.node.thaw()


@pytest.mark.sim_seeds(4)
@pytest.mark.parametrize(
    "calamity",
    [
        _nothing,
        partial(_crash, then=_same_disk),
        partial(_crash, then=_lose_disk),
        _oversleep,
    ],
    ids=["calm", "crash", "lost-disk", "oversleep"],
)
def test_o6_w2_packed_from_the_journal(
    sim_seed: int, calamity: Calamity, log_watch: LogWatch
) -> None:
    log_watch.expect(f"{TROUBLE}|{WAITS}")
    simulate(sim_seed, lambda sim: _world(sim, sim_seed, calamity, sim_seed % 3 > 0))


@pytest.mark.sim_seeds(4)
def test_o6_w1_packed_and_the_power_lost(sim_seed: int, log_watch: LogWatch) -> None:
    log_watch.expect(f"{TROUBLE}|{WAITS}|{LOST}")
    calamity = partial(_crash, then=_lose_power)
    simulate(sim_seed, lambda sim: _world(sim, sim_seed, calamity, calm=True))

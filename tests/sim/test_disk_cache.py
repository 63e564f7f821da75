"""C1, C2, C6 in the simulation: whole clients over cache disks that err and somebody spoils."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from functools import partial

import pytest

from fsclient.control.warmup_server import ANSWER_BYTES, WARM_XATTR
from fsclient.volume import cache_options
from fsdata.disk_cache.directory import usage
from fsmeta.errors import StoreError
from fsmeta.schema import keys
from fsmeta.types import ROOT_CALLER, ROOT_INO, Ino
from tests.conftest import LogWatch
from tests.sim.test_client import DATA, META, TROUBLE, WINDOW_S, crash, eager, live
from tests.sim.world.cluster import Cluster, Node, Weather
from tests.sim.world.disks import SimDisks
from tests.sim.world.harness import simulate
from tests.sim.world.scheduler import SimRuntime

__all__ = ["eager"]

SPOILT = 30  # cache files in one world
WARMED = 30  # requests of each client
VERBS = ("disk", "disk", "memory", "both", "meta", "check", "evict")
CACHE_TROUBLE = f"{TROUBLE}|^WARNING fsdata.disk_cache.directory.health: "


@pytest.fixture(autouse=True)
def small() -> Iterator[None]:
    """Caches of a few blocks, in a few shards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_options, "SIZE_BYTES_MIN", 1)
        patch.setattr(usage, "SHARDS", 3)
        patch.setattr(cache_options, "OPEN_MAX", 4)
        yield


def _spoil(cluster: Cluster, dice: random.Random) -> None:
    """Somebody is at the disks while clients work; some of these die."""
    assert cluster.disks is not None
    for _ in range(SPOILT):
        cluster.sim.sleep(dice.random() * WINDOW_S / SPOILT)
        cluster.disks.spoil()
    if dice.random() < 0.3:
        crash(cluster, dice)


@pytest.mark.sim_seeds(60)
def test_spoilt_disk_caches(sim_seed: int, log_watch: LogWatch) -> None:
    log_watch.expect(CACHE_TROUBLE)
    weather = Weather() if sim_seed % 2 else Weather(META, DATA)

    def body(sim: SimRuntime) -> None:
        disks = SimDisks(sim, sim_seed + 7)
        live(sim, sim_seed, weather, _spoil, disks=disks)

    simulate(sim_seed, body)


def _warm(cluster: Cluster, dice: random.Random) -> None:
    """Every client is asked to warm, look for and evict files that change meanwhile."""
    for node in cluster.nodes:
        seed = dice.getrandbits(30)
        node.act("warm", partial(_warm_some, node, cluster.backend.rows, random.Random(seed)))
    _spoil(cluster, dice)


def _warm_some(
    node: Node, rows: Mapping[bytes, Mapping[bytes, bytes]], dice: random.Random
) -> None:
    warmer = node.client.vfs.questions.warmer
    assert warmer is not None
    for _ in range(WARMED):
        node.process.sleep(dice.random() * WINDOW_S / WARMED)
        files = [
            row for row, fields in sorted(rows.items()) if row[:1] == b"i" and _has_data(fields)
        ]
        ino = Ino(keys.id_of(dice.choice(files))) if files else ROOT_INO
        verb = dice.choice(VERBS)
        begin = dice.choice((0, dice.randrange(1 << 20)))
        name = b"%b.%b.%d.%d" % (WARM_XATTR, verb.encode(), begin, 1 << 40)
        try:
            answer = warmer.answer(ROOT_CALLER, ino, name)
        except (OSError, StoreError):
            continue  # not there, a directory, or the network
        assert verb == "check" or len(answer) <= ANSWER_BYTES


def _has_data(fields: Iterable[bytes]) -> bool:
    return any(field[:1] == b"c" for field in fields)


@pytest.mark.sim_seeds(40)
def test_warmed_disk_caches(sim_seed: int, log_watch: LogWatch) -> None:
    log_watch.expect(CACHE_TROUBLE)
    weather = Weather() if sim_seed % 2 else Weather(META, DATA)

    def body(sim: SimRuntime) -> None:
        disks = SimDisks(sim, sim_seed + 7)
        live(sim, sim_seed, weather, _warm, disks=disks)

    simulate(sim_seed, body)

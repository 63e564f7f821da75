"""R1: gc with no safety age runs all the time, while clients write, die and are taken for dead."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from fsclient.upkeep import gc as collect_module, gc_checkpoint
from fsclient.upkeep.gc_checkpoint import GcCheckpoint
from fsmeta.errors import ConfigError
from tests.conftest import LogWatch
from tests.sim.loads import Load
from tests.sim.loads.logs import Logs
from tests.sim.loads.records import Records
from tests.sim.loads.trees import Trees
from tests.sim.test_client import (
    DATA,
    META,
    TROUBLE,
    Calamity,
    _employ,
    _lose_leases,
    _outages,
    crash,
    eager,
)
from tests.sim.world.cluster import Cluster, Weather
from tests.sim.world.harness import simulate
from tests.sim.world.scheduler import SimRuntime

__all__ = ["eager"]
GC_ERROR = "^ERROR fsclient.files.write_errors: inode .* data written and not stored is lost: "


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect_module, "BATCH", 3)
    monkeypatch.setattr(gc_checkpoint, "SAVE_EVERY_S", 0.0)


class Killed(BaseException):
    """What a process that is killed does not see."""


class Collector:
    """Runs gc again and again, in a thread of the world; killed now and then, it goes on."""

    def __init__(self, cluster: Cluster, dice: random.Random, cursor: str) -> None:
        self._cluster = cluster
        self._dice = dice
        self._cursor = cursor
        self._stopping = False
        self.deleted = self.runs = self.kills = 0
        self._thread = cluster.sim.process("gc").spawn("gc", self._work)

    def _work(self) -> None:
        while not self._stopping:
            place = GcCheckpoint(self._cluster.sim, self._cursor, "the volume")
            try:
                self.deleted += self._cluster.collect(place=place, step=self._step).deleted.objects
                self.runs += 1
                place.remove()
            except Killed:
                self.kills += 1
            except ConfigError as error:
                assert "another gc" in str(error)
            self._cluster.sim.sleep(self._dice.random() * 5)

    def _step(self) -> None:
        """It is killed, or delayed, or somebody runs another one."""
        fate = self._dice.random()
        if fate < 0.1 and not self._stopping:
            raise Killed
        if fate < 0.2:
            self._cluster.sim.sleep(self._dice.random())
        elif fate < 0.25:
            self._cluster.collect()

    def stop(self) -> None:
        self._stopping = True
        self._thread.join()
        assert self.runs or self.kills


def live(
    cluster: Cluster,
    loads: list[Load],
    dice: random.Random,
    calamity: Calamity,
    cursor: str,
    quiet_s: float = 0,
) -> None:
    """Some clients work, gc runs and `calamity` comes; in the end nothing is lost or left over.

    `quiet_s`: how long nobody works before that is judged.
    """
    leaks = cluster.leaks
    first = cluster.add()
    for load in loads:
        load.prepare(first)
    for _ in range(dice.randrange(3)):
        cluster.add()
    collector = Collector(cluster, dice, cursor)
    for node in cluster.nodes:
        _employ(node, loads, dice)
    calamity(cluster, dice)
    for node in cluster.living():
        if not node.actors:
            _employ(node, loads, dice)
    cluster.settle()
    cluster.sim.sleep(quiet_s)
    for load in loads:
        load.check(cluster.living()[-1])
    cluster.drain()
    collector.stop()
    cluster.stop()
    last = cluster.collect()
    assert not last.held_by
    assert not last.recent.objects, "nobody is there who could commit anything"
    assert cluster.collect(delete=False).leaked.objects == 0
    cluster.leaks = leaks  # what a crash leaves gc has taken
    cluster.judge()


def _live(sim: SimRuntime, seed: int, weather: Weather, calamity: Calamity, cursor: str) -> None:
    dice = random.Random(seed + 5)
    cluster = Cluster(sim, seed, weather)
    makers: list[Callable[[], Load]] = [Trees, Logs, lambda: Records(dice)]
    live(cluster, [make() for make in dice.sample(makers, 2)], dice, calamity, cursor)


def nothing(cluster: Cluster, dice: random.Random) -> None:
    """All is well."""


@pytest.mark.sim_seeds(20)
@pytest.mark.parametrize("calamity", [nothing, _outages, crash, _lose_leases])
def test_gc_takes_nothing_that_is_used_and_leaves_nothing(
    sim_seed: int, calamity: Calamity, log_watch: LogWatch, tmp_path: Path
) -> None:
    log_watch.expect(TROUBLE)
    weather = Weather() if sim_seed % 2 else Weather(META, DATA)
    simulate(
        sim_seed, lambda sim: _live(sim, sim_seed, weather, calamity, str(tmp_path / "cursor"))
    )

"""W1, W4: a client drains its journal and ends, others change what it has made, and the power goes.

Names that were removed and not synced may be back: nothing of a drained journal is published anew.
"""

from __future__ import annotations

import os
import random

import pytest

from tests.sim.test_writeback import CALM_DATA, read_all
from tests.sim.world.cluster import Cluster, Node, Weather
from tests.sim.world.harness import simulate
from tests.sim.world.posix import Posix
from tests.sim.world.scheduler import SimRuntime
from tests.sim.world.staging import SimDisk

NAMES = tuple(b"/d/%d" % number for number in range(6))


def _write(posix: Posix, name: bytes, data: bytes) -> None:
    file = posix.open(name, os.O_CREAT | os.O_RDWR | os.O_TRUNC)
    try:
        file.write(0, data)
    finally:
        file.close()


def _leave(cluster: Cluster, node: Node) -> None:
    """As `umount`."""
    assert node.client.stop()
    assert node.client.drained
    cluster.nodes.remove(node)


def _body(sim: SimRuntime, seed: int) -> None:
    dice = random.Random(seed)
    cluster = Cluster(sim, seed, Weather(data=CALM_DATA))
    cluster.leaks = True
    disk = SimDisk(sim, seed)
    other = cluster.add()
    theirs = Posix(other.client.vfs)
    theirs.mkdir(b"/d")
    for _ in range(3):
        mine = cluster.add(disk)
        posix = Posix(mine.client.vfs)
        for name in dice.sample(NAMES, 4):
            _write(posix, name, b"mine" * dice.randrange(1, 500))
        if dice.random() < 0.3:
            sim.sleep(3)  # the journal is synced meanwhile
        _leave(cluster, mine)
        for name in NAMES:
            if dice.random() < 0.5:
                _write(theirs, name, b"theirs" * dice.randrange(500))
            elif dice.random() < 0.3 and name[3:] in theirs.listdir(b"/d"):
                theirs.unlink(name)
        before = read_all(theirs, b"/d")
        disk.lose_power()
        mine = cluster.add(disk)
        assert mine.client.writeback is not None
        assert mine.client.writeback.settle(None, 60), "what came back is never published"
        assert read_all(Posix(mine.client.vfs), b"/d") == before
        assert read_all(theirs, b"/d") == before
        assert theirs.listdir(b"/") == [b"d"], "nothing is rescued that nobody had lost"
        _leave(cluster, mine)
    assert disk.names() == []
    cluster.settle()
    cluster.drain()
    cluster.stop()
    cluster.judge()


@pytest.mark.sim_seeds(25)
def test_w1_a_drained_journal_does_not_come_back(sim_seed: int) -> None:
    """Its log was there again, and its marks were not: it was published over newer files."""
    simulate(sim_seed, lambda sim: _body(sim, sim_seed))

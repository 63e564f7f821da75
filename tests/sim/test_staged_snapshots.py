"""T2, W2: snapshots of directories that mounts write back, in simulated worlds.

A snapshot holds what was acknowledged before it was asked for. One that says it is of one moment
shows a state of the writer's line, no earlier one than that, and shows it ever after.
"""

from __future__ import annotations

import errno
import json
import random
from functools import partial

import pytest

from fsclient.control.clone_jobs import CLONE_XATTR
from fsmeta.errors import StoreError
from fsmeta.schema import keys
from fsmeta.schema.snapshot_inos import snapshot_dir_of
from fsmeta.types import ROOT_CALLER, Ino
from tests.conftest import LogWatch
from tests.sim.test_writeback import (
    CALM_DATA,
    DATA,
    META,
    NAMES_AND_BYTES,
    TROUBLE,
    Calamity,
    Host,
    World,
    _crash,
    _lose_disk,
    _same_disk,
    live,
)
from tests.sim.world.cluster import Node, Weather
from tests.sim.world.harness import simulate
from tests.sim.world.posix import Posix
from tests.sim.world.stored import State, content_of

TAKEN = 6  # by each client
TRIES = 5  # in peace; what is compacted meanwhile counts as changed
LOOK_S = 0.05
REFUSED = (errno.EIO, errno.ECANCELED)  # the network; others took us for dead


class Kept:
    """The snapshots of a world, and what each showed at first."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.shown: dict[Ino, State] = {}
        self._count = 0

    def work(self, host: Host, node: Node, dice: random.Random) -> None:
        """Take some while the writer goes on; they die together."""
        for _ in range(TAKEN):
            node.process.sleep(dice.random() * 0.5)
            try:
                self.take(host, node)
            except StoreError:
                return

    def take(self, host: Host, node: Node) -> bool:
        """Whether one of one moment was taken."""
        self._count += 1
        vfs, line, word = node.client.vfs, host.line, b"s%d" % self._count
        source = Posix(vfs).stat(line.path).ino
        wish = {"source": source, "name": word.decode(), "preserve": False, "snapshot": True}
        done = line.done
        xattr = CLONE_XATTR + word
        vfs.xattrs.setxattr(ROOT_CALLER, source, xattr, json.dumps(wish).encode(), 0)
        while not (report := json.loads(vfs.xattrs.getxattr(ROOT_CALLER, source, xattr)))["done"]:
            node.process.sleep(LOOK_S)
        if report["errno"]:
            assert report["errno"] in REFUSED, report
            return False
        rows = self.world.cluster.backend.rows
        dentry = rows[keys.dir_row(snapshot_dir_of(source))][word]
        root = keys.unpack_dentry(b"", word, dentry)[1]
        self.shown[root] = self.show(root)
        if report["changed"]:
            return False
        line.look(self.shown[root], done)
        return True

    def show(self, root: Ino) -> State:
        """What the stores have of a snapshot."""
        cluster = self.world.cluster
        return {
            name: content_of(cluster, keys.unpack_dentry(b"", name, value)[1])
            for name, value in cluster.backend.rows.get(keys.dir_row(root), {}).items()
        }


def _taking(world: World, dice: random.Random, then: Calamity | None) -> None:
    """Snapshots are taken all the time; `then` something happens to who takes them."""
    kept = Kept(world)
    busy: set[Node] = set()

    def employ() -> None:
        for host in world.hosts:
            if host.node not in busy:
                busy.add(host.node)
                own = random.Random(dice.getrandbits(30))
                host.node.act("taker", partial(kept.work, host, host.node, own))

    employ()
    if then is not None:
        then(world, dice)
        employ()
    for host in world.hosts:
        for actor in host.node.actors:
            actor.join()
    world.cluster.settle()
    for host in world.hosts:
        assert any(kept.take(host, host.node) for _ in range(TRIES)), "none is of one moment"
    for root, state in kept.shown.items():
        assert kept.show(root) == state, "a snapshot has changed"


def _world(seed: int, then: Calamity | None) -> None:
    weather = Weather(data=CALM_DATA) if seed % 2 else Weather(META, DATA)
    taking = partial(_taking, then=then)
    simulate(seed, lambda sim: live(sim, seed, weather, taking, 1 + seed % 2, NAMES_AND_BYTES))


@pytest.mark.sim_seeds(6)
def test_t2_w2_snapshots_hold_what_was_done(sim_seed: int, log_watch: LogWatch) -> None:
    log_watch.expect(TROUBLE)
    _world(sim_seed, None)


@pytest.mark.sim_seeds(8)
def test_t2_w2_who_takes_snapshots_dies(sim_seed: int, log_watch: LogWatch) -> None:
    """With the disk kept or lost: nothing is seen of a snapshot that was not complete."""
    log_watch.expect(TROUBLE)
    _world(sim_seed, partial(_crash, then=_lose_disk if sim_seed % 3 == 1 else _same_disk))

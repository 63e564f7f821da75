"""W2: domains two levels below the root in simulated worlds: who waits for whom, and who does not.

Two jobs of one client work in directories side by side. The store refuses the first object of one
of them that carries a mark; what that job did from there on is held back, and the other's is not.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from functools import partial
from typing import Final

import pytest

from fsclient.writeback.writeback import WriteBack, WriteBackOptions
from fsdata.objects.contract import Buffer
from fsdata.objects.mem import MemObjects
from fsmeta.errors import Unavailable
from fsmeta.types import Ino
from tests.conftest import LogWatch
from tests.sim.test_writeback import Line, read_all
from tests.sim.world.cluster import BLOCK, Cluster, Node, Weather
from tests.sim.world.faults import Faults
from tests.sim.world.harness import simulate
from tests.sim.world.posix import Posix
from tests.sim.world.scheduler import SimRuntime
from tests.sim.world.staging import SimDisk
from tests.sim.world.stored import stored

TURNS: Final = 12
NAMES: Final = (b"a", b"b", b"c")
SIZES: Final = (0, 900, BLOCK, 2 * BLOCK + 5)
MARK: Final = b"not to be taken!"
LOOK_S: Final = 0.05
DATA: Final = Faults(latency_s=0.05, slow=0.1, slow_s=1.0, refused=0, reply_lost=0, request_lost=0)
WAITS: Final = (
    r"^WARNING fs(data.staging|client.writeback)\S*: .*wait|"
    "^WARNING fsclient.background.leadership: session .* sent no heartbeat"
)


class Picky(MemObjects):
    """Refuses the first object that has the mark, until it is told otherwise."""

    def __init__(self, sim: SimRuntime) -> None:
        super().__init__(sim)
        self.refused = ""
        self.open = False

    def put(self, key: str, pieces: Sequence[Buffer]) -> None:
        if not self.open:
            if not self.refused and MARK in b"".join(pieces):
                self.refused = key
            if key == self.refused:
                raise Unavailable("simulated: not this one")
        super().put(key, pieces)


class World:
    """A client on a host of its own, which may be killed, and the judge of what others see."""

    def __init__(self, sim: SimRuntime, seed: int, depth: int) -> None:
        self.sim = sim
        self.dice = random.Random(seed + 5)
        self.depth = depth
        self.cluster = Cluster(sim, seed, Weather(data=DATA))
        self.cluster.leaks = True
        self.objects = self.cluster.objects = Picky(sim)
        self.disk = SimDisk(sim, seed)
        self.node = self._boot()
        self.held, self.free = Line(b"/team/held"), Line(b"/team/free")
        self.posix.mkdir(b"/team")
        for line in self.lines:
            self.posix.mkdir(line.path)
        self.over = False
        sim.spawn_in(None, "judge", self._judge)

    @property
    def lines(self) -> tuple[Line, Line]:
        return self.held, self.free

    @property
    def posix(self) -> Posix:
        return Posix(self.node.client.vfs)

    @property
    def back(self) -> WriteBack:
        assert self.node.client.writeback is not None
        return self.node.client.writeback

    def _boot(self) -> Node:
        return self.cluster.add(self.disk, WriteBackOptions(domain_depth=self.depth))

    def restart(self) -> None:
        """SIGKILL, and another client takes up the journal."""
        self.node.crash()
        self.sim.sleep(1)
        self.node = self._boot()
        for line in self.lines:
            line.resume(line.look(read_all(self.posix, line.path), line.done))

    def _judge(self) -> None:
        while not self.over:
            self.look()
            self.sim.sleep(LOOK_S)

    def look(self) -> None:
        """What the store shows is a state that was, and none from before the last one shown."""
        for line in self.lines:
            line.seen = line.look(stored(self.cluster, line.path), line.seen)

    def work(self) -> None:
        """Both jobs, side by side, to their ends."""
        for line, mark in ((self.held, MARK), (self.free, b"")):
            own = random.Random(self.dice.getrandbits(30))
            self.node.act("job", partial(self._job, line, mark, own))
        for actor in self.node.actors:
            actor.join()

    def _job(self, line: Line, mark: bytes, dice: random.Random) -> None:
        posix = self.posix
        for turn in range(TURNS):
            self.node.process.sleep(dice.random() * 0.3)
            now = line.states[-1]
            name, other = dice.sample(NAMES, 2)
            verb = dice.choice(("write", "write", "rename", "unlink"))
            if turn == 0 or verb == "write" or name not in now:
                data = mark + dice.randbytes(900 if turn == 0 else dice.choice(SIZES))
                self._fill(line, posix, name, data)
            elif verb == "rename":
                left = {key: data for key, data in now.items() if key != name}
                line.issue({**left, other: now[name]})
                posix.rename(line.path + b"/" + name, line.path + b"/" + other)
            else:
                line.issue({key: data for key, data in now.items() if key != name})
                posix.unlink(line.path + b"/" + name)
            line.acknowledge()

    def _fill(self, line: Line, posix: Posix, name: bytes, data: bytes) -> None:
        line.issue({**line.states[-1], name: b""})
        file = posix.open(line.path + b"/" + name, os.O_CREAT | os.O_RDWR | os.O_TRUNC)
        try:
            if data:
                line.issue({**line.states[-1], name: data})
                file.write(0, data)
        finally:
            file.close()

    def ino(self, line: Line) -> Ino:
        return self.posix.stat(line.path).ino


def live(sim: SimRuntime, seed: int, depth: int) -> None:
    """One world from beginning to end."""
    world = World(sim, seed, depth)
    world.work()
    if seed % 2:
        world.restart()
    held, free = world.lines
    assert world.back.settle(world.ino(free), 60) == (depth == 2)
    assert not world.back.settle(world.ino(held), 0)
    world.look()
    shown = stored(world.cluster, free.path)
    assert (shown == free.states[-1]) == (depth == 2), (free.seen, free.done)
    assert stored(world.cluster, held.path) != held.states[-1], "nothing was held back"

    world.objects.open = True
    world.cluster.settle()
    assert world.back.settle(None, 300), "never published"
    world.look()
    world.over = True
    for line in world.lines:
        assert stored(world.cluster, line.path) == line.states[-1]
    world.cluster.drain()
    world.cluster.stop()
    assert world.disk.names() == [], "a journal is left"
    world.cluster.judge()


@pytest.mark.sim_seeds(16)
def test_w2_two_levels_down(sim_seed: int, log_watch: LogWatch) -> None:
    """Jobs below one directory are two domains."""
    log_watch.expect(WAITS)
    simulate(sim_seed, lambda sim: live(sim, sim_seed, 2))


@pytest.mark.sim_seeds(4)
def test_w2_one_level_down(sim_seed: int, log_watch: LogWatch) -> None:
    """The same jobs are one domain, and wait for each other."""
    log_watch.expect(WAITS)
    simulate(sim_seed, lambda sim: live(sim, sim_seed, 1))

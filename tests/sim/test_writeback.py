"""W1, W2: write-back in simulated worlds: crashes, lost disks, lost power, bad networks.

Writers change files in directories of their own, one domain each. What a writer has done is a line
of states. At every look the store must show one of these states, never an earlier one than before,
and every byte of it must be in the object store; so no crash can show others what is out of order.
After a crash the writer's own mount shows all it was told is done.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from functools import partial

import pytest

from fsclient.client.client import MountClient
from fsclient.writeback.writeback import WriteBack
from fsmeta.errors import StoreError
from fsmeta.ops.data.ranges import KEEP_SIZE, ZERO_RANGE
from tests.conftest import LogWatch
from tests.fsdata.world import pattern
from tests.sim.world.cluster import BLOCK, Cluster, Node, Weather
from tests.sim.world.faults import Faults
from tests.sim.world.harness import simulate
from tests.sim.world.posix import Posix
from tests.sim.world.scheduler import SimRuntime
from tests.sim.world.staging import SimDisk
from tests.sim.world.stored import State, stored

Verbs = tuple[str, ...]
Calamity = Callable[["World", random.Random], None]

NAMES_AND_BYTES: Verbs = ("write", "write", "write", "rename", "unlink", "link", "fsync")
RANGES: Verbs = (
    *(
        "write",
        "fsync",
        "rename",
        "unlink",
        "punch",
        "reserve",
        "reserve",
        "copy",
        "copy",
        "tmpfile",
    ),
)
TURNS = 14
NAMES = (b"a", b"b", b"c", b"d")
SIZES = (0, 1, 900, BLOCK, 3 * BLOCK + 5)
PATTERN = pattern(1 << 20, 11)
DATA = Faults(latency_s=0.05, slow=0.1, slow_s=2.0, refused=0.05, reply_lost=0.05, request_lost=0)
CALM_DATA = Faults(latency_s=0.05, slow=0.1, slow_s=1.0, refused=0, reply_lost=0, request_lost=0)
META = Faults(refused=0.02, reply_lost=0.03, request_lost=0.02, late=0.02, news_lost=0.02)
LOOK_S = 0.05
TROUBLE = (
    "^WARNING fsclient.(background.(background|leader(?:ship)?)|mount.client): |"
    "^WARNING fsclient.writeback.publisher: |"
    "^WARNING fsdata.staging.uploads: (uploads wait|staging disk: .*no space)|"
    "^WARNING fsclient.writeback.(?:writeback|staging_log): staging journal: .*no space|"
    "^ERROR fsclient.files.write_errors: inode .* data written and not stored is lost: "
)
LOST = (  # with the power
    r"^ERROR fs(data.staging|client.writeback)\S*: .*(is|are) lost"
)
PULLED = "^WARNING fs.*: staging (disk|journal): .*(disk is gone|could not be synced)"


class Line:
    """What one writer did: the states of its directory, one behind the other."""

    def __init__(self, path: bytes) -> None:
        self.path = path
        self.states: list[State] = [{}]
        self.done = 0  # the last state that a call has returned for
        self.safe = 0  # the last state that survives a loss of power
        self.seen = 0  # the last state that the store has shown

    def issue(self, state: State) -> None:
        """A call begins that leads to `state`."""
        self.states.append(state)

    def acknowledge(self) -> None:
        self.done = len(self.states) - 1

    def look(self, state: State, begin: int) -> int:
        """Which state from `begin` on this is."""
        for at in range(begin, len(self.states)):
            if self.states[at] == state:
                return at
        shown = {name: len(data) for name, data in state.items()}
        line = [{name: len(data) for name, data in each.items()} for each in self.states[begin:]]
        raise AssertionError(f"{self.path!r} shows {shown}, which is none of {line}")

    def resume(self, at: int) -> None:
        """The writer goes on from state `at`."""
        del self.states[at + 1 :]
        self.done = at
        self.safe = min(self.safe, at)
        assert self.seen <= at, "others have seen what the writer has not"


class Host:
    """A writer's machine: its disk stays, its clients come and go."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.line = Line(b"/w%d" % number)
        self.disk = SimDisk(world.cluster.sim, world.dice.getrandbits(30))
        self.node = self._boot()
        Posix(self.node.client.vfs).mkdir(self.line.path)

    def _boot(self) -> Node:
        return self.world.cluster.add(self.disk)

    def work(self) -> None:
        own = random.Random(self.world.dice.getrandbits(30))
        self.node.act("writer", partial(self._write, self.node, own))

    def restart(self, floor: int) -> None:
        """Boot anew after a crash: the mount must show state `floor` or a later one."""
        self.node = self._boot()
        shown = read_all(Posix(self.node.client.vfs), self.line.path)
        at = self.line.look(shown, floor)
        # what looks the same may come later, and what is between is published on the way there
        self.line.resume(max(at, *(n for n, each in enumerate(self.line.states) if each == shown)))
        self.work()

    def _write(self, node: Node, dice: random.Random) -> None:
        posix, line = Posix(node.client.vfs), self.line
        for _ in range(TURNS):
            node.process.sleep(dice.random() * 0.3)
            try:
                self._turn(posix, dice)
                line.acknowledge()
                shown = read_all(posix, line.path)
            except StoreError:
                return  # who knows; nobody goes on from here
            except OSError as error:
                if self.disk.dead:
                    return  # some of what it has done is lost
                raise AssertionError(f"{line.states[-2:]}") from error
            assert self.disk.dead or shown == line.states[-1], "the mount does not show what it did"

    def _turn(self, posix: Posix, dice: random.Random) -> None:
        """One change of the directory."""
        now = self.line.states[-1]
        name, other = dice.sample(NAMES, 2)
        verb = dice.choice(self.world.verbs)
        if verb == "tmpfile":
            self._name_nameless(posix, name, dice)
        elif verb in ("write", "fsync") or name not in now:
            self._fill(posix, name, dice, durable=verb == "fsync")
        elif verb == "rename":
            left = {key: data for key, data in now.items() if key != name}
            same = other in now and self._is_same(posix, name, other)
            self.line.issue(dict(now) if same else {**left, other: now[name]})
            posix.rename(self._path(name), self._path(other))
        elif verb == "unlink":
            self.line.issue({key: data for key, data in now.items() if key != name})
            posix.unlink(self._path(name))
        elif verb == "punch":
            self._punch(posix, name)
        elif verb == "reserve":
            self._reserve(posix, name, dice)
        elif verb == "copy":
            self._copy(posix, name, other)
        elif other not in now:
            self.line.issue({**now, other: now[name]})
            posix.link(self._path(name), self._path(other))

    def _is_same(self, posix: Posix, name: bytes, other: bytes) -> bool:
        return posix.stat(self._path(name)).ino == posix.stat(self._path(other)).ino

    def _path(self, name: bytes) -> bytes:
        return self.line.path + b"/" + name

    def _name_nameless(self, posix: Posix, name: bytes, dice: random.Random) -> None:
        """A file of O_TMPFILE is written, and gets a name unless that is taken."""
        now = self.line.states[-1]
        data = PATTERN[: dice.choice(SIZES)]
        file = posix.tmpfile(self.line.path)
        try:
            if data:
                file.write(0, data)
            if dice.random() < 0.5:
                file.fsync()
            if name not in now:
                if data:
                    self.line.issue({**now, name: b""})  # linked before it is stored
                self.line.issue({**now, name: data})
                posix.link_open(file, self._path(name))
        finally:
            file.close()

    def _punch(self, posix: Posix, name: bytes) -> None:
        """A hole in the first half of a file."""
        now = self.line.states[-1]
        half = len(now[name]) // 2
        if half:
            self._same(posix, name, bytes(half) + now[name][half:])
            file = posix.open(self._path(name), os.O_RDWR)
            try:
                file.punch(0, half)
            finally:
                file.close()

    def _reserve(self, posix: Posix, name: bytes, dice: random.Random) -> None:
        """Space from the middle of a file to beyond its end, which may be its new end."""
        data = self.line.states[-1][name]
        begin, length = len(data) // 2, len(data) + dice.choice(SIZES) + 1
        mode = dice.choice((0, KEEP_SIZE, ZERO_RANGE, ZERO_RANGE | KEEP_SIZE))
        shown = data[:begin] + bytes(len(data) - begin) if mode & ZERO_RANGE else data
        grown = shown.ljust(len(shown) if mode & KEEP_SIZE else begin + length, b"\0")
        self._same(posix, name, grown)
        file = posix.open(self._path(name), os.O_RDWR)
        try:
            file.reserve(mode, begin, length)
        finally:
            file.close()

    def _copy(self, posix: Posix, name: bytes, other: bytes) -> None:
        """All of a file over the beginning of another."""
        now = self.line.states[-1]
        data = now[name]
        if other not in now or not data or self._is_same(posix, name, other):
            return
        self._same(posix, other, data + now[other][len(data) :])
        source, target = posix.open(self._path(name)), posix.open(self._path(other), os.O_RDWR)
        try:
            assert source.copy(target, 0, 0, len(data)) == len(data)
            self.world.shared += 1
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:
                raise
            target.write(0, source.read(0, len(data)))  # as the kernel does
        finally:
            source.close()
            target.close()

    def _same(self, posix: Posix, name: bytes, data: bytes) -> None:
        """A call begins that makes a file `data`; its hard links show the same."""
        now = self.line.states[-1]
        names = [each for each in now if self._is_same(posix, name, each)]
        self.line.issue({**now, **dict.fromkeys(names, data)})

    def _fill(self, posix: Posix, name: bytes, dice: random.Random, durable: bool) -> None:
        """Write a file anew; its hard links show the same."""
        now = self.line.states[-1]
        size, shift = dice.choice(SIZES), dice.randrange(1000)
        data = PATTERN[shift : shift + size]
        names = [name]
        if name in now:
            names = [each for each in now if self._is_same(posix, name, each)]
        self.line.issue({**now, **dict.fromkeys(names, b"")})
        file = posix.open(self._path(name), os.O_CREAT | os.O_RDWR | os.O_TRUNC)
        try:
            if data:
                self.line.issue({**now, **dict.fromkeys(names, data)})
                file.write(0, data)
            if durable:
                file.fsync()
                self.line.safe = len(self.line.states) - 1
        finally:
            file.close()


class World:
    """One simulated volume, its writers, and the judge who looks all the time."""

    def __init__(
        self, sim: SimRuntime, seed: int, weather: Weather, writers: int, verbs: Verbs
    ) -> None:
        self.verbs = verbs
        self.shared = 0  # copies that took no data
        self.dice = random.Random(seed + 3)
        self.cluster = Cluster(sim, seed, weather)
        self.cluster.leaks = True
        self.watcher = self.cluster.add()
        self.hosts = [Host(self, number) for number in range(writers)]
        self.looks = 0
        self.partly = 0  # looks at which something was held back
        self.over = False
        self.look_s = LOOK_S
        sim.spawn_in(None, "judge", self._judge)

    def _judge(self) -> None:
        while not self.over:
            self.look()
            self.cluster.sim.sleep(self.look_s)

    def look(self) -> None:
        """Each directory, as the store has it at this moment, is on its line."""
        for host in self.hosts:
            line = host.line
            line.seen = line.look(stored(self.cluster, line.path), line.seen)
            self.looks += 1
            self.partly += line.seen < line.done


def read_all(posix: Posix, path: bytes) -> State:
    """A directory as a client shows it."""
    found = {}
    for name in posix.listdir(path):
        file = posix.open(path + b"/" + name)
        try:
            found[name] = file.read(0, 1 << 20)
        finally:
            file.close()
    return found


def live(
    sim: SimRuntime,
    seed: int,
    weather: Weather,
    calamity: Calamity | None,
    writers: int,
    verbs: Verbs = NAMES_AND_BYTES,
) -> None:
    """One world from beginning to end."""
    world = World(sim, seed, weather, writers, verbs)
    for host in world.hosts:
        host.work()
    reader = world.watcher
    reader.act("reader", partial(_read, world, reader))
    if calamity is not None:
        calamity(world, world.dice)
    for host in world.hosts:
        for actor in host.node.actors:
            actor.join()
    world.cluster.settle()
    for host in world.hosts:
        assert _writeback(host.node.client).settle(None, 300), "never published"
    world.look()
    world.over = True
    for host in world.hosts:
        host.line.look(stored(world.cluster, host.line.path), host.line.done)
        shown = read_all(Posix(host.node.client.vfs), host.line.path)
        assert shown == stored(world.cluster, host.line.path)
    world.cluster.drain()
    world.cluster.stop()
    for host in world.hosts:
        assert host.disk.names() == [], "a journal is left"
    world.cluster.judge()


def _read(world: World, node: Node) -> None:
    """A client on another host reads what there is, and meets no error."""
    posix = Posix(node.client.vfs)
    while not world.over and node.process.monotonic() < 60:
        node.process.sleep(0.5)
        for host in world.hosts:
            try:
                read_all(posix, host.line.path)
            except FileNotFoundError:
                pass  # it was removed or renamed meanwhile
            except StoreError:
                return  # its own network


def _writeback(client: MountClient) -> WriteBack:
    assert client.writeback is not None
    return client.writeback


@pytest.mark.sim_seeds(30)
def test_w2_calm(sim_seed: int) -> None:
    weather = Weather(data=CALM_DATA)
    simulate(sim_seed, lambda sim: live(sim, sim_seed, weather, None, 1 + sim_seed % 2))


@pytest.mark.sim_seeds(50)
def test_w2_bad_networks(sim_seed: int, log_watch: LogWatch) -> None:
    log_watch.expect(TROUBLE)
    weather = Weather(META, DATA)
    simulate(sim_seed, lambda sim: live(sim, sim_seed, weather, None, 1 + sim_seed % 2))


def _crash(world: World, dice: random.Random, then: Callable[[Host], int]) -> None:
    """Writers die; `then` says which state the next client must show at least."""
    for _ in range(dice.randrange(1, 4)):
        world.cluster.sim.sleep(dice.random() * 4)
        host = dice.choice(world.hosts)
        host.node.crash()
        world.cluster.sim.sleep(1)  # what it had sent arrives
        host.restart(then(host))


def _same_disk(host: Host) -> int:
    return host.line.done


def _lose_disk(host: Host) -> int:
    host.disk = SimDisk(host.world.cluster.sim, host.world.dice.getrandbits(30))
    return host.line.seen


def _lose_power(host: Host) -> int:
    host.disk.lose_power()
    return max(host.line.safe, host.line.seen)


@pytest.mark.sim_seeds(60)
def test_w1_crashes(sim_seed: int, log_watch: LogWatch) -> None:
    log_watch.expect(TROUBLE)
    weather = Weather(data=CALM_DATA) if sim_seed % 2 else Weather(META, DATA)
    calamity = partial(_crash, then=_same_disk)
    simulate(sim_seed, lambda sim: live(sim, sim_seed, weather, calamity, 1 + sim_seed % 2))


@pytest.mark.sim_seeds(20)
def test_w1_crashes_among_ranges(sim_seed: int, log_watch: LogWatch) -> None:
    """fallocate, copies, and files that get their first name."""
    log_watch.expect(TROUBLE)
    weather = Weather(data=CALM_DATA) if sim_seed % 2 else Weather(META, DATA)
    calamity = partial(_crash, then=_same_disk) if sim_seed % 3 else None
    writers = 1 + sim_seed % 2
    simulate(sim_seed, lambda sim: live(sim, sim_seed, weather, calamity, writers, RANGES))


@pytest.mark.sim_seeds(50)
def test_w2_lost_disks(sim_seed: int, log_watch: LogWatch) -> None:
    log_watch.expect(TROUBLE)
    weather = Weather(data=CALM_DATA) if sim_seed % 2 else Weather(META, DATA)
    calamity = partial(_crash, then=_lose_disk)
    simulate(sim_seed, lambda sim: live(sim, sim_seed, weather, calamity, 1 + sim_seed % 2))


def _pull_disks(world: World, dice: random.Random) -> None:
    """Disks are pulled out under clients that go on for a while."""
    for _ in range(dice.randrange(1, 4)):
        world.cluster.sim.sleep(dice.random() * 4)
        host = dice.choice(world.hosts)
        host.disk.dead = True
        world.cluster.sim.sleep(dice.random() * 4)
        host.node.crash()
        world.cluster.sim.sleep(1)
        host.restart(_lose_disk(host))


@pytest.mark.sim_seeds(40)
def test_w2_disks_pulled_out_of_running_hosts(sim_seed: int, log_watch: LogWatch) -> None:
    """What is lost is followed by nothing that relies on it, and nobody waits for ever."""
    log_watch.expect(f"{TROUBLE}|{LOST}|{PULLED}")
    weather = Weather(data=CALM_DATA) if sim_seed % 2 else Weather(META, DATA)
    simulate(sim_seed, lambda sim: live(sim, sim_seed, weather, _pull_disks, 1 + sim_seed % 2))


@pytest.mark.sim_seeds(50)
def test_w1_lost_power(sim_seed: int, log_watch: LogWatch) -> None:
    log_watch.expect(f"{TROUBLE}|{LOST}")
    weather = Weather(data=CALM_DATA) if sim_seed % 2 else Weather(META, DATA)
    calamity = partial(_crash, then=_lose_power)
    simulate(sim_seed, lambda sim: live(sim, sim_seed, weather, calamity, 1))


def _an_hour_away(world: World, dice: random.Random) -> None:
    """The object store does not answer for an hour; who works meanwhile notices nothing."""
    world.cluster.sim.sleep(dice.random())
    for host in world.hosts:
        host.node.objects.network.cut = True
    world.look_s = 5.0
    world.cluster.sim.sleep(3600)
    for host in world.hosts:
        assert host.line.done == len(host.line.states) - 1, "the writer waits for the store"
        assert host.line.seen < host.line.done, "nothing was held back"
        host.node.objects.network.cut = False
    world.look_s = LOOK_S


@pytest.mark.sim_seeds(2)
def test_w4_a_store_that_is_away_for_an_hour(sim_seed: int, log_watch: LogWatch) -> None:
    log_watch.expect(TROUBLE)
    weather = Weather(data=CALM_DATA)
    simulate(sim_seed, lambda sim: live(sim, sim_seed, weather, _an_hour_away, 1 + sim_seed % 2))


def _fill_disks(world: World, dice: random.Random) -> None:
    """Staging disks are full for a while."""
    for _ in range(3):
        host = dice.choice(world.hosts)
        world.cluster.sim.sleep(dice.random() * 2)
        host.disk.full = True
        world.cluster.sim.sleep(dice.random() * 3)
        host.disk.full = False


@pytest.mark.sim_seeds(25)
def test_w4_full_disks(sim_seed: int, log_watch: LogWatch) -> None:
    log_watch.expect(TROUBLE)
    weather = Weather(data=CALM_DATA)
    simulate(sim_seed, lambda sim: live(sim, sim_seed, weather, _fill_disks, 1 + sim_seed % 2))

"""A simulated volume with whole clients on it: start, stop, crash, freeze, partition, heal, judge.

`Cluster` is the world: one metadata backend and one object store, shared. A `Node` is one client
process with a bad network on both sides. After a test has let things happen, `Cluster.settle` heals
the world and demands that nothing is left over and everything fits together.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from math import inf
from typing import Final, NamedTuple

from fsclient.client.client import MountClient
from fsclient.client.client_options import ClientOptions
from fsclient.client.given_parts import GivenParts
from fsclient.upkeep.gc import Collected, Job, Progress, collect
from fsclient.upkeep.gc_checkpoint import GcCheckpoint
from fsclient.upkeep.verify_objects import verify_objects
from fsclient.volume.cache_options import CacheOptions
from fsclient.writeback.writeback import WriteBackOptions
from fsdata.objects.mem import MemObjects
from fsdata.resources.memory_budget import BUFFER_BYTES_MIN
from fsmeta.check.check import Examination
from fsmeta.meta.meta import Meta
from fsmeta.rules.settings import BLOCK_BYTES_MIN, FormatChoices, create_volume, new_format
from fsmeta.runtime import Thread
from fsmeta.schema import keys
from fsmeta.schema.snapshot_inos import is_snapshot_dir
from fsmeta.store.contract import FENCE_FIELD
from fsmeta.store.mem import MemStore
from fsmeta.txn.retry import DEADLINE_S, Transactor
from fsmeta.txn.row_cache import RowCache
from fsmeta.types import ROOT_INO, Ino
from tests.sim.world.disks import SimDisks
from tests.sim.world.fault_objects import FaultObjects
from tests.sim.world.faults import CALM, Faults, FaultStore
from tests.sim.world.lossy_metadata import LossyBackend
from tests.sim.world.scheduler import SimRuntime
from tests.sim.world.staging import SimDisk

BLOCK: Final = BLOCK_BYTES_MIN
END_S: Final = 600.0  # after healing: a lease, rounds, retries under way, and three hours of trash
STOP_S: Final = 15.0  # a client that is idle leaves in no time; one that deletes may take DRAIN_S
LOOK_S: Final = 2.0
WRITE_BACK: Final = WriteBackOptions()
DISKS: Final = CacheOptions("/ssd0:/ssd1", "400KiB", free_ratio=0.0, writes=True)


def _go_on() -> None:
    """Nothing happens to a gc."""


class Weather(NamedTuple):
    """How the networks of one world behave."""

    meta: Faults = CALM
    data: Faults = CALM

    @property
    def leaks(self) -> bool:
        """Whether objects may be left that nobody knows of, without any client having died."""
        return self.data.late > 0


class Promise:
    """A number that only grows, and since when: what others must see once news have had time."""

    def __init__(self) -> None:
        self._steps: list[tuple[float, int]] = [(-inf, 0)]

    @property
    def value(self) -> int:
        return self._steps[-1][1]

    def raise_to(self, value: int, now: float) -> None:
        if value > self.value:
            self._steps.append((now, value))

    def by(self, when: float) -> int:
        """The value at `when`."""
        return max(value for since, value in self._steps if since <= when)


class Node:
    """One client process."""

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        weather: Weather,
        disk: SimDisk | None = None,
        back: WriteBackOptions = WRITE_BACK,
    ) -> None:
        """With `disk` it writes back."""
        sim, chance = cluster.sim, cluster.chance
        self.name = name
        self.process = sim.process(name, skew_ns=int(chance.uniform(-5, 5) * 10**9))
        meta = MemStore(cluster.backend, tracked=chance.random() < 0.8)
        self.store = FaultStore(meta, sim, chance.getrandbits(30), weather.meta, self.process)
        self.objects = FaultObjects(cluster.objects, sim, chance.getrandbits(30), weather.data)
        options = ClientOptions(
            buffer_bytes=BUFFER_BYTES_MIN,
            upload_threads=2,
            prefetch_threads=1,
            mountpoint=name,
            meta_timeout_s=cluster.meta_timeout_s,
        )
        if disk is not None:
            options = options._replace(writeback=back)
        if cluster.disks is not None:
            options = options._replace(cache=DISKS)
        given = GivenParts(self.objects, disk, cache_files=cluster.disks)
        self.client = MountClient(self.store, self.process, options, given)
        self.shaken = False  # others may have taken it for dead, so what it held may be deleted
        self.crashed = False
        self._sim = sim
        self._rows = cluster.backend.rows
        # how long news may take, so how old what it opens may be: docs/SEMANTICS.md, close-to-open
        self._lag_s = weather.meta.news_late_s
        self._frozen_at = self._thawed_at = -inf
        self.actors: list[Thread] = []
        self.client.start()

    def act(self, name: str, body: Callable[[], None]) -> None:
        """Let `body` run as a thread of this process."""
        self.actors.append(self.process.spawn(name, body))

    def crash(self) -> None:
        self.crashed = True
        self.process.crash()

    def freeze(self) -> None:
        self._frozen_at = self._sim.monotonic()
        self.process.freeze()

    def thaw(self) -> None:
        self._thawed_at = self._sim.monotonic()
        self.process.thaw()

    def informed(self) -> float:
        """The moment up to which it must have heard of everything."""
        now = self._sim.monotonic()
        if self._frozen_at > self._thawed_at or now < self._thawed_at + self._lag_s:
            now = self._frozen_at
        return now - self._lag_s

    def now(self) -> float:
        return self._sim.monotonic()

    def session_id(self) -> int:
        session = self.client.meta.session
        return 0 if session is None else session.id

    def has_session(self) -> bool:
        """Whether the volume knows it as alive."""
        return FENCE_FIELD in self._rows.get(keys.session_row(self.session_id()), {})

    def cut(self, cut: bool) -> None:
        """Take the network away, or give it back."""
        self.store.network.cut = self.objects.network.cut = cut

    def heal(self) -> None:
        self.store.heal()
        self.objects.heal()
        self.thaw()


class Cluster:
    """The world of one seed."""

    def __init__(
        self,
        sim: SimRuntime,
        seed: int,
        weather: Weather,
        disks: SimDisks | None = None,
        trash_days: int = 0,
        meta_timeout_s: float = DEADLINE_S,
    ) -> None:
        self.sim = sim
        self.meta_timeout_s = meta_timeout_s
        self.disks = disks
        self.weather = weather
        self.chance = random.Random(seed + 2)
        self.backend = LossyBackend(sim)
        self.objects = MemObjects(sim)
        self.nodes: list[Node] = []
        self.leaks = weather.leaks
        self.trash_days = trash_days
        settings = new_format("sim", "mem", "", FormatChoices(BLOCK, trash_days=trash_days))
        store = MemStore(self.backend)
        transactor = Transactor(store, sim, RowCache(sim))
        transactor.run(lambda txn: create_volume(txn, settings, (0, 0), sim.now_ns()))

    def add(self, disk: SimDisk | None = None, back: WriteBackOptions = WRITE_BACK) -> Node:
        """Start one more client; with `disk` it writes back."""
        node = Node(self, f"n{len(self.nodes)}", self.weather, disk, back)
        self.nodes.append(node)
        return node

    def living(self) -> list[Node]:
        return [node for node in self.nodes if not node.crashed]

    # --- the end ---------------------------------------------------------------------------------

    def settle(self) -> None:
        """Heal the world; then everything that was begun ends."""
        if self.disks is not None:
            self.disks.heal()
        for node in self.nodes:
            if not node.crashed:
                node.heal()
        deadline = self.sim.monotonic() + END_S
        for node in self.living():
            for actor in node.actors:
                actor.join(deadline - self.sim.monotonic())
            assert not any(actor.is_alive() for actor in node.actors), f"{node.name} hangs"
            while not node.has_session():
                assert self.sim.monotonic() < deadline, f"{node.name} does not come back"
                self.sim.sleep(LOOK_S)
        self.sim.sleep(LOOK_S)  # what is late arrives

    def drain(self) -> None:
        """Wait until all that has no name is deleted."""
        deadline = self.sim.monotonic() + END_S
        while self._garbage():
            assert self.sim.monotonic() < deadline, f"never deleted: {self._garbage()}"
            self.sim.sleep(LOOK_S)

    def _garbage(self) -> dict[bytes, list[int]]:
        """What waits for deletion, and sessions of the dead."""
        found = {}
        for row in (keys.ORPHANS, keys.DEAD_SLICES, keys.TRASH, keys.CLONES):
            found[row] = [keys.id_of(field) for field in self.backend.rows.get(row, {})]
        alive = {node.session_id() for node in self.living()}
        sessions = [keys.id_of(field) for field in self.backend.rows.get(keys.SESSIONS, {})]
        found[keys.SESSIONS] = [sid for sid in sessions if sid not in alive]
        return {row: ids for row, ids in found.items() if ids}

    def stop(self) -> None:
        """Every client leaves, and leaves nothing behind."""
        for node in self.living():
            begun = self.sim.monotonic()
            assert node.client.stop(), f"{node.name} could not store everything"
            assert self.sim.monotonic() - begun < STOP_S, f"{node.name} takes long to leave"
            gauges = node.client.budget.gauges()
            assert gauges.writing == gauges.ahead == 0, f"{node.name}: {gauges}"
            assert node.client.vfs.files.handle_count() == 0, node.name
            assert node.process.alive() == [], node.name

    def judge(self) -> None:
        """Metadata and objects are true to themselves and to each other."""
        with Examination(MemStore(self.backend)) as examination:
            checked = examination.run()
            assert not checked.problems, "\n".join(map(str, checked.problems))
            assert not checked.dead
            verdict = verify_objects(self.objects, BLOCK, examination, data=True)
        assert not self.backend.rows.get(keys.SESSIONS)
        assert checked.inodes == len(self._reachable()), "something hangs in a loop"
        assert not verdict.problems, "\n".join(verdict.problems)
        assert self.leaks or not verdict.leaked, f"{verdict.leaked} objects leaked"

    def collect(
        self,
        delete: bool = True,
        place: GcCheckpoint | None = None,
        step: Callable[[], None] = _go_on,
    ) -> Collected:
        """What `slicefs gc --age 0` does, from a process of its own with a good network.

        `step` is called now and then, and may raise.
        """
        meta = Meta(MemStore(self.backend), self.sim)
        progress = Progress(lambda _: step(), lambda _seen, _so_far: step())
        return collect(meta, self.objects, self.sim, Job(0, delete, threads=2), progress, place)

    def _reachable(self) -> set[Ino]:
        """Every inode that a path leads to."""
        shelves = (Ino(keys.id_of(row)) for row in self.backend.rows if row[:1] == b"d")
        found, todo = {ROOT_INO}, [ROOT_INO, *filter(is_snapshot_dir, shelves)]
        while todo:
            row = keys.dir_row(todo.pop())
            for name, value in self.backend.rows.get(row, {}).items():
                _, ino = keys.unpack_dentry(row, name, value)
                if ino not in found:
                    found.add(ino)
                    todo.append(ino)
        return found

"""Whole clients in a simulated world: one seed decides schedule, latency, faults and calamities.

Each test builds a `Cluster`, lets the actors of some `loads` run on one to three clients while
things go wrong in its own way, heals the world and judges it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest

from fsclient.background import steady_clock, tidy_queue, trash_expiry
from fsclient.background.leadership import LEASE_S
from fsdata.format import geometry
from fsmeta.meta import trash as engine_trash
from fsmeta.schema import trash
from fsmeta.txn.retry import DEADLINE_S
from tests.conftest import LogWatch
from tests.sim.loads import Load
from tests.sim.loads.appends import Appends
from tests.sim.loads.believers import Believers
from tests.sim.loads.counters import Counters
from tests.sim.loads.held import Held
from tests.sim.loads.logs import Logs
from tests.sim.loads.names import Loops, Tokens, Winners
from tests.sim.loads.records import Records
from tests.sim.loads.rules import Rules
from tests.sim.loads.shares import Shares
from tests.sim.loads.snaps import Snaps
from tests.sim.loads.trees import Trees
from tests.sim.world.cluster import Cluster, Node, Weather
from tests.sim.world.disks import SimDisks
from tests.sim.world.faults import Faults
from tests.sim.world.harness import simulate
from tests.sim.world.scheduler import SimRuntime

Calamity = Callable[[Cluster, random.Random], None]

TURNS = 24
ACTORS = 2  # threads of a client
WINDOW_S = 20.0  # calamities come within so long
OUTAGE_S = 40.0  # longer than calls are repeated, shorter than a lease

META = Faults(refused=0.02, reply_lost=0.03, request_lost=0.02, late=0.02, news_lost=0.02)
DATA = Faults(refused=0.03, reply_lost=0.03, request_lost=0, slow=0.03, slow_s=2.0)
TROUBLE = (  # log messages that are right where the world is bad
    r"^WARNING fsclient.(background.(background|leader(?:ship)?)|mount.client|vfs.locks.[a-z_]+): |"
    "^ERROR fsclient.files.write_errors: inode .* data written and not stored is lost: "
)
LATE_PUTS = DATA._replace(late=0.03, late_s=3.0)


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compaction and rounds come after little work, as they would after much; holes are small."""
    monkeypatch.setattr(tidy_queue, "COMMITS_BEFORE_LOOK", 3)
    monkeypatch.setattr(geometry, "COMPACT_SLICES", 4)
    monkeypatch.setattr(geometry, "COMPACT_HIDDEN_MIN", 2)
    monkeypatch.setattr(geometry, "HOLE_MIN_BYTES", 64)
    monkeypatch.setattr(geometry, "HOLES_MAX", 2)
    # the trash has days of one hour, which lasts longer than a lease
    monkeypatch.setattr(trash, "HOUR_NS", 90 * 10**9)
    monkeypatch.setattr(trash_expiry, "HOURS_A_DAY", 1)
    monkeypatch.setattr(engine_trash, "NOTE_S", 15.0)
    monkeypatch.setattr(trash_expiry, "FORGET_S", 90.0)
    monkeypatch.setattr(steady_clock, "LEAP_S", 30.0)
    monkeypatch.setattr(steady_clock, "BELIEVE_S", 60.0)


def _loads(dice: random.Random) -> list[Load]:
    """Two kinds of work for one world."""
    records = partial(Records, dice)
    makers: list[Callable[[], Load]] = [
        Trees, Logs, records, Held, Tokens, Winners, Loops, Rules, Counters, Appends, Shares
    ]  # fmt: skip
    first = dice.choice((Trees, Logs, records, Held, Appends, Shares))
    return [first(), dice.choice([make for make in makers if make is not first])()]


def live(
    sim: SimRuntime,
    seed: int,
    weather: Weather,
    calamity: Calamity | None,
    loads: list[Load] | None = None,
    disks: SimDisks | None = None,
    meta_timeout_s: float = DEADLINE_S,
) -> None:
    """One world from beginning to end; its clients share the cache disks `disks`."""
    dice = random.Random(seed + 3)
    days = int(seed % 3 == 1)  # of an hour that is short, see `eager`
    cluster = Cluster(sim, seed, weather, disks, days, meta_timeout_s)
    loads = loads or _loads(dice)
    first = cluster.add()
    for load in loads:
        load.prepare(first)
    for _ in range(dice.randrange(3)):
        cluster.add()
    for node in cluster.nodes:
        _employ(node, loads, dice)
    if calamity is not None:
        calamity(cluster, dice)
        for node in cluster.living():
            if not node.actors:
                _employ(node, loads, dice)
    cluster.settle()
    for load in loads:
        load.check(cluster.living()[-1])
    cluster.drain()
    cluster.stop()
    cluster.judge()


def _employ(node: Node, loads: list[Load], dice: random.Random) -> None:
    for number in range(ACTORS):
        load = loads[number % len(loads)]
        own = random.Random(dice.getrandbits(30))
        node.act(f"actor{number}", partial(load.act, node, own, TURNS))


@pytest.mark.sim_seeds(40)
def test_calm(sim_seed: int) -> None:
    """Nothing goes wrong but the order of things; not even an object may be left over."""
    simulate(sim_seed, lambda sim: live(sim, sim_seed, Weather(), None))


@pytest.mark.sim_seeds(70)
def test_bad_networks(sim_seed: int, log_watch: LogWatch) -> None:
    log_watch.expect(TROUBLE)
    weather = Weather(META, LATE_PUTS if sim_seed % 2 else DATA)
    simulate(sim_seed, lambda sim: live(sim, sim_seed, weather, None))


def _outages(cluster: Cluster, dice: random.Random) -> None:
    """One of the stores is away for a client, for longer sometimes than calls are repeated."""
    cluster.leaks = True
    for _ in range(dice.randrange(1, 4)):
        cluster.sim.sleep(dice.random() * WINDOW_S / 2)
        victim = dice.choice(cluster.nodes)
        network = dice.choice((victim.store, victim.objects, victim.objects)).network
        network.cut = True
        cluster.sim.sleep(dice.choice((1, 10, OUTAGE_S)))
        network.cut = False


@pytest.mark.sim_seeds(60)
def test_outages(sim_seed: int, log_watch: LogWatch) -> None:
    log_watch.expect(TROUBLE)
    weather = Weather() if sim_seed % 2 else Weather(META, DATA)
    simulate(sim_seed, lambda sim: live(sim, sim_seed, weather, _outages))


def crash(cluster: Cluster, dice: random.Random) -> None:
    """Clients die, and new ones come."""
    cluster.leaks = True
    for _ in range(dice.randrange(1, 4)):
        cluster.sim.sleep(dice.random() * WINDOW_S / 2)
        victim = dice.choice(cluster.living())
        victim.crash()
        if len(cluster.living()) < 2 or dice.random() < 0.5:
            cluster.add()


@pytest.mark.sim_seeds(90)
def test_crashes(sim_seed: int, log_watch: LogWatch) -> None:
    log_watch.expect(TROUBLE)
    weather = Weather() if sim_seed % 2 else Weather(META, DATA)
    simulate(sim_seed, lambda sim: live(sim, sim_seed, weather, crash))


def _lose_leases(cluster: Cluster, dice: random.Random) -> None:
    """Clients stop, or lose their network, for longer than a lease; then they come back."""
    cluster.leaks = True
    if len(cluster.nodes) < 2:
        cluster.add()
    for _ in range(dice.randrange(1, 3)):
        cluster.sim.sleep(dice.random() * WINDOW_S)
        victim = dice.choice(cluster.living())
        victim.shaken = True
        frozen = dice.random() < 0.5
        if frozen:
            victim.freeze()
        else:
            victim.cut(True)
        cluster.sim.sleep(LEASE_S * dice.choice((0.2, 1, 2)) + dice.random() * 30)
        if frozen:
            victim.thaw()
        else:
            victim.cut(False)


@pytest.mark.sim_seeds(90)
def test_lost_leases(sim_seed: int, log_watch: LogWatch) -> None:
    log_watch.expect(TROUBLE)
    weather = Weather() if sim_seed % 2 else Weather(META, DATA)
    simulate(sim_seed, lambda sim: live(sim, sim_seed, weather, _lose_leases))


def _ahead(right: Callable[[], int], by_ns: int) -> int:
    return right() + by_ns


def _wrong_clocks(cluster: Cluster, dice: random.Random) -> None:
    """Clocks of hosts, and the metadata store's, are set wrong by days, both ways, and right again.

    What is deleted goes where the host's clock says: where there is a trash that is not days away.
    """
    day_s = 86_400.0
    far_s = day_s if not cluster.trash_days else trash.HOUR_NS / 1e9
    right = cluster.backend.now_ns
    for _ in range(dice.randrange(2, 6)):
        cluster.sim.sleep(dice.random() * WINDOW_S)
        ahead_s = dice.choice((-3, -1, 1, 3))
        if dice.random() < 0.5:
            dice.choice(cluster.living()).process.set_clock(min(1, ahead_s) * far_s)
        else:
            cluster.backend.now_ns = partial(_ahead, right, int(ahead_s * day_s * 1e9))
        if len(cluster.nodes) < 3 and dice.random() < 0.3:
            cluster.add()
    cluster.sim.sleep(dice.random() * WINDOW_S)
    cluster.backend.now_ns = right
    for node in cluster.living():
        node.process.set_clock(0)


@pytest.mark.sim_seeds(40)
def test_wrong_clocks(sim_seed: int, log_watch: LogWatch) -> None:
    """Nothing that programs see follows from a clock: not even an object may be left over."""
    log_watch.expect("^WARNING fsclient.background.steady_clock: the clock was set")
    simulate(sim_seed, lambda sim: live(sim, sim_seed, Weather(), _wrong_clocks))


@pytest.mark.sim_seeds(50)
def test_locks(sim_seed: int, log_watch: LogWatch) -> None:
    """P3: nothing but locks, whatever goes wrong."""
    log_watch.expect(TROUBLE)
    weather = Weather() if sim_seed % 2 else Weather(META, DATA)
    calamity = (None, crash, _lose_leases, _outages)[sim_seed // 2 % 4]
    simulate(sim_seed, lambda sim: live(sim, sim_seed, weather, calamity, [Counters()]))


@pytest.mark.sim_seeds(24)
def test_t2_snapshots_and_clones(sim_seed: int, log_watch: LogWatch) -> None:
    """T2: nothing but snapshots and clones of a tree that changes, whatever goes wrong."""
    log_watch.expect(TROUBLE)
    weather = Weather() if sim_seed % 2 else Weather(META, DATA)
    calamity = (None, crash, _lose_leases, _outages)[sim_seed // 2 % 4]
    simulate(sim_seed, lambda sim: live(sim, sim_seed, weather, calamity, [Snaps()]))


@pytest.mark.sim_seeds(24)
def test_p6_kernels_that_drop_inodes_and_look_again(sim_seed: int, log_watch: LogWatch) -> None:
    """P6: nothing but what kernels believe, and FORGETs that are late."""
    log_watch.expect(TROUBLE)
    weather = Weather() if sim_seed % 2 else Weather(META, DATA)
    calamity = (None, crash, _lose_leases, _outages)[sim_seed // 2 % 4]
    simulate(sim_seed, lambda sim: live(sim, sim_seed, weather, calamity, [Believers()]))

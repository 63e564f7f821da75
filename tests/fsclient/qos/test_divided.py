"""Mounts in simulated time: the whole limit is used, and no more, whatever comes and goes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest

from fsclient.fuse.wire import abi
from fsclient.fuse.wire.parse import BODY
from fsclient.fuse.wire.protocol import Opcode
from fsclient.kernel.later import Later
from fsclient.qos.exchange import EXCHANGE_S, FORGET_S, LOOK_S
from fsclient.qos.qos import Qos
from fsclient.qos.throttle import PATIENCE_S, THREADS_MAX, Slots
from fsmeta.admin import rate_limits
from fsmeta.admin.rate_limits import RateLimitChange
from fsmeta.meta.meta import Meta
from fsmeta.ops.names.rename import DentryLocation
from fsmeta.rules import quota
from fsmeta.rules.rate_limits import DEMANDS, LIMITS, NO_LIMITS, VOLUME, RateLimits
from fsmeta.store.mem import MemBackend, MemStore
from fsmeta.types import ROOT_CALLER, ROOT_INO, Caller, Ino
from tests.conftest import LogWatch
from tests.fsmeta.engines import make_volume
from tests.sim.world.harness import simulate
from tests.sim.world.scheduler import SimRuntime

MIB = 1 << 20
WRITE_BYTES = MIB // 4
USER = Caller(1000, 100, (), 1, True)
OTHER = Caller(1001, 100, (), 2, True)


def request(size: int = WRITE_BYTES) -> memoryview:
    """A request with its header, as far as limits look at it."""
    view = memoryview(bytearray(BODY + abi.WRITE_IN.size))
    view[BODY + 16 : BODY + 20] = size.to_bytes(4, "little")
    return view


class SimMount:
    """A mount with programs that write as fast as they may."""

    def __init__(self, sim: SimRuntime, backend: MemBackend, mount: RateLimits = NO_LIMITS) -> None:
        self.sim = sim
        self.meta = Meta(MemStore(backend), sim)
        self.meta.sessions.open({})
        self.qos = Qos(self.meta, sim, mount)
        self.done: Counter[int] = Counter()  # bytes written by each user
        self.ended = False
        serving = [-1] * THREADS_MAX
        slots = Slots(0, lambda _slot: None, serving, lambda _unique: False)
        self.serve = self.qos.throttle.around(self._served, slots, ROOT_INO)
        self.qos.start()

    def _served(self, opcode: int, caller: Caller, _ino: int, view: memoryview, _end: int) -> bytes:
        size = int.from_bytes(view[BODY + 16 : BODY + 20], "little")
        self.done[caller.uid] += size if opcode == Opcode.WRITE else 1
        return bytes(8)

    def call(
        self,
        caller: Caller,
        ino: Ino = ROOT_INO,
        opcode: Opcode = Opcode.WRITE,
        size: int = WRITE_BYTES,
    ) -> float:
        """One request, to its end; how long it took."""
        view, begun = request(size), self.sim.monotonic()
        answer = self.serve(opcode, caller, ino, view, len(view))
        if isinstance(answer, Later):
            came = self.sim.event()
            answer.begin(lambda _outcome: came.set())
            came.wait()
        return self.sim.monotonic() - begun

    def write(
        self,
        caller: Caller,
        ino: Ino = ROOT_INO,
        pause_s: float = 0.0,
        size: int = WRITE_BYTES,
        opcode: Opcode = Opcode.WRITE,
    ) -> None:
        """Start a program that writes and writes."""

        def body() -> None:
            while not self.ended:
                self.call(caller, ino, opcode, size)
                self.sim.sleep(max(pause_s, 0.001))

        self.sim.spawn("program", body)


Body = Callable[[SimRuntime, MemBackend], None]


def run(seed: int, body: Body) -> None:
    def whole(sim: SimRuntime) -> None:
        backend = MemBackend(sim)
        make_volume(MemStore(backend), sim)
        body(sim, backend)

    simulate(seed, whole, steps_max=5_000_000)


def limit(mount: SimMount, node: bytes, **change: int) -> None:
    rate_limits.set_limits(mount.meta, node, RateLimitChange(**change))
    mount.sim.sleep(LOOK_S + 1)


def rate_of(mounts: list[SimMount], seconds: float, uid: int = USER.uid) -> float:
    """Bytes a second of all mounts together from now on."""
    sim = mounts[0].sim
    before = sum(mount.done[uid] for mount in mounts)
    sim.sleep(seconds)
    return (sum(mount.done[uid] for mount in mounts) - before) / seconds


@pytest.mark.parametrize("seed", range(3))
def test_q2_mounts_divide_a_limit(seed: int) -> None:
    """Busy ones get the same, an idle one leaves its part, one that dies does, too."""

    def body(sim: SimRuntime, backend: MemBackend) -> None:
        mounts = [SimMount(sim, backend) for _ in range(4)]
        limit(mounts[0], quota.user_node(USER.uid), write=8 * MIB)
        mounts[0].write(USER)
        sim.sleep(3)
        assert rate_of(mounts, 10) == pytest.approx(8 * MIB, rel=0.06), "one alone has all of it"
        for mount in mounts[1:3]:
            mount.write(USER)
            mount.write(USER)
        sim.sleep(4)
        before = [mount.done[USER.uid] for mount in mounts]
        assert rate_of(mounts, 20) == pytest.approx(8 * MIB, rel=0.06)
        parts = [mount.done[USER.uid] - past for mount, past in zip(mounts, before, strict=True)]
        assert parts[3] == 0
        for part in parts[:3]:
            assert part == pytest.approx(8 * MIB * 20 / 3, rel=0.1)
        mounts[2].write(OTHER)
        assert rate_of(mounts, 2, OTHER.uid) > 100 * MIB, "other users are not limited"
        mounts[0].ended = True  # and says nothing any more, as a mount that was killed
        mounts[0].qos.exchange._stop.set()
        sim.sleep(FORGET_S + 4)
        assert rate_of(mounts, 10) == pytest.approx(8 * MIB, rel=0.06)
        assert len(rate_limits.all_demands(mounts[1].meta)) == 2
        for mount in mounts[1:]:
            mount.ended = True
        sim.sleep(3)
        for mount in mounts[1:]:
            mount.qos.stop()
        assert rate_limits.all_demands(mounts[1].meta) == {}

    run(seed, body)


def test_q2_a_slow_program_is_not_slowed_by_a_fast_one() -> None:
    """It needs less than its part: requests of its mount do not wait."""

    def body(sim: SimRuntime, backend: MemBackend) -> None:
        slow, fast = SimMount(sim, backend), SimMount(sim, backend)
        limit(slow, VOLUME, write=8 * MIB)
        fast.write(OTHER)
        slow.write(USER, pause_s=0.25)  # 1 MiB a second
        sim.sleep(4)
        delayed = slow.qos.throttle.numbers()["qos_requests_delayed_total"]
        assert rate_of([slow], 20) == pytest.approx(MIB, rel=0.05)
        assert slow.qos.throttle.numbers()["qos_requests_delayed_total"] == delayed
        assert rate_of([fast], 20, OTHER.uid) == pytest.approx(7 * MIB, rel=0.08)
        slow.ended = fast.ended = True
        sim.sleep(1)

    run(0, body)


def test_q2_directories_below_each_other() -> None:
    """What is in the inner directory counts in both, and a move takes a file out of a limit."""

    def body(sim: SimRuntime, backend: MemBackend) -> None:
        mount = SimMount(sim, backend)
        meta = mount.meta
        outer = meta.create(ROOT_CALLER, ROOT_INO, b"outer", 0o40755).ino
        inner = meta.create(ROOT_CALLER, outer, b"inner", 0o40755).ino
        file = meta.create(ROOT_CALLER, inner, b"file", 0o100644).ino
        limit(mount, quota.dir_node(outer), write=4 * MIB)
        limit(mount, quota.dir_node(inner), write=8 * MIB)
        mount.write(USER, file)
        sim.sleep(2)
        assert rate_of([mount], 10) == pytest.approx(4 * MIB, rel=0.06)
        limit(mount, quota.dir_node(outer), write=0)
        assert rate_of([mount], 10) == pytest.approx(8 * MIB, rel=0.06)
        meta.rename(ROOT_CALLER, DentryLocation(inner, b"file"), DentryLocation(ROOT_INO, b"file"))
        sim.sleep(LOOK_S + 1)
        assert rate_of([mount], 2) > 50 * MIB
        mount.ended = True
        sim.sleep(1)

    run(0, body)


def test_q2_the_store_is_away() -> None:
    """Mounts keep their parts, and no request waits for the store."""

    def body(sim: SimRuntime, backend: MemBackend) -> None:
        mounts = [SimMount(sim, backend) for _ in range(2)]
        limit(mounts[0], VOLUME, write=8 * MIB)
        for mount in mounts:
            mount.write(USER)
        sim.sleep(4)

        def away(*_: object) -> None:
            raise OSError("simulated: away")

        for mount in mounts:
            mount.qos.exchange._others = away  # type: ignore[method-assign, assignment]
        assert rate_of(mounts, 30) == pytest.approx(8 * MIB, rel=0.06)
        for mount in mounts:
            mount.ended = True
        sim.sleep(1)

    run(0, body)


def test_q2_a_limit_of_one_mount() -> None:
    def body(sim: SimRuntime, backend: MemBackend) -> None:
        own = SimMount(sim, backend, RateLimits(write=4 * MIB))
        other = SimMount(sim, backend)
        for mount in (own, other):
            mount.write(USER)
        sim.sleep(2 * EXCHANGE_S)
        assert rate_of([own], 10) == pytest.approx(4 * MIB, rel=0.06)
        assert rate_of([other], 1) > 100 * MIB
        assert rate_limits.all_demands(own.meta) == {}, "it is nobody else's business"
        own.ended = other.ended = True
        sim.sleep(1)

    run(0, body)


def test_q2_threads_end_and_requests_keep_their_order() -> None:
    def body(sim: SimRuntime, backend: MemBackend) -> None:
        mount = SimMount(sim, backend)
        limit(mount, VOLUME, ops=10)
        order: list[int] = []
        for number in range(100):
            view = request()
            answer = mount.serve(Opcode.GETATTR, USER, ROOT_INO, view, len(view))
            if isinstance(answer, Later):
                answer.begin(partial(lambda note, _outcome: order.append(note), number))
            else:
                order.append(number)
        sim.sleep(11)
        assert order == list(range(100))
        assert mount.qos.throttle.numbers()["qos_requests_held"] == 0
        sim.sleep(60)
        assert len(mount.qos.throttle._free_slots) == THREADS_MAX

    run(0, body)


@pytest.mark.parametrize(("writers", "limited"), [(1, 128 << 10), (100, MIB)])
def test_q2_large_requests_and_many_of_them(writers: int, limited: int) -> None:
    """A mount all of whose requests wait for long has its part all the same, and no more."""

    def body(sim: SimRuntime, backend: MemBackend) -> None:
        mounts = [SimMount(sim, backend) for _ in range(4)]
        limit(mounts[0], VOLUME, write=limited)
        for mount in mounts:
            for _ in range(writers):
                mount.write(USER, size=MIB)
        sim.sleep(60)  # each has begun with a request of eight seconds
        assert rate_of(mounts, 300) == pytest.approx(limited, rel=0.1)
        for mount in mounts:
            mount.ended = True
        sim.sleep(1)

    run(0, body)


def test_q2_a_limit_that_is_raised() -> None:
    """What was owed under the old one is made good at the new rate."""

    def body(sim: SimRuntime, backend: MemBackend) -> None:
        mount = SimMount(sim, backend)
        limit(mount, VOLUME, write=64 << 10)
        for _ in range(50):
            mount.write(USER, size=MIB)
        sim.sleep(5)
        limit(mount, VOLUME, write=100 * MIB)
        sim.sleep(2)
        assert mount.call(USER) < 2.0
        mount.ended = True
        sim.sleep(1)

    run(0, body)


def test_q2_a_narrow_limit_leaves_the_wide_one_to_others() -> None:
    def body(sim: SimRuntime, backend: MemBackend) -> None:
        mount = SimMount(sim, backend)
        limit(mount, VOLUME, write=10 * MIB)
        limit(mount, quota.user_node(USER.uid), write=64 << 10)
        for _ in range(500):
            mount.write(USER, size=MIB)
        sim.sleep(1)
        assert mount.call(OTHER) < 1.0
        mount.write(OTHER)
        sim.sleep(2)
        assert rate_of([mount], 20, OTHER.uid) == pytest.approx(10 * MIB, rel=0.06)
        mount.ended = True
        sim.sleep(1)

    run(0, body)


def test_q2_a_file_that_has_lost_its_directory() -> None:
    """It comes under the limits of the one it was made in."""

    def body(sim: SimRuntime, backend: MemBackend) -> None:
        mount = SimMount(sim, backend)
        meta = mount.meta
        top = meta.create(ROOT_CALLER, ROOT_INO, b"top", 0o40755).ino
        limit(mount, quota.dir_node(top), write=MIB)
        sub = meta.create(ROOT_CALLER, top, b"sub", 0o40755).ino
        file = meta.create(ROOT_CALLER, sub, b"file", 0o100644).ino
        mount.qos.limiter.made_in(file, sub)  # as the answer to CREATE tells
        meta.unlink(ROOT_CALLER, sub, b"file")
        meta.rmdir(ROOT_CALLER, top, b"sub")
        mount.write(USER, file)
        sim.sleep(10)
        assert rate_of([mount], 20) == pytest.approx(MIB, rel=0.06)
        mount.ended = True
        sim.sleep(1)

    run(0, body)


def test_q2_names_wait_for_some_seconds_only() -> None:
    """The kernel holds the lock of the directory meanwhile."""

    def body(sim: SimRuntime, backend: MemBackend) -> None:
        mount = SimMount(sim, backend)
        limit(mount, quota.user_node(USER.uid), ops=10)
        for _ in range(200):
            mount.write(USER, opcode=Opcode.GETATTR)
        sim.sleep(10)
        took = mount.call(USER, opcode=Opcode.MKDIR)
        assert took == pytest.approx(PATIENCE_S, abs=0.1)
        mount.ended = True
        sim.sleep(1)

    run(0, body)


def test_q2_what_a_later_version_has_stored(log_watch: LogWatch) -> None:
    log_watch.expect("that this version does not know is left out")

    def body(sim: SimRuntime, backend: MemBackend) -> None:
        mount = SimMount(sim, backend)
        mount.meta.transactor.run(lambda txn: txn.put(LIMITS, b"zone", b"?"))
        mount.meta.transactor.run(lambda txn: txn.put(DEMANDS, bytes(8), b"?"))
        limit(mount, VOLUME, write=MIB)
        mount.write(USER)
        sim.sleep(2)
        assert rate_of([mount], 10) == pytest.approx(MIB, rel=0.06)
        mount.ended = True
        sim.sleep(1)

    run(0, body)

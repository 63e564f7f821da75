"""Polling while requests flow: when it is asked for, and that the kernel hears of it."""

from __future__ import annotations

import errno
import os
import struct
import threading
import time
from pathlib import Path

import pytest

from fsclient.fuse.session import idle_poll
from fsclient.fuse.session.idle_poll import DEVICE, IdlePolling, wake_s
from fsmeta.errors import ConfigError
from fsmeta.runtime import SystemRuntime
from tests.sim.world.harness import simulate
from tests.sim.world.scheduler import SimRuntime
from tests.support.processes import descriptors

LOOK_S = 0.005


class World:
    """An IdlePolling over a file, and a session that serves at a certain rate."""

    def __init__(self, sim: SimRuntime, device: Path, mode: str = "always") -> None:
        device.write_bytes(b"")
        self.sim = sim
        self.device = device
        self.idle = IdlePolling(sim, mode, str(device))
        self.served = 0.0

    def serve(self, per_second: float, seconds: float) -> None:
        for _ in range(round(seconds / LOOK_S)):
            self.sim.sleep(LOOK_S)
            self.served += per_second * LOOK_S
            self.idle.look(round(self.served))

    def told(self) -> list[int]:
        """What was written to the device, oldest first."""
        data = self.device.read_bytes()
        return list(struct.unpack(f"={len(data) // 4}i", data))


POLL, HALT = 0, 2_000_000_000


def test_polling_follows_the_requests(tmp_path: Path) -> None:
    def body(sim: SimRuntime) -> None:
        world = World(sim, tmp_path / "device")
        world.serve(per_second=500, seconds=1)
        assert world.told() == []
        world.serve(per_second=3000, seconds=0.05)
        assert world.told() == [POLL]
        assert world.idle.numbers() == {"idle_polling": 1, "idle_polling_asked_total": 1}
        world.serve(per_second=100, seconds=0.02)
        world.serve(per_second=3000, seconds=1)
        assert world.told() == [POLL]  # a short rest changes nothing
        world.serve(per_second=100, seconds=0.1)
        assert world.told() == [POLL, HALT]
        world.serve(per_second=3000, seconds=0.05)
        world.idle.rest()
        assert world.told() == [POLL, HALT, POLL, HALT]
        world.idle.rest()
        assert world.idle.numbers() == {"idle_polling": 0, "idle_polling_asked_total": 2}
        assert len(world.told()) == 4

    simulate(0, body)


def test_never_means_never(tmp_path: Path) -> None:
    def body(sim: SimRuntime) -> None:
        world = World(sim, tmp_path / "device", "never")
        world.idle.probe()
        world.serve(per_second=3000, seconds=1)
        world.idle.rest()
        assert world.told() == []

    simulate(0, body)


def test_without_the_device(tmp_path: Path) -> None:
    absent = str(tmp_path / "absent")
    polling = IdlePolling(SystemRuntime(), "auto", absent)
    polling.probe()
    polling.look(10**9)
    assert polling.numbers()["idle_polling"] == 0
    with pytest.raises(ConfigError, match=f"--idle-poll always: can't open {absent}: No such file"):
        IdlePolling(SystemRuntime(), "always", absent)


def test_a_trial_leaves_things_as_they_were() -> None:
    cpus, before = os.sched_getaffinity(0), set(descriptors())
    taken = wake_s(SystemRuntime())
    assert 0 <= taken < 1
    assert os.sched_getaffinity(0) == cpus
    assert not {place for place in set(descriptors()) - before if place.startswith("pipe:")}


@pytest.mark.parametrize("whose", ["ours", "theirs"])
def test_a_trial_that_is_not_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    """Some containers may not choose their processors: the mount goes on, and nothing is left."""
    caller, choose = threading.current_thread(), os.sched_setaffinity

    def refuse(pid: int, cpus: set[int]) -> None:
        if (threading.current_thread() is caller) == (whose == "ours") and len(cpus) == 1:
            raise PermissionError(errno.EPERM, "not allowed")
        choose(pid, cpus)

    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one processor: no trial")
    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    monkeypatch.setattr(idle_poll, "_is_virtual", lambda: True)
    device = tmp_path / "device"
    device.write_bytes(b"")
    polling = IdlePolling(SystemRuntime(), "auto", str(device))
    before = set(descriptors())
    polling.probe()
    polling.look(10**9)
    assert device.read_bytes() == b""
    assert not {place for place in set(descriptors()) - before if place.startswith("pipe:")}


@pytest.mark.skipif(not os.access(DEVICE, os.R_OK | os.W_OK), reason=f"needs {DEVICE}, as root")
def test_the_kernel_hears_of_it() -> None:
    """Others may ask for the same meanwhile, so only the asking itself is looked at."""
    polling = IdlePolling(SystemRuntime(), "always")
    for served in range(10**6, 10**7, 10**6):
        time.sleep(0.001)
        polling.look(served)
    assert polling.asked
    descriptor = os.open(DEVICE, os.O_RDONLY)
    try:
        assert struct.unpack("=i", os.read(descriptor, 4)) == (POLL,)
    finally:
        os.close(descriptor)
        polling.rest()

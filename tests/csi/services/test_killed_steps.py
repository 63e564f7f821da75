"""K1, K2: the driver is killed before and after each step of each call, which is then repeated."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import grpc
import pytest

from tests.csi.driver import Driver
from tests.faults.program import needs_mounts

pytestmark = needs_mounts
MIB = 1 << 20
MOMENTS_MAX = 60  # of one call


@pytest.fixture
def stopping(driver: Driver) -> Driver:
    """A driver that can be told to kill itself."""
    driver.end()
    driver.program = (sys.executable, "-m", "tests.csi.services.stopping_driver")
    driver.environment["STOP_AT"] = str(driver.base / "stop-at")
    driver.start()
    return driver


def killed_at(driver: Driver, moment: int, call: Callable[[], Any]) -> bool:
    """Whether the driver dies at that moment of a call; it serves again afterwards."""
    (driver.base / "stop-at").write_text(str(moment))
    os.kill(driver.pid, signal.SIGUSR1)
    driver.probe()  # it has heard of it
    with suppress(grpc.RpcError):
        call()
        return False
    assert driver.end() == -signal.SIGKILL
    driver.start()
    return True


def at_each_moment(
    driver: Driver, call: Callable[[], Any], undo: Callable[[], Any], every: int = 1
) -> int:
    """Kill the driver at each moment of a call, or every few; repeat the call, and undo it."""
    moment = 1
    while killed_at(driver, moment, call):
        call()
        undo()
        moment += every
        assert moment < MOMENTS_MAX
    (driver.base / "stop-at").write_text("0")
    os.kill(driver.pid, signal.SIGUSR1)
    driver.probe()
    undo()
    return moment - 1


def test_some_moments(stopping: Driver) -> None:
    """Of the calls that start clients, bind mounts and end both: one client, and then none."""
    driver = stopping
    volume = driver.create("pvc-1")
    target = driver.base / "pods/1"
    stage, unstage = partial(driver.stage, volume), partial(driver.unstage, volume)
    publish = partial(driver.publish, volume, target)
    unpublish = partial(driver.unpublish, volume, target)
    assert at_each_moment(driver, stage, unstage, 6) >= 6
    stage()
    assert at_each_moment(driver, publish, unpublish, 5) >= 5
    publish()
    (target / "file").write_text("a mount, and not the directory below it")
    assert at_each_moment(driver, unpublish, publish, 5) >= 5
    unpublish()
    assert not target.exists()
    assert len(driver.client_pids()) == 2  # the controller's, too
    unstage()
    driver.delete(volume.volume_id)
    assert os.listdir(driver.state / "volumes") == []
    driver.finish()


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_every_moment_of_every_call(stopping: Driver) -> None:
    """Also of the calls of the controller."""
    driver = stopping
    size = {"capacity_range": {"required_bytes": MIB}}
    create, delete = partial(driver.create, "pvc-1", **size), partial(driver.delete, "pvc-1")
    assert at_each_moment(driver, create, delete) >= 6
    volume = create()
    assert at_each_moment(driver, delete, create) >= 4
    snapshot = partial(driver.snapshot, "snap-1", "pvc-1")
    forget = partial(driver.delete_snapshot, "snap-1")
    assert at_each_moment(driver, snapshot, forget) >= 6
    snapshot()
    assert at_each_moment(driver, forget, snapshot) >= 4
    source = {"snapshot": {"snapshot_id": snapshot().snapshot_id}}
    clone = partial(driver.create, "pvc-2", volume_content_source=source)
    assert at_each_moment(driver, clone, partial(driver.delete, "pvc-2")) >= 6
    forget()
    sizes = iter(range(2 * MIB, 1000 * MIB, MIB))
    grown = [MIB]

    def expand() -> None:
        grown[0] = next(sizes)
        driver.expand("pvc-1", grown[0])

    assert at_each_moment(driver, expand, lambda: None) >= 2
    target = driver.base / "pods/1"
    stage, unstage = partial(driver.stage, volume), partial(driver.unstage, volume)
    publish, unpublish = (
        partial(driver.publish, volume, target),
        partial(driver.unpublish, volume, target),
    )
    assert at_each_moment(driver, stage, unstage) >= 6
    stage()
    assert at_each_moment(driver, unstage, stage) >= 6
    assert at_each_moment(driver, publish, unpublish) >= 4
    publish()
    assert driver.stats(volume, target).usage[0].total == grown[0]
    assert at_each_moment(driver, unpublish, publish) >= 4
    unpublish()
    unstage()
    delete()
    assert list(driver.list_volumes().entries) == []
    assert os.listdir(driver.state / "volumes") == []
    driver.finish()

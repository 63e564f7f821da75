"""K2: nodes that reboot, and records of one volume that harm no other."""

from __future__ import annotations

import os
import signal
import subprocess
import uuid

import grpc
import pytest

from csi.errors import Code
from tests.csi.driver import ONE_POD, Driver
from tests.faults.program import needs_mounts
from tests.support.outcome import errno_of
from tests.support.waiting import wait_until

pytestmark = needs_mounts


def reboot(driver: Driver) -> None:
    """The node loses all processes and mounts; its disk stays."""
    driver.end(signal.SIGKILL)
    for pid in [*driver.supervisor_pids(), *driver.client_pids()]:
        os.kill(pid, signal.SIGKILL)
    for path in driver.mounts():
        subprocess.run(["umount", "-l", path], check=True)
    driver.start()


def test_a_pod_of_its_own_after_a_reboot(driver: Driver) -> None:
    """The next pod gets a volume for one pod, though no one unpublished it from the last one."""
    volume = driver.create("pvc-1")
    first, second = driver.base / "pods/1", driver.base / "pods/2"
    driver.stage(volume)
    driver.publishing(volume, first, mode=ONE_POD).result()
    with pytest.raises(grpc.RpcError) as caught:
        driver.publishing(volume, second, mode=ONE_POD).result()
    assert caught.value.code() is Code.FAILED_PRECONDITION
    (first / "file").write_text("kept")
    reboot(driver)
    driver.stage(volume)
    driver.publishing(volume, second, mode=ONE_POD).result()
    assert (second / "file").read_text() == "kept"
    for target in (first, second):
        driver.unpublish(volume, target)
    driver.unstage(volume)
    driver.delete(volume.volume_id)
    driver.finish()


def test_a_damaged_record_harms_no_other_volume(driver: Driver) -> None:
    """The driver goes on, heals the others and says which record it is."""
    volume = driver.create("pvc-1", parameters={"mountOptions": "no-supervisor"})
    target = driver.base / "pods/1"
    driver.stage(volume)
    driver.publish(volume, target)
    (target / "file").write_text("kept")
    bad = [driver.state / "volumes" / f"{number}{uuid.uuid4().hex}" for number in range(2)]
    for home, text in zip(bad, ("{", '{"volume_id": "x", "words": [], "later": 1}'), strict=True):
        home.mkdir()
        (home / "record.json").write_text(text)
    driver.end()
    os.kill(driver.client_pid(volume), signal.SIGKILL)
    driver.start("--heal-interval", "0.2")
    wait_until(lambda: "was started again" in driver.log.read_text())
    wait_until(lambda: errno_of(lambda: os.listdir(target)) == 0)
    assert (target / "file").read_text() == "kept"
    for home in bad:
        assert f"{home}/record.json is damaged" in driver.log.read_text()
        (home / "record.json").unlink()
        home.rmdir()
    assert driver.probe()
    driver.unpublish(volume, target)
    driver.unstage(volume)
    driver.delete(volume.volume_id)
    driver.finish()

"""K2: pods see nothing of a client that dies, and a healed mount reaches their mount namespaces."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.csi.driver import Driver
from tests.faults.program import SLICEFS, needs_mounts
from tests.support.outcome import errno_of
from tests.support.waiting import wait_until

pytestmark = needs_mounts
POD = """
import os, sys
place, stop = sys.argv[1:]
held = os.open(f"{place}/held", os.O_RDWR | os.O_CREAT | os.O_APPEND)
gone = os.open(f"{place}/gone", os.O_RDWR | os.O_CREAT)
os.unlink(f"{place}/gone")
os.write(gone, b"unlinked")
count = 0
while not os.path.exists(stop):
    os.write(held, b"%d\\n" % count)
    count += 1
    with open(f"{place}/count", "w") as file:
        file.write(str(count))
    os.listdir(place)
os.fsync(held)
assert os.pread(gone, 100, 0) == b"unlinked"
assert os.pread(held, 1 << 30, 0) == b"".join(b"%d\\n" % number for number in range(count))
"""
LOOKER = 'read -r line; ls "$0"'


@contextmanager
def shared(driver: Driver) -> Iterator[Path]:
    """A directory for targets whose mounts reach other mount namespaces, as kubelet's does."""
    pods = driver.base / "pods"
    pods.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", pods], check=True)
    subprocess.run(["mount", "--make-shared", pods], check=True)
    yield pods
    subprocess.run(["umount", pods], check=True)


def in_a_container(*words: str | Path) -> list[str | Path]:
    """A command with a mount namespace of its own, which hears of mounts (HostToContainer)."""
    return ["unshare", "--mount", "--propagation", "slave", *words]


def count(place: Path) -> int:
    """How far the pod's program has come."""
    try:
        return int((place / "count").read_text() or "0")
    except FileNotFoundError:
        return 0


def goes_on(place: Path) -> None:
    """Returns when the pod's program has done more."""
    before = count(place)
    wait_until(lambda: count(place) > before + 5)


def test_a_pod_sees_no_error(driver: Driver) -> None:
    """The driver and the client die while a pod writes, and the client is upgraded."""
    volume = driver.create("pvc-1")
    stop = driver.base / "stop"
    with shared(driver) as pods:
        target = pods / "1"
        driver.stage(volume)
        driver.publish(volume, target)
        words = in_a_container(sys.executable, "-c", POD, target, stop)
        with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as pod:
            for step in ("client", "driver", "both", "upgrade"):
                goes_on(target)
                client = driver.client_pid(volume)
                if step in ("driver", "both"):
                    driver.end(signal.SIGKILL)
                if step in ("client", "both"):
                    os.kill(client, signal.SIGKILL)
                if step in ("driver", "both"):
                    driver.start()
                if step == "upgrade":
                    mount = driver.client_home(volume) / "mnt"
                    subprocess.run([SLICEFS, "upgrade", mount], check=True, capture_output=True)
                    assert driver.client_pid(volume) != client
                goes_on(target)
                assert not driver.stats(volume, target).volume_condition.abnormal
                assert pod.poll() is None
            stop.touch()
            assert pod.wait(60) == 0, pod.communicate()[1]
        assert "had died" not in driver.log.read_text()  # the driver had nothing to heal
        driver.unpublish(volume, target)
    driver.unstage(volume)
    assert driver.supervisor_pids() == []
    driver.delete(volume.volume_id)
    driver.finish()


def test_healed_in_a_container(driver: Driver) -> None:
    """Without a supervisor the pod sees the next client's mount, where it looks again."""
    volume = driver.create("pvc-1", parameters={"mountOptions": "no-supervisor"})
    with shared(driver) as pods:
        target = pods / "1"
        driver.stage(volume)
        assert driver.supervisor_pids() == []
        driver.publish(volume, target)
        (target / "kept").touch()
        words = in_a_container("sh", "-c", LOOKER, target)
        with subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as pod:
            own = Path(f"/proc/{pod.pid}/ns/mnt")
            wait_until(lambda: own.readlink() != Path("/proc/self/ns/mnt").readlink())
            os.kill(driver.client_pid(volume), signal.SIGKILL)
            wait_until(lambda: errno_of(lambda: os.listdir(target)) != 0)
            assert not driver.stats(volume, target).volume_condition.abnormal
            assert pod.communicate("look\n")[0] == "kept\n"
        driver.unpublish(volume, target)
    driver.unstage(volume)
    driver.delete(volume.volume_id)
    driver.finish()


def test_options_that_exclude_a_supervisor(driver: Driver) -> None:
    """Passthrough has its mount; a mount with both words says why it can't be."""
    volume = driver.create("pvc-1", parameters={"mountOptions": "passthrough"})
    driver.stage(volume)
    assert driver.supervisor_pids() == []
    config = json.loads((driver.client_home(volume) / "mnt/.config").read_text())
    assert "supervisor" not in config["mount"]
    driver.unstage(volume)
    driver.delete(volume.volume_id)
    driver.finish()

"""K1, K2: volumes through the driver: what is repeated, killed, refused and hidden."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import grpc
import pytest

from tests.csi.driver import PROGRAM, SECRET, Driver, code_of
from tests.faults.program import needs_mounts
from tests.support.outcome import errno_of
from tests.support.redis_server import free_port
from tests.support.waiting import wait_until

pytestmark = needs_mounts
Code = grpc.StatusCode
MIB = 1 << 20


def fill(path: Path, size: int) -> None:
    with path.open("wb", buffering=0) as file:
        for _ in range(size // MIB):
            file.write(bytes(MIB))


def test_a_volume_from_claim_to_end(driver: Driver) -> None:
    """Every call twice; quota, expansion, snapshot, clone; nothing is left."""
    wanted: dict[str, Any] = {
        "parameters": {
            "pathPattern": "${.PVC.namespace}/${pvc.name}",
            "csi.storage.k8s.io/pvc/namespace": "team",
            "csi.storage.k8s.io/pvc/name": "data",
        },
        "capacity_range": {"required_bytes": 4 * MIB},
    }
    volume = driver.create("pvc-1", **wanted)
    assert driver.create("pvc-1", **wanted) == volume
    assert dict(volume.volume_context) == {"subdir": "team/data"}
    first, second = driver.base / "pods/1", driver.base / "pods/2"
    for _ in range(2):
        driver.stage(volume)
        driver.publish(volume, first)
        driver.publish(volume, second, readonly=True)
    assert code_of(driver.publish, volume, second) is Code.ALREADY_EXISTS
    assert code_of(driver.unstage, volume) is Code.FAILED_PRECONDITION
    (first / "kept").write_text("before")
    assert (second / "kept").read_text() == "before"
    assert errno_of(lambda: (second / "new").write_text("x")) == errno.EROFS
    assert errno_of(lambda: fill(first / "big", 8 * MIB)) == errno.EDQUOT
    (first / "big").unlink()
    assert driver.expand(volume.volume_id, 32 * MIB) == 32 * MIB
    assert driver.expand(volume.volume_id, 2 * MIB) == 32 * MIB  # a volume never shrinks
    fill(first / "big", 8 * MIB)
    found = driver.stats(volume, first)
    assert not found.volume_condition.abnormal
    assert found.usage[0].total == 32 * MIB
    snapshot = driver.snapshot("snap-1", volume.volume_id)
    assert driver.snapshot("snap-1", volume.volume_id) == snapshot
    (first / "kept").write_text("after")
    for target in (first, first, second, second):
        driver.unpublish(volume, target)
        assert not target.exists()
    for _ in range(2):
        driver.unstage(volume)
    for _ in range(2):  # its snapshot stays
        driver.delete(volume.volume_id)
    source = {"snapshot": {"snapshot_id": snapshot.snapshot_id}}
    clone = driver.create("pvc-2", volume_content_source=source)
    driver.stage(clone)
    driver.publish(clone, first)
    assert (first / "kept").read_text() == "before"
    driver.unpublish(clone, first)
    driver.unstage(clone)
    for _ in range(2):
        driver.delete_snapshot(snapshot.snapshot_id)
        driver.delete(clone.volume_id)
    assert os.listdir(driver.state / "volumes") == []
    driver.finish()


def test_killed_driver_and_killed_client(driver: Driver) -> None:
    """The client outlives the driver; one without a supervisor is started again and bound anew."""
    volume = driver.create("pvc-1", parameters={"mountOptions": "no-supervisor"})
    target = driver.base / "pods/1"
    driver.stage(volume)
    driver.publish(volume, target)
    with (target / "open").open("w") as file:
        driver.end(signal.SIGKILL)
        file.write("written while there is no driver")
        driver.start()
        driver.stage(volume)
        driver.publish(volume, target)
    assert (target / "open").read_text() == "written while there is no driver"
    os.kill(driver.client_pid(volume), signal.SIGKILL)
    wait_until(
        lambda: errno_of(lambda: os.listdir(target)) in (errno.ENOTCONN, errno.ECONNABORTED), 60
    )
    assert not driver.stats(volume, target).volume_condition.abnormal
    assert (target / "open").read_text() == "written while there is no driver"
    driver.unpublish(volume, target)
    driver.unstage(volume)
    driver.delete(volume.volume_id)
    driver.finish()


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_killed_again_and_again(driver: Driver) -> None:
    """Each call is cut off after another time, and then repeated to its end."""
    target = driver.base / "pods/1"
    for delay_s in (0.0, 0.05, 0.2, 0.5, 1.0):
        cut(driver, delay_s, lambda: driver.create("pvc-1", capacity_range={"limit_bytes": MIB}))
        volume = driver.create("pvc-1", capacity_range={"limit_bytes": MIB})
        calls: list[Callable[[], Any]] = [
            partial(driver.stage, volume),
            partial(driver.publish, volume, target),
            partial((target / "file").write_text, "x"),
            partial(driver.snapshot, "snap-1", volume.volume_id),
            partial(driver.delete_snapshot, "snap-1"),
            partial(driver.unpublish, volume, target),
            partial(driver.unstage, volume),
            partial(driver.delete, volume.volume_id),
        ]
        for call in calls:
            cut(driver, delay_s, call)
            call()
        assert os.listdir(driver.state / "volumes") == []
    driver.finish()


def cut(driver: Driver, delay_s: float, call: Callable[[], Any]) -> None:
    """Begin a call, kill the driver some time later, and start it again."""

    def run() -> None:
        with suppress(grpc.RpcError, ValueError, grpc.FutureCancelledError):
            call()

    thread = threading.Thread(target=run)
    thread.start()
    time.sleep(delay_s)
    driver.end(signal.SIGKILL)
    thread.join()
    driver.start()


def test_bad_requests_change_nothing(driver: Driver) -> None:
    """Targets, capacities, secrets and ids that can't be right."""
    volume = driver.create("pvc-1")
    assert code_of(driver.create, "pvc-1", capacity_range={"required_bytes": MIB}) is (
        Code.ALREADY_EXISTS
    )
    for changed in ({"mountOptions": "cache-size=1GiB"}, {"onDelete": "retain"}):
        assert code_of(driver.create, "pvc-1", parameters=changed) is Code.ALREADY_EXISTS
    huge = {"required_bytes": (1 << 63) - 1}
    assert code_of(driver.create, "pvc-2", capacity_range=huge) is Code.OUT_OF_RANGE
    odd = {"required_bytes": 2 * MIB, "limit_bytes": MIB}
    assert code_of(driver.create, "pvc-2", capacity_range=odd) is Code.OUT_OF_RANGE
    for pattern in ("../${name}", "", "/", "${who}", ".csi/volumes"):
        parameters = {"pathPattern": pattern}
        if pattern:
            found = code_of(driver.create, "pvc-2", parameters=parameters)
            assert found is Code.INVALID_ARGUMENT
    taken = {"pathPattern": "pvc-1/inner"}
    assert code_of(driver.create, "pvc-2", parameters=taken) is Code.ALREADY_EXISTS
    for secrets in (
        {},
        {"name": "csivol"},
        {**driver.secrets, "access-key": "one without the other"},
        {**driver.secrets, "name": "other"},
        {**driver.secrets, "password": SECRET},
    ):
        assert code_of(driver.create, "pvc-2", secrets=secrets) is Code.INVALID_ARGUMENT
    wrong = {**driver.secrets, "metaurl": driver.secrets["metaurl"].replace(SECRET, SECRET[::-1])}
    assert code_of(driver.stage, volume, secrets=wrong) is Code.INTERNAL
    for secrets in ({}, {**driver.secrets, "name": "other"}):
        assert code_of(driver.stage, volume, secrets=secrets) is Code.INVALID_ARGUMENT
    assert os.listdir(driver.state / "volumes") == []
    driver.stage(volume)
    assert code_of(driver.create, "x" * 300) is Code.INVALID_ARGUMENT
    file, link, other = (driver.base / name for name in ("file", "link", "other"))
    file.write_text("x")
    link.symlink_to(driver.base)
    other.mkdir()
    for target in (file, link):
        assert code_of(driver.publish, volume, target) is Code.INVALID_ARGUMENT
    subprocess.run(["mount", "-t", "tmpfs", "none", other], check=True)
    assert code_of(driver.publish, volume, other) is Code.ALREADY_EXISTS
    subprocess.run(["umount", other], check=True)
    driver.unstage(volume)
    driver.delete(volume.volume_id)
    driver.finish()


def test_many_at_once_and_nothing_secret(driver: Driver) -> None:
    """20 pods at once; no process, log or record for others shows the password."""
    volume = driver.create("pvc-1")
    driver.stage(volume)
    targets = [driver.base / f"pods/{number}" for number in range(20)]
    for call in [driver.publishing(volume, target) for target in targets]:
        call.result()
    (targets[0] / "file").write_text("x")
    assert all((target / "file").exists() for target in targets)
    assert len(driver.client_pids()) == 2  # the controller's and the volume's
    for pid in [*driver.client_pids(), driver.pid]:
        assert SECRET.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    logs = [driver.log, *driver.state.glob("*/*/log")]
    assert len(logs) == 3
    for log in logs:
        assert SECRET not in log.read_text()
    for record in driver.state.glob("volumes/*/record.json"):
        assert record.stat().st_mode & 0o077 == 0
    assert SECRET not in str(volume)
    for call in [driver.unpublishing(volume, target) for target in targets]:
        call.result()
    driver.unstage(volume)
    driver.delete(volume.volume_id)
    driver.finish()


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_200_pods_on_20_volumes(driver: Driver) -> None:
    """200 targets at once, each twice, also while others leave: one client for each volume."""
    volumes = [driver.create(f"pvc-{number}") for number in range(20)]
    for call in [driver.staging(volume) for volume in volumes for _ in range(2)]:
        call.result()
    pods = [
        (each, driver.base / f"pods/{n}-{each.volume_id}") for each in volumes for n in range(10)
    ]
    for _ in range(2):
        for call in [driver.publishing(*pod) for pod in pods]:
            call.result()
    assert len(driver.client_pids()) == 21  # the controller's, too
    for number, (_, target) in enumerate(pods):
        (target / f"file{number}").write_text("x")
    assert all(len(os.listdir(target)) == 10 for _, target in pods)
    half = len(pods) // 2
    leaving = [driver.unpublishing(*pod) for pod in pods[:half]]
    for call in [*[driver.publishing(*pod) for pod in pods[half:]], *leaving]:
        call.result()
    assert [target.exists() for _, target in pods] == [False] * half + [True] * half
    for _ in range(2):
        for call in [driver.unpublishing(*pod) for pod in pods]:
            call.result()
    for volume in volumes:
        driver.unstage(volume)
        driver.delete(volume.volume_id)
    assert os.listdir(driver.state / "volumes") == []
    driver.finish()


def test_numbers_and_health(driver: Driver) -> None:
    driver.end()
    port = free_port()
    driver.start("--metrics", f"127.0.0.1:{port}")

    def page(name: str) -> str:
        with urlopen(f"http://127.0.0.1:{port}/{name}", timeout=60) as answer:
            return bytes(answer.read()).decode()

    assert page("healthz") == "ok\n"
    assert 'slicefs_csi_calls_total{call="Probe",code="OK"}' in page("metrics")
    assert "slicefs_csi_volumes 0" in page("metrics")


@pytest.mark.parametrize(
    "words",
    [
        ["--endpoint", "tcp://x", "--node-id", "n"],
        ["--endpoint", "unix:///x", "--node-id", ""],
        ["--endpoint", "unix:///x", "--node-id", "n", "--metrics", "9000x"],
    ],
)
def test_bad_options_are_one_line(words: list[str]) -> None:
    done = subprocess.run([PROGRAM, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("slicefs-csi: --")
    assert done.stderr.count("\n") == 1

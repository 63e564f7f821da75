"""K2: clients in pods of their own, which the driver makes and deletes through the API."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.csi.driver import SECRET, Driver
from tests.csi.kube_standin import ApiStandIn, KubeletStandIn
from tests.faults.program import needs_mounts
from tests.support.outcome import errno_of
from tests.support.waiting import wait_until

pytestmark = needs_mounts
TEMPLATE = {"spec": {"containers": [{"name": "client", "image": "slicefs-csi:0.1.0"}]}}


@pytest.fixture
def api(secrets: dict[str, str]) -> Iterator[ApiStandIn]:
    found = ApiStandIn(Path(secrets["bucket"]).parent)
    yield found
    found.stop()


@pytest.fixture
def kubelet(api: ApiStandIn) -> Iterator[KubeletStandIn]:
    found = KubeletStandIn(api.port, api.account)
    yield found
    found.stop()


@pytest.fixture
def pod_driver(
    secrets: dict[str, str], api: ApiStandIn, kubelet: KubeletStandIn
) -> Iterator[Driver]:
    """A driver whose clients are pods."""
    del kubelet
    base = Path(secrets["bucket"]).parent
    (base / "pod.json").write_text(json.dumps(TEMPLATE))
    found = Driver(base, secrets)
    found.options = ("--mount-pod", str(base / "pod.json"), "--service-account", str(api.account))
    found.environment = {
        "KUBERNETES_SERVICE_HOST": "127.0.0.1",
        "KUBERNETES_SERVICE_PORT": str(api.port),
    }
    found.start()
    yield found
    found.clean_up()


def test_a_client_in_a_pod(pod_driver: Driver, api: ApiStandIn, kubelet: KubeletStandIn) -> None:
    """One pod for a volume, whatever is killed; the API never hears a secret."""
    driver = pod_driver
    volume = driver.create("pvc-1")
    wrong = {**driver.secrets, "metaurl": driver.secrets["metaurl"].replace(SECRET, SECRET[::-1])}
    with pytest.raises(grpc.RpcError) as caught:
        driver.stage(volume, secrets=wrong)
    assert "username-password" in caught.value.details()
    assert api.pods == {}
    call = driver.staging(volume)
    wait_until(lambda: api.pods)
    driver.end(signal.SIGKILL)
    call.exception()
    driver.start()
    first, second = driver.base / "pods/1", driver.base / "pods/2"
    driver.stage(volume)
    driver.publish(volume, first)
    driver.publish(volume, second)
    (first / "file").write_text("x")
    assert (second / "file").read_text() == "x"
    [pod] = api.pods.values()
    assert pod["metadata"]["annotations"] == {"csi.slicefs/volume": volume.volume_id}
    name = pod["metadata"]["name"]
    with (first / "open").open("w") as file:
        os.kill(driver.client_pid(volume), signal.SIGKILL)
        file.write("the supervisor in the pod has the next client go on")
    assert (second / "open").read_text().endswith("go on")
    os.killpg(kubelet.running[name].pid, signal.SIGKILL)
    dead = (errno.ENOTCONN, errno.ECONNABORTED)
    wait_until(lambda: errno_of(lambda: os.listdir(first)) in dead)
    assert not driver.stats(volume, first).volume_condition.abnormal
    assert (second / "file").read_text() == "x"
    kubelet.ask("DELETE", f"/api/v1/namespaces/kube-system/pods/{name}")  # as a drain does
    wait_until(lambda: "deletionTimestamp" in api.pods[name]["metadata"])
    (first / "file").write_text("a pod that is to end goes on until it is unstaged")
    driver.unpublish(volume, first)
    driver.unpublish(volume, second)
    driver.unstage(volume)
    wait_until(lambda: not api.pods)
    driver.delete(volume.volume_id)
    assert not any(SECRET in body for body in api.bodies)
    assert SECRET not in driver.log.read_text()
    assert os.listdir(driver.state / "volumes") == []
    driver.finish()


def test_a_client_moves_to_a_new_pod(
    pod_driver: Driver, api: ApiStandIn, kubelet: KubeletStandIn
) -> None:
    """The driver is upgraded, then the client under an open file; a bad image disturbs nothing."""
    driver, volume = pod_driver, pod_driver.create("pvc-1")
    target = driver.base / "pods/1"
    driver.stage(volume)
    driver.publish(volume, target)
    [first] = api.pods
    with (target / "open").open("w") as file:
        file.write("before ")
        file.flush()
        template = json.dumps({"metadata": {"labels": {"generation": "2"}}, **TEMPLATE})
        restart_with(driver, template)
        wait_until(lambda: first not in api.pods and len(api.pods) == 1)
        assert first not in kubelet.running
        [second] = api.pods
        file.write("after")
    assert (target / "open").read_text() == "before after"
    assert "moves to the pod" in driver.log.read_text()
    assert not driver.stats(volume, target).volume_condition.abnormal
    os.kill(driver.client_pid(volume), signal.SIGKILL)  # its supervisor is the one of the new pod
    (target / "again").write_text("served")
    kubelet.programs["broken"] = ("sh", "-c", "echo no slicefs in the image; exit 1")
    spec = {"containers": [{"name": "client", "image": "broken"}]}
    restart_with(driver, json.dumps({"spec": spec}))
    wait_until(lambda: "no slicefs in the image" in driver.log.read_text())
    wait_until(lambda: list(api.pods) == [second])
    (target / "again").write_text("served still")
    driver.unpublish(volume, target)
    driver.unstage(volume)
    wait_until(lambda: not api.pods)
    driver.delete(volume.volume_id)
    driver.finish()


def restart_with(driver: Driver, template: str) -> None:
    """Another version of the driver, whose clients are pods like this one."""
    driver.end(signal.SIGTERM)
    (driver.base / "pod.json").write_text(template)
    if "--upgrade-clients" not in driver.options:
        driver.options += ("--upgrade-clients", "--heal-interval", "0.2")
    driver.start()


def test_no_api_server(pod_driver: Driver, api: ApiStandIn) -> None:
    """A stage without an API server is repeated later; a client that runs needs none."""
    driver = pod_driver
    volume = driver.create("pvc-1")
    token = api.account / "token"
    right = token.read_text()
    token.write_text("expired")
    with pytest.raises(grpc.RpcError) as caught:
        driver.stage(volume)
    assert "401" in caught.value.details()
    token.write_text(right)
    driver.stage(volume)
    other = driver.create("pvc-2")  # the process ids in its pod are the same
    driver.stage(other)
    driver.unstage(other)
    driver.delete(other.volume_id)
    token.write_text("expired")
    target = driver.base / "pods/1"
    driver.publish(volume, target)
    assert not driver.stats(volume, target).volume_condition.abnormal
    driver.unpublish(volume, target)
    token.write_text(right)
    driver.unstage(volume)
    driver.delete(volume.volume_id)
    driver.finish()

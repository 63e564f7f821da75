"""K1-K3 in a Kubernetes of one node: API server, kubelet and containerd are the real ones."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from csi.services.table import DRIVER_NAME
from tests.csi.deploy.schemas import definition_files
from tests.csi.driver import SECRET, Driver
from tests.csi.go_programs import go_program
from tests.csi.kube_build import BUILD_S, kubesim
from tests.csi.kube_cluster import KubeCluster
from tests.faults.program import REPOSITORY, needs_mounts
from tests.support.redis_server import free_port
from tests.support.waiting import wait_until

pytestmark = [needs_mounts, pytest.mark.soak, pytest.mark.timeout(BUILD_S + 1200)]
DEPLOY: Final = REPOSITORY / "csi/deploy"
READY_S: Final = 300.0
WRITER: Final = """
while true; do
  n=$((n+1)); (echo $n >> /data/log) 2>&1 && echo written || echo lost; /busybox usleep 100000
done
"""
PROVISIONER: Final = (
    "github.com/kubernetes-csi/external-provisioner/v6/cmd/csi-provisioner",
    "v6.3.0",
)
FILLER: Final = "/busybox dd if=/dev/zero of=/data/big bs=64k count=1024; /busybox rm /data/big"


@pytest.fixture(scope="module")
def cluster() -> Iterator[KubeCluster]:
    program = kubesim()
    with KubeCluster(Path(tempfile.mkdtemp(prefix="slicefs-kube-")), program) as found:
        found.start_control_plane()
        yield found


def documents(path: Path, kubelet_dir: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text().replace("/var/lib/kubelet", str(kubelet_dir))))


def test_manifests_install(cluster: KubeCluster) -> None:
    """As docs/CSI.md says; the API server knows every field."""
    apply = ("apply", "--validate=strict", "-f")
    cluster.kubectl(*apply, str(DEPLOY / "slicefs-csi.yaml"))
    for group in ("snapshot.storage.k8s.io", "data.fluid.io"):
        for path in definition_files(group):
            cluster.kubectl("create", "-f", str(path))  # some are too large for `apply`
    cluster.kubectl("wait", "--for=condition=Established", "--timeout=120s", "crd", "--all")
    for path in sorted(DEPLOY.glob("examples/*.yaml")):
        found = documents(path, cluster.kubelet_dir)
        cluster.kubectl(*apply, "-", content=found)
        cluster.kubectl("delete", "--wait=false", "-f", "-", content=found)
    names = {each["metadata"]["name"] for each in cluster.get("csidrivers")["items"]}
    assert names == {DRIVER_NAME}
    cluster.kubectl("delete", "-f", str(DEPLOY / "slicefs-csi.yaml"))


class Node:
    """The driver in the cluster, with programs of this host in its containers."""

    def __init__(self, cluster: KubeCluster, secrets: Mapping[str, str]) -> None:
        self._cluster = cluster
        self._secrets = secrets
        places = {"/usr", "/etc", "/root", str(REPOSITORY), str(Path(sys.base_prefix))}
        places.add(str(Path(secrets["bucket"]).parent))
        self._places = sorted(
            place for place in places if not any(place.startswith(f"{up}/") for up in places)
        )
        self._port = str(free_port())
        self._path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

    def install(self, release: str = "first") -> None:
        """The manifests, with programs of this host, and without what is not built here.

        Another `release` has other mount pods, to which clients move.
        """
        found = documents(DEPLOY / "slicefs-csi.yaml", self._cluster.kubelet_dir)
        for each in found:
            if each["kind"] == "Deployment":  # both have the host's network here
                each |= json.loads(json.dumps(each).replace("9909", self._port))
            if each["kind"] in ("DaemonSet", "Deployment"):
                spec = each["spec"]["template"]["spec"]
                if each["kind"] == "DaemonSet":
                    each["spec"]["template"]["metadata"]["labels"]["release"] = release
                spec["containers"] = [self._container(c) for c in spec["containers"]]
                spec["containers"] = [c for c in spec["containers"] if c]
                each["spec"]["template"]["spec"] = self._localised(spec)
            if each["metadata"]["name"] == "slicefs-csi-mount-pod":
                pod = yaml.safe_load(each["data"]["pod.json"])
                pod["spec"] = self._localised(pod["spec"])
                pod["metadata"] = {"labels": {"release": release}}
                each["data"]["pod.json"] = json.dumps(pod)
        self._cluster.kubectl("apply", "-f", "-", content=found)
        [secret, *_] = documents(DEPLOY / "examples/class.yaml", self._cluster.kubelet_dir)
        secret["stringData"] = dict(self._secrets)
        self._cluster.kubectl("apply", "-f", "-", content=[secret])

    def _localised(self, spec: Any) -> Any:
        return self._cluster.localised(spec, self._places, self._path)

    def _container(self, container: dict[str, Any]) -> dict[str, Any] | None:
        if container["name"] == "driver":  # the data are in a directory here
            args = [*container["args"], "--allow-local-stores", "--upgrade-clients=true"]
            return {**container, "args": args}
        if container["name"] == "registrar":
            socket = container["args"][1].partition("=")[2]
            command = [sys.executable, "-m", "tests.csi.kube_registrar", socket, "/registration"]
            found = {**container, "image": "slicefs-csi:0.1.0", "command": command}
            return {**found, "workingDir": str(REPOSITORY), "args": []}
        if container["name"] == "provisioner":
            command = [str(go_program(*PROVISIONER, replaces=True))]
            return {**container, "image": "slicefs-csi:0.1.0", "command": command}
        return None


def test_a_claim_and_a_pod(cluster: KubeCluster, secrets: dict[str, str]) -> None:
    """A user's pod writes within its quota, while the node plugin and the client are killed."""
    cluster.start_node()
    node = Node(cluster, secrets)
    node.install()
    controller = Driver(cluster.base, secrets)
    controller.connect(controller_socket(cluster))
    volume = controller.create("pvc-1", capacity_range={"required_bytes": 16 << 20})
    claim(cluster, volume)
    run(cluster, "writer", WRITER)
    run(cluster, "filler", FILLER)
    wait_until(lambda: phase(cluster, "filler") == "Succeeded", READY_S)
    assert "Disk quota exceeded" in log(cluster, "filler")
    [mount_pod] = mount_pods(cluster)
    everything = cluster.kubectl("get", "pods,configmaps,pv", "-A", "-o", "yaml")
    everything += cluster.kubectl("logs", "-n", "kube-system", mount_pod)
    assert SECRET not in everything
    kill(f"slicefs-csi --endpoint.*{cluster.kubelet_dir}")
    goes_on(cluster)
    assert "lost" not in log(cluster, "writer")
    assert mount_pods(cluster) == [mount_pod]
    kill(f"fsclient.cli.main mount.*{cluster.kubelet_dir}")
    goes_on(cluster)
    assert "lost" not in log(cluster, "writer")
    node.install("second")
    wait_until(lambda: mount_pod not in mount_pods(cluster), READY_S)
    assert len(mount_pods(cluster)) == 1
    goes_on(cluster)
    assert "lost" not in log(cluster, "writer")
    kill(f"(fsclient.cli.main mount|fsclient.survival.supervisor).*{cluster.kubelet_dir}")
    wait_until(lambda: "lost" in log(cluster, "writer"), READY_S)
    goes_on(cluster)  # the driver has bound another client's mount
    cluster.kubectl("delete", "pod", "writer", "filler", "--grace-period=1")
    wait_until(lambda: not mount_pods(cluster), READY_S)
    controller.delete(volume.volume_id)
    provisioned(cluster)
    controller.slicefs("fsck", "--data")


def provisioned(cluster: KubeCluster) -> None:
    """external-provisioner makes the volume of a claim, and deletes it with the claim."""
    kinds = {each["kind"]: each for each in documents(DEPLOY / "examples/class.yaml", Path())}
    [wanted, _] = documents(DEPLOY / "examples/training.yaml", Path())
    wanted["metadata"]["name"] = "provisioned"
    wanted["spec"]["resources"]["requests"]["storage"] = "16Mi"
    cluster.kubectl("apply", "-f", "-", content=[kinds["StorageClass"], wanted])
    wait_until(lambda: cluster.get("pvc", "provisioned")["status"]["phase"] == "Bound", READY_S)
    name = cluster.get("pvc", "provisioned")["spec"]["volumeName"]
    attributes = cluster.get("pv", name)["spec"]["csi"]["volumeAttributes"]
    assert attributes["subdir"] == "default/provisioned"
    run(cluster, "filler", FILLER, "provisioned")
    wait_until(lambda: phase(cluster, "filler") == "Succeeded", READY_S)
    assert "Disk quota exceeded" in log(cluster, "filler")
    cluster.kubectl("delete", "pod/filler", "pvc/provisioned")
    wait_until(lambda: cluster.kubectl_code("get", "pv", name) != 0, READY_S)


def controller_socket(cluster: KubeCluster) -> Path:
    """Where the controller answers; by a link, for the path itself is too long for a socket."""
    pattern = "pods/*/volumes/kubernetes.io~empty-dir/socket/csi.sock"
    wait_until(lambda: list(cluster.kubelet_dir.glob(pattern)), READY_S)
    link = cluster.base / "controller"
    link.symlink_to(next(cluster.kubelet_dir.glob(pattern)).parent)
    return link / "csi.sock"


def claim(cluster: KubeCluster, volume: Any) -> None:
    """A persistent volume as external-provisioner makes it, and the claim `checkpoints` for it."""
    [made, wanted] = documents(DEPLOY / "examples/static.yaml", cluster.kubelet_dir)
    made["spec"]["csi"]["volumeHandle"] = volume.volume_id
    made["spec"]["csi"]["volumeAttributes"] = dict(volume.volume_context)
    wanted["metadata"]["name"] = "checkpoints"
    for each in (made, wanted):
        each["spec"]["accessModes"] = ["ReadWriteMany"]
    cluster.kubectl("apply", "-f", "-", content=[made, wanted])
    wait_until(lambda: cluster.get("pvc", "checkpoints")["status"]["phase"] == "Bound", READY_S)


def run(cluster: KubeCluster, name: str, script: str, claimed: str = "checkpoints") -> None:
    """Start a pod as user 1000 with a claim on /data."""
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "nodeName": "node-1",
            "restartPolicy": "Never",
            "hostNetwork": True,
            "automountServiceAccountToken": False,
            "securityContext": {"runAsUser": 1000, "runAsGroup": 1000, "runAsNonRoot": True},
            "containers": [
                {
                    "name": "main",
                    "image": "slicefs-csi:0.1.0",
                    "command": ["/busybox", "sh", "-c", script],
                    "volumeMounts": [
                        {"name": "d", "mountPath": "/data", "mountPropagation": "HostToContainer"}
                    ],
                }
            ],
            "volumes": [{"name": "d", "persistentVolumeClaim": {"claimName": claimed}}],
        },
    }
    cluster.kubectl("apply", "-f", "-", content=[pod])
    wait_until(lambda: phase(cluster, name) in ("Running", "Succeeded"), READY_S)


def phase(cluster: KubeCluster, name: str) -> str:
    return str(cluster.get("pod", name)["status"].get("phase"))


def log(cluster: KubeCluster, name: str) -> str:
    return cluster.kubectl("logs", name)


def mount_pods(cluster: KubeCluster) -> list[str]:
    found = cluster.get("pods", "-n", "kube-system", "-l", "app=slicefs-mount")["items"]
    return [each["metadata"]["name"] for each in found]


def kill(pattern: str) -> None:
    """SIGKILL what has such a command line; kubelet or the driver starts it again."""
    done = subprocess.run(["pgrep", "-f", pattern], capture_output=True, text=True, check=True)
    for pid in done.stdout.split():
        os.kill(int(pid), signal.SIGKILL)


def goes_on(cluster: KubeCluster) -> None:
    """Returns when the writer has written more."""
    before = log(cluster, "writer").count("written")
    wait_until(lambda: log(cluster, "writer").count("written") > before + 5, READY_S)

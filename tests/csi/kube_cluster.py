"""A Kubernetes of one node: etcd, API server, controllers, scheduler, containerd and kubelet.

All but etcd and containerd is `kubesim`, which is compiled from Kubernetes' own modules. The node
lives in a mount namespace whose mounts are shared, as systemd makes them; its containers have a
small root of their own and the programs of this host.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import yaml

from tests.csi.kube_image import write_image
from tests.csi.kube_standin import make_certificate
from tests.support.redis_server import free_port
from tests.support.waiting import wait_until

NODE: Final = "node-1"
IMAGE: Final = "slicefs-csi:0.1.0"
START_S: Final = 300.0
_NODE: Final = """
umount -l $(grep ' - fuse' /proc/self/mountinfo | cut -d' ' -f5)  # else they do not end
mount --make-rshared / && exec sleep inf
"""
_CNI: Final = {"cniVersion": "0.3.1", "name": "lo", "plugins": [{"type": "loopback"}]}
_SYSCTLS: Final = (  # kubelet sets them
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
)
_ADMIN: Final = secrets.token_hex(16)
_CONTAINERD: Final = """
version = 2
root = "{base}/containerd"
state = "{base}/containerd.run"
[grpc]
  address = "{base}/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "docker.io/library/slicefs-csi:0.1.0"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{base}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
"""


class KubeCluster:
    """Started and ended by `with`; `base` is a short, empty directory."""

    def __init__(self, base: Path, kubesim: Path) -> None:
        self.base = base
        self.port = free_port()
        self.kubelet_dir = base / "kubelet"
        self.config = base / "admin.conf"
        self._kubesim = kubesim
        self._etcd = f"http://127.0.0.1:{free_port()}"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._sysctls = {name: Path(f"/proc/sys/{name}").read_text() for name in _SYSCTLS}

    # --- the control plane -----------------------------------------------------------------------

    def start_control_plane(self) -> None:
        """Returns when the API server is ready."""
        make_certificate(self.base)
        key = self.base / "sa.key"
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
        self.config.write_text(json.dumps(self._kubeconfig()))
        (self.base / "tokens").write_text(f"{_ADMIN},admin,admin,system:masters\n")
        peer = f"http://127.0.0.1:{free_port()}"
        words: list[str | Path] = [
            "etcd",
            "--data-dir",
            self.base / "etcd",
            "--listen-client-urls",
            self._etcd,
        ]
        words += ["--advertise-client-urls", self._etcd, "--listen-peer-urls", peer]
        words += ["--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"]
        self.spawn("etcd", [*words, "--unsafe-no-fsync"])
        self.spawn("apiserver", [self._kubesim, "apiserver", *self._api_options(key)])
        wait_until(lambda: self.kubectl_code("get", "--raw", "/readyz") == 0, START_S)
        common = [f"--kubeconfig={self.config}", "--leader-elect=false", "--secure-port=0"]
        options = [f"--root-ca-file={self.base}/ca.crt"]
        options += [f"--service-account-private-key-file={key}"]
        options += ["--use-service-account-credentials=false"]
        self.spawn("controllers", [self._kubesim, "controller-manager", *common, *options])
        self.spawn("scheduler", [self._kubesim, "scheduler", *common])

    def _api_options(self, key: Path) -> list[str]:
        return [
            f"--etcd-servers={self._etcd}",
            "--bind-address=127.0.0.1",
            f"--secure-port={self.port}",
            f"--tls-cert-file={self.base}/ca.crt",
            f"--tls-private-key-file={self.base}/tls.key",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            "--service-cluster-ip-range=10.0.0.0/24",
            f"--token-auth-file={self.base}/tokens",
            "--authorization-mode=Node,RBAC",
            "--endpoint-reconciler-type=none",
            "--allow-privileged=true",
            "--kubelet-preferred-address-types=InternalIP",
        ]

    def _kubeconfig(self) -> dict[str, Any]:
        server = f"https://127.0.0.1:{self.port}"
        cluster = {"server": server, "certificate-authority": f"{self.base}/ca.crt"}
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "kube", "cluster": cluster}],
            "users": [{"name": "admin", "user": {"token": _ADMIN}}],
            "contexts": [{"name": "kube", "context": {"cluster": "kube", "user": "admin"}}],
            "current-context": "kube",
        }

    # --- the node --------------------------------------------------------------------------------

    def start_node(self) -> None:
        """Returns when kubelet has made itself known."""
        self.kubelet_dir.mkdir()
        (self.base / "cni").mkdir()
        (self.base / "cni/lo.conflist").write_text(json.dumps(_CNI))
        (self.base / "containerd.toml").write_text(_CONTAINERD.format(base=self.base))
        self.spawn("node", ["unshare", "-m", "sh", "-c", _NODE])
        wait_until(self._is_shared)
        containerd = ["containerd", "--config", str(self.base / "containerd.toml")]
        self.spawn("containerd", self.inside(*containerd))
        image = self.base / "image.tar"
        write_image(image, f"docker.io/library/{IMAGE}")
        version = [*self._ctr, "version"]
        wait_until(lambda: subprocess.run(version, capture_output=True).returncode == 0)
        words = self.inside(*self._ctr, "images", "import", str(image))
        done = subprocess.run(words, capture_output=True, text=True)
        assert done.returncode == 0, done
        settings = self.base / "kubelet.yaml"
        settings.write_text(json.dumps(self._kubelet_settings()))
        options = [f"--config={settings}", f"--kubeconfig={self.config}"]
        options += [
            f"--hostname-override={NODE}",
            f"--root-dir={self.kubelet_dir}",
            f"--cert-dir={self.base}/pki",
        ]
        self.spawn("kubelet", self.inside(str(self._kubesim), "kubelet", *options))
        wait_until(lambda: self.kubectl_code("get", "node", NODE) == 0, START_S)

    def _is_shared(self) -> bool:
        try:
            table = Path(f"/proc/{self._processes['node'].pid}/mountinfo").read_text()
        except OSError:
            return False
        return any(" / / " in line and " shared:" in line for line in table.splitlines())

    def _kubelet_settings(self) -> dict[str, Any]:
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "failCgroupV1": False,
            "cgroupDriver": "cgroupfs",
            "cgroupsPerQOS": False,
            "enforceNodeAllocatable": [],
            "failSwapOn": False,
            "makeIPTablesUtilChains": False,
            "localStorageCapacityIsolation": False,
            "evictionHard": {"nodefs.available": "1Mi", "imagefs.available": "1Mi"},
            "containerRuntimeEndpoint": f"unix://{self.base}/containerd.sock",
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "podLogsDir": f"{self.base}/podlogs",
            "port": free_port(),
            "healthzPort": 0,
            "syncFrequency": "5s",
        }

    def inside(self, *words: str) -> list[str]:
        """The same command in the node's mount namespace."""
        return ["nsenter", "-t", str(self._processes["node"].pid), "-m", "--", *words]

    # --- what tests use --------------------------------------------------------------------------

    def spawn(self, name: str, words: Sequence[str | Path]) -> None:
        """Start a program whose log is `NAME.log`."""
        with (self.base / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                list(map(str, words)), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def kubectl_code(self, *words: str) -> int:
        """The exit code of kubectl."""
        return self._kubectl(words, None).returncode

    def kubectl(self, *words: str, content: Any = None) -> str:
        """What kubectl prints; `content` is its standard input."""
        text = None if content is None else yaml.safe_dump_all(content)
        done = self._kubectl(words, text)
        assert done.returncode == 0, done
        return done.stdout

    def get(self, *words: str) -> Any:
        """Objects as kubectl finds them."""
        return json.loads(self.kubectl("get", *words, "-o", "json"))

    def _kubectl(self, words: Sequence[str], text: str | None) -> subprocess.CompletedProcess[str]:
        command = ["kubectl", f"--kubeconfig={self.config}", "--request-timeout=60s", *words]
        environment = {**os.environ, "HOME": str(self.base)}
        return subprocess.run(
            command, input=text, env=environment, capture_output=True, text=True, check=False
        )

    def localised(self, spec: Mapping[str, Any], places: Sequence[str], path: str) -> Any:
        """A pod's specification with programs of this host, and without a network of its own."""
        found: Any = json.loads(json.dumps(spec))
        found["hostNetwork"] = True
        named = {f"host{number}": place for number, place in enumerate(places)}
        volumes = [{"name": name, "hostPath": {"path": place}} for name, place in named.items()]
        mounts = [{"name": name, "mountPath": place} for name, place in named.items()]
        environment = [
            {"name": "PATH", "value": path},
            {"name": "KUBERNETES_SERVICE_HOST", "value": "127.0.0.1"},
            {"name": "KUBERNETES_SERVICE_PORT", "value": str(self.port)},
        ]
        found["volumes"] = [*found.get("volumes", []), *volumes]
        for container in found["containers"]:
            container["env"] = [*container.get("env", []), *environment]
            container["volumeMounts"] = [*container.get("volumeMounts", []), *mounts]
        return found

    # --- the end ---------------------------------------------------------------------------------

    def stop(self) -> None:
        """End everything, containers and mounts with it."""
        for name in ("kubelet", "scheduler", "controllers"):
            self._end(name)
        if "containerd" in self._processes:
            self._end_containers()
        for name in ("containerd", "apiserver", "etcd", "node"):
            self._end(name)
        for name, value in self._sysctls.items():
            Path(f"/proc/sys/{name}").write_text(value)
        shutil.rmtree(self.base, ignore_errors=True)

    def _end_containers(self) -> None:
        done = subprocess.run([*self._ctr, "tasks", "ls", "-q"], capture_output=True, text=True)
        for name in done.stdout.split():
            for words in (["tasks", "kill", "--all", "-s", "SIGKILL"], ["tasks", "delete"]):
                subprocess.run([*self._ctr, *words, name], capture_output=True)

    @property
    def _ctr(self) -> list[str]:
        return ["ctr", "-a", f"{self.base}/containerd.sock", "-n", "k8s.io"]

    def _end(self, name: str) -> None:
        process = self._processes.pop(name, None)
        if process is not None:
            process.kill()
            process.wait()

    def __enter__(self) -> KubeCluster:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

"""The CSI driver: how long pods wait for a volume, and how much memory the driver takes.

    python -m tools.bench csi --repeat 5 --pods 20

A pod waits for NodeStage and NodePublish, the second one for NodePublish alone. The volume is on a
Redis of the benchmark's own and a directory; clients are processes of this host.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import grpc

from csi.proto import csi_pb2 as pb
from tools.benchlib import redis

CALL_S: Final = 120.0
START_S: Final = 60.0
FIRST_S: Final = 3.0  # what is asked for: the first pod of a volume
SECOND_S: Final = 0.3
IDLE_MIB: Final = 80
_BIN: Final = Path(sys.executable).parent
_MODE: Final = 5  # MULTI_NODE_MULTI_WRITER


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m tools.bench csi", description=__doc__)
    made.add_argument("--repeat", type=int, default=5, help="volumes; 5")
    made.add_argument("--pods", type=int, default=20, help="of each volume; 20")
    made.add_argument("--mount-options", default="", help="mountOptions: no-supervisor")
    made.add_argument("--dir", type=Path, help="where all is; a temporary directory")
    return made


def main(words: Sequence[str]) -> int:
    """Measure and print."""
    arguments = parser().parse_args(words)
    workspace = Path(tempfile.mkdtemp(prefix="slicefs-csi-", dir=arguments.dir))
    try:
        with redis.running(workspace / "redis.log") as server, _driver(workspace) as driver:
            driver.secrets = {
                "name": "bench",
                "metaurl": f"redis://127.0.0.1:{server.port}/1",
                "storage": "file",
                "bucket": str(workspace / "bucket"),
            }
            _measure(driver, arguments)
    finally:
        shutil.rmtree(workspace, ignore_errors=True)
    return 0


def _measure(driver: BenchDriver, arguments: argparse.Namespace) -> None:
    _print("driver, idle, before", f"{driver.memory_mib():.0f} MiB", f"< {IDLE_MIB} MiB")
    first: list[float] = []
    second: list[float] = []
    away: list[float] = []
    for number in range(arguments.repeat):
        volume = driver.create(f"pvc-{number}", arguments.mount_options)
        targets = [driver.base / f"pods/{number}-{pod}" for pod in range(arguments.pods)]
        begin = time.monotonic()
        driver.stage(volume)
        driver.publish(volume, targets[0])
        first.append(time.monotonic() - begin)
        second += [_seconds(driver.publish, volume, each) for each in targets[1:]]
        away += [_seconds(driver.unpublish, volume, each) for each in targets]
        driver.unstage(volume)
        driver.delete(volume)
    _print("first pod of a volume", _shown(first), f"< {FIRST_S} s")
    _print("further pods", _shown(second), f"< {SECOND_S} s")
    _print("a pod leaves", _shown(away), "")
    _print("driver, idle, afterwards", f"{driver.memory_mib():.0f} MiB", f"< {IDLE_MIB} MiB")


def _seconds(call: Callable[..., None], *arguments: Any) -> float:
    begin = time.monotonic()
    call(*arguments)
    return time.monotonic() - begin


def _shown(seconds: Sequence[float]) -> str:
    if not seconds:
        return "not measured"
    return f"median {statistics.median(seconds):.3f} s, worst {max(seconds):.3f} s"


def _print(what: str, found: str, wanted: str) -> None:
    print(f"{what:26} {found:36} {wanted}", flush=True)


class BenchDriver:
    """`slicefs-csi` as a process, called as Kubernetes calls it."""

    def __init__(self, base: Path, pid: int) -> None:
        self.base = base
        self.secrets: dict[str, str] = {}
        self._pid = pid
        self._channel = grpc.insecure_channel(f"unix://{base}/csi.sock")

    def close(self) -> None:
        self._channel.close()

    def memory_mib(self) -> float:
        """What it has of memory now (RSS)."""
        with open(f"/proc/{self._pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)

    def is_ready(self) -> bool:
        """Whether it answers that clients can be started."""
        try:
            return bool(self._call("Identity", "Probe", pb.ProbeRequest(), pb.ProbeResponse).ready)
        except grpc.RpcError:
            return False

    def create(self, name: str, mount_options: str) -> pb.Volume:
        request = pb.CreateVolumeRequest(
            name=name,
            secrets=self.secrets,
            volume_capabilities=[_capability()],
            parameters={"mountOptions": mount_options},
        )
        volume: pb.Volume = self._call(
            "Controller", "CreateVolume", request, pb.CreateVolumeResponse
        ).volume
        return volume

    def delete(self, volume: pb.Volume) -> None:
        request = pb.DeleteVolumeRequest(volume_id=volume.volume_id, secrets=self.secrets)
        self._call("Controller", "DeleteVolume", request, pb.DeleteVolumeResponse)

    def stage(self, volume: pb.Volume) -> None:
        """Start the client of a volume."""
        request = pb.NodeStageVolumeRequest(
            volume_id=volume.volume_id,
            staging_target_path=str(self.base / "staging"),
            volume_capability=_capability(),
            volume_context=volume.volume_context,
            secrets=self.secrets,
        )
        self._call("Node", "NodeStageVolume", request, pb.NodeStageVolumeResponse)

    def unstage(self, volume: pb.Volume) -> None:
        """End the client of a volume."""
        request = pb.NodeUnstageVolumeRequest(
            volume_id=volume.volume_id, staging_target_path=str(self.base / "staging")
        )
        self._call("Node", "NodeUnstageVolume", request, pb.NodeUnstageVolumeResponse)

    def publish(self, volume: pb.Volume, target: Path) -> None:
        """Bind a volume to where a pod wants it."""
        request = pb.NodePublishVolumeRequest(
            volume_id=volume.volume_id,
            staging_target_path=str(self.base / "staging"),
            target_path=str(target),
            volume_capability=_capability(),
        )
        self._call("Node", "NodePublishVolume", request, pb.NodePublishVolumeResponse)

    def unpublish(self, volume: pb.Volume, target: Path) -> None:
        """Unbind it."""
        request = pb.NodeUnpublishVolumeRequest(volume_id=volume.volume_id, target_path=str(target))
        self._call("Node", "NodeUnpublishVolume", request, pb.NodeUnpublishVolumeResponse)

    def _call(self, service: str, name: str, request: Any, response: Any) -> Any:
        method = self._channel.unary_unary(
            f"/csi.v1.{service}/{name}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=response.FromString,
        )
        return method(request, timeout=CALL_S)


@contextmanager
def _driver(workspace: Path) -> Iterator[BenchDriver]:
    """A driver that serves."""
    words = [str(_BIN / "slicefs-csi"), "--endpoint", f"unix://{workspace}/csi.sock"]
    words += ["--node-id", "bench", "--state-dir", str(workspace / "state")]
    with (workspace / "driver.log").open("wb") as log:
        process = subprocess.Popen([*words, "--allow-local-stores"], stderr=log)
    found = BenchDriver(workspace, process.pid)
    try:
        deadline = time.monotonic() + START_S
        while not found.is_ready():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((workspace / "driver.log").read_text())
            time.sleep(0.05)
        yield found
    finally:
        found.close()
        process.terminate()
        process.wait()
        for home in (workspace / "state/stores").glob("*"):  # the controller leaves its mounts
            subprocess.run([_BIN / "slicefs", "umount", home / "mnt"], check=False)


def _capability() -> pb.VolumeCapability:
    found = pb.VolumeCapability()
    found.mount.SetInParent()
    found.access_mode.mode = _MODE  # type: ignore[assignment]
    return found

"""The driver as a process, called over gRPC as Kubernetes calls it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest

from csi.names import file_name
from csi.proto import csi_pb2 as pb
from tests.faults.program import SLICEFS, succeed
from tests.support.waiting import wait_until

PROGRAM = os.path.join(os.path.dirname(sys.executable), "slicefs-csi")
CALL_S = 100.0
START_S = 60.0
ANY_WRITERS = 5  # MULTI_NODE_MULTI_WRITER
ONE_POD = 6  # SINGLE_NODE_SINGLE_WRITER
SECRET = "s3cr3t-Passw0rd"


class Driver:
    """`slicefs-csi` with its state below `base`; it may be killed and started again."""

    def __init__(self, base: Path, secrets: Mapping[str, str]) -> None:
        self.base = base
        self.secrets = dict(secrets)
        self.state = base / "state"
        self.socket = base / "csi.sock"
        self.log = base / "driver.log"
        self.options: tuple[str, ...] = ()
        self.allows_local = True  # most tests keep data in a directory
        self.program: tuple[str, ...] = (PROGRAM,)
        self.environment: dict[str, str] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Any = None

    def start(self, *options: str) -> None:
        """Returns when it answers."""
        words = [*self.program, "--endpoint", f"unix://{self.socket}", "--node-id", "node-1"]
        words += ["--state-dir", str(self.state), "--heal-interval", "3600"]
        words += ["--allow-local-stores"] if self.allows_local else []
        words += [*self.options, *options]
        environment = {**os.environ, **self.environment}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stderr=log, env=environment
            )
        self.connect(self.socket)
        wait_until(self._answers, START_S)

    def connect(self, socket: Path) -> None:
        """Call a driver that another program has started."""
        self._channel = grpc.insecure_channel(f"unix://{socket}")

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.log.read_text()
        try:
            return self.probe()
        except grpc.RpcError:
            return False

    def probe(self) -> bool:
        """Whether it says that it is ready."""
        return bool(self.call("Identity", "Probe", pb.ProbeRequest(), pb.ProbeResponse).ready)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def end(self, number: int = signal.SIGTERM) -> int | None:
        """A signal, and the end, of which it is the exit code; clients stay."""
        process, self._process = self._process, None
        if process is None:
            return None
        self._channel.close()
        process.send_signal(number)
        return process.wait(START_S)

    def call(self, service: str, name: str, request: Any, response: Any) -> Any:
        """One call. Raises: RpcError."""
        return self.begin(service, name, request, response).result()

    def begin(self, service: str, name: str, request: Any, response: Any) -> Any:
        """The future of a call."""
        method = self._channel.unary_unary(
            f"/csi.v1.{service}/{name}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=response.FromString,
        )
        return method.future(request, timeout=CALL_S)

    # --- controller ------------------------------------------------------------------------------

    def create(self, name: str, **fields: Any) -> Any:
        """The volume."""
        fields = {"secrets": self.secrets, "volume_capabilities": [capability()], **fields}
        request = pb.CreateVolumeRequest(name=name, **fields)
        return self.call("Controller", "CreateVolume", request, pb.CreateVolumeResponse).volume

    def delete(self, volume_id: str) -> None:
        request = pb.DeleteVolumeRequest(volume_id=volume_id, secrets=self.secrets)
        self.call("Controller", "DeleteVolume", request, pb.DeleteVolumeResponse)

    def expand(self, volume_id: str, size: int) -> int:
        request = pb.ControllerExpandVolumeRequest(
            volume_id=volume_id, secrets=self.secrets, capacity_range={"required_bytes": size}
        )
        response = pb.ControllerExpandVolumeResponse
        found = self.call("Controller", "ControllerExpandVolume", request, response)
        return int(found.capacity_bytes)

    def snapshot(self, name: str, volume_id: str) -> Any:
        request = pb.CreateSnapshotRequest(
            name=name, source_volume_id=volume_id, secrets=self.secrets
        )
        response = pb.CreateSnapshotResponse
        return self.call("Controller", "CreateSnapshot", request, response).snapshot

    def delete_snapshot(self, snapshot_id: str) -> None:
        request = pb.DeleteSnapshotRequest(snapshot_id=snapshot_id, secrets=self.secrets)
        self.call("Controller", "DeleteSnapshot", request, pb.DeleteSnapshotResponse)

    def list_volumes(self, max_entries: int = 0, token: str = "") -> Any:
        request = pb.ListVolumesRequest(max_entries=max_entries, starting_token=token)
        return self.call("Controller", "ListVolumes", request, pb.ListVolumesResponse)

    def free_bytes(self) -> int:
        """What GetCapacity says."""
        request = pb.GetCapacityRequest(volume_capabilities=[capability()])
        found = self.call("Controller", "GetCapacity", request, pb.GetCapacityResponse)
        return int(found.available_capacity)

    # --- node ------------------------------------------------------------------------------------

    def staging(self, volume: Any, **fields: Any) -> Any:
        """The future of NodeStageVolume."""
        fields = {"secrets": self.secrets, "volume_capability": capability(), **fields}
        request = pb.NodeStageVolumeRequest(
            volume_id=volume.volume_id,
            staging_target_path=str(self.base / "staging"),
            volume_context=volume.volume_context,
            **fields,
        )
        return self.begin("Node", "NodeStageVolume", request, pb.NodeStageVolumeResponse)

    def stage(self, volume: Any, **fields: Any) -> None:
        self.staging(volume, **fields).result()

    def unstage(self, volume: Any) -> None:
        request = pb.NodeUnstageVolumeRequest(
            volume_id=volume.volume_id, staging_target_path=str(self.base / "staging")
        )
        self.call("Node", "NodeUnstageVolume", request, pb.NodeUnstageVolumeResponse)

    def publishing(
        self, volume: Any, target: Path, readonly: bool = False, mode: int = ANY_WRITERS
    ) -> Any:
        """The future of NodePublishVolume."""
        request = pb.NodePublishVolumeRequest(
            volume_id=volume.volume_id,
            staging_target_path=str(self.base / "staging"),
            target_path=str(target),
            volume_capability=capability(mode),
            readonly=readonly,
        )
        return self.begin("Node", "NodePublishVolume", request, pb.NodePublishVolumeResponse)

    def publish(self, volume: Any, target: Path, readonly: bool = False) -> None:
        self.publishing(volume, target, readonly).result()

    def unpublishing(self, volume: Any, target: Path) -> Any:
        """The future of NodeUnpublishVolume."""
        request = pb.NodeUnpublishVolumeRequest(volume_id=volume.volume_id, target_path=str(target))
        return self.begin("Node", "NodeUnpublishVolume", request, pb.NodeUnpublishVolumeResponse)

    def unpublish(self, volume: Any, target: Path) -> None:
        self.unpublishing(volume, target).result()

    def stats(self, volume: Any, target: Path) -> Any:
        request = pb.NodeGetVolumeStatsRequest(volume_id=volume.volume_id, volume_path=str(target))
        response = pb.NodeGetVolumeStatsResponse
        return self.call("Node", "NodeGetVolumeStats", request, response)

    def client_pid(self, volume: Any) -> int:
        """The process that serves a staged volume."""
        home = os.fsencode(self.client_home(volume))
        [found] = [
            pid for pid in self.client_pids() if home in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        return found

    def client_home(self, volume: Any) -> Path:
        """The directory of a staged volume's client."""
        return self.state / "volumes" / file_name(volume.volume_id)

    # --- after a test ----------------------------------------------------------------------------

    def mounts(self) -> list[str]:
        """What is mounted below `base`, the latest first."""
        rows = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        return [row[4] for row in reversed(rows) if row[4].startswith(f"{self.base}/")]

    def finish(self) -> None:
        """Unmount the controller's private mount; nothing else is mounted, and fsck is clean."""
        self.end()
        for path in self.mounts():
            assert "/state/stores/" in path, path
            succeed("umount", path)
        self.slicefs("fsck", "--data")

    def slicefs(self, command: str, *options: str) -> str:
        """What a command of `slicefs` says about the volume; it must end well."""
        environment = {**os.environ, "META_OF_TEST": self.secrets["metaurl"]}
        for name, key in (("ACCESS_KEY", "access-key"), ("SECRET_KEY", "secret-key")):
            if key in self.secrets:
                environment[name] = self.secrets[key]
        words = [SLICEFS, command, "env:META_OF_TEST", *options]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done
        return done.stdout

    def clean_up(self) -> None:
        """Whatever became of the test: no process and no mount."""
        self.end(signal.SIGKILL)
        for path in self.mounts():
            subprocess.run(["umount", "-l", path], check=False, capture_output=True)
        for pid in [*self.supervisor_pids(), *self._pids(b"mount")]:
            os.kill(pid, signal.SIGKILL)

    def client_pids(self) -> list[int]:
        """Clients below `base` that serve; one that waits for its turn has no /dev/fuse yet."""
        return [pid for pid in self._pids(b"mount") if _serves(pid)]

    def supervisor_pids(self) -> list[int]:
        """Processes that keep mounts below `base` while a client dies."""
        return self._pids(b"fsclient.survival.supervisor")

    def _pids(self, word: bytes) -> list[int]:
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes()
            except OSError:
                continue
            if os.fsencode(self.state) in words and word in words.split(b"\0"):
                found.append(int(path.parent.name))
        return found


def _serves(pid: int) -> bool:
    """Whether a process has /dev/fuse open."""
    for each in Path(f"/proc/{pid}/fd").glob("*"):
        try:
            if os.readlink(each) == "/dev/fuse":
                return True
        except OSError:
            continue  # closed meanwhile
    return False


def code_of(call: Any, *arguments: Any, **fields: Any) -> Any:
    """The status of a call that must fail."""
    with pytest.raises(grpc.RpcError) as caught:
        call(*arguments, **fields)
    assert SECRET not in caught.value.details()
    return caught.value.code()


def capability(mode: int = ANY_WRITERS, *flags: str) -> pb.VolumeCapability:
    """Mounted, MULTI_NODE_MULTI_WRITER unless said otherwise."""
    found = pb.VolumeCapability()
    found.mount.mount_flags.extend(flags)
    found.access_mode.mode = mode  # type: ignore[assignment]
    return found

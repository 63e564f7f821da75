"""The node service: one client for each volume, bound to where pods want it."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from csi.clients.backend import Backend, parse_secrets
from csi.clients.client import Usage
from csi.clients.mounting import mount_words
from csi.clients.node_volumes import NodeVolumes
from csi.errors import Code, CsiError, invalid
from csi.host import mounts
from csi.names import check_absolute, check_id, clean_path
from csi.proto import csi_pb2 as pb
from csi.services.locks import Locks
from csi.services.staging import Staging
from csi.services.table import Call, Service
from csi.volumes.parameters import SINGLE_WRITER, check_capability, is_read_only, parse_range

log = logging.getLogger(__name__)

_RPC = pb.NodeServiceCapability.RPC
_CAPABILITIES = (
    _RPC.STAGE_UNSTAGE_VOLUME,
    _RPC.GET_VOLUME_STATS,
    _RPC.EXPAND_VOLUME,
    _RPC.VOLUME_CONDITION,
    _RPC.SINGLE_NODE_MULTI_WRITER,
)


class Node:
    """See `Service`. Calls for one volume come one after the other."""

    name = "csi.v1.Node"

    def __init__(self, node_id: str, volumes: NodeVolumes, staging: Staging) -> None:
        self._node_id = node_id
        self._volumes = volumes
        self._staging = staging
        self._locks = Locks()

    def calls(self) -> Mapping[str, Call]:
        return {
            "NodeGetInfo": (self.get_info, pb.NodeGetInfoRequest),
            "NodeGetCapabilities": (self.get_capabilities, pb.NodeGetCapabilitiesRequest),
            "NodeStageVolume": (self.stage, pb.NodeStageVolumeRequest),
            "NodeUnstageVolume": (self.unstage, pb.NodeUnstageVolumeRequest),
            "NodePublishVolume": (self.publish, pb.NodePublishVolumeRequest),
            "NodeUnpublishVolume": (self.unpublish, pb.NodeUnpublishVolumeRequest),
            "NodeGetVolumeStats": (self.get_stats, pb.NodeGetVolumeStatsRequest),
            "NodeExpandVolume": (self.expand, pb.NodeExpandVolumeRequest),
        }

    async def get_info(self, request: pb.NodeGetInfoRequest) -> pb.NodeGetInfoResponse:
        """The node's id; it takes any number of volumes."""
        del request
        return pb.NodeGetInfoResponse(node_id=self._node_id)

    async def get_capabilities(
        self, request: pb.NodeGetCapabilitiesRequest
    ) -> pb.NodeGetCapabilitiesResponse:
        """What this node can do."""
        del request
        found = [pb.NodeServiceCapability(rpc=_RPC(type=each)) for each in _CAPABILITIES]
        return pb.NodeGetCapabilitiesResponse(capabilities=found)

    async def stage(self, request: pb.NodeStageVolumeRequest) -> pb.NodeStageVolumeResponse:
        """Start the volume's client, unless it runs."""
        volume_id = check_id("volume id", request.volume_id)
        check_absolute("staging target path", request.staging_target_path)
        check_capability(request.volume_capability)
        backend, words = _wanted(request)
        async with self._locks.hold(volume_id):
            await self._staging.stage(volume_id, backend, words)
        return pb.NodeStageVolumeResponse()

    async def unstage(self, request: pb.NodeUnstageVolumeRequest) -> pb.NodeUnstageVolumeResponse:
        """Store everything and end the client; an error while data are not stored."""
        volume_id = check_id("volume id", request.volume_id)
        check_absolute("staging target path", request.staging_target_path)
        async with self._locks.hold(volume_id):
            await self._staging.unstage(volume_id)
        return pb.NodeUnstageVolumeResponse()

    async def publish(self, request: pb.NodePublishVolumeRequest) -> pb.NodePublishVolumeResponse:
        """Bind the staged mount to the target of a pod."""
        volume_id = check_id("volume id", request.volume_id)
        target = check_absolute("target path", request.target_path)
        check_capability(request.volume_capability)
        if not request.staging_target_path:
            raise CsiError(Code.FAILED_PRECONDITION, "the staging target path is missing")
        readonly = request.readonly or is_read_only(request.volume_capability)
        single = request.volume_capability.access_mode.mode == SINGLE_WRITER
        async with self._locks.hold(volume_id):
            await self._staging.publish(volume_id, target, readonly, single)
        return pb.NodePublishVolumeResponse()

    async def unpublish(
        self, request: pb.NodeUnpublishVolumeRequest
    ) -> pb.NodeUnpublishVolumeResponse:
        """Unmount the target and remove it."""
        volume_id = check_id("volume id", request.volume_id)
        target = check_absolute("target path", request.target_path)
        async with self._locks.hold(volume_id):
            await self._staging.unpublish(volume_id, target)
        return pb.NodeUnpublishVolumeResponse()

    async def get_stats(
        self, request: pb.NodeGetVolumeStatsRequest
    ) -> pb.NodeGetVolumeStatsResponse:
        """Usage, and whether the client lives; a dead one is started again first."""
        volume_id = check_id("volume id", request.volume_id)
        path = self._path_of(volume_id, request.volume_path)
        async with self._locks.hold(volume_id):
            try:
                await self._staging.heal(volume_id)
                usage = await self._volumes.client(volume_id).usage(path)
            except CsiError as error:
                return _abnormal(error.text)
        if usage is None:
            return _abnormal("the client has died and is not mounted again")
        return _normal(usage)

    async def expand(self, request: pb.NodeExpandVolumeRequest) -> pb.NodeExpandVolumeResponse:
        """The quota is the controller's; mounts follow it by themselves."""
        volume_id = check_id("volume id", request.volume_id)
        capacity = parse_range(request.capacity_range)
        self._path_of(volume_id, request.volume_path)
        return pb.NodeExpandVolumeResponse(capacity_bytes=capacity.wanted)

    async def heal(self) -> int:
        """Mount volumes anew whose clients have died; how many are not well."""
        bad = 0
        for record in self._volumes.all():
            try:
                async with self._locks.hold(record.volume_id):
                    await self._staging.heal(record.volume_id)
            except CsiError as error:
                bad += 1
                log.warning("volume %r: %s", record.volume_id, error.text)
        return bad

    def _path_of(self, volume_id: str, path: str) -> str:
        """A path where the volume is published or staged. Raises: CsiError."""
        if not path:
            raise invalid("the volume path is missing")
        record = self._volumes.read(volume_id)
        if record is None:
            raise CsiError(Code.NOT_FOUND, f"volume {volume_id} is not staged here")
        path = path.rstrip("/")
        if path not in record.targets or mounts.find(path) is None:
            raise CsiError(Code.NOT_FOUND, f"volume {volume_id} is not mounted at {path[:200]}")
        return path


def _wanted(request: pb.NodeStageVolumeRequest) -> tuple[Backend, tuple[str, ...]]:
    """The volume to mount, and how. Raises: CsiError."""
    backend = parse_secrets(request.secrets)
    context = request.volume_context
    subdir = clean_path("subdir", context.get("subdir", ""))
    options = [context.get("mountOptions", ""), *request.volume_capability.mount.mount_flags]
    return backend, mount_words(options, is_read_only(request.volume_capability), subdir)


def _abnormal(text: str) -> pb.NodeGetVolumeStatsResponse:
    condition = pb.VolumeCondition(abnormal=True, message=text)
    return pb.NodeGetVolumeStatsResponse(
        usage=[pb.VolumeUsage(unit=pb.VolumeUsage.BYTES)], volume_condition=condition
    )


def _normal(usage: Usage) -> pb.NodeGetVolumeStatsResponse:
    space = pb.VolumeUsage(
        total=usage.total,
        available=usage.available,
        used=usage.used,
        unit=pb.VolumeUsage.BYTES,
    )
    inodes = pb.VolumeUsage(
        total=usage.inodes,
        available=usage.inodes_free,
        used=usage.inodes - usage.inodes_free,
        unit=pb.VolumeUsage.INODES,
    )
    condition = pb.VolumeCondition(abnormal=False, message="mounted")
    return pb.NodeGetVolumeStatsResponse(usage=[space, inodes], volume_condition=condition)


_SERVICE: type[Service] = Node

"""The node service: one client for each volume, bound to where pods want it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from csi.clients.backend import parse_secrets
from csi.clients.client import VolumeUsage
from csi.clients.mounting import mount_words
from csi.clients.node_volumes import NodeVolumes
from csi.errors import Code, CsiError, invalid
from csi.host import mounts
from csi.names import check_absolute, check_id, clean_path
from csi.proto import csi_pb2 as pb
from csi.services.locks import Locks
from csi.services.staging import NodeStaging
from csi.services.table import Call, Service
from csi.volumes.parameters import SINGLE_WRITER, check_capability, is_read_only, parse_range

log = logging.getLogger(__name__)

_HEALS_AT_ONCE: Final = 8  # a volume whose store is away holds none of the others up for long
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

    def __init__(
        self, node_id: str, volumes: NodeVolumes, staging: NodeStaging, allow_local: bool
    ) -> None:
        """`allow_local`: secrets may name stores of this host."""
        self._node_id = node_id
        self._allow_local = allow_local
        self._volumes = volumes
        self._staging = staging
        self._damaged: list[str] = []  # what the log says already
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
        backend = parse_secrets(request.secrets, self._allow_local)
        words = _wanted(request)
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
        records, damaged = self._volumes.all()
        for text in damaged:
            if text not in self._damaged:
                log.error("%s", text)
        self._damaged = damaged
        few = asyncio.Semaphore(_HEALS_AT_ONCE)

        async def heal(volume_id: str) -> bool:
            async with few:
                return await self._tried(volume_id, self._staging.heal) is not None

        healed = await asyncio.gather(*(heal(record.volume_id) for record in records))
        return len(damaged) + healed.count(False)

    async def renew(self) -> None:
        """Have clients move to pods of the present template, one after the other."""
        for record in self._volumes.all()[0]:
            if await self._tried(record.volume_id, self._staging.renew):
                return

    async def _tried(self, volume_id: str, act: Callable[[str], Awaitable[bool]]) -> bool | None:
        """What it says; None where it fails, which is logged: it is nothing to end the driver."""
        try:
            async with self._locks.hold(volume_id):
                return await act(volume_id)
        except CsiError as error:
            log.warning("volume %r: %s", volume_id, error.text)
        except Exception:
            log.exception("volume %r", volume_id)
        return None

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


def _wanted(request: pb.NodeStageVolumeRequest) -> tuple[str, ...]:
    """How the volume is to be mounted. Raises: CsiError."""
    context = request.volume_context
    subdir = clean_path("subdir", context.get("subdir", ""))
    options = [context.get("mountOptions", ""), *request.volume_capability.mount.mount_flags]
    return mount_words(options, is_read_only(request.volume_capability), subdir)


def _abnormal(text: str) -> pb.NodeGetVolumeStatsResponse:
    condition = pb.VolumeCondition(abnormal=True, message=text)
    return pb.NodeGetVolumeStatsResponse(
        usage=[pb.VolumeUsage(unit=pb.VolumeUsage.BYTES)], volume_condition=condition
    )


def _normal(usage: VolumeUsage) -> pb.NodeGetVolumeStatsResponse:
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

"""The controller service: volumes and snapshots, made on a private mount."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp
from google.protobuf.wrappers_pb2 import Int64Value

from csi.clients.backend import parse_secrets
from csi.errors import Code, CsiError, invalid
from csi.names import check_id, id_for
from csi.proto import csi_pb2 as pb
from csi.services.locks import Locks
from csi.services.table import Call, Service
from csi.volumes.catalog import SnapshotRecord, VolumeRecord
from csi.volumes.parameters import (
    CAPACITY_MAX,
    check_capabilities,
    parse_parameters,
    parse_range,
    refusal,
)
from csi.volumes.snapshots import Snapshots, list_snapshots
from csi.volumes.stores import ControllerVolume, ControllerVolumes
from csi.volumes.volumes import Volumes, free_bytes, list_volumes

_RPC = pb.ControllerServiceCapability.RPC
_CAPABILITIES = (
    _RPC.CREATE_DELETE_VOLUME,
    _RPC.LIST_VOLUMES,
    _RPC.GET_CAPACITY,
    _RPC.CREATE_DELETE_SNAPSHOT,
    _RPC.LIST_SNAPSHOTS,
    _RPC.CLONE_VOLUME,
    _RPC.EXPAND_VOLUME,
    _RPC.SINGLE_NODE_MULTI_WRITER,
)


class Controller:
    """See `Service`. Calls with one volume's or snapshot's id come one after the other."""

    name = "csi.v1.Controller"

    def __init__(
        self,
        stores: ControllerVolumes,
        volumes: Volumes,
        snapshots: Snapshots,
        allow_local: bool,
    ) -> None:
        """`allow_local`: secrets may name stores of this host."""
        self._allow_local = allow_local
        self._stores = stores
        self._volumes = volumes
        self._snapshots = snapshots
        self._locks = Locks()

    def calls(self) -> Mapping[str, Call]:
        return {
            "CreateVolume": (self.create_volume, pb.CreateVolumeRequest),
            "DeleteVolume": (self.delete_volume, pb.DeleteVolumeRequest),
            "ValidateVolumeCapabilities": (self.validate, pb.ValidateVolumeCapabilitiesRequest),
            "ListVolumes": (self.list_volumes, pb.ListVolumesRequest),
            "GetCapacity": (self.get_capacity, pb.GetCapacityRequest),
            "ControllerGetCapabilities": (
                self.get_capabilities,
                pb.ControllerGetCapabilitiesRequest,
            ),
            "ControllerExpandVolume": (self.expand_volume, pb.ControllerExpandVolumeRequest),
            "CreateSnapshot": (self.create_snapshot, pb.CreateSnapshotRequest),
            "DeleteSnapshot": (self.delete_snapshot, pb.DeleteSnapshotRequest),
            "ListSnapshots": (self.list_snapshots, pb.ListSnapshotsRequest),
        }

    async def get_capabilities(
        self, request: pb.ControllerGetCapabilitiesRequest
    ) -> pb.ControllerGetCapabilitiesResponse:
        """What this controller can do."""
        del request
        found = [pb.ControllerServiceCapability(rpc=_RPC(type=each)) for each in _CAPABILITIES]
        return pb.ControllerGetCapabilitiesResponse(capabilities=found)

    async def create_volume(self, request: pb.CreateVolumeRequest) -> pb.CreateVolumeResponse:
        """A directory with a quota, empty or a clone."""
        name = check_id("volume name", request.name)
        check_capabilities(request.volume_capabilities)
        wish = parse_parameters(name, request.parameters)
        capacity = parse_range(request.capacity_range)
        source = _source(request)
        store = await self._open(request.secrets)
        volume_id = id_for(name)
        async with self._locks.hold(f"volume {volume_id}"):
            record = await self._volumes.create(store, volume_id, wish, capacity, source)
        volume = _volume(record)
        if source:
            volume.content_source.CopyFrom(request.volume_content_source)
        return pb.CreateVolumeResponse(volume=volume)

    async def delete_volume(self, request: pb.DeleteVolumeRequest) -> pb.DeleteVolumeResponse:
        """Delete, archive or retain, as the class of the volume says."""
        volume_id = check_id("volume id", request.volume_id)
        store = await self._open(request.secrets)
        async with self._locks.hold(f"volume {volume_id}"):
            await self._volumes.delete(store, volume_id)
        return pb.DeleteVolumeResponse()

    async def validate(
        self, request: pb.ValidateVolumeCapabilitiesRequest
    ) -> pb.ValidateVolumeCapabilitiesResponse:
        """Whether a volume can be used in these ways."""
        volume_id = check_id("volume id", request.volume_id)
        if not request.volume_capabilities:
            raise invalid("the volume capabilities are missing")
        store = await self._open(request.secrets)
        await self._volumes.require(store, volume_id)
        for each in request.volume_capabilities:
            if why := refusal(each):
                return pb.ValidateVolumeCapabilitiesResponse(message=why)
        confirmed = pb.ValidateVolumeCapabilitiesResponse.Confirmed(
            volume_context=request.volume_context,
            volume_capabilities=request.volume_capabilities,
            parameters=request.parameters,
        )
        return pb.ValidateVolumeCapabilitiesResponse(confirmed=confirmed)

    async def list_volumes(self, request: pb.ListVolumesRequest) -> pb.ListVolumesResponse:
        """Of all SliceFS volumes that are mounted here: the request has no secrets."""
        found = await asyncio.to_thread(list_volumes, self._stores.mounted())
        begin, end, next_token = _page(request, len(found))
        entry = pb.ListVolumesResponse.Entry
        return pb.ListVolumesResponse(
            entries=[entry(volume=_volume(each)) for each in found[begin:end]],
            next_token=next_token,
        )

    async def get_capacity(self, request: pb.GetCapacityRequest) -> pb.GetCapacityResponse:
        """The room for one more volume, where that is largest: the request has no secrets."""
        for each in request.volume_capabilities:
            if refusal(each):
                return pb.GetCapacityResponse(available_capacity=0)
        found = await asyncio.to_thread(free_bytes, self._stores.mounted())
        return pb.GetCapacityResponse(
            available_capacity=found, maximum_volume_size=Int64Value(value=CAPACITY_MAX)
        )

    async def expand_volume(
        self, request: pb.ControllerExpandVolumeRequest
    ) -> pb.ControllerExpandVolumeResponse:
        """Raise the quota; mounts follow at once."""
        volume_id = check_id("volume id", request.volume_id)
        capacity = parse_range(request.capacity_range)
        if not capacity.wanted:
            raise invalid("the capacity range is missing")
        store = await self._open(request.secrets)
        async with self._locks.hold(f"volume {volume_id}"):
            found = await self._volumes.expand(store, volume_id, capacity)
        return pb.ControllerExpandVolumeResponse(capacity_bytes=found)

    async def create_snapshot(self, request: pb.CreateSnapshotRequest) -> pb.CreateSnapshotResponse:
        """What the volume is now; its data is shared."""
        name = check_id("snapshot name", request.name)
        source_id = check_id("source volume id", request.source_volume_id)
        store = await self._open(request.secrets)
        snapshot_id = id_for(name)
        async with (
            self._locks.hold(f"snapshot {snapshot_id}"),
            self._locks.hold(f"volume {source_id}"),
        ):
            record = await self._snapshots.create(store, snapshot_id, source_id)
        return pb.CreateSnapshotResponse(snapshot=_snapshot(record))

    async def delete_snapshot(self, request: pb.DeleteSnapshotRequest) -> pb.DeleteSnapshotResponse:
        """Delete it; the volume and clones of it stay."""
        snapshot_id = check_id("snapshot id", request.snapshot_id)
        store = await self._open(request.secrets)
        async with self._locks.hold(f"snapshot {snapshot_id}"):
            await self._snapshots.delete(store, snapshot_id)
        return pb.DeleteSnapshotResponse()

    async def list_snapshots(self, request: pb.ListSnapshotsRequest) -> pb.ListSnapshotsResponse:
        """Of the volume in the secrets; without secrets, of all that are mounted here."""
        if request.secrets:
            catalogs = [(await self._open(request.secrets)).catalog]
        else:
            catalogs = self._stores.mounted()
        found = await asyncio.to_thread(
            list_snapshots, catalogs, request.snapshot_id, request.source_volume_id
        )
        begin, end, next_token = _page(request, len(found))
        entry = pb.ListSnapshotsResponse.Entry
        return pb.ListSnapshotsResponse(
            entries=[entry(snapshot=_snapshot(each)) for each in found[begin:end]],
            next_token=next_token,
        )

    async def _open(self, secrets: Mapping[str, str]) -> ControllerVolume:
        return await self._stores.open(parse_secrets(secrets, self._allow_local))


def _source(request: pb.CreateVolumeRequest) -> str:
    if not request.HasField("volume_content_source"):
        return ""
    found = request.volume_content_source
    if found.WhichOneof("type") == "snapshot":
        return f"snapshot:{check_id('source snapshot id', found.snapshot.snapshot_id)}"
    if found.WhichOneof("type") == "volume":
        return f"volume:{check_id('source volume id', found.volume.volume_id)}"
    raise invalid("the content source is neither a snapshot nor a volume")


def _page(request: Any, count: int) -> tuple[int, int, str]:
    """Begin and end of what is asked for, and the token for the rest. Raises: CsiError."""
    token = request.starting_token
    if token and not (token.isascii() and token.isdigit()):
        raise CsiError(
            Code.ABORTED, "the starting token is not of this driver: start again without a token"
        )
    begin = int(token or 0)
    if begin > count:
        raise CsiError(Code.ABORTED, "the starting token is too large: start again without a token")
    end = min(count, begin + request.max_entries) if request.max_entries > 0 else count
    return begin, end, str(end) if end < count else ""


def _volume(record: VolumeRecord) -> pb.Volume:
    context = {"subdir": record.path}
    if record.mount_options:
        context["mountOptions"] = record.mount_options
    return pb.Volume(
        volume_id=record.volume_id, capacity_bytes=record.capacity, volume_context=context
    )


def _snapshot(record: SnapshotRecord) -> pb.Snapshot:
    created = Timestamp()
    created.FromNanoseconds(record.created_ns)
    return pb.Snapshot(
        snapshot_id=record.snapshot_id,
        source_volume_id=record.source_id,
        size_bytes=record.size,
        creation_time=created,
        ready_to_use=True,
    )


_SERVICE: type[Service] = Controller

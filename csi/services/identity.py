"""The identity service: what the driver is, and whether it is ready."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping

from google.protobuf.wrappers_pb2 import BoolValue

from csi.proto import csi_pb2 as pb
from csi.services.table import DRIVER_NAME, Call, Service


class Identity:
    """See `Service`."""

    name = "csi.v1.Identity"

    def __init__(self, version: str, slicefs: str, with_controller: bool) -> None:
        self._version = version
        self._slicefs = slicefs
        self._with_controller = with_controller

    def calls(self) -> Mapping[str, Call]:
        return {
            "GetPluginInfo": (self.get_plugin_info, pb.GetPluginInfoRequest),
            "GetPluginCapabilities": (self.get_capabilities, pb.GetPluginCapabilitiesRequest),
            "Probe": (self.probe, pb.ProbeRequest),
        }

    async def get_plugin_info(self, request: pb.GetPluginInfoRequest) -> pb.GetPluginInfoResponse:
        """Name and version."""
        del request
        return pb.GetPluginInfoResponse(name=DRIVER_NAME, vendor_version=self._version)

    async def get_capabilities(
        self, request: pb.GetPluginCapabilitiesRequest
    ) -> pb.GetPluginCapabilitiesResponse:
        """The controller service and online expansion."""
        del request
        service, expansion = pb.PluginCapability.Service, pb.PluginCapability.VolumeExpansion
        found = [
            pb.PluginCapability(volume_expansion=expansion(type=expansion.ONLINE)),
        ]
        if self._with_controller:
            controller = service(type=service.CONTROLLER_SERVICE)
            found.append(pb.PluginCapability(service=controller))
        return pb.GetPluginCapabilitiesResponse(capabilities=found)

    async def probe(self, request: pb.ProbeRequest) -> pb.ProbeResponse:
        """Ready where there are `slicefs` and `/dev/fuse`."""
        del request
        return pb.ProbeResponse(ready=BoolValue(value=self.is_ready()))

    def is_ready(self) -> bool:
        """Whether clients can be started."""
        return shutil.which(self._slicefs) is not None and os.path.exists("/dev/fuse")


_SERVICE: type[Service] = Identity

"""Take, delete and list snapshots of volumes. They stay when their volume is deleted."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import replace
from typing import Any

from csi.clients.program import Program, require
from csi.errors import Code, CsiError
from csi.volumes.catalog import CREATING, READY, Catalog, SnapshotRecord
from csi.volumes.stores import ControllerVolume
from csi.volumes.volumes import Volumes, remove_retired


class Snapshots:
    """Calls for one snapshot do not overlap: the service holds its lock."""

    def __init__(self, program: Program, volumes: Volumes) -> None:
        self._program = program
        self._volumes = volumes

    async def create(
        self, store: ControllerVolume, snapshot_id: str, source_id: str
    ) -> SnapshotRecord:
        """The snapshot, taken or found. Raises: CsiError."""
        catalog = store.catalog
        record = await asyncio.to_thread(catalog.snapshot, snapshot_id)
        if record is not None and record.source_id != source_id:
            raise CsiError(
                Code.ALREADY_EXISTS, f"snapshot {snapshot_id} is one of volume {record.source_id}"
            )
        if record is not None and record.state == READY:
            return record
        volume = await self._volumes.require(store, source_id)
        record = SnapshotRecord(snapshot_id, source_id, volume.uid, volume.path, 0, 0, CREATING)
        await asyncio.to_thread(catalog.write_snapshot, record)
        directory = await asyncio.to_thread(catalog.directory, volume.path)
        taken = await self._take(directory, snapshot_id)
        created_ns = int(float(taken["created"]) * 1e9)
        record = replace(record, created_ns=created_ns, size=int(taken["space"]), state=READY)
        await asyncio.to_thread(catalog.write_snapshot, record)
        return record

    async def _take(self, directory: str, name: str) -> dict[str, Any]:
        """What `slicefs` says of the snapshot, which an earlier call may have taken."""
        done = await self._program.tree("snapshot", "create", directory, name, "--json")
        if done.code:
            for found in await self._taken(directory):
                if found["name"] == name:
                    return found
        told = json.loads(require(done, f"can't take the snapshot {name}"))
        made: dict[str, Any] = told["snapshot"]
        return made

    async def _taken(self, directory: str) -> list[dict[str, Any]]:
        done = await self._program.tree("snapshot", "list", directory, "--json")
        told = json.loads(require(done, "can't list the snapshots"))
        found: list[dict[str, Any]] = told["snapshots"]
        return found

    async def delete(self, store: ControllerVolume, snapshot_id: str) -> None:
        """Delete it; one that is gone is fine. Raises: CsiError."""
        catalog = store.catalog
        record = await asyncio.to_thread(catalog.snapshot, snapshot_id)
        if record is None:
            return
        directory = await asyncio.to_thread(catalog.snapshot_source, record)
        place = os.path.join(directory, ".snapshots", snapshot_id)
        if await asyncio.to_thread(os.path.isdir, place):
            done = await self._program.tree("snapshot", "delete", directory, snapshot_id)
            if await asyncio.to_thread(os.path.isdir, place):
                require(done, f"can't delete the snapshot {snapshot_id}")
        await remove_retired(catalog, record.source_uid)
        await asyncio.to_thread(catalog.remove_snapshot, snapshot_id)


def list_snapshots(
    catalogs: list[Catalog], snapshot_id: str, source_id: str
) -> list[SnapshotRecord]:
    """Those that match, by id; an empty id matches all."""
    found = [each for catalog in catalogs for each in catalog.snapshots()]
    matching = [
        each
        for each in found
        if (not snapshot_id or each.snapshot_id == snapshot_id)
        and (not source_id or each.source_id == source_id)
    ]
    return sorted(matching, key=lambda each: each.snapshot_id)

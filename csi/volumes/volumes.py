"""Make, delete and grow volumes. Each step may be repeated; the record says how far they are."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from typing import Final

from csi.clients.program import TREE_S, Program, require
from csi.errors import Code, CsiError
from csi.host import flags
from csi.host.commands import run
from csi.volumes.catalog import CREATING, DELETING, READY, Catalog, VolumeRecord
from csi.volumes.parameters import CAPACITY_MAX, CapacityRange, ClassParameters
from csi.volumes.stores import ControllerVolume

_UID_BYTES: Final = 12


class Volumes:
    """Calls for one volume do not overlap: the service holds its lock."""

    def __init__(self, program: Program) -> None:
        self._program = program

    async def create(
        self,
        store: ControllerVolume,
        volume_id: str,
        wish: ClassParameters,
        capacity: CapacityRange,
        source: str,
    ) -> VolumeRecord:
        """The volume, made or found. Raises: CsiError."""
        record = await asyncio.to_thread(store.catalog.volume, volume_id)
        if record is None:
            size = await asyncio.to_thread(_source_size, store.catalog, source)
            if capacity.wanted and capacity.wanted < size:
                raise CsiError(Code.OUT_OF_RANGE, f"the source holds {size} bytes: ask for as much")
            uid = os.urandom(_UID_BYTES).hex()
            found = (wish.on_delete, source, wish.mount_options, CREATING)
            record = VolumeRecord(volume_id, uid, wish.path, capacity.wanted, *found)
            await asyncio.to_thread(_begin, store.catalog, record)
        _require_same(record, capacity, source, wish)
        if record.state == READY:
            return record
        await asyncio.to_thread(store.catalog.claim, record)
        await self._fill(store.catalog, record, wish)
        if record.capacity:
            await self._program.set_quota(store.backend, record.path, record.capacity)
        record = replace(record, state=READY)
        await asyncio.to_thread(store.catalog.write_volume, record)
        return record

    async def _fill(self, catalog: Catalog, record: VolumeRecord, wish: ClassParameters) -> None:
        """The directory: empty, or a copy of the source that shares its data."""
        target = await asyncio.to_thread(catalog.directory, record.path)
        if not record.source:
            await asyncio.to_thread(_make_directory, target, wish)
            return
        above = os.path.dirname(target)
        await asyncio.to_thread(os.makedirs, above, 0o755, exist_ok=True)
        if await asyncio.to_thread(os.path.isdir, target):  # it appears when it is complete
            return
        source = await asyncio.to_thread(_source_directory, catalog, record.source)
        done = await self._program.tree("clone", "--preserve", source, target)
        if not await asyncio.to_thread(os.path.isdir, target):  # of a driver that was killed
            require(done, f"can't clone {record.source}")

    async def delete(self, store: ControllerVolume, volume_id: str) -> None:
        """Delete the volume as its class says; one that is gone is fine. Raises: CsiError."""
        catalog = store.catalog
        record = await asyncio.to_thread(catalog.volume, volume_id)
        if record is None:
            return
        if record.state != DELETING:
            record = replace(record, state=DELETING)
            await asyncio.to_thread(catalog.write_volume, record)
        directory = await asyncio.to_thread(catalog.directory, record.path)
        if await asyncio.to_thread(os.path.isdir, directory):
            if record.capacity and record.on_delete != "delete":
                await self._program.set_quota(store.backend, record.path, 0)
            await asyncio.to_thread(_put_away, catalog, record)
        if record.on_delete == "delete":
            await remove_retired(catalog, record.uid)
        await asyncio.to_thread(catalog.forget, record)

    async def expand(self, store: ControllerVolume, volume_id: str, capacity: CapacityRange) -> int:
        """The capacity afterwards; a volume never shrinks. Raises: CsiError."""
        record = await self.require(store, volume_id)
        wanted = capacity.wanted
        if not record.capacity or wanted <= record.capacity:
            return record.capacity or wanted
        await self._program.set_quota(store.backend, record.path, wanted)
        await asyncio.to_thread(store.catalog.write_volume, replace(record, capacity=wanted))
        return wanted

    async def require(self, store: ControllerVolume, volume_id: str) -> VolumeRecord:
        """Raises: CsiError where there is no such volume."""
        record = await asyncio.to_thread(store.catalog.volume, volume_id)
        if record is None or record.state != READY:
            raise CsiError(Code.NOT_FOUND, f"there is no volume {volume_id}")
        return record


def list_volumes(catalogs: list[Catalog]) -> list[VolumeRecord]:
    """All volumes, by id. Raises: CsiError."""
    found = [each for catalog in catalogs for each in catalog.volumes()]
    return sorted(found, key=lambda each: each.volume_id)


def free_bytes(catalogs: list[Catalog]) -> int:
    """The room in that which has most; without any, as much as a volume can have."""
    return min(CAPACITY_MAX, max((each.free_bytes() for each in catalogs), default=CAPACITY_MAX))


async def remove_retired(catalog: Catalog, uid: str) -> None:
    """Remove what was a volume; its snapshots, and the directory for them, stay."""
    directory = catalog.retired(uid)
    if not await asyncio.to_thread(os.path.isdir, directory):
        return
    remove = ["rm", "-rf", "--", directory]
    done = await run(remove, {}, TREE_S)
    if done.code and "Operation not permitted" in done.err:
        await asyncio.to_thread(flags.clear_tree, directory)
        done = await run(remove, {}, TREE_S)
    if done.code != 0 and not await asyncio.to_thread(_snapshots, directory):
        require(done, "can't remove a deleted volume")


def _snapshots(directory: str) -> list[str]:
    try:
        return os.listdir(os.path.join(directory, ".snapshots"))
    except OSError:
        return []


def _begin(catalog: Catalog, record: VolumeRecord) -> None:
    """Write the record, unless the path is in use. Raises: CsiError."""
    directory = catalog.directory(record.path)
    if os.path.lexists(directory) and (
        record.source
        or not os.path.isdir(directory)
        or os.listdir(directory)
        or _snapshots(directory)
    ):
        raise CsiError(
            Code.ALREADY_EXISTS,
            f"{record.path} exists in the volume and is not empty: change the pathPattern, or use "
            "it as a static volume with the attribute subdir",
        )
    catalog.write_volume(record)
    try:
        catalog.claim(record)
    except CsiError:
        catalog.forget(record)
        raise


def _make_directory(target: str, wish: ClassParameters) -> None:
    os.makedirs(target, 0o755, exist_ok=True)
    fd = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fchown(fd, wish.uid, wish.gid)
        os.fchmod(fd, wish.mode)
    finally:
        os.close(fd)


def _put_away(catalog: Catalog, record: VolumeRecord) -> None:
    """Move the directory out of the way, with one rename."""
    directory = catalog.directory(record.path)
    if record.on_delete != "retain":
        flags.clear(directory)
    if record.on_delete == "delete":
        os.rename(directory, catalog.retired(record.uid))
    elif record.on_delete == "archive":
        os.rename(directory, catalog.archived(record.path, record.uid))


def _require_same(
    record: VolumeRecord, capacity: CapacityRange, source: str, wish: ClassParameters
) -> None:
    if record.state == DELETING:
        raise CsiError(Code.ABORTED, f"volume {record.volume_id} is being deleted, try again")
    if (record.source, record.path) != (source, wish.path) or not capacity.fits(record.capacity):
        raise CsiError(
            Code.ALREADY_EXISTS,
            f"volume {record.volume_id} exists with another capacity, source or path: change "
            "the name",
        )
    if (record.mount_options, record.on_delete) != (wish.mount_options, wish.on_delete):
        raise CsiError(
            Code.ALREADY_EXISTS,
            f"volume {record.volume_id} exists with another mountOptions or onDelete: change the "
            "name, or delete the claim first",
        )


def _source_size(catalog: Catalog, source: str) -> int:
    """What a source takes up at least. Raises: CsiError where there is none."""
    kind, _, source_id = source.partition(":")
    if kind == "snapshot":
        snapshot = catalog.snapshot(source_id)
        if snapshot is None or snapshot.state != READY:
            raise CsiError(Code.NOT_FOUND, f"there is no snapshot {source_id}")
        return snapshot.size
    if kind == "volume":
        volume = catalog.volume(source_id)
        if volume is None or volume.state != READY:
            raise CsiError(Code.NOT_FOUND, f"there is no volume {source_id}")
    return 0


def _source_directory(catalog: Catalog, source: str) -> str:
    """Raises: CsiError where the source is gone."""
    _source_size(catalog, source)
    kind, _, source_id = source.partition(":")
    if kind == "snapshot":
        snapshot = catalog.snapshot(source_id)
        assert snapshot is not None
        return os.path.join(catalog.snapshot_source(snapshot), ".snapshots", source_id)
    volume = catalog.volume(source_id)
    assert volume is not None
    return catalog.directory(volume.path)

"""Records of volumes and snapshots, in the SliceFS volume itself: `.csi` at its root.

Any controller finds them there, so none is lost with a pod. Calls block on the mount and belong
into a thread. A record says what a call is about to do before it does it, so a call that was cut
off goes on when it is repeated.

    .csi/volumes/HASH     a volume: its path, capacity, state
    .csi/snapshots/HASH   a snapshot: of which volume, when, how large
    .csi/paths/HASH       which volume has a path
    .csi/retired/UID      what was a deleted volume, as long as it has snapshots
    .csi/archive/NAME     what was a volume that is deleted with `onDelete: archive`
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any, Final

from csi.errors import Code, CsiError
from csi.host import mounts
from csi.host.records import (
    create_record,
    read_record,
    remove_leftovers,
    remove_record,
    write_record,
)
from csi.names import CATALOG, file_name

CREATING: Final = "creating"
READY: Final = "ready"
DELETING: Final = "deleting"
_ARCHIVE_BYTES_MAX: Final = 200  # of a name, besides the uid
_FOLDERS: Final = ("volumes", "snapshots", "paths", "retired", "archive")


@dataclass(frozen=True)
class VolumeRecord:
    """A volume that CreateVolume has made, or is about to make."""

    volume_id: str
    uid: str  # of this one; one that is made later under the same id has another
    path: str
    capacity: int
    on_delete: str
    source: str  # `snapshot:ID`, `volume:ID` or empty
    mount_options: str
    state: str


@dataclass(frozen=True)
class SnapshotRecord:
    """A snapshot that CreateSnapshot has taken, or is about to take."""

    snapshot_id: str
    source_id: str
    source_uid: str
    path: str  # of the source, while that lives
    created_ns: int
    size: int
    state: str


class Catalog:
    """The records below the private mount at `root`."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._own = os.path.join(root, CATALOG)

    def prepare(self) -> None:
        """Make the directories; remove what is left of writers that were killed."""
        os.makedirs(self._own, 0o700, exist_ok=True)
        for folder in _FOLDERS:
            place = os.path.join(self._own, folder)
            os.makedirs(place, 0o700, exist_ok=True)
            remove_leftovers(place)

    def volume(self, volume_id: str) -> VolumeRecord | None:
        """Raises: CsiError where the record is damaged."""
        found = self._read("volumes", volume_id)
        return None if found is None else VolumeRecord(**found)

    def write_volume(self, record: VolumeRecord) -> None:
        """Durable when it returns."""
        write_record(self._place("volumes", record.volume_id), asdict(record))

    def snapshot(self, snapshot_id: str) -> SnapshotRecord | None:
        """Raises: CsiError where the record is damaged."""
        found = self._read("snapshots", snapshot_id)
        return None if found is None else SnapshotRecord(**found)

    def write_snapshot(self, record: SnapshotRecord) -> None:
        """Durable when it returns."""
        write_record(self._place("snapshots", record.snapshot_id), asdict(record))

    def remove_snapshot(self, snapshot_id: str) -> None:
        """It may be gone already."""
        remove_record(self._place("snapshots", snapshot_id))

    def volumes(self) -> list[VolumeRecord]:
        """All that are made."""
        return [VolumeRecord(**found) for found in self._ready("volumes")]

    def snapshots(self) -> list[SnapshotRecord]:
        """All that are taken."""
        return [SnapshotRecord(**found) for found in self._ready("snapshots")]

    def free_bytes(self) -> int:
        """What the volume has room for."""
        found = os.statvfs(self._require_mounted())
        return found.f_bavail * found.f_frsize

    def _ready(self, folder: str) -> list[dict[str, Any]]:
        place = os.path.join(self._require_mounted(), CATALOG, folder)
        names = [name for name in os.listdir(place) if not name.startswith(".")]
        found = [read_record(os.path.join(place, name)) for name in names]
        return [each for each in found if each is not None and each["state"] == READY]

    def claim(self, record: VolumeRecord) -> None:
        """Have the path for this volume alone. Raises: CsiError where another has it.

        A claim whose volume has no record was left by a call that was cut off.
        """
        parts = record.path.split("/")
        for count in range(1, len(parts)):
            self._refuse_other("/".join(parts[:count]), record.volume_id)
        content = {"volume_id": record.volume_id}
        while not create_record(self._place("paths", record.path), content):
            if not self._refuse_other(record.path, record.volume_id):
                return
            remove_record(self._place("paths", record.path))

    def _refuse_other(self, path: str, volume_id: str) -> bool:
        """Whether a claim is stale. Raises: CsiError where it holds for another volume."""
        claim = self._read("paths", path)
        owner = None if claim is None else claim["volume_id"]
        if owner is None or owner == volume_id:
            return False
        found = self.volume(owner)
        if found is None or found.path != path:
            return True
        raise CsiError(
            Code.ALREADY_EXISTS, f"volume {owner} has the path {path}: change the pathPattern"
        )

    def forget(self, record: VolumeRecord) -> None:
        """Remove a volume's claim, and then its record."""
        claim = self._read("paths", record.path)
        if claim is not None and claim["volume_id"] == record.volume_id:
            remove_record(self._place("paths", record.path))
        remove_record(self._place("volumes", record.volume_id))

    def directory(self, path: str) -> str:
        """The directory of a volume, on the private mount.

        Raises: CsiError where a symbolic link leads elsewhere. Pods of another volume may have made
        it, where that is the directory above.
        """
        place = self._require_mounted()
        for part in path.split("/"):
            place = os.path.join(place, part)
            if os.path.islink(place):
                raise CsiError(
                    Code.FAILED_PRECONDITION, f"{path}: {part} is a symbolic link: remove it"
                )
        return place

    def retired(self, uid: str) -> str:
        """Where the directory of a deleted volume is."""
        return os.path.join(self._own, "retired", uid)

    def archived(self, path: str, uid: str) -> str:
        """Where the directory of an archived volume is."""
        name = os.fsdecode(os.fsencode(path.replace("/", "_"))[:_ARCHIVE_BYTES_MAX])
        return os.path.join(self._own, "archive", f"{name}-{uid}")

    def snapshot_source(self, record: SnapshotRecord) -> str:
        """The directory that has the snapshot: what was the volume may have moved."""
        moved = self.retired(record.source_uid), self.archived(record.path, record.source_uid)
        here = [place for place in moved if os.path.isdir(place)]
        return here[0] if here else self.directory(record.path)

    def _place(self, folder: str, key: str) -> str:
        return os.path.join(self._require_mounted(), CATALOG, folder, file_name(key))

    def _require_mounted(self) -> str:
        """The root. Raises: CsiError where it is a bare directory, which knows no volume."""
        if mounts.find(self.root) is None:
            raise CsiError(Code.UNAVAILABLE, "the volume is not mounted any more, try again")
        return self.root

    def _read(self, folder: str, key: str) -> dict[str, Any] | None:
        return read_record(self._place(folder, key))

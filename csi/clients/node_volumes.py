"""What this node knows of its staged volumes: a directory and a record for each.

The record holds what is needed to mount the volume anew, secrets included, so it is for root alone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from csi.clients.backend import Backend
from csi.clients.client import VolumeClient
from csi.clients.program import Program
from csi.clients.starters import Starter
from csi.errors import CsiError
from csi.host.records import damaged_record, read_record, remove_record, write_record
from csi.names import file_name

_RECORD = "record.json"


@dataclass(frozen=True)
class NodeRecord:
    """A volume that is staged here, or about to be. `repr` shows no secret."""

    volume_id: str
    name: str
    words: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    targets: Mapping[str, bool]  # where it is published; whether read-only
    allow_local: bool = False  # whether its stores may be of this host

    def is_of(self, backend: Backend) -> bool:
        """Whether that is the same SliceFS volume; a password in its URL may have changed."""
        found = Backend(self.name, self.environment, "", "", (), self.allow_local)
        return (found.name, found.server) == (backend.name, backend.server)

    @property
    def writes_back(self) -> bool:
        """Whether a dead client has left a journal that has to be published."""
        return any(word.startswith("writeback") for word in self.words)


class NodeVolumes:
    """The volumes below `home`."""

    def __init__(self, home: str, program: Program, starter: Starter) -> None:
        self._home = home
        self._program = program
        self._starter = starter

    def client(self, volume_id: str) -> VolumeClient:
        """The client of a volume, which may not be there."""
        return VolumeClient(self._directory(volume_id), volume_id, self._program, self._starter)

    def read(self, volume_id: str) -> NodeRecord | None:
        """Raises: CsiError where the record is damaged."""
        return _read(os.path.join(self._directory(volume_id), _RECORD))

    def write(self, record: NodeRecord) -> None:
        """Durable when it returns."""
        directory = self._directory(record.volume_id)
        os.makedirs(directory, 0o700, exist_ok=True)
        write_record(os.path.join(directory, _RECORD), asdict(record))

    def remove(self, volume_id: str) -> None:
        """Forget a volume that is not mounted any more."""
        directory = self._directory(volume_id)
        self.client(volume_id).remove()
        remove_record(os.path.join(directory, _RECORD))
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(directory)

    def all(self) -> tuple[list[NodeRecord], list[str]]:
        """Every volume that has a record, and what is wrong with records that are damaged."""
        names = os.listdir(self._home) if os.path.isdir(self._home) else []
        records: list[NodeRecord] = []
        damaged: list[str] = []
        for name in sorted(names):
            try:
                found = _read(os.path.join(self._home, name, _RECORD))
            except CsiError as error:
                damaged.append(error.text)
            else:
                records += [] if found is None else [found]
        return records, damaged

    def _directory(self, volume_id: str) -> str:
        return os.path.join(self._home, file_name(volume_id))


def _read(path: str) -> NodeRecord | None:
    """Raises: CsiError where the record is damaged, or of another version."""
    found = read_record(path)
    try:
        return None if found is None else NodeRecord(**{**found, "words": tuple(found["words"])})
    except (TypeError, KeyError) as error:
        raise damaged_record(path) from error

"""What this node knows of its staged volumes: a directory and a record for each.

The record holds what is needed to mount the volume anew, secrets included, so it is for root alone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from csi.clients.client import Client
from csi.clients.program import Program
from csi.host.records import read_record, remove_record, write_record
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

    @property
    def writes_back(self) -> bool:
        """Whether a dead client has left a journal that has to be published."""
        return any(word.startswith("writeback") for word in self.words)


class NodeVolumes:
    """The volumes below `home`."""

    def __init__(self, home: str, program: Program) -> None:
        self._home = home
        self._program = program

    def client(self, volume_id: str) -> Client:
        """The client of a volume, which may not be there."""
        return Client(self._directory(volume_id), self._program)

    def read(self, volume_id: str) -> NodeRecord | None:
        """Raises: CsiError where the record is damaged."""
        found = read_record(os.path.join(self._directory(volume_id), _RECORD))
        return None if found is None else NodeRecord(**{**found, "words": tuple(found["words"])})

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

    def all(self) -> list[NodeRecord]:
        """Every volume that has a record."""
        names = os.listdir(self._home) if os.path.isdir(self._home) else []
        paths = [os.path.join(self._home, name, _RECORD) for name in sorted(names)]
        found = [record for path in paths if (record := read_record(path)) is not None]
        return [NodeRecord(**{**record, "words": tuple(record["words"])}) for record in found]

    def _directory(self, volume_id: str) -> str:
        return os.path.join(self._home, file_name(volume_id))

"""The private mounts of the controller: one for each SliceFS volume that it works on."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass

from csi.clients.backend import Backend
from csi.clients.client import VolumeClient
from csi.clients.mounting import ensure_mounted
from csi.clients.program import Program
from csi.clients.starters import HostStarter
from csi.volumes.catalog import Catalog


@dataclass(frozen=True)
class ControllerVolume:
    """A SliceFS volume that is mounted for the controller."""

    backend: Backend
    catalog: Catalog


class ControllerVolumes:
    """Mounts below `home`, made when needed and kept. Threading: the event loop's."""

    def __init__(self, home: str, program: Program) -> None:
        self._home = home
        self._program = program
        self._starter = HostStarter(program)
        self._locks: dict[str, asyncio.Lock] = {}
        self._checked: set[tuple[str, str]] = set()

    async def open(self, backend: Backend) -> ControllerVolume:
        """The store, mounted. Raises: CsiError."""
        home = os.path.join(self._home, backend.key)
        client = self._client(home, backend.name)
        async with self._locks.setdefault(backend.key, asyncio.Lock()):
            words = ("--cache-dir", "none", "--buffer-size", "32MiB", "--backup-meta", "0")
            await ensure_mounted(client, self._program, backend, words)
            catalog = Catalog(client.mountpoint)
            if (backend.key, backend.name) not in self._checked:
                await client.require_settings(backend.name, backend.allow_local)
                await asyncio.to_thread(catalog.prepare)
                self._checked.add((backend.key, backend.name))
            return ControllerVolume(backend, catalog)

    def mounted(self) -> list[Catalog]:
        """The catalogs of all stores that are mounted now."""
        names = os.listdir(self._home) if os.path.isdir(self._home) else []
        clients = [self._client(os.path.join(self._home, name), name) for name in sorted(names)]
        return [Catalog(client.mountpoint) for client in clients if client.is_alive()]

    def _client(self, home: str, title: str) -> VolumeClient:
        return VolumeClient(home, title, self._program, self._starter)

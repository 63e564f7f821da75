"""Stage, publish and back: each step may be repeated, and the record goes before the deed.

Calls for one volume do not overlap: the service holds its lock.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from csi.clients.backend import Backend
from csi.clients.mounting import ensure_mounted, for_pods, survives
from csi.clients.node_volumes import NodeRecord, NodeVolumes
from csi.clients.program import Program
from csi.errors import Code, CsiError
from csi.host import mounts

log = logging.getLogger(__name__)


class NodeStaging:
    """The steps of the node service. `heals` counts clients that were started again."""

    def __init__(self, volumes: NodeVolumes, program: Program) -> None:
        self.heals = 0
        self._volumes = volumes
        self._program = program

    async def stage(self, volume_id: str, backend: Backend, words: tuple[str, ...]) -> None:
        """Raises: CsiError."""
        client = self._volumes.client(volume_id)
        record = self._volumes.read(volume_id)
        same = record is None or (record.words == words and record.is_of(backend))
        if not same and client.is_alive():
            raise CsiError(
                Code.ALREADY_EXISTS,
                f"volume {volume_id} is staged with other options or another store: unstage it",
            )
        targets = {} if record is None else record.targets
        secret = dict(backend.environment)
        new = NodeRecord(volume_id, backend.name, words, secret, targets, backend.allow_local)
        if new != record:
            self._volumes.write(new)
        try:
            started = await ensure_mounted(client, self._program, backend, for_pods(words))
            if not started:  # by a call that may have been cut off before it looked
                await client.require_settings(backend.name, backend.allow_local)
        except CsiError as error:
            if not targets and error.code is not Code.UNAVAILABLE:  # kubelet will not unstage
                await client.stop()
                self._volumes.remove(volume_id)
            raise
        if started and targets:
            self._bind_all(new)

    async def unstage(self, volume_id: str) -> None:
        """Raises: CsiError while data are not stored, or a pod has the volume."""
        client = self._volumes.client(volume_id)
        record = self._volumes.read(volume_id)
        if record is not None and record.writes_back and not client.is_alive():
            await self.heal(volume_id)  # so that the journal is published
        device = client.device()
        if device is not None:
            used = [path for path in mounts.places(device) if path != client.mountpoint]
            if used:
                raise CsiError(
                    Code.FAILED_PRECONDITION, f"volume {volume_id} is published at {used[0]}"
                )
        await client.stop()
        self._volumes.remove(volume_id)

    async def publish(self, volume_id: str, target: str, readonly: bool, single: bool) -> None:
        """Raises: CsiError."""
        record = self._volumes.read(volume_id)
        if record is None:
            raise CsiError(Code.FAILED_PRECONDITION, f"volume {volume_id} is not staged here")
        others = (other for other in record.targets if other != target)
        if single and any(mounts.find(other) is not None for other in others):
            raise CsiError(
                Code.FAILED_PRECONDITION,
                f"volume {volume_id} is for one pod, and another pod has it",
            )
        await self.heal(volume_id)
        if record.targets.get(target, readonly) != readonly:
            raise CsiError(
                Code.ALREADY_EXISTS, f"{target} is published already, and readonly differs"
            )
        device = self._device(volume_id)
        found = mounts.find(target)
        if found is not None and found.device != device:
            raise CsiError(Code.ALREADY_EXISTS, f"something else is mounted at {target}")
        mounts.make_target(target)
        if target not in record.targets:
            self._volumes.write(replace(record, targets={**record.targets, target: readonly}))
        self._bind(volume_id, device, target, readonly)

    async def unpublish(self, volume_id: str, target: str) -> None:
        """Raises: CsiError where it is in use."""
        device = self._volumes.client(volume_id).device()
        mounts.unmount(target, busy_device=device or "")
        mounts.remove_target(target)
        record = self._volumes.read(volume_id)
        if record is not None and target in record.targets:
            rest = {path: mode for path, mode in record.targets.items() if path != target}
            self._volumes.write(replace(record, targets=rest))

    async def heal(self, volume_id: str) -> bool:
        """Mount anew if the client has died, and bind it where it was; whether it is staged.

        Raises: CsiError.
        """
        record = self._volumes.read(volume_id)
        if record is None:
            return False
        client = self._volumes.client(volume_id)
        words = for_pods(record.words)
        if await client.ensure(words, record.environment, record.name, record.allow_local):
            self.heals += 1
            log.warning("volume %r: its client had died and was started again", volume_id)
        self._bind_all(record)
        return True

    async def renew(self, volume_id: str) -> bool:
        """Have the client move to a pod of the present template, if it has a supervisor.

        Whether it is still under way. Raises: CsiError where it could not move.
        """
        record = self._volumes.read(volume_id)
        if record is None or not survives(for_pods(record.words)):
            return False
        return await self._volumes.client(volume_id).renew()

    def _bind_all(self, record: NodeRecord) -> None:
        """Bind the mount where a dead client's is still; targets that are gone stay gone."""
        device = self._device(record.volume_id)
        for target, readonly in record.targets.items():
            if mounts.find(target) is not None:
                self._bind(record.volume_id, device, target, readonly)

    def _bind(self, volume_id: str, device: str, target: str, readonly: bool) -> None:
        """The mount of this volume on top of a target, once, and as it is wanted."""
        found = mounts.find(target)
        if found is None or found.device != device:
            mounts.bind(self._volumes.client(volume_id).mountpoint, target, readonly)
        elif readonly and not found.readonly:
            mounts.remount_readonly(target)

    def _device(self, volume_id: str) -> str:
        device = self._volumes.client(volume_id).device()
        if device is None:
            raise CsiError(Code.UNAVAILABLE, f"volume {volume_id} is not mounted, try again")
        return device

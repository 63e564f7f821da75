"""How a client is started: a process of this host, or a pod of the cluster.

Either way the client holds the flock(2) of its `VolumeClient` from before it mounts until it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Final, Protocol

from csi.clients.program import Program
from csi.cluster.pods import MountPods
from csi.host.commands import CommandResult
from csi.host.records import read_record, remove_record, write_record

POD_PROGRAM: Final = "slicefs-csi-client"
_LAUNCH: Final = "launch.json"


@dataclass(frozen=True)
class Launch:
    """What a client is started with. `repr` shows no secret."""

    home: str  # has `mnt`, `log` and `lock`
    title: str  # what users call it
    words: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)

    @property
    def mountpoint(self) -> str:
        """Where it mounts."""
        return os.path.join(self.home, "mnt")

    @property
    def log(self) -> str:
        """What it logs."""
        return os.path.join(self.home, "log")

    @property
    def lock(self) -> str:
        """The file that it has locked while it lives."""
        return os.path.join(self.home, "lock")

    @classmethod
    def read(cls, home: str) -> Launch | None:
        """What was written for the program in a pod; None where it is not wanted any more."""
        found = read_record(os.path.join(home, _LAUNCH))
        return None if found is None else cls(**{**found, "words": tuple(found["words"])})

    def write(self) -> None:
        """For root alone, and durable when it returns."""
        write_record(os.path.join(self.home, _LAUNCH), asdict(self))

    @staticmethod
    def remove(home: str) -> None:
        """It may be gone already."""
        remove_record(os.path.join(home, _LAUNCH))


class Starter(Protocol):
    """Starts clients, and clears up behind them."""

    async def start(self, launch: Launch, lock: int, is_up: Callable[[], bool]) -> CommandResult:
        """Mount; the client takes over the lock, which the descriptor `lock` holds.

        Raises: CsiError.
        """

    async def renew(self, home: str, title: str) -> bool:
        """Have a client that runs move to where one would be started now, where that has changed.

        Whether it is still under way. Raises: CsiError where it could not move.
        """

    async def forget(self, home: str, title: str) -> None:
        """The client has ended, and none is wanted. Raises: CsiError."""


class HostStarter:
    """Clients are processes of this host, or of the cgroup that `Program` knows."""

    def __init__(self, program: Program) -> None:
        self._program = program

    async def start(self, launch: Launch, lock: int, is_up: Callable[[], bool]) -> CommandResult:
        del is_up  # it is when the command has ended
        return await self._program.mount(
            launch.mountpoint, launch.log, launch.words, launch.environment, lock
        )

    async def renew(self, home: str, title: str) -> bool:
        del home, title
        return False  # `slicefs upgrade` is for that

    async def forget(self, home: str, title: str) -> None:
        del home, title


class PodStarter:
    """Clients are pods, so they outlive the driver's container."""

    def __init__(self, pods: MountPods) -> None:
        self._pods = pods

    async def start(self, launch: Launch, lock: int, is_up: Callable[[], bool]) -> CommandResult:
        launch.write()
        fcntl.flock(lock, fcntl.LOCK_UN)  # the program in the pod takes it
        return await self._pods.start(launch.title, (POD_PROGRAM, launch.home), is_up)

    async def renew(self, home: str, title: str) -> bool:
        return await self._pods.renew(title, (POD_PROGRAM, home))

    async def forget(self, home: str, title: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            Launch.remove(home)
        await self._pods.stop(title)


_STARTERS: tuple[type[Starter], ...] = (HostStarter, PodStarter)

"""A client: one `slicefs mount` process with a directory of its own, which outlives the driver.

Where it runs is up to its `Starter`. A client holds an flock(2) on `lock` from before it mounts
until it has died, so the lock says whether it lives, whatever became of the driver between any two
steps: a new driver starts no second one, and mistakes no other process for it. A client that has a
supervisor shares the lock with that, and is replaced while the lock stays held. `mnt` is the mount,
`log` what it logs.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from csi.clients.backend import NO_LOCAL_VARIABLE, refuse_local
from csi.clients.program import Program, means_local_store, means_no_volume
from csi.clients.starters import Launch, Starter
from csi.errors import Code, CsiError, invalid
from csi.host import mounts
from csi.host.commands import CommandResult, run

_WAIT_S: Final = 60.0  # for a client that is starting or ending
_LOOK_S: Final = 0.02
_PROBE_S: Final = 10.0  # then a client is called slow; it may wait for its stores
_CONFIG_BYTES_MAX: Final = 1 << 16
_DEAD: Final = ("Transport endpoint is not connected", "Software caused connection abort")


class VolumeNotFormatted(CsiError):
    """The volume is not formatted yet."""


class VolumeUsage(NamedTuple):
    """What statfs(2) says of a mount."""

    total: int
    available: int
    used: int
    inodes: int
    inodes_free: int


class VolumeClient:
    """The client in the directory `home`. Calls for one client do not overlap: a lock is held."""

    def __init__(self, home: str, title: str, program: Program, starter: Starter) -> None:
        """`title`: what users call it."""
        self.home = home
        self._title = title
        self.mountpoint = os.path.join(home, "mnt")
        self._program = program
        self._starter = starter
        self._lock = os.path.join(home, "lock")
        self._log = os.path.join(home, "log")

    def is_alive(self) -> bool:
        """Whether it is mounted and its process lives. It asks the client nothing."""
        return mounts.find(self.mountpoint) is not None and self._is_locked()

    def device(self) -> str | None:
        """The device of the mount, as `mounts` names it."""
        found = mounts.find(self.mountpoint)
        return None if found is None else found.device

    async def ensure(
        self, words: Sequence[str], env: Mapping[str, str], name: str, allow_local: bool
    ) -> bool:
        """Mount the volume where it is not mounted; the result says whether a client was started.

        A stale mount is detached first. The volume must have this `name`; with `allow_local` its
        data may be on this host. Raises: CsiError, VolumeNotFormatted.
        """
        os.makedirs(self.home, 0o700, exist_ok=True)
        lock = await self._take_lock()
        if lock is None:
            return False
        try:
            mounts.unmount(self.mountpoint, lazy=True)
            os.makedirs(self.mountpoint, 0o700, exist_ok=True)
            strict = {} if allow_local else {NO_LOCAL_VARIABLE: "yes"}
            launch = Launch(self.home, self._title, tuple(words), {**env, **strict})
            done = await self._starter.start(launch, lock, self.is_alive)
        finally:
            os.close(lock)
        _require_mounted(done)
        try:
            await self.require_settings(name, allow_local)
        except CsiError:
            await self._program.umount(self.mountpoint)
            await self._starter.forget(self.home, self._title)
            raise
        return True

    async def stop(self) -> None:
        """Store everything, unmount and wait for the end; the volume stays usable until then.

        Raises: CsiError, and then not all is stored, or it is in use.
        """
        if self.is_alive():
            done = await self._program.flush(self.mountpoint)
            if done.code != 0 and self.is_alive():
                raise CsiError(
                    Code.UNAVAILABLE, f"data are still being stored, try again: {done.err}"
                )
        if self.is_alive():
            done = await self._program.umount(self.mountpoint)
            if done.code != 0:
                raise CsiError(Code.UNAVAILABLE, f"not unmounted cleanly: {done.err}")
        lock = await self._take_lock()
        if lock is None:
            raise CsiError(Code.UNAVAILABLE, "the client is still mounted, try again")
        try:
            mounts.unmount(self.mountpoint, lazy=True)
            await self._starter.forget(self.home, self._title)
        finally:
            os.close(lock)

    async def renew(self) -> bool:
        """Have it move to a pod of the present template; whether it is still under way.

        Raises: CsiError where it could not move: it goes on as it is.
        """
        return self.is_alive() and await self._starter.renew(self.home, self._title)

    def remove(self) -> None:
        """Remove what is left in `home`, but for records. Raises: CsiError."""
        mounts.remove_target(self.mountpoint)
        for path in (self._log, self._lock):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    async def usage(self, path: str) -> VolumeUsage | None:
        """What the mount says of itself at `path`; None where it is dead.

        A command asks, which can be killed where the client does not answer. Raises: CsiError.
        """
        done = await run(["stat", "-f", "-c", "%S %b %a %f %c %d", path], {}, _PROBE_S)
        if done.code is None:
            raise CsiError(Code.UNAVAILABLE, f"the client does not answer: {done.err}")
        if done.code:
            if any(text in done.err for text in _DEAD):
                return None
            raise CsiError(Code.INTERNAL, f"can't look at the mount: {done.err}")
        unit, blocks, available, free, inodes, inodes_free = map(int, done.out.split())
        used = (blocks - free) * unit
        return VolumeUsage(blocks * unit, available * unit, used, inodes, inodes_free)

    # --- the lock --------------------------------------------------------------------------------

    async def _take_lock(self) -> int | None:
        """A descriptor that holds the lock; None where a client holds it and is mounted.

        Raises: CsiError where a client holds it for long and is not mounted.
        """
        loop = asyncio.get_running_loop()
        give_up = loop.time() + _WAIT_S
        while True:
            fd = self._try_lock()
            if fd is not None:
                return fd
            if mounts.find(self.mountpoint) is not None and not await self._is_aborted():
                return None
            if loop.time() > give_up:
                raise CsiError(Code.UNAVAILABLE, "a client is starting or ending, try again")
            await asyncio.sleep(_LOOK_S)

    async def _is_aborted(self) -> bool:
        """Whether the kernel has cut the client off; it ends then."""
        try:
            return await self.usage(self.mountpoint) is None
        except CsiError:
            return False  # slow is not dead

    def _is_locked(self) -> bool:
        fd = self._try_lock()
        if fd is not None:
            os.close(fd)
        return fd is None

    def _try_lock(self) -> int | None:
        try:
            fd = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # there is no `home`, so there is no client
            return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            if error.errno != errno.EWOULDBLOCK:
                raise
            return None
        return fd

    # --- the settings ----------------------------------------------------------------------------

    async def require_settings(self, name: str, allow_local: bool) -> None:
        """Raises: CsiError where the volume has another name, or data where it may not."""
        path = os.path.join(self.mountpoint, ".config")
        done = await run(["head", "-c", str(_CONFIG_BYTES_MAX), path], {}, _PROBE_S)
        try:
            volume: Any = json.loads(done.out)["volume"]
            found, storage = volume["name"], volume["storage"]
        except (ValueError, KeyError, TypeError) as error:
            raise CsiError(Code.UNAVAILABLE, "the client does not say what it mounts") from error
        if found != name:
            raise invalid(
                f"the volume in metaurl is called {found!r}, the secret names {name!r}: correct it"
            )
        if not allow_local:
            refuse_local("the storage of the volume", storage)


def _require_mounted(done: CommandResult) -> None:
    if done.code == 0:
        return
    if done.code is None:
        raise CsiError(Code.UNAVAILABLE, f"the volume can't be mounted yet: {done.err}")
    if means_no_volume(done):
        raise VolumeNotFormatted(
            Code.FAILED_PRECONDITION,
            f"the volume can't be mounted: {done.err}; or put storage and bucket into the secret, "
            "and the driver formats it",
        )
    if means_local_store(done):
        raise invalid(f"{done.err}, or start slicefs-csi with --allow-local-stores")
    raise CsiError(Code.INTERNAL, f"the volume can't be mounted: {done.err}")

"""A client: one `slicefs mount` process with a directory of its own, which outlives the driver.

A client holds an flock(2) on `lock` from before it starts until it has died, so the lock says
whether it lives, whatever became of the driver between any two steps: a new driver neither starts
a second one nor takes a process that has its pid for it. `mnt` is the mount, `log` what it logs.
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

from csi.clients.program import Program, means_no_volume
from csi.errors import Code, CsiError, invalid
from csi.host import mounts
from csi.host.commands import Done, run

_WAIT_S: Final = 60.0  # for a client that is starting or ending
_LOOK_S: Final = 0.02
_PROBE_S: Final = 10.0  # then a client is called slow; it may wait for its stores
_CONFIG_BYTES_MAX: Final = 1 << 16
_DEAD: Final = ("Transport endpoint is not connected", "Software caused connection abort")


class NoVolume(CsiError):
    """The volume is not formatted yet."""


class Usage(NamedTuple):
    """What statfs(2) says of a mount."""

    total: int
    available: int
    used: int
    inodes: int
    inodes_free: int


class Client:
    """The client in the directory `home`. Calls for one client do not overlap: a lock is held."""

    def __init__(self, home: str, program: Program) -> None:
        self.home = home
        self.mountpoint = os.path.join(home, "mnt")
        self._program = program
        self._lock = os.path.join(home, "lock")
        self._log = os.path.join(home, "log")

    def is_alive(self) -> bool:
        """Whether it is mounted and its process lives. It asks the client nothing."""
        return mounts.find(self.mountpoint) is not None and self._is_locked()

    def device(self) -> str | None:
        """The device of the mount, as `mounts` names it."""
        found = mounts.find(self.mountpoint)
        return None if found is None else found.device

    async def ensure(self, words: Sequence[str], env: Mapping[str, str], name: str) -> bool:
        """Mount, unless that is so; whether a client was started.

        A stale mount is detached first. `name`: the volume must be called so.
        Raises: CsiError, NoVolume.
        """
        os.makedirs(self.home, 0o700, exist_ok=True)
        lock = await self._take_lock()
        if lock is None:
            return False
        try:
            mounts.unmount(self.mountpoint, lazy=True)
            os.makedirs(self.mountpoint, 0o700, exist_ok=True)
            done = await self._program.mount(self.mountpoint, self._log, words, env, lock)
        finally:
            os.close(lock)
        _require_mounted(done)
        try:
            await self.require_name(name)
        except CsiError:
            await self._program.umount(self.mountpoint)
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
        os.close(lock)
        mounts.unmount(self.mountpoint, lazy=True)

    def remove(self) -> None:
        """Remove what is left in `home`, but for records. Raises: CsiError."""
        mounts.remove_target(self.mountpoint)
        for path in (self._log, self._lock):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    async def usage(self, path: str) -> Usage | None:
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
        return Usage(blocks * unit, available * unit, used, inodes, inodes_free)

    # --- the lock --------------------------------------------------------------------------------

    async def _take_lock(self) -> int | None:
        """A descriptor that holds the lock; None where a client has it and is mounted.

        Raises: CsiError where a client has it and is not mounted for long.
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

    # --- the name --------------------------------------------------------------------------------

    async def require_name(self, name: str) -> None:
        """Raises: CsiError where the volume has another."""
        path = os.path.join(self.mountpoint, ".config")
        done = await run(["head", "-c", str(_CONFIG_BYTES_MAX), path], {}, _PROBE_S)
        try:
            found: Any = json.loads(done.out)["volume"]["name"]
        except (ValueError, KeyError, TypeError) as error:
            raise CsiError(Code.UNAVAILABLE, "the client does not say what it mounts") from error
        if found != name:
            raise invalid(
                f"the volume in metaurl is called {found!r}, the secret names {name!r}: correct it"
            )


def _require_mounted(done: Done) -> None:
    if done.code == 0:
        return
    if done.code is None:
        raise CsiError(Code.UNAVAILABLE, f"the volume can't be mounted yet: {done.err}")
    if means_no_volume(done):
        raise NoVolume(Code.FAILED_PRECONDITION, f"the volume can't be mounted: {done.err}")
    raise CsiError(Code.INTERNAL, f"the volume can't be mounted: {done.err}")

"""The `slicefs` commands that the driver uses, each with its longest time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from csi.clients.backend import META, NO_LOCAL_VARIABLE, Backend
from csi.errors import Code, CsiError
from csi.host.commands import CommandResult, run

MOUNT_S: Final = 60.0  # a metadata store that is away is waited for 30 s by the mount itself
COMMAND_S: Final = 90.0
FLUSH_S: Final = 20  # then NodeUnstage says that it has to be tried again
UMOUNT_S: Final = 100.0  # `slicefs umount` gives up after 60 s in which nothing was stored
TREE_S: Final = 3600.0  # a clone, a snapshot or a removal of a large tree
PLAIN: Final = ("--no-supervisor",)  # unless the words behind it ask for a supervisor
_NO_VOLUME: Final = ("there is no volume in", "there is no metadata file")


class Program:
    """`slicefs`, as the driver calls it."""

    def __init__(self, slicefs: str) -> None:
        self._slicefs = slicefs

    async def mount(
        self,
        mountpoint: str,
        log: str,
        words: Sequence[str],
        environment: Mapping[str, str],
        lock: int,
    ) -> CommandResult:
        """Mount in the background; the client keeps the descriptor `lock` while it lives."""
        command = (self._slicefs, "mount", "-d", "--log", log, *PLAIN, *words, META, mountpoint)
        return await run(command, environment, MOUNT_S, (lock,))

    async def umount(self, mountpoint: str) -> CommandResult:
        """Unmount; exit code 3: a journal of this host holds data that are not stored."""
        return await run([self._slicefs, "umount", mountpoint], {}, UMOUNT_S)

    async def flush(self, mountpoint: str) -> CommandResult:
        """Store what was written; exit code 1: not all is stored yet."""
        words = ("flush", "--wait", "--timeout", str(FLUSH_S), mountpoint)
        return await run([self._slicefs, *words], {}, FLUSH_S * 2)

    async def format(self, backend: Backend) -> CommandResult:
        """Format the volume; one that exists stays as it is, and is an error."""
        place = ("--storage", backend.storage, "--bucket", backend.bucket)
        words = ("format", *place, *backend.format_words, META, backend.name)
        return await run([self._slicefs, *words], backend.environment, COMMAND_S)

    async def set_quota(self, backend: Backend, path: str, capacity_bytes: int) -> None:
        """Limit a directory of the volume; 0 takes the limit away. Raises: CsiError."""
        size = ("--capacity", f"{capacity_bytes}B")
        words = ("quota", "set", META, "--path", f"/{path}", *size, "--json")
        done = await run([self._slicefs, *words], backend.environment, TREE_S)
        require(done, f"can't limit {path}")

    async def tree(self, *words: str) -> CommandResult:
        """`clone` or `snapshot`, on paths of a mount."""
        return await run([self._slicefs, *words], {}, TREE_S)


def means_no_volume(done: CommandResult) -> bool:
    """Whether a mount failed because the volume was never formatted."""
    return any(text in done.err for text in _NO_VOLUME)


def means_local_store(done: CommandResult) -> bool:
    """Whether a mount failed because the volume's data would be on this host."""
    return NO_LOCAL_VARIABLE in done.err


def require(done: CommandResult, what: str) -> str:
    """What a command printed. Raises: CsiError with its reason where it failed."""
    if done.code is None:
        raise CsiError(Code.UNAVAILABLE, f"{what}: {done.err}")
    if done.code:
        raise CsiError(Code.INTERNAL, f"{what}: {done.err or f'exit code {done.code}'}")
    return done.out

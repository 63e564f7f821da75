"""Copies of blocks in memory that the processes of one user have in common on this host.

    /dev/shm/slicefs-UID/users       locked by each process that uses the directory
    /dev/shm/slicefs-UID/VOLUME/     a cache directory, as on a disk

The workers of a DataLoader are processes: without this each fetches every block of small files for
itself. A block that one of them fetches is a hit for the others, and of those that miss it at the
same time one fetches (`fsdata/disk_cache/directory/fetch_claims`).

The last process to leave removes the directory. A process that is killed loses its lock, so the
directory stays only where the last one was killed, and until the next one ends.

Threading: any thread.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from contextlib import suppress
from typing import Final

from fsclient.volume.cache_options import SIZE_BYTES_MIN
from fsdata.resources.private_paths import make_private, open_folder, require_private
from fsmeta.errors import ConfigError
from slicefs.client.parallel import RUNTIME

MEMORY: Final = "/dev/shm"
MEMORY_SHARE: Final = 8  # no more than an eighth of the memory
USERS: Final = "users"
TRIES: Final = 1000  # to use a directory that others come to and leave all the time
FREE_RATIO: Final = 0.5  # of the file system: torch passes tensors there
SHM_MIN: Final = 1 << 30  # a container has 64 MiB by default, which it needs itself
_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_LIMITS: Final = (  # of a container, cgroups(7); a process elsewhere in the tree has the machine's
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
)


def directory() -> str:
    """Where the copies are."""
    return f"{MEMORY}/slicefs-{os.geteuid()}"


def capacity_bytes() -> int:
    """What they may take; 0 where that is too little to be of use."""
    try:
        found = os.statvfs(MEMORY)
    except OSError:
        return 0
    size = found.f_blocks * found.f_frsize
    most = min(_memory_bytes() // MEMORY_SHARE, int(size * (1 - FREE_RATIO)))
    return most if size >= SHM_MIN and most >= SIZE_BYTES_MIN else 0


def _memory_bytes() -> int:
    """The machine's memory, or the limit of the container that this process is in."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in _LIMITS:
        with suppress(OSError, ValueError), open(path, encoding="ascii") as file:
            found = min(found, int(file.read()))  # "max" where there is none
    return found


class SharedCopies:
    """The use of the directory by this process."""

    def __init__(self) -> None:
        self._users = -1  # a descriptor of the file that its users lock
        self._lock = RUNTIME.lock()

    @property
    def joined(self) -> bool:
        """Whether this process uses the directory."""
        return self._users >= 0

    def join(self) -> bool:
        """Use the directory, until `leave`; whether it can be used."""
        with self._lock:
            if self._users < 0 and capacity_bytes():
                with suppress(OSError, ConfigError):
                    self._users = _joined(directory())
            return self._users >= 0

    def leave(self) -> None:
        """End the use. The last one removes the directory."""
        with self._lock:
            if self._users < 0:
                return
            with suppress(OSError):  # others use it: the last of them will remove it
                fcntl.flock(self._users, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(directory(), self._users)
            os.close(self._users)
            self._users = -1

    def forget(self) -> None:
        """In a forked child: the descriptor is the parent's, too, and so may be the lock."""
        self._lock = RUNTIME.lock()
        if self._users >= 0:
            os.close(self._users)
            self._users = -1


def _remove(path: str, users: int) -> None:
    """Remove the directory, if it is the one of the locked file `users`: another one may have come
    in its place, or a link. That file goes last, so that no new user finds half of it.
    """
    at = open_folder(path, os.O_NOFOLLOW)
    try:
        if not os.path.samestat(os.fstat(users), os.stat(USERS, dir_fd=at, follow_symlinks=False)):
            return
        with os.scandir(at) as entries:
            found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
        for name, is_folder in found:
            if is_folder:
                shutil.rmtree(name, dir_fd=at)
            elif name != USERS:
                os.unlink(name, dir_fd=at)
        os.unlink(USERS, dir_fd=at)
    finally:
        os.close(at)
    os.rmdir(path)


def _joined(path: str) -> int:
    """A descriptor of the locked file of users. Raises: OSError, ConfigError."""
    for _ in range(TRIES):
        with suppress(FileNotFoundError, FileExistsError):  # its last user is just removing it
            make_private(path)
            require_private(path, "shared copies")
            users = os.open(f"{path}/{USERS}", _FLAGS, 0o600)
            fcntl.flock(users, fcntl.LOCK_SH)
            if _is_same(users, f"{path}/{USERS}"):
                return users
            os.close(users)
    raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)


def _is_same(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False

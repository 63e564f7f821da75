"""One client of a volume in this process: made at first use, left at exit, never shared by a fork.

Called by `Client`. A connection is a whole client as a mount has it (`fsclient/client`), with
a session of its own in the volume. After a fork the child forgets the connections of its parent
without touching them: their sockets, locks and threads are the parent's.

Threading: any method from any thread. `_LIVE` is changed under `_LOCK`, which a child makes anew.
"""

from __future__ import annotations

import atexit
import errno
import os
from collections.abc import Callable
from contextlib import suppress
from math import inf, nan
from typing import Any, Final, NamedTuple

from fsclient.cli.options.key_options import offered
from fsclient.client.client import MountClient as VolumeClient
from fsclient.client.client_options import ClientOptions
from fsclient.client.given_parts import GivenParts
from fsclient.volume.cache_options import NONE, SIZE, CacheOptions, check_cache
from fsclient.volume.metadata_url import naming, open_store, require_sound
from fsclient.volume.object_stores import Pacing
from fsclient.volume.units import parse_size
from fsclient.writeback.writeback import WriteBackOptions
from fsdata.resources.memory_budget import BUFFER_BYTES
from fsmeta.errors import ConfigError, Fenced, LimitExceeded, StoreError, StoreFull
from fsmeta.types import Caller
from slicefs.client.fork_guard import guard_of
from slicefs.client.parallel import RUNTIME
from slicefs.client.shared_copies import FREE_RATIO, SharedCopies, capacity_bytes, directory

SHARED: Final = "memory"  # in place of a cache directory: memory that processes share
COPIES: Final = SharedCopies()
FILE_BYTES: Final = 64 << 20  # of one file that are not stored yet: enough for any link
_ERRNOS: Final = (
    (Fenced, errno.ESTALE),
    (StoreFull, errno.ENOSPC),
    (LimitExceeded, errno.EDQUOT),
)  # as the kernel is told them; any other StoreError is EIO


class Settings(NamedTuple):
    """What makes a connection; all of it can be pickled."""

    url: str  # of the metadata
    path: str  # in the volume, to which relative paths are relative
    caller: Caller
    umask: int
    cache_dir: str = ""  # "": none, or what the user of this connection thinks best; SHARED
    cache_size: str = SIZE
    buffer_bytes: int = BUFFER_BYTES
    file_bytes: int = FILE_BYTES
    staging_dir: str = ""
    heartbeat_s: float = 5.0
    meta_timeout_s: float = 0.0  # 0: as mounts have it
    store_options: tuple[str, ...] = ()
    upload_bytes_s: int = 0
    download_bytes_s: int = 0


class Connection:
    """A client that is running."""

    def __init__(self, settings: Settings) -> None:
        """Join the volume. Raises: ConfigError, OSError EIO."""
        self.pid = os.getpid()
        self.settings = settings
        self._closed = False
        store = open_store(settings.url, RUNTIME)
        self.guard = guard_of(store)
        try:
            require_sound(settings.url, store)
            with naming(settings.url):
                self.client = VolumeClient(
                    store, RUNTIME, _options(settings), GivenParts(offer=offered(None, False))
                )
        except BaseException:
            store.close()
            raise
        self.vfs = self.client.vfs
        self.meta = self.client.meta
        try:
            self.client.start()
        except BaseException:
            self.client.stop()
            raise
        _enter(self)

    @property
    def alive(self) -> bool:
        """Whether it is this process's, and not closed."""
        return not self._closed and self.pid == os.getpid()

    def close(self) -> bool:
        """Store everything and leave; False where something could not be stored."""
        if not self.alive:
            return True
        self._closed = True
        _leave(self)
        stored = self.client.stop()
        return stored and self.client.drained

    def lost(self) -> str:
        """What could not be stored, in one line; known once it is closed."""
        return str(self.client.lost or "some changes wait in the staging directory")


def _options(settings: Settings) -> ClientOptions:
    """The options of the client. Raises: ConfigError."""
    options = ClientOptions(
        buffer_bytes=settings.buffer_bytes,
        file_bytes=settings.file_bytes,
        heartbeat_s=settings.heartbeat_s,
        store_options=settings.store_options,
        pacing=Pacing(
            upload_bytes_s=settings.upload_bytes_s, download_bytes_s=settings.download_bytes_s
        ),
        cache=_cache_options(settings),
    )
    check_cache(options.cache, os.devnull)
    if settings.meta_timeout_s:
        options = options._replace(meta_timeout_s=settings.meta_timeout_s)
    if settings.staging_dir:
        options = options._replace(staging_dir=settings.staging_dir, writeback=WriteBackOptions())
    return options


def _cache_options(settings: Settings) -> CacheOptions:
    """Where copies of blocks are kept; nowhere if they can't be kept in shared memory."""
    if settings.cache_dir != SHARED:
        return CacheOptions(directories=settings.cache_dir or NONE, size=settings.cache_size)
    if not use_copies():
        return CacheOptions()
    size = str(min(capacity_bytes(), parse_size(settings.cache_size)))
    return CacheOptions(directories=directory(), size=size, free_ratio=FREE_RATIO)


def as_oserror(error: Exception, path: object = None) -> OSError:
    """What callers see of `error`: an `OSError` that names the path."""
    shown = os.fsdecode(path) if isinstance(path, bytes) else path
    if isinstance(error, OSError):
        if error.filename is None and shown is not None:
            error.filename = shown
        return error
    assert isinstance(error, StoreError), error
    number = next((code for kind, code in _ERRNOS if isinstance(error, kind)), errno.EIO)
    return OSError(number, f"{os.strerror(number)}: {error}", shown)


def process_umask() -> int:
    """The umask of this process, without changing it."""
    with suppress(OSError, ValueError), open("/proc/self/status", encoding="ascii") as status:
        for line in status:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    return 0o022


def parse_bytes(value: int | str, name: str) -> int:
    """A size as a number or with a unit. Raises: ConfigError."""
    if isinstance(value, int) and value >= 0:
        return value
    try:
        return parse_size(str(value))
    except (ConfigError, ValueError) as error:
        raise ConfigError(f"{name}: {value!r} is no size: use a number or 64MiB") from error


def parse_seconds(value: float | str, name: str, least: float = 0.0) -> float:
    """A time in seconds, `least` or more. Raises: ConfigError."""
    try:
        found = float(value)
    except (TypeError, ValueError):
        found = nan
    if not least <= found < inf:
        raise ConfigError(f"{name}: {value!r}: use a number of seconds from {least:g} on")
    return found


# --- the end of the process, and forks ---------------------------------------------------------

_LIVE: Final[list[Connection]] = []
_FORGOTTEN: Final[list[Connection]] = []  # of the parent: freeing them would close what is its own
_state: dict[str, Any] = {"lock": RUNTIME.lock(), "leaving": 0}
_AT_FORK: Final[list[Callable[[], None]]] = []


def _enter(connection: Connection) -> None:
    with _state["lock"]:
        _LIVE.append(connection)
        if _state["leaving"] == os.getpid():
            return
        _state["leaving"] = os.getpid()
    import multiprocessing
    from multiprocessing import util

    if multiprocessing.parent_process() is not None:  # such a process ends without atexit
        util.Finalize(None, close_all, exitpriority=100)


def _leave(connection: Connection) -> None:
    with _state["lock"]:
        if connection in _LIVE:
            _LIVE.remove(connection)


def close_all() -> None:
    """Leave every volume: what is written and open is stored. Called when the process ends."""
    for connection in list(_LIVE):
        with suppress(OSError, StoreError):
            connection.close()


def use_copies() -> bool:
    """Have shared copies as long as this process runs; whether that can be."""
    first = not COPIES.joined
    if not COPIES.join():
        return False
    if first:
        from multiprocessing import util

        # behind the end of its worker processes, which are ended by a signal and do not leave
        util.Finalize(None, _leave_copies, exitpriority=-1)
    return True


def _leave_copies() -> None:
    close_all()
    COPIES.leave()


def after_fork(reset: Callable[[], None]) -> None:
    """Have `reset` called in a child of this process, before its program goes on."""
    _AT_FORK.append(reset)


def _before_fork() -> None:
    for connection in list(_LIVE):
        if connection.guard is not None:
            connection.guard.hold()


def _in_parent() -> None:
    for connection in list(_LIVE):
        if connection.guard is not None:
            connection.guard.release()


def _in_child() -> None:
    _state["lock"] = RUNTIME.lock()
    for connection in _LIVE:
        if connection.guard is not None:
            connection.guard.keep()
    _FORGOTTEN.extend(_LIVE)
    _LIVE.clear()
    COPIES.forget()
    for reset in _AT_FORK:
        reset()


atexit.register(close_all)
os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)

"""`slicefs.Client`: a volume in this process, without a mount.

It has the caches, the write-back and the permissions of a mount: each request is judged by the
caller's uid, gid and groups in user space. A program with the metadata URL can name any uid, so
this protects from mistakes and not from the owner of the URL.

    with slicefs.Client("redis://localhost/1") as fs:
        with fs.open("data/labels.txt", "rt") as file: …

A client connects at its first use. It pickles to its URL and options, and a forked child connects
anew. Threading: any method from any thread; a file by one thread at a time.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import IO, Any, Final, Self
from weakref import WeakSet

from fsclient.volume.cache_options import NONE, SIZE
from fsclient.volume.units import format_size
from fsdata.resources.memory_budget import BUFFER_BYTES, BUFFER_BYTES_MIN
from fsmeta.errors import ConfigError
from fsmeta.store.url import shown_url
from fsmeta.types import Caller, Slice
from fsmeta.user_namespace import own_gid, own_groups, own_uid
from slicefs.client import bulk, durable, files
from slicefs.client.batches import BatchReader, Prefetch
from slicefs.client.bulk import KnownFile
from slicefs.client.connection import (
    FILE_BYTES,
    SHARED,
    Connection,
    Settings,
    after_fork,
    parse_bytes,
    parse_seconds,
    process_umask,
    use_copies,
)
from slicefs.client.namespace import Namespace
from slicefs.client.parallel import RUNTIME
from slicefs.client.paths import CallerView, Path
from slicefs.client.ranges import MAX_GAP_BYTES, Item
from slicefs.client.volumes import split_volume_url

HEARTBEAT_S_MIN: Final = 0.01
ID_MAX: Final = (1 << 32) - 1  # (uid_t) -1 stands for no user
FILE_BUFFER_BYTES: Final = 1 << 20  # as the kernel's largest request
_CLIENTS: Final[WeakSet[Client]] = WeakSet()


class Client(Namespace):
    """A volume. Paths are as on a mount of its root; relative ones begin at the URL's path."""

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        uid: int | None = None,
        gid: int | None = None,
        groups: Sequence[int] | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_size: int | str = SIZE,
        **options: Any,
    ) -> None:
        """`url` is a metadata URL, `META-URL#PATH` or `slicefs://VOLUME/PATH`.

        `cache_dir`: where copies of blocks are kept, "memory" where other processes of this user
        find them as long as one runs, or "none".
        The caller is this process's unless `uid` says otherwise. `options`: `umask`,
        `buffer_size`, `write_buffer_size` (of one file), `staging_dir` (write-back),
        `heartbeat`, `meta_timeout`, `store_options`, `upload_limit`, `download_limit` (bytes a
        second). Raises: ConfigError.
        """
        meta, path = split_volume_url(os.fspath(url))
        caller = _caller(uid, gid, groups)
        self._settings = Settings(
            url=meta,
            path=path,
            caller=caller,
            umask=int(options.pop("umask", process_umask())),
            cache_dir=_cache_dir(cache_dir),
            cache_size=str(cache_size),
            buffer_bytes=_buffer_bytes(options.pop("buffer_size", BUFFER_BYTES), "buffer_size"),
            file_bytes=_buffer_bytes(
                options.pop("write_buffer_size", FILE_BYTES), "write_buffer_size"
            ),
            staging_dir=str(options.pop("staging_dir", "") or ""),
            heartbeat_s=parse_seconds(options.pop("heartbeat", 5.0), "heartbeat", HEARTBEAT_S_MIN),
            meta_timeout_s=parse_seconds(options.pop("meta_timeout", 0.0), "meta_timeout"),
            store_options=tuple(options.pop("store_options", ())),
            upload_bytes_s=parse_bytes(options.pop("upload_limit", 0), "upload_limit"),
            download_bytes_s=parse_bytes(options.pop("download_limit", 0), "download_limit"),
        )
        if options:
            raise ConfigError(f"unknown option {min(options)!r} of slicefs.Client: leave it out")
        self._begin()

    def _begin(self) -> None:
        self._lock = RUNTIME.lock()
        self._connection: Connection | None = None
        self._closed = False
        self._top = b"/" + os.fsencode(self._settings.path).strip(b"/")
        self._batches = BatchReader(self.view)
        _CLIENTS.add(self)

    def __getstate__(self) -> Settings:
        return self._settings

    def __setstate__(self, settings: Settings) -> None:
        self._settings = settings
        self._begin()

    def __repr__(self) -> str:
        return f"slicefs.Client({self.url!r})"

    @property
    def url(self) -> str:
        """The volume's URL, without its password."""
        path = self._settings.path.strip("/")
        return shown_url(self._settings.url) + (f"#{path}" if path else "")

    def hold_copies(self) -> None:
        """Keep what processes share by `share_copies` at least as long as this process runs."""
        if not self._settings.cache_dir:
            use_copies()

    def share_copies(self) -> None:
        """Share copies of blocks with other processes of this host, as `cache_dir="memory"` does.

        That is nothing where the client has a `cache_dir`, or is connected already.
        """
        with self._lock:
            connected = self._connection is not None and self._connection.alive
            if not self._settings.cache_dir and not connected:
                self._settings = self._settings._replace(cache_dir=SHARED)

    @property
    def path(self) -> str:
        """Where relative paths begin in the volume."""
        return os.fsdecode(self._top)

    def is_of(self, meta: str) -> bool:
        """Whether it is a client of the volume with this metadata URL."""
        return meta == self._settings.url

    def connection(self) -> Connection:
        """The connection of this process, made if need be. Raises: ConfigError, OSError."""
        connection = self._connection
        if connection is not None and connection.alive:
            return connection
        with self._lock:
            if self._closed:
                raise ValueError("the client is closed")
            if self._connection is None or not self._connection.alive:
                self._connection = Connection(self._settings)
            return self._connection

    def view(self) -> CallerView:
        """The volume as this client's caller sees it."""
        settings = self._settings
        return CallerView(self.connection(), settings.caller, settings.umask, self._top)

    # --- files -----------------------------------------------------------------------------------

    def open(
        self,
        path: Path,
        mode: str = "rb",
        *,
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        atomic: bool = False,
        permissions: int = 0o666,
    ) -> IO[Any]:
        """As `open`. `atomic`: a file that is written appears whole at `close`, or not at all."""
        parsed = files.parse_mode(mode)
        if atomic and (not parsed.flags & os.O_TRUNC or parsed.reads):
            raise ValueError(f"atomic=True is for mode 'wb' or 'w', not {mode!r}")
        if not parsed.text and (encoding, errors, newline) != (None, None, None):
            raise ValueError("binary mode takes no encoding, errors or newline")
        if buffering == 0 and (atomic or parsed.text):
            raise ValueError("only binary files, not atomic ones, are without a buffer")
        size = FILE_BUFFER_BYTES if buffering in (-1, 1) else buffering
        view = self.view()
        if atomic:
            ino, fh = view.run(path, lambda: files.open_unnamed(view, path, permissions))
            raw = files.RawFile(self.view, ino, fh, os.O_RDWR, path)
            binary: Any = files.AtomicFile(raw, view, path, size)
        else:
            ino, fh = view.run(path, lambda: files.open_raw(view, path, parsed.flags, permissions))
            raw = files.RawFile(self.view, ino, fh, parsed.flags, path)
            binary = _buffered(raw, parsed, size)
        if not parsed.text:
            return binary  # type: ignore[no-any-return]
        kind = files.AtomicText if atomic else io.TextIOWrapper
        return kind(binary, encoding, errors, newline, line_buffering=buffering == 1)

    def read_many(self, items: Sequence[Item], *, max_gap: int = MAX_GAP_BYTES) -> list[memoryview]:
        """Each item's bytes in order: neighbouring ranges merged, many files at a time.

        An item is a path, or `(path, begin, end)`; a range past the end of its file is short.
        """
        return self._batches.read_many(items, max_gap)

    def read_known(self, files: Sequence[KnownFile]) -> list[memoryview]:
        """Whole files of snapshots by their slices, as a manifest has them: without metadata.

        The caller is not judged: one that has the manifest may read. A file without a slice is
        read as `read_many` does, and so is one whose slice is gone with its snapshot.
        """
        return self._batches.read_known(files)

    def slices(self, paths: Sequence[str]) -> list[Slice | None]:
        """The one slice that has all of a file, for each of some files of a snapshot.

        None where there is none, or several. Raises: ConfigError for a file of no snapshot.
        """
        return bulk.slices(self.view(), paths)

    def prefetch(self, items: Iterable[Item]) -> Prefetch:
        """Have items read into this process's caches in the background."""
        return self._batches.prefetch(list(items))

    # --- durability ------------------------------------------------------------------------------

    def wait_durable(self, path: Path | None = None, timeout: float | None = None) -> bool:
        """Store what was written so far, to a file or to all; whether others see all of it.

        False after `timeout` seconds. Raises: what could not be stored.
        """
        return durable.wait_durable(self.view(), path, timeout)

    def drain(self, deadline: float) -> durable.DrainReport:
        """Store as much as can be in `deadline` seconds: for SIGTERM and notices of preemption."""
        return durable.drain(self.view(), deadline)

    def close(self) -> None:
        """Store everything and leave the volume. Raises: OSError EIO where something is lost."""
        with self._lock:
            connection, self._connection = self._connection, None
            self._closed = True
        if connection is not None and not connection.close():
            raise OSError(errno.EIO, f"not everything was stored: {connection.lost()}", self.url)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _caller(uid: int | None, gid: int | None, groups: Sequence[int] | None) -> Caller:
    """By default this process's; the groups of another user are not looked up."""
    own = uid is None and gid is None
    for name, each in (("uid", uid), ("gid", gid), *(("groups", each) for each in groups or ())):
        if each is not None and not (isinstance(each, int) and 0 <= each < ID_MAX):
            raise ConfigError(f"{name}: {each!r} is no id: use a number from 0 to {ID_MAX - 1}")
    if groups is None:
        groups = own_groups() if own else ()
    return Caller(
        own_uid() if uid is None else uid,
        own_gid() if gid is None else gid,
        tuple(groups),
        os.getpid(),
    )


def _cache_dir(value: str | os.PathLike[str] | None) -> str:
    """Raises: ConfigError for what may be a mistake: a relative name is some directory's."""
    text = os.fspath(value or "")
    for each in text.split(":") if text not in ("", NONE, SHARED) else ():
        if not os.path.isabs(os.path.expanduser(each)):
            raise ConfigError(
                f'cache_dir: {each!r}: use an absolute path, "{SHARED}", or "{NONE}" for no copies'
            )
    return text


def _buffer_bytes(value: int | str, option: str) -> int:
    """Raises: ConfigError."""
    found = parse_bytes(value, option)
    if found < BUFFER_BYTES_MIN:
        raise ConfigError(f"{option}: {value!r}: at least {format_size(BUFFER_BYTES_MIN)}")
    return found


def _buffered(raw: files.RawFile, mode: files.Mode, size: int) -> Any:
    """`raw` behind the buffer that `open` would give it."""
    if size == 0:
        return raw
    if mode.reads and mode.writes:
        return io.BufferedRandom(raw, size)
    return io.BufferedReader(raw, size) if mode.reads else io.BufferedWriter(raw, size)


def _renew_locks() -> None:
    """In a forked child: the parent's threads may have held them."""
    for client in _CLIENTS:
        client.__setstate__(client.__getstate__())


after_fork(_renew_locks)

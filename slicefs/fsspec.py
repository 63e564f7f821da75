"""fsspec's protocol `slicefs`: what pandas, pyarrow, zarr and Hugging Face `datasets` open.

    fsspec.open("slicefs://VOLUME/path")                     the volume's URL as `Client` finds it
    fsspec.filesystem("slicefs", url="redis://host/1")       a volume by its metadata URL

Paths are absolute in the volume: `/path`. Those of a URL keep its volume, as `VOLUME:/path`, and
so do the names that are listed below them: Hugging Face `datasets` puts `slicefs://` before such
names, and opens them in another process. A file written with mode `wb` appears whole when it is
closed, or with its transaction. Options but `url`, `volume` and `auto_mkdir` are those of `Client`.

Threading: any method from any thread; an instance pickles to its options.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Final

try:
    from fsspec.spec import AbstractFileSystem
    from fsspec.utils import isfilelike, stringify_path
except ModuleNotFoundError as missing:
    raise ImportError("slicefs.fsspec needs fsspec: pip install 'slicefs[train]'") from missing

from fsmeta.errors import ConfigError
from slicefs.client.client import Client
from slicefs.client.names import DirEntry
from slicefs.client.ranges import MAX_GAP_BYTES, WHOLE, Item
from slicefs.client.volumes import snapshot_path

COPY_BYTES: Final = 8 << 20
_PREFIX: Final = "slicefs://"
_NAMED: Final = re.compile(r"([A-Za-z0-9][A-Za-z0-9_-]*):(?:/|\Z)")  # VOLUME:/path
_TYPES: Final = {0o040000: "directory", 0o100000: "file"}


class SliceFSFileSystem(AbstractFileSystem):
    """Files of a volume."""

    protocol = "slicefs"
    root_marker = "/"

    def __init__(
        self,
        url: str | None = None,
        volume: str | None = None,
        auto_mkdir: bool = True,
        of_url: str | None = None,
        **options: Any,
    ) -> None:
        """`auto_mkdir`: writing a file makes the directories above it. `of_url` is the volume that
        a URL names: fsspec allows no option twice, and `volume` may be given beside the URL.

        Raises: ConfigError.
        """
        known = {name: options.pop(name) for name in _OF_FSSPEC if name in options}
        super().__init__(**known)
        if volume and of_url and volume != of_url:
            raise ConfigError(f"fsspec slicefs: {_PREFIX}{of_url} is not in volume {volume}")
        self.volume = volume or of_url or ""
        if not url and not self.volume:
            raise ConfigError("fsspec slicefs: name the volume: slicefs://VOLUME/path, or url=…")
        self.auto_mkdir = auto_mkdir
        self.client = Client(url or f"{_PREFIX}{self.volume}", **options)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(each) for each in path]
        volume, below = _split(stringify_path(path))
        return f"{volume}:{below}" if volume else below

    @classmethod
    def _parent(cls, path: Any) -> str:
        volume, below = _split(stringify_path(path))
        above = below.rpartition("/")[0] or "/"
        return f"{volume}:{above}" if volume else above

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, Any]:
        volume = _split(path)[0]
        return {"of_url": volume} if volume else {}

    def unstrip_protocol(self, name: str) -> str:
        """The URL of a path."""
        return f"{_PREFIX}{self.volume}{self._at(name)}"

    def _at(self, path: Any) -> str:
        """A path in the volume. Raises: ConfigError for one in another volume."""
        volume, below = _split(stringify_path(path))
        if volume and self.volume and volume != self.volume:
            raise ConfigError(f"{path}: this file system is of volume {self.volume}")
        return below

    @property
    def fsid(self) -> str:
        """The volume, for caches."""
        return f"slicefs-{self.client.url}"

    # --- names -----------------------------------------------------------------------------------

    def ls(self, path: str, detail: bool = True, **more: Any) -> list[Any]:
        """Names in a directory, or the file itself."""
        del more
        above = self._strip_protocol(path).rstrip("/")
        try:
            found = [_info(f"{above}/{entry.name}", entry) for entry in self._scan(self._at(path))]
        except NotADirectoryError:
            found = [self.info(path)]
        return found if detail else [each["name"] for each in found]

    def _scan(self, path: str) -> Iterator[DirEntry]:
        for entry in self.client.scandir(path):
            try:
                entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue  # it went meanwhile
            yield entry

    def info(self, path: str, **more: Any) -> dict[str, Any]:
        """Size, type and attributes. Raises: FileNotFoundError."""
        del more
        at = self._at(path)
        return _described(self._strip_protocol(path), self.client.stat(at), self.client.lstat(at))

    def exists(self, path: str, **more: Any) -> bool:
        """Whether a path leads anywhere."""
        del more
        return self.client.exists(self._at(path))

    def mkdir(self, path: str, create_parents: bool = True, **more: Any) -> None:
        """Make a directory. Raises: FileExistsError."""
        del more
        at = self._at(path)
        if create_parents:
            self.client.makedirs(at)
        else:
            self.client.mkdir(at)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a directory and those above."""
        at = self._at(path)
        if at == "/":
            if not exist_ok:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), at)
            return
        self.client.makedirs(at, exist_ok=exist_ok)

    def rmdir(self, path: str) -> None:
        """Remove an empty directory."""
        self.client.rmdir(self._at(path))

    def rm_file(self, path: str) -> None:
        """Remove a file."""
        self.client.remove(self._at(path))

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        """Remove files; `recursive`: directories with all that is below."""
        for each in path if isinstance(path, list) else [path]:
            at = self._at(each)
            if any(mark in at for mark in "*?[") and not self.client.exists(at):
                super().rm(at, recursive=recursive, maxdepth=maxdepth)
            elif self.client.lstat(at).st_mode & 0o170000 != 0o040000:
                self.client.remove(at)
            elif not recursive:
                raise ValueError(f"{at} is a directory: set recursive=True")
            else:
                self.client.rmtree(at)

    def mv(self, path1: str, path2: str, *args: Any, **more: Any) -> None:
        """Move a file or directory, in one step."""
        del args, more
        old, new = self._at(path1), self._at(path2)
        self._make_above(new)
        self.client.rename(old, new)

    def cp_file(self, path1: str, path2: str, **more: Any) -> None:
        """Copy a file, or make a directory."""
        del more
        old, new = self._at(path1), self._at(path2)
        if self.isdir(old):
            self.makedirs(new, exist_ok=True)
            return
        with self.client.open(old, "rb") as source, self._open(new, "wb") as target:
            while data := source.read(COPY_BYTES):
                target.write(data)

    def created(self, path: str) -> datetime:
        """When the attributes changed last: a volume shows no other."""
        return datetime.fromtimestamp(self.info(path)["created"], tz=UTC)

    def modified(self, path: str) -> datetime:
        """When the content changed last."""
        return datetime.fromtimestamp(self.info(path)["mtime"], tz=UTC)

    def touch(self, path: str, truncate: bool = True, **more: Any) -> None:
        """Make a file, or set its times; `truncate` empties it."""
        del more
        at = self._at(path)
        self._make_above(at)
        with self.client.open(at, "wb" if truncate else "ab"):
            pass
        self.client.utime(at)

    def _make_above(self, path: str) -> None:
        above = self._parent(path)
        if self.auto_mkdir and above not in ("", "/"):
            self.client.makedirs(above, exist_ok=True)

    # --- data ------------------------------------------------------------------------------------

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        autocommit: bool = True,
        cache_options: Any = None,
        **more: Any,
    ) -> Any:
        del block_size, cache_options, more
        at = self._at(path)
        if mode != "rb":
            self._make_above(at)
        if mode != "wb":
            return self.client.open(at, mode)
        file = self.client.open(at, "wb", atomic=True)
        return file if autocommit else _Deferred(file)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **more: Any) -> None:
        """Write a file, whole or not at all. Raises: FileExistsError with mode `create`."""
        del more
        at = self._at(path)
        if mode == "create" and self.client.exists(at):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), at)
        with self.open(at, "wb") as file:
            file.write(value)

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **more: Any
    ) -> bytes:
        """Bytes of a file; negative positions count from its end."""
        del more
        at = self._at(path)
        if min(start or 0, end or 0) < 0:
            size = self.client.stat(at).st_size
            start, end = _from_end(start, size), _from_end(end, size)
        begin, stop = start or 0, WHOLE if end is None else max(end, start or 0)
        return bytes(self.client.read_many([(at, begin, stop)])[0])

    def cat(self, path: Any, recursive: bool = False, on_error: str = "raise", **more: Any) -> Any:
        """The bytes of a file, or of several by path, in one batch of reads."""
        paths = self.expand_path(path, recursive=recursive)
        if len(paths) < 2 or on_error != "raise":
            return super().cat(path, recursive=recursive, on_error=on_error, **more)
        wanted = [each for each in paths if not recursive or self.isfile(each)]
        found = self.client.read_many([self._at(each) for each in wanted])
        return {each: bytes(data) for each, data in zip(wanted, found, strict=True)}

    def cat_ranges(
        self,
        paths: Sequence[str],
        starts: Any,
        ends: Any,
        max_gap: int | None = None,
        on_error: str = "return",
        **more: Any,
    ) -> list[Any]:
        """Ranges of files, neighbours merged, many at a time."""
        if not isinstance(paths, list):
            raise TypeError("cat_ranges: paths are a list")
        begins = starts if isinstance(starts, list) else [starts] * len(paths)
        stops = ends if isinstance(ends, list) else [ends] * len(paths)
        if not len(begins) == len(stops) == len(paths):
            raise ValueError("cat_ranges: as many starts and ends as paths")
        ranges = list(zip(paths, begins, stops, strict=True))
        if all((begin or 0) >= 0 and (stop or 0) >= 0 for _, begin, stop in ranges):
            items: list[Item] = [
                (self._at(path), begin or 0, WHOLE if stop is None else stop)
                for path, begin, stop in ranges
            ]
            gap = MAX_GAP_BYTES if max_gap is None else max_gap
            try:
                return [bytes(each) for each in self.client.read_many(items, max_gap=gap)]
            except OSError:
                if on_error != "return":
                    raise
        return list(super().cat_ranges(paths, starts, ends, on_error=on_error, **more))

    def get_file(self, rpath: str, lpath: Any, callback: Any = None, **more: Any) -> None:
        """Copy a file to this host; what is there of it after an error is removed."""
        del callback, more
        at = self._at(rpath)
        if isfilelike(lpath):
            self._pour(at, lpath)
        elif self.isdir(at):
            os.makedirs(lpath, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(os.path.abspath(lpath)), exist_ok=True)
            with open(lpath, "wb") as target:
                self._pour(at, target)

    def _pour(self, path: str, target: Any) -> None:
        with self.client.open(path, "rb") as source:
            while data := source.read(COPY_BYTES):
                target.write(data)


_OF_FSSPEC: Final = (
    "asynchronous",
    "loop",
    "skip_instance_cache",
    "use_listings_cache",
    "listings_expiry_time",
    "max_paths",
)


class _Deferred:
    """A file of a transaction: closed, it waits for `commit` or `discard`."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.closed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def close(self) -> None:
        """Keep what was written."""
        if not self.closed:
            self._file.flush()
            self.closed = True

    def commit(self) -> None:
        """Give the file its name."""
        self._file.close()

    def discard(self) -> None:
        """Leave nothing."""
        self._file.abort()

    def __enter__(self) -> _Deferred:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


def _split(text: str) -> tuple[str, str]:
    """The volume that a URL or a path names, or "", and the absolute path in it."""
    if text.startswith(_PREFIX):
        volume, _, below = text.removeprefix(_PREFIX).partition("/")
        return volume.removesuffix(":"), "/" + snapshot_path(below).strip("/")
    found = _NAMED.match(text)
    if found is None:
        return "", "/" + text.strip("/")
    return found[1], "/" + text[found.end() :].strip("/")


def _info(path: str, entry: DirEntry) -> dict[str, Any]:
    """What `info` says, from a listing."""
    link = entry.stat(follow_symlinks=False)
    try:
        found = entry.stat()
    except OSError:
        found = link  # it leads nowhere
    return _described(path, found, link)


def _described(path: str, found: os.stat_result, link: os.stat_result) -> dict[str, Any]:
    kind = found.st_mode & 0o170000
    return {
        "name": path,
        "size": found.st_size if kind != 0o040000 else 0,
        "type": _TYPES.get(kind, "other"),
        "created": found.st_ctime,
        "mtime": found.st_mtime,
        "mode": found.st_mode,
        "uid": found.st_uid,
        "gid": found.st_gid,
        "ino": found.st_ino,
        "nlink": found.st_nlink,
        "islink": link.st_mode & 0o170000 == 0o120000,
    }


def _from_end(position: int | None, size: int) -> int | None:
    return position if position is None or position >= 0 else max(0, size + position)

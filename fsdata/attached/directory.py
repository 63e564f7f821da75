"""A directory of the host whose files are attached: local disks, NFS, Lustre.

A record of such a file has `file://` for its endpoint, the directory as its bucket and the path
below it as its key, both quoted as in a URL. Its ETag is made of inode, size, mtime and ctime; it
is compared before and after the bytes are read. A client reads only below the directories that
its environment names: else root of a container could read files of the host.

Threading: any thread.
"""

from __future__ import annotations

import errno
import os
from typing import Final
from urllib.parse import quote, unquote_to_bytes

from fsdata.attached.source import changed
from fsmeta.errors import ConfigError
from fsmeta.types import AttachedObject

DIRECTORY: Final = "file://"  # the endpoint of such records
ALLOWED_ENV: Final = "SLICEFS_ATTACH_DIRS"  # directories, with `:` between them
_GONE: Final = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)  # ELOOP: it is a symlink now


def file_etag(found: os.stat_result) -> str:
    """What changes with each change of a file."""
    return f"{found.st_ino:x}-{found.st_size:x}-{found.st_mtime_ns:x}-{found.st_ctime_ns:x}"


def quoted(path: str) -> str:
    """A path as records have it: names need not be UTF-8."""
    return quote(os.fsencode(path))


class HostDirectory:
    """A directory whose files are read."""

    # Copies would be read by clients whose environment does not allow the directory.
    on_disks = False

    def __init__(self, bucket: str) -> None:
        """Raises: ConfigError where the client's environment does not allow it."""
        self._root = os.path.realpath(os.fsdecode(unquote_to_bytes(bucket)))
        self.place = f"{DIRECTORY}{quoted(self._root)}"
        allowed = os.environ.get(ALLOWED_ENV, "")
        if not any(_is_below(self._root, each) for each in allowed.split(":") if each):
            raise ConfigError(f"start the client with {ALLOWED_ENV}={self._root}")

    def close(self) -> None:
        """See `AttachedSource`."""

    def get(self, found: AttachedObject, begin: int, end: int) -> bytes:
        """See `AttachedSource`."""
        path = os.path.join(self._root, os.fsdecode(unquote_to_bytes(found.key)))
        if not _is_below(os.path.dirname(path), self._root):
            raise changed(path, "is elsewhere now")
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno not in _GONE:
                raise
            if not os.path.isdir(self._root):
                raise OSError(errno.EIO, f"{self._root} is not on this host", path) from error
            raise changed(path, "is gone") from error
        try:
            _require_same(descriptor, found, path)
            data = os.pread(descriptor, end - begin, begin)
            _require_same(descriptor, found, path)
        finally:
            os.close(descriptor)
        if len(data) != end - begin:
            raise OSError(errno.EIO, f"{len(data)} bytes of {end - begin} were read", path)
        return data


def _is_below(path: str, folder: str) -> bool:
    """Whether a directory is another one or lies in it, symlinks resolved."""
    real, above = os.path.realpath(path), os.path.realpath(folder)
    return real == above or real.startswith(above.rstrip("/") + "/")


def _require_same(descriptor: int, found: AttachedObject, path: str) -> None:
    if file_etag(os.fstat(descriptor)) != found.etag:
        raise changed(path, "has changed")

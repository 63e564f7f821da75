"""What a scan lists: the objects of a bucket, or the files of a directory of the host."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from fsclient.fuse.mount.mount import FUSE_TYPE, find_mount
from fsdata.attached.directory import DIRECTORY, file_etag, quoted
from fsdata.objects.contract import ObjectInfo
from fsmeta.errors import ConfigError
from slicefs.stores.local import LocalTree
from slicefs.stores.opening import open_tree
from slicefs.stores.s3 import S3Tree
from slicefs.stores.tree import TEMPORARY


class AttachEntry(NamedTuple):
    """Something that a source has. A path that ends with `/` is a directory."""

    path: str  # below the place of the source
    info: ObjectInfo | None  # None for what can't be attached: a symlink, a device


class AttachPlace(NamedTuple):
    """Where objects are, as records have it."""

    endpoint: str
    region: str
    bucket: str
    prefix: str  # of all keys


class ScanSource(Protocol):
    """What a scan reads."""

    place: AttachPlace

    def listed(self) -> Iterator[AttachEntry]:
        """All of it; what is in a directory, and below it, comes together. Raises: OSError."""
        ...

    def key_of(self, path: str) -> str:
        """The key of what is at `path`, or would be."""
        ...

    def close(self) -> None:
        """Let go of connections."""
        ...


def open_source(url: str) -> ScanSource:
    """Raises: ConfigError."""
    tree = open_tree(url)
    if isinstance(tree, S3Tree):
        try:
            tree.require_reachable()
        except ConfigError:
            tree.close()
            raise
        return BucketSource(tree)
    tree.close()
    if isinstance(tree, LocalTree) and url.startswith(DIRECTORY):
        return DirectorySource(tree.url.removeprefix(DIRECTORY))
    raise ConfigError(f"{url}: only s3://BUCKET/PREFIX and file:///DIR can be attached")


class BucketSource:
    """Objects below a prefix."""

    def __init__(self, tree: S3Tree) -> None:
        self._tree = tree
        bucket = tree.bucket
        account = bucket.account
        self.place = AttachPlace(account.endpoint, account.region, bucket.name, bucket.prefix)

    def listed(self) -> Iterator[AttachEntry]:
        """See `ScanSource`: in the order of keys."""
        for info in self._tree.objects():
            yield AttachEntry(info.key.removeprefix(self.place.prefix), info)

    def key_of(self, path: str) -> str:
        """See `ScanSource`."""
        return self.place.prefix + path

    def close(self) -> None:
        """See `ScanSource`."""
        self._tree.close()


class DirectorySource:
    """Regular files below a directory of this host. Symlinks are not followed."""

    def __init__(self, folder: str) -> None:
        """Raises: ConfigError for what is no directory, and for one on a mount of ours."""
        self._root = os.path.realpath(folder)
        if not os.path.isdir(self._root):
            raise ConfigError(f"{folder} is no directory")
        if is_on_slicefs(self._root):
            raise ConfigError(
                f"{folder} is on a SliceFS mount: use `slicefs clone` in one volume, else sync"
            )
        self.place = AttachPlace(DIRECTORY, "", quoted(self._root), "")

    def listed(self) -> Iterator[AttachEntry]:
        """See `ScanSource`: a directory, and then what is in it."""
        walk = os.fwalk(self._root, onerror=_raise, follow_symlinks=False)
        for folder, folders, files, descriptor in walk:
            below = os.path.relpath(folder, self._root)
            before = "" if below == "." else f"{below}/"
            if before:
                yield AttachEntry(before, ObjectInfo(quoted(before), 0, 0))
            for name in files:
                if not name.startswith(TEMPORARY):
                    yield AttachEntry(before + name, _found(before + name, name, descriptor))
            for name in folders:
                mode = os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode
                if stat.S_ISLNK(mode):
                    yield AttachEntry(before + name, None)

    def key_of(self, path: str) -> str:
        """See `ScanSource`."""
        return quoted(path)

    def close(self) -> None:
        """See `ScanSource`."""


def _raise(error: OSError) -> None:
    raise error


def _found(path: str, name: str, folder: int) -> ObjectInfo | None:
    found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if not stat.S_ISREG(found.st_mode):
        return None
    return ObjectInfo(quoted(path), found.st_size, found.st_mtime_ns, file_etag(found))


def is_on_slicefs(path: str) -> bool:
    """Whether a mount of ours has `path`, which need not be there; its symlinks are resolved."""
    while True:
        info = find_mount(path)
        if info is not None:
            return info.fstype == FUSE_TYPE
        if path == "/":
            return False
        path = os.path.dirname(path)

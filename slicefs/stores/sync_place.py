"""A directory of a volume as a side of `slicefs sync`, through a `Client`: nothing is mounted.

The command finds `VolumeAccess` by its entry point. Each component of a key is looked at before
anything is made below it: no key and no symlink in the tree leads out of it. A file is written
under a temporary name of its directory and renamed, as in a local tree.

Threading: any method from any thread.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final

from fsclient.sync.items import (
    LINK_SUFFIX,
    PIECE_BYTES,
    TARGET_MAX,
    Content,
    Item,
    ItemKind,
    ItemRefused,
    SyncSide,
    names_of,
    order,
)
from fsclient.sync.volumes import OpenVolume, SyncVolumes
from fsmeta.types import SetAttr
from slicefs.client.client import Client
from slicefs.client.names import setattr_
from slicefs.client.parallel import RUNTIME
from slicefs.client.volumes import is_volume_url, split_volume_url

_KINDS: Final = {
    stat.S_IFREG: ItemKind.FILE,
    stat.S_IFDIR: ItemKind.DIR,
    stat.S_IFLNK: ItemKind.LINK,
}
_KNOWN_MAX: Final = 100_000  # directories that were looked at; then all are looked at again


class VolumeAccess:
    """See `fsclient.sync.volumes.Volumes`."""

    def split(self, url: str) -> tuple[str, str] | None:
        """Raises: ConfigError."""
        return split_volume_url(url) if is_volume_url(url) else None

    def open(self, meta: str) -> OpenVolume:
        """Raises: ConfigError, StoreError."""
        return _Volume(meta)


class _Volume:
    """A volume that is open."""

    def __init__(self, meta: str) -> None:
        self._client = Client(meta)
        self._client.connection()  # so that what is wrong with the volume is said at once

    def is_dir(self, path: str) -> bool | None:
        try:
            return stat.S_ISDIR(self._client.stat(f"/{path}").st_mode)
        except FileNotFoundError:
            return None

    def place(self, path: str, create: bool, only: str, links_as_files: bool) -> SyncSide:
        if create:
            self._client.makedirs(f"/{path}", exist_ok=True)
        return VolumePlace(self._client, path, only, links_as_files)

    def close(self) -> None:
        self._client.close()


class VolumePlace:
    """The tree at `top` of a volume, or the one file `only` there."""

    has_modes = True

    def __init__(self, client: Client, top: str, only: str, links_as_files: bool) -> None:
        self._client = client
        self._top = f"/{top}".rstrip("/")
        self._only = only
        self._links_as_files = links_as_files
        self._known: set[str] = set()  # directories below the top; each step on it is atomic

    def stop(self) -> None:
        """Nothing: a client's requests end by themselves."""

    def close(self) -> None:
        self._client.close()

    # --- listing ---------------------------------------------------------------------------------

    def list(self) -> Iterator[Item]:
        if self._only:
            with suppress(FileNotFoundError):
                yield self._item(self._only, self._client.lstat(f"{self._top}/{self._only}"))
            return
        yield from self._below("")

    def _below(self, prefix: str) -> Iterator[Item]:
        items = []
        for entry in self._client.scandir(f"{self._top}/{prefix}"):
            with suppress(FileNotFoundError):  # removed since it was listed
                items.append(self._item(prefix + entry.name, entry.stat(follow_symlinks=False)))
        for item in sorted(items, key=lambda each: order(each.key)):
            yield item
            if item.kind is ItemKind.DIR:
                yield from self._below(item.key)

    def _item(self, key: str, found: os.stat_result) -> Item:
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), ItemKind.OTHER)
        target = self._client.readlink(f"{self._top}/{key}") if kind is ItemKind.LINK else ""
        several = kind is ItemKind.FILE and found.st_nlink > 1
        item = Item(
            key + "/" if kind is ItemKind.DIR else key,
            kind,
            found.st_size if kind is ItemKind.FILE else 0,
            found.st_mtime_ns,
            stat.S_IMODE(found.st_mode),
            found.st_uid,
            found.st_gid,
            found.st_atime_ns,
            target,
            (0, found.st_ino) if several else None,
        )
        if kind is ItemKind.LINK and self._links_as_files:
            size = len(os.fsencode(target))
            return item._replace(key=key + LINK_SUFFIX, kind=ItemKind.FILE, size=size)
        return item

    # --- reading ---------------------------------------------------------------------------------

    def read(self, item: Item) -> Content:
        if item.target:  # a link that is a file here
            return Content(iter((os.fsencode(item.target),)), {})
        path = self._folder(item.key)
        if not stat.S_ISREG(self._client.lstat(path).st_mode):
            raise ItemRefused("it is no regular file any more")
        names = self._client.listxattr(path)
        xattrs = {name: self._client.getxattr(path, name) for name in names}
        return Content(self._pieces(path, item), xattrs)

    def _pieces(self, path: str, item: Item) -> Iterator[bytes]:
        with self._client.open(path, "rb", buffering=0) as file:
            done = 0
            while piece := file.read(PIECE_BYTES):
                done += len(piece)
                yield piece
        found = self._client.lstat(path)
        if done != found.st_size or found.st_mtime_ns != item.mtime_ns:
            raise ItemRefused("it was changed while it was copied: run the command again")

    # --- writing ---------------------------------------------------------------------------------

    def _folder(self, key: str, create: bool = False) -> str:
        """The path of an item, all of whose directories are some. Raises: OSError, Refused."""
        *above, name = names_of(key)
        path = self._top
        for each in above:
            path = f"{path}/{each}"
            if path in self._known:
                continue
            if create:
                with suppress(FileExistsError):
                    self._client.mkdir(path)
            if not stat.S_ISDIR(self._client.lstat(path).st_mode):
                raise ItemRefused(f"{each} on the way to it is no directory")
            if len(self._known) >= _KNOWN_MAX:
                self._known.clear()
            self._known.add(path)
        return f"{path}/{name}"

    def write(self, item: Item, content: Content) -> None:
        if self._links_as_files and item.key.endswith(LINK_SUFFIX) and item.size <= TARGET_MAX:
            target = os.fsdecode(b"".join(content.pieces))
            key = item.key.removesuffix(LINK_SUFFIX)
            self.make(item._replace(key=key, kind=ItemKind.LINK, target=target))
            return

        def fill(path: str) -> None:
            with self._client.open(path, "xb", buffering=0, permissions=0o600) as file:
                for piece in content.pieces:
                    view = memoryview(piece)
                    while view:
                        view = view[file.write(view) :]
            self._dress(path, item, content.xattrs)

        self._replace(item.key, fill)

    def make(self, item: Item) -> None:
        if item.kind is ItemKind.LINK:

            def fill(path: str) -> None:
                self._client.symlink(item.target, path)
                self._dress(path, item, {})

            self._replace(item.key, fill)
            return
        path = self._folder(item.key, create=True)
        with suppress(FileExistsError):
            self._client.mkdir(path, 0o777 if item.mode is None else 0o700)
        if not stat.S_ISDIR(self._client.lstat(path).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))

    def link(self, first: str, key: str) -> None:
        path = self._folder(first)
        self._replace(key, lambda temporary: self._client.link(path, temporary))

    def _replace(self, key: str, fill: Callable[[str], None]) -> None:
        """Have a file made under a temporary name, and rename it."""
        path = self._folder(key, create=True)
        above = path.rpartition("/")[0]
        temporary = f"{above}/.slicefs-sync.{RUNTIME.random_bits(64):016x}"
        try:
            fill(temporary)
            self._client.rename(temporary, path)
        finally:
            with suppress(OSError):  # it was renamed; or two names of one file, which stay two
                self._client.unlink(temporary)

    def dress(self, item: Item) -> None:
        self._dress(self._folder(item.key), item, {})

    def _dress(self, path: str, item: Item, xattrs: Mapping[str, bytes]) -> None:
        """Owner, mode, attributes and times, in one change; owners where the caller is root."""
        view, is_link = self._client.view(), item.kind is ItemKind.LINK
        for name, value in xattrs.items():
            with suppress(PermissionError):
                self._client.setxattr(path, name, value)
        if item.mode is None:
            mode = (0o777 if item.kind is ItemKind.DIR else 0o666) & ~view.umask
            mode_or_none = None if is_link else mode
            want = SetAttr(mode=mode_or_none, atime_ns=item.mtime_ns, mtime_ns=item.mtime_ns)
        else:
            own = view.caller.uid == 0
            want = SetAttr(
                mode=None if is_link else item.mode,
                uid=item.uid if own else None,
                gid=item.gid if own else None,
                atime_ns=item.atime_ns,
                mtime_ns=item.mtime_ns,
            )
        view.run(path, lambda: setattr_(view, path, want, False))

    def delete(self, items: Sequence[Item]) -> None:
        for item in items:
            with suppress(FileNotFoundError):
                path = self._folder(item.key)
                if item.kind is not ItemKind.DIR:
                    as_file = self._links_as_files and item.target
                    self._client.unlink(path.removesuffix(LINK_SUFFIX) if as_file else path)
                    continue
                self._known.discard(path)
                try:
                    self._client.rmdir(path)
                except OSError as error:
                    if error.errno != errno.ENOTEMPTY:
                        raise


_CONFORMS: tuple[type[SyncVolumes], Callable[[Client, str, str, bool], SyncSide]] = (
    VolumeAccess,
    VolumePlace,
)

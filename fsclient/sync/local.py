"""A directory as a side of a sync: a local tree or a mount.

Every name is reached from the descriptor of the top, one component at a time with O_NOFOLLOW: no
key and no symlink below the top leads elsewhere. A file is written under a temporary name of its
directory and renamed. Threading: any method from any thread.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Final

from fsclient.sync.items import (
    LINK_SUFFIX,
    PIECE_BYTES,
    TARGET_MAX,
    TEMPORARY,
    Content,
    Item,
    ItemKind,
    ItemRefused,
    SyncSide,
    names_of,
    order,
)
from fsmeta.runtime import Runtime

_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_KINDS: Final = {
    stat.S_IFREG: ItemKind.FILE,
    stat.S_IFDIR: ItemKind.DIR,
    stat.S_IFLNK: ItemKind.LINK,
}
_NO_XATTRS: Final = (errno.ENOTSUP, errno.EPERM, errno.EACCES)
_LABELS: Final = ("security.selinux", "security.evm", "security.ima")


class LocalPlace:
    """The tree at `top`, or the one file `only` there. Raises: OSError where it is not there."""

    has_modes = True

    def __init__(
        self,
        top: str,
        runtime: Runtime,
        create: bool = False,
        only: str = "",
        links_as_files: bool = False,
    ) -> None:
        """`links_as_files`: a link is a file here, NAME.rclonelink with its target."""
        self._links_as_files = links_as_files
        if create:
            os.makedirs(top, exist_ok=True)
        self._fd = os.open(top, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._runtime = runtime
        self._only = only
        self._umask = os.umask(0)
        os.umask(self._umask)

    def stop(self) -> None:
        """Nothing: no call on files is repeated."""

    def close(self) -> None:
        os.close(self._fd)

    # --- listing ---------------------------------------------------------------------------------

    def list(self) -> Iterator[Item]:
        if self._only:
            with suppress(FileNotFoundError):
                found = os.stat(self._only, dir_fd=self._fd, follow_symlinks=False)
                item = _item(self._only, found, self._fd)
                as_file = self._links_as_files and item.kind is ItemKind.LINK
                yield _link_as_file(item) if as_file else item
            return
        yield from self._below(os.dup(self._fd), "")

    def _below(self, fd: int, prefix: str) -> Iterator[Item]:
        try:
            with os.scandir(fd) as entries:
                names = {self._listed(each): each.name for each in entries}
            for name in sorted(names, key=order):
                bare = names[name]
                try:
                    found = os.stat(bare, dir_fd=fd, follow_symlinks=False)
                    item = _item(prefix + bare, found, fd)
                    if self._links_as_files and item.kind is ItemKind.LINK:
                        item = _link_as_file(item)
                    below = os.open(bare, _FOLDER, dir_fd=fd) if item.kind is ItemKind.DIR else -1
                except FileNotFoundError:
                    continue  # removed since it was listed
                except OSError as error:
                    raise OSError(error.errno, error.strerror, prefix + bare) from error
                yield item
                if below >= 0:
                    yield from self._below(below, item.key)
        finally:
            os.close(fd)

    def _listed(self, entry: os.DirEntry[str]) -> str:
        """The last part of an entry's key."""
        if entry.is_dir(follow_symlinks=False):
            return entry.name + "/"
        as_file = self._links_as_files and entry.is_symlink()
        return entry.name + LINK_SUFFIX if as_file else entry.name

    # --- reading ---------------------------------------------------------------------------------

    def read(self, item: Item) -> Content:
        if item.target:  # a link that is a file here
            return Content(iter((os.fsencode(item.target),)), {})
        with self._folder(item.key) as (folder, name):
            fd = os.open(name, _READ, dir_fd=folder)
        try:
            before = os.fstat(fd)
            if not stat.S_ISREG(before.st_mode):
                raise ItemRefused("it is no regular file any more")
            return Content(_Pieces(fd, before), _xattrs(fd))
        except BaseException:
            os.close(fd)
            raise

    # --- writing ---------------------------------------------------------------------------------

    @contextmanager
    def _folder(self, key: str, create: bool = False) -> Iterator[tuple[int, str]]:
        """The directory of an item and its name there. Raises: OSError, Refused."""
        *above, name = names_of(key)
        fd = os.dup(self._fd)
        try:
            for each in above:
                if create:
                    with suppress(FileExistsError):
                        os.mkdir(each, 0o777, dir_fd=fd)
                try:
                    below = os.open(each, _FOLDER, dir_fd=fd)
                except OSError as error:
                    if error.errno in (errno.ENOTDIR, errno.ELOOP):
                        raise ItemRefused(f"{each} on the way to it is no directory") from error
                    raise
                os.close(fd)
                fd = below
            yield fd, name
        finally:
            os.close(fd)

    def write(self, item: Item, content: Content) -> None:
        if self._links_as_files and item.key.endswith(LINK_SUFFIX) and item.size <= TARGET_MAX:
            target = os.fsdecode(b"".join(content.pieces))
            key = item.key.removesuffix(LINK_SUFFIX)
            self.make(item._replace(key=key, kind=ItemKind.LINK, target=target))
            return

        def fill(folder: int, name: str) -> None:
            fd = os.open(name, _NEW, 0o600, dir_fd=folder)
            try:
                for piece in content.pieces:
                    view = memoryview(piece)
                    while view:
                        view = view[os.write(fd, view) :]
                _dress(fd, item, content.xattrs, self._umask)
            finally:
                os.close(fd)

        self._replace(item.key, fill)

    def make(self, item: Item) -> None:
        if item.kind is ItemKind.LINK:
            self._replace(item.key, lambda folder, name: self._symlink(item, folder, name))
            return
        with self._folder(item.key, create=True) as (folder, name):
            with suppress(FileExistsError):
                os.mkdir(name, 0o777 if item.mode is None else 0o700, dir_fd=folder)
            os.close(os.open(name, _FOLDER, dir_fd=folder))

    def _symlink(self, item: Item, folder: int, name: str) -> None:
        os.symlink(item.target, name, dir_fd=folder)
        if os.geteuid() == 0 and item.mode is not None:
            os.chown(name, item.uid, item.gid, dir_fd=folder, follow_symlinks=False)
        times = (item.mtime_ns if item.mode is None else item.atime_ns, item.mtime_ns)
        os.utime(name, ns=times, dir_fd=folder, follow_symlinks=False)

    def link(self, first: str, key: str) -> None:
        with self._folder(first) as (theirs, name):

            def make(folder: int, temporary: str) -> None:
                os.link(
                    name, temporary, src_dir_fd=theirs, dst_dir_fd=folder, follow_symlinks=False
                )

            self._replace(key, make)

    def _replace(self, key: str, make: Callable[[int, str], None]) -> None:
        """Have a file made under a temporary name, and rename it."""
        temporary = f".slicefs-sync.{self._runtime.random_bits(64):016x}"
        with self._folder(key, create=True) as (folder, name):
            try:
                make(folder, temporary)
                os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
            finally:
                with suppress(OSError):  # it was renamed; or two names of one file, which stay two
                    os.unlink(temporary, dir_fd=folder)

    def dress(self, item: Item) -> None:
        with self._folder(item.key) as (folder, name):
            fd = os.open(name, _FOLDER, dir_fd=folder)
            try:
                _dress(fd, item, {}, self._umask)
            finally:
                os.close(fd)

    def delete(self, items: Sequence[Item]) -> None:
        for item in items:
            with suppress(FileNotFoundError), self._folder(item.key) as (folder, name):
                if item.kind is not ItemKind.DIR:
                    if item.target and self._links_as_files:
                        name = name.removesuffix(LINK_SUFFIX)
                    os.unlink(name, dir_fd=folder)
                    continue
                try:
                    os.rmdir(name, dir_fd=folder)
                except OSError as error:
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                        raise


def is_temporary(key: str) -> bool:
    """Whether a sync has left it behind when it was killed."""
    return TEMPORARY.fullmatch(key.rpartition("/")[2]) is not None


def _item(key: str, found: os.stat_result, fd: int) -> Item:
    kind = _KINDS.get(stat.S_IFMT(found.st_mode), ItemKind.OTHER)
    target = ""
    if kind is ItemKind.LINK:
        target = os.readlink(key.rpartition("/")[2], dir_fd=fd)
    several = kind is ItemKind.FILE and found.st_nlink > 1
    return Item(
        key + "/" if kind is ItemKind.DIR else key,
        kind,
        found.st_size if kind is ItemKind.FILE else 0,
        found.st_mtime_ns,
        stat.S_IMODE(found.st_mode),
        found.st_uid,
        found.st_gid,
        found.st_atime_ns,
        target,
        (found.st_dev, found.st_ino) if several else None,
    )


def _link_as_file(item: Item) -> Item:
    """A symlink as a file with its target."""
    size = len(os.fsencode(item.target))
    return item._replace(key=item.key + LINK_SUFFIX, kind=ItemKind.FILE, size=size)


class _Pieces:
    """The bytes of an open file; at the end it must be as it was."""

    def __init__(self, fd: int, before: os.stat_result) -> None:
        self._fd = fd
        self._before = before
        self._offset = 0

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        """Raises: Refused, OSError."""
        piece = os.pread(self._fd, PIECE_BYTES, self._offset)
        if piece:
            self._offset += len(piece)
            return piece
        after = os.fstat(self._fd)
        if self._offset != after.st_size or after.st_mtime_ns != self._before.st_mtime_ns:
            raise ItemRefused("it was changed while it was copied: run the command again")
        raise StopIteration

    def close(self) -> None:
        """Let go of the descriptor."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _xattrs(fd: int) -> dict[str, bytes]:
    try:
        names = [name for name in os.listxattr(fd) if name not in _LABELS]
        return {name: os.getxattr(fd, name) for name in names}
    except OSError as error:
        if error.errno in (*_NO_XATTRS, errno.ENODATA):
            return {}
        raise


def _dress(fd: int, item: Item, xattrs: Mapping[str, bytes], umask: int) -> None:
    """Owner, mode, attributes and times, as far as the item has them and the caller may."""
    if item.mode is None:
        os.fchmod(fd, 0o666 & ~umask)
        os.utime(fd, ns=(item.mtime_ns, item.mtime_ns))
        return
    if os.geteuid() == 0:
        os.fchown(fd, item.uid, item.gid)
    for name, value in xattrs.items():
        try:
            os.setxattr(fd, name, value)
        except OSError as error:
            if error.errno not in _NO_XATTRS:
                raise
    os.fchmod(fd, item.mode)
    os.utime(fd, ns=(item.atime_ns, item.mtime_ns))


_CONFORMS: Callable[[str, Runtime], SyncSide] = LocalPlace

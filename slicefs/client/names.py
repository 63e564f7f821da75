"""Verbs on names and attributes, as `os` has them, for `Client`.

Each takes a `CallerView` and raises `OSError`; `Client` gives it the errno's path. Directories are
listed and emptied by their inodes: a name that is exchanged meanwhile leads nowhere else.

Threading: any thread; functions only.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from typing import Final

from fsclient.kernel.contract import EntryOut
from fsmeta.types import Attr, Dentry, FileType, Ino, SetAttr, StatFs
from slicefs.client.paths import CallerView, Path

PAGE_NAMES: Final = 1024  # of a listing: attributes are asked for so many at a time
_UNLIMITED: Final = 1 << 50  # bytes that a volume without a limit shows, as mounts do
_BLOCK_BYTES: Final = 4096
_INODES: Final = 1 << 40


def stat_result(attr: Attr) -> os.stat_result:
    """Attributes as `os.stat` has them."""
    times = (attr.atime_ns, attr.mtime_ns, attr.ctime_ns)
    whole = tuple(each // 10**9 for each in times)
    more = {
        "st_atime": times[0] / 1e9,
        "st_mtime": times[1] / 1e9,
        "st_ctime": times[2] / 1e9,
        "st_atime_ns": times[0],
        "st_mtime_ns": times[1],
        "st_ctime_ns": times[2],
        "st_blksize": _BLOCK_BYTES,
        "st_blocks": attr.space // 512,
        "st_rdev": attr.rdev,
    }
    fixed = (attr.mode, attr.ino, 0, attr.nlink, attr.uid, attr.gid, attr.size)
    return os.stat_result((*fixed, *whole), more)


class DirEntry:
    """One name in a directory, as `os.DirEntry`: its attributes came with the listing."""

    def __init__(
        self, view: CallerView, folder: str, parent: Ino, dentry: Dentry, attr: Attr | None
    ):
        self.name = os.fsdecode(dentry.name)
        self.path = f"{folder.rstrip('/')}/{self.name}" if folder else self.name
        self._view = view
        self._parent = parent
        self._dentry = dentry
        self._attr = attr

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"

    def __fspath__(self) -> str:
        return self.path

    def inode(self) -> int:
        """Its inode number."""
        return self._dentry.ino

    def is_symlink(self) -> bool:
        """Whether it is a symbolic link."""
        return self._dentry.type is FileType.LNK

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """Whether it is a directory, or a link to one."""
        return self._is(FileType.DIR, follow_symlinks)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """Whether it is a plain file, or a link to one."""
        return self._is(FileType.REG, follow_symlinks)

    def _is(self, kind: FileType, follow: bool) -> bool:
        if not follow or not self.is_symlink():
            return self._dentry.type is kind
        try:
            return FileType.of_mode(self.stat().st_mode) is kind
        except FileNotFoundError:
            return False

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Its attributes."""
        if follow_symlinks and self.is_symlink():
            return self._view.run(self.path, lambda: stat_result(self._view.find(self.path)))
        attr = self._attr
        if attr is None:
            attr = self._view.run(
                self.path, lambda: self._view.lookup(self._parent, self._dentry.name)
            )
            self._attr = attr
        return stat_result(attr)


def _a_page(names: Sequence[Dentry]) -> int:
    """How many names are taken at once."""
    return min(len(names), PAGE_NAMES)


def entries(view: CallerView, ino: Ino, attrs: bool) -> Iterator[tuple[Dentry, Attr | None]]:
    """Names in a directory but `.` and `..`, with attributes where wanted and allowed.

    Raises: ENOTDIR, EACCES.
    """
    vfs, caller = view.vfs, view.caller
    fh = vfs.directories.opendir(caller, ino).fh
    try:
        if attrs:
            try:
                vfs.access(caller, ino, os.X_OK)
            except PermissionError:
                attrs = False  # a caller that may not search learns names and types
        cookie = 0
        while True:
            found: Sequence[EntryOut | None]
            if attrs:
                names, cookies, told = vfs.directories.readdirplus(caller, ino, fh, cookie, _a_page)
                found = told.each(names)
            else:
                names, cookies = vfs.directories.readdir(caller, ino, fh, cookie, PAGE_NAMES)
                found = [None] * len(names)
            if not names:
                return
            cookie = cookies[-1]
            for dentry, entry in zip(names, found, strict=True):
                attr = None if entry is None else entry.attr
                if attr is not None:
                    vfs.forget(attr.ino, 1)
                if dentry.name not in (b".", b".."):
                    yield Dentry(*dentry), attr
    finally:
        vfs.directories.releasedir(ino, fh)


def scandir(view: CallerView, path: Path) -> Iterator[DirEntry]:
    """`os.scandir`, with attributes."""
    folder = os.fsdecode(path)
    ino = view.find(path).ino
    for dentry, attr in entries(view, ino, attrs=True):
        yield DirEntry(view, folder, ino, dentry, attr)


def mkdir(view: CallerView, path: Path, mode: int) -> None:
    """mkdir(2). Raises: EEXIST."""
    place = view.place(path, follow=False)
    if place.attr is not None:
        raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))
    view.entry(view.vfs.mkdir(view.caller, place.parent, place.name, mode, view.umask))


def makedirs(view: CallerView, path: Path, mode: int, exist_ok: bool) -> None:
    """`os.makedirs`. Raises: EEXIST."""
    text = os.fsencode(path).rstrip(b"/") or b"/"
    words = text.split(b"/")
    for count in range(1, len(words) + 1):
        part = b"/".join(words[:count])
        if words[count - 1] in (b"", b".", b".."):
            continue
        last = count == len(words)
        place = view.place(part)
        if place.attr is None:
            try:
                view.entry(view.vfs.mkdir(view.caller, place.parent, place.name, mode, view.umask))
                continue
            except FileExistsError:
                place = view.place(part)  # another client was faster
        if last and (not exist_ok or not place.found().is_dir):
            raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))


def rename(view: CallerView, old: Path, new: Path, flags: int = 0) -> None:
    """renameat2(2)."""
    source, target = view.target(old), view.target(new)
    source.found()
    view.vfs.rename(view.caller, source.parent, source.name, target.parent, target.name, flags)


def unlink(view: CallerView, path: Path) -> None:
    """unlink(2). Raises: ENOENT, EISDIR."""
    place = view.target(path)
    if place.found().is_dir:
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    view.vfs.unlink(view.caller, place.parent, place.name)


def rmdir(view: CallerView, path: Path) -> None:
    """rmdir(2). Raises: ENOENT, ENOTDIR, ENOTEMPTY."""
    place = view.target(path)
    if not place.found().is_dir:
        raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    view.vfs.rmdir(view.caller, place.parent, place.name)


def rmtree(view: CallerView, path: Path) -> int:
    """Remove a directory and everything below; how many names. Links are removed, not followed.

    What another client makes meanwhile leads to ENOTEMPTY. Raises: ENOTDIR, EACCES.
    """
    place = view.target(path)
    top = place.found()
    if not top.is_dir:
        raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    removed = 0
    todo: list[tuple[Ino, bytes, Ino, bool]] = [(place.parent, place.name, top.ino, False)]
    while todo:
        parent, name, ino, emptied = todo.pop()
        if emptied:
            view.vfs.rmdir(view.caller, parent, name)
            removed += 1
            continue
        todo.append((parent, name, ino, True))
        for dentry, _ in list(entries(view, ino, attrs=False)):
            if dentry.type is FileType.DIR:
                todo.append((ino, dentry.name, dentry.ino, False))
                continue
            try:
                view.vfs.unlink(view.caller, ino, dentry.name)
                removed += 1
            except FileNotFoundError:
                pass  # another client was faster
    return removed


def link(view: CallerView, path: Path, new: Path) -> None:
    """link(2); a symbolic link at the end of `path` is not followed."""
    attr = view.find(path, follow=False)
    place = view.target(new)
    view.entry(view.vfs.link(view.caller, attr.ino, place.parent, place.name))


def symlink(view: CallerView, target: Path, path: Path) -> None:
    """symlink(2)."""
    place = view.target(path)
    text = os.fsencode(target)
    view.entry(view.vfs.symlink(view.caller, place.parent, place.name, text))


def readlink(view: CallerView, path: Path) -> str:
    """readlink(2). Raises: EINVAL."""
    attr = view.find(path, follow=False)
    if attr.type is not FileType.LNK:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    return os.fsdecode(view.vfs.readlink(view.caller, attr.ino))


def setattr_(view: CallerView, path: Path, want: SetAttr, follow: bool) -> None:
    """chmod(2), chown(2), utimensat(2), truncate(2)."""
    attr = view.find(path, follow)
    if want.size is not None and attr.is_dir:
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    owner = want.uid is not None or want.gid is not None
    if (owner and not attr.is_dir) or (want.size is not None and view.kills):
        want = want._replace(kill_suid=True)
    if want.mode is not None and attr.type is FileType.LNK:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    view.vfs.setattr(view.caller, attr.ino, want, None)


def statvfs_result(found: StatFs) -> os.statvfs_result:
    """Usage and limits as `os.statvfs` has them."""
    space = found.space_limit or found.space_used + _UNLIMITED
    inodes = found.inodes_limit or found.inodes_used + _INODES
    blocks = space // _BLOCK_BYTES
    free = max(0, space - found.space_used) // _BLOCK_BYTES
    left = max(0, inodes - found.inodes_used)
    sizes = (_BLOCK_BYTES, _BLOCK_BYTES, blocks, free, free, inodes, left, left)
    return os.statvfs_result((*sizes, 0, 255))


def is_regular(attr: Attr) -> bool:
    """Whether it is a plain file."""
    return stat.S_ISREG(attr.mode)

"""The kernel's part of open, read, write and truncate above a `FileSystem`."""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass, field

from fsclient.kernel.contract import FileSystem, SetAttr, WriteHow
from fsmeta.types import Attr, Caller, Ino
from tests.model.fswalk import Found, FsWalk, Place
from tests.model.inodes import STICKY, R, W, fail
from tests.model.ops import KEEP_SIZE, PUNCH_HOLE
from tests.model.tree import LastKind, Sysctls

_NOT_PASSED_ON = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_DIRECTORY


@dataclass(slots=True)
class FsHandle:
    """An open file; `fh` only for files and directories."""

    attr: Attr  # at open; only what never changes is used
    readable: bool
    writable: bool
    append: bool
    fh: int = -1
    held: list[Ino] = field(default_factory=list)  # to be forgotten at close

    @property
    def is_pipe(self) -> bool:
        return stat.S_ISFIFO(self.attr.mode)


class Opener:
    """One open(2) by one caller."""

    def __init__(
        self, fs: FileSystem, caller: Caller, sysctls: Sysctls, others: list[FsHandle]
    ) -> None:
        self._fs = fs
        self._caller = caller
        self._sysctls = sysctls
        self._others = others  # all that is open, for pipes
        self._held: list[Ino] = []

    def open(self, path: bytes, flags: int, mode: int, umask: int = 0) -> FsHandle:
        """Raises: what open(2) says; nothing is held then."""
        try:
            return self._open(path, flags, mode, umask)
        except BaseException:
            forget(self._fs, self._held)
            raise

    def _open(self, path: bytes, flags: int, mode: int, umask: int) -> FsHandle:
        walk = FsWalk(self._fs, self._caller, self._sysctls, self._held)
        if flags & os.O_CREAT:
            place, found = self._last(walk, path, flags)
            if found is None:
                return self._create(place, flags, mode, umask)
            self._may_create(place, found, flags)
        else:
            found = walk.end(path, follow=not flags & os.O_NOFOLLOW)
            if flags & os.O_DIRECTORY and not found.is_dir:
                fail(errno.ENOTDIR)
        return self._open_found(found.attr, flags)

    def _last(self, walk: FsWalk, path: bytes, flags: int) -> tuple[Place, Found | None]:
        place = walk.parent(path)
        while True:
            if place.kind is LastKind.NORM and place.slash:
                walk.search(place)
                fail(errno.EISDIR)
            found = walk.find(place)
            if found is None or not found.is_link or flags & (os.O_EXCL | os.O_NOFOLLOW):
                return place, found
            place = walk.follow(place, found.attr)

    def _create(self, place: Place, flags: int, mode: int, umask: int) -> FsHandle:
        mode = stat.S_IFREG | stat.S_IMODE(mode)
        kill_suid = self._caller.uid != 0
        entry, opened = self._fs.create(
            self._caller, place.parent, place.name, mode, flags, kill_suid, umask
        )
        assert entry.attr is not None
        self._held.append(entry.attr.ino)
        return self._handle(entry.attr, flags, opened.fh)

    def _may_create(self, place: Place, found: Found, flags: int) -> None:
        """O_CREAT of what exists; may_create_in_sticky()."""
        if flags & os.O_EXCL:
            fail(errno.EEXIST)
        if found.is_dir:
            fail(errno.EISDIR)
        parent = self._fs.getattr(self._caller, place.parent, None).attr
        sysctls = self._sysctls
        level = {stat.S_IFREG: sysctls.regular, stat.S_IFIFO: sysctls.fifos}.get(found.kind)
        mine = found.attr.uid in (parent.uid, self._caller.uid)
        if not parent.mode & STICKY or level == 0 or mine:
            return
        if parent.mode & 0o002 or (parent.mode & 0o020 and level is not None and level >= 2):
            fail(errno.EACCES)

    def _open_found(self, attr: Attr, flags: int) -> FsHandle:
        """may_open(), then the file's own open."""
        access = flags & os.O_ACCMODE
        wants = (R if access != os.O_WRONLY else 0) | (W if access != os.O_RDONLY else 0)
        if stat.S_ISLNK(attr.mode):
            fail(errno.ELOOP)
        if attr.is_dir:
            if wants & W or flags & os.O_TRUNC:
                fail(errno.EISDIR)
            return self._handle(
                attr, flags, self._fs.directories.opendir(self._caller, attr.ino).fh
            )
        if stat.S_ISREG(attr.mode):
            kill_suid = self._caller.uid != 0
            opened = self._fs.open(self._caller, attr.ino, flags & ~_NOT_PASSED_ON, kill_suid)
            return self._handle(attr, flags, opened.fh)
        self._fs.access(self._caller, attr.ino, wants | (W if flags & os.O_TRUNC else 0))
        read_elsewhere = any(h.attr.ino == attr.ino and h.readable for h in self._others)
        if not stat.S_ISFIFO(attr.mode) or (access == os.O_WRONLY and not read_elsewhere):
            fail(errno.ENXIO)
        return self._handle(attr, flags, -1)

    def _handle(self, attr: Attr, flags: int, fh: int) -> FsHandle:
        access = flags & os.O_ACCMODE
        return FsHandle(
            attr,
            access != os.O_WRONLY,
            access != os.O_RDONLY,
            bool(flags & os.O_APPEND),
            fh,
            self._held,
        )


def forget(fs: FileSystem, held: list[Ino]) -> None:
    """Take lookups back."""
    for ino in held:
        fs.forget(ino, 1)
    held.clear()


def close(fs: FileSystem, caller: Caller, handle: FsHandle) -> None:
    """close(2); the handle is gone even where it fails."""
    ino = handle.attr.ino
    try:
        if handle.attr.is_dir:
            fs.directories.releasedir(ino, handle.fh)
        elif handle.fh >= 0:
            try:
                fs.flush(caller, ino, handle.fh)
            finally:
                fs.release(ino, handle.fh)
    finally:
        forget(fs, handle.held)


def read(fs: FileSystem, caller: Caller, handle: FsHandle, offset: int, size: int) -> bytes:
    """pread(2)."""
    _check(handle, offset, handle.readable)
    if handle.attr.is_dir:
        fail(errno.EISDIR)
    return b"".join(fs.read(caller, handle.attr.ino, handle.fh, offset, size)) if size else b""


def write(fs: FileSystem, caller: Caller, handle: FsHandle, offset: int, data: bytes) -> int:
    """pwrite(2); the kernel puts an append at the size it knows."""
    _check(handle, offset, handle.writable)
    if not data:
        return 0
    ino = handle.attr.ino
    if handle.append:
        offset = fs.getattr(caller, ino, handle.fh).attr.size
    how = WriteHow(kill_suid=caller.uid != 0, append=handle.append)
    return fs.write(caller, ino, handle.fh, offset, memoryview(data), how)


def _check(handle: FsHandle, offset: int, able: bool) -> None:
    if offset < 0:
        fail(errno.EINVAL)
    if handle.is_pipe:
        fail(errno.ESPIPE)
    if not able:
        fail(errno.EBADF)


def truncate(fs: FileSystem, caller: Caller, attr: Attr, size: int) -> None:
    """truncate(2)."""
    if attr.is_dir:
        fail(errno.EISDIR)
    if not stat.S_ISREG(attr.mode):
        fail(errno.EINVAL)
    fs.setattr(caller, attr.ino, SetAttr(size=size, kill_suid=caller.uid != 0), None)


def ftruncate(fs: FileSystem, caller: Caller, handle: FsHandle, size: int) -> None:
    """ftruncate(2)."""
    if not stat.S_ISREG(handle.attr.mode) or not handle.writable:
        fail(errno.EINVAL)
    want = SetAttr(size=size, kill_suid=caller.uid != 0)
    fs.setattr(caller, handle.attr.ino, want, handle.fh)


def fallocate(
    fs: FileSystem, caller: Caller, handle: FsHandle, mode: int, place: tuple[int, int]
) -> None:
    """fallocate(2) at (offset, length); what the file system does not know it refuses itself."""
    offset, length = place
    if offset < 0 or length <= 0:
        fail(errno.EINVAL)
    if mode & PUNCH_HOLE and not mode & KEEP_SIZE:
        fail(errno.EOPNOTSUPP)
    if not handle.writable:
        fail(errno.EBADF)
    if handle.is_pipe:
        fail(errno.ESPIPE)
    ino = handle.attr.ino
    if caller.uid != 0 and fs.getattr(caller, ino, handle.fh).attr.mode & (
        stat.S_ISUID | stat.S_ISGID
    ):
        fs.setattr(caller, ino, SetAttr(kill_suid=True, opened=True), handle.fh)  # file_modified()
    fs.ranges.fallocate(caller, ino, handle.fh, mode, offset, length)

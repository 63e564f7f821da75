"""A `FileSystem` as a driver, without a kernel: `FsDriver` does what the kernel would do above it.

Paths are walked by `lookup` (`fswalk`), open files kept here (`fsfiles`), and each lookup is taken
back by `forget`. Callers are not `checked`, so the file system judges all permissions itself.
Errors of the store are no answers: they come out of `run` as they are.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from typing import assert_never

from fsclient.kernel.contract import FileSystem, SetAttr
from fsmeta.types import Attr, Caller, Ino
from tests.model import fsfiles, ops as o
from tests.model.attributes import USER_PREFIX, check_xattr
from tests.model.drivers import Driver, wipe
from tests.model.fsfiles import FsHandle, Opener, forget
from tests.model.fsnames import FsNames
from tests.model.fswalk import Found
from tests.model.inodes import FIXED, STICKY, fail
from tests.model.ops import Op, Result, Slot, Target, User, Value
from tests.model.syscalls import is_comparable
from tests.model.tree import Sysctls

READDIR_PAGE = 3  # entries taken before the listing is continued by cookie


class FsDriver:
    """Runs operations on `fs`. With `bare`, verbs are called without the kernel's own lookups."""

    def __init__(
        self,
        fs: FileSystem,
        sysctls: Sysctls | None = None,
        bare: bool = False,
        name: str = "fs",
    ) -> None:
        self.name = name
        self._fs = fs
        self._sysctls = sysctls or Sysctls()
        self._bare = bare
        self._handles: dict[tuple[User, Slot], FsHandle] = {}

    def run(self, user: User, op: Op) -> Result:
        held: list[Ino] = []
        one = _One(self._fs, user, self._sysctls, self._bare, held, self._handles)
        try:
            return Result(0, one.perform(op))
        except OSError as error:
            return Result(error.errno or errno.EIO)
        finally:
            forget(self._fs, held)

    def reset(self) -> None:
        self._close_all()
        wipe(self)

    def _close_all(self) -> None:
        for user, slot in list(self._handles):
            self.run(user, o.Close(slot))

    def close(self) -> None:
        """Close all slots; the file system is the caller's."""
        self._close_all()


class _One:
    """One operation."""

    def __init__(
        self,
        fs: FileSystem,
        user: User,
        sysctls: Sysctls,
        bare: bool,
        held: list[Ino],
        handles: dict[tuple[User, Slot], FsHandle],
    ) -> None:
        self._fs = fs
        self._user = user
        self._caller = Caller(user.uid, user.gid, user.groups)
        self._sysctls = sysctls
        self._handles = handles
        self._names = FsNames(fs, self._caller, sysctls, bare, held)

    def perform(self, op: Op) -> Value:
        match op:
            case o.Open(slot, path, flags, mode, umask):
                if (self._user, slot) in self._handles:
                    self._close(slot)
                self._handles[self._user, slot] = self._open(path, flags, mode, umask)
            case o.Close(slot):
                self._close(slot)
            case o.Read(file, offset, size):
                return self._read(file, offset, size)
            case o.Write(file, offset, data):
                return self._write(file, offset, data)
            case o.Truncate(file, size):
                self._truncate(file, size)
            case o.Fallocate(slot, mode, offset, length):
                place = offset, length
                fsfiles.fallocate(self._fs, self._caller, self._handle(slot), mode, place)
            case o.SetXattr() | o.GetXattr() | o.ListXattr() | o.RemoveXattr():
                return self._xattr(op)
            case o.GetFlags() | o.SetFlags():
                return self._flags(op)
            case o.Mkdir() | o.Rmdir() | o.Mknod() | o.Symlink() | o.Link() | o.Unlink():
                self._change_names(op)
            case o.Rename(old, new, flags):
                self._names.rename(old, new, flags)
            case _:
                return self._attribute(op)
        return None

    # --- open files

    def _open(self, path: bytes, flags: int, mode: int = 0, umask: int = 0) -> FsHandle:
        others = list(self._handles.values())
        opener = Opener(self._fs, self._caller, self._sysctls, others)
        return opener.open(path, flags, mode, umask)

    def _handle(self, slot: Slot) -> FsHandle:
        return self._handles.get((self._user, slot)) or fail(errno.EBADF)

    def _close(self, slot: Slot) -> None:
        handle = self._handle(slot)
        del self._handles[self._user, slot]
        fsfiles.close(self._fs, self._caller, handle)

    def _read(self, file: Target, offset: int, size: int) -> bytes:
        if not isinstance(file, bytes):
            return fsfiles.read(self._fs, self._caller, self._handle(file), offset, size)
        handle = self._open(file, os.O_RDONLY)
        try:
            return fsfiles.read(self._fs, self._caller, handle, offset, size)
        finally:
            fsfiles.close(self._fs, self._caller, handle)

    def _write(self, file: Target, offset: int, data: bytes) -> int:
        if not isinstance(file, bytes):
            return fsfiles.write(self._fs, self._caller, self._handle(file), offset, data)
        handle = self._open(file, os.O_WRONLY)
        try:
            return fsfiles.write(self._fs, self._caller, handle, offset, data)
        finally:
            fsfiles.close(self._fs, self._caller, handle)

    def _truncate(self, file: Target, size: int) -> None:
        handle = None if isinstance(file, bytes) else self._handle(file)
        if size < 0:
            fail(errno.EINVAL)
        if handle is not None:
            fsfiles.ftruncate(self._fs, self._caller, handle, size)
        elif isinstance(file, bytes):
            fsfiles.truncate(self._fs, self._caller, self._end(file).attr, size)

    # --- names and attributes

    def _end(self, path: bytes, follow: bool = True) -> Found:
        return self._names.walk().end(path, follow)

    def _change_names(
        self, op: o.Mkdir | o.Rmdir | o.Mknod | o.Symlink | o.Link | o.Unlink
    ) -> None:
        match op:
            case o.Mkdir(path, mode, umask):
                self._names.mkdir(path, mode, umask)
            case o.Rmdir(path):
                self._names.rmdir(path)
            case o.Mknod(path, mode, rdev, umask):
                self._names.mknod(path, mode, rdev, umask)
            case o.Symlink(target, path):
                self._names.symlink(target, path)
            case o.Link(old, new):
                self._names.link(old, new)
            case o.Unlink(path):
                self._names.unlink(path)
            case _:
                assert_never(op)

    def _attribute(
        self,
        op: o.Chmod | o.Chown | o.Utimens | o.Stat | o.Access | o.Listdir | o.Readlink | o.Stamp,
    ) -> Value:
        match op:
            case o.Chmod(file, mode):
                self._setattr(self._attr(file).ino, SetAttr(mode=stat.S_IMODE(mode)))
            case o.Chown(path, uid, gid, follow):
                ids = [None if number == -1 else number for number in (uid, gid)]
                self._setattr(self._attr(path, follow).ino, SetAttr(uid=ids[0], gid=ids[1]))
            case o.Utimens():
                return self._utimens(op)
            case o.Stat(file, follow):
                return _stat_value(self._attr(file, follow))
            case o.Access(path, mask):
                ino = self._end(path).attr.ino
                if mask:
                    self._fs.access(self._caller, ino, mask)
            case o.Listdir(path):
                return self._listdir(self._end(path))
            case o.Readlink(path):
                found = self._end(path, follow=False)
                if not found.is_link:
                    fail(errno.EINVAL)
                return self._fs.readlink(self._caller, found.attr.ino)
            case o.Stamp(path):
                attr = self._attr(path, follow=False)
                return o.StampValue(attr.ino, attr.mtime_ns, attr.ctime_ns)
            case _:
                assert_never(op)
        return None

    def _attr(self, file: Target, follow: bool = True) -> Attr:
        """Fresh attributes of a path or slot."""
        if isinstance(file, bytes):
            return self._fs.getattr(self._caller, self._end(file, follow).attr.ino, None).attr
        handle = self._handle(file)
        regular = stat.S_ISREG(handle.attr.mode)
        fh = handle.fh if regular else None
        return self._fs.getattr(self._caller, handle.attr.ino, fh).attr

    def _setattr(self, ino: Ino, want: SetAttr) -> Attr:
        return self._fs.setattr(self._caller, ino, want, None).attr

    def _utimens(self, op: o.Utimens) -> Value:
        if op.atime == op.mtime == o.OMIT:
            return o.TimesValue(None, None)
        want = SetAttr(
            atime_ns=op.atime if op.atime >= 0 else None,
            mtime_ns=op.mtime if op.mtime >= 0 else None,
            atime_now=op.atime == o.NOW,
            mtime_now=op.mtime == o.NOW,
        )
        attr = self._setattr(self._end(op.path, op.follow).attr.ino, want)
        atime = o.explicit(attr.atime_ns) if op.atime >= 0 else None
        return o.TimesValue(atime, o.explicit(attr.mtime_ns))

    def _listdir(self, found: Found) -> tuple[bytes, ...]:
        """Page by page, as a small buffer would make the kernel do."""
        if not found.is_dir:
            fail(errno.ENOTDIR)
        ino = found.attr.ino
        fh = self._fs.directories.opendir(self._caller, ino).fh
        names: list[bytes] = []
        cookies: Sequence[int] = [0]
        try:
            while cookies:
                at = cookies[-1]
                page, cookies = self._fs.directories.readdir(
                    self._caller, ino, fh, at, READDIR_PAGE
                )
                names += [name for name, _, _ in page]
        finally:
            self._fs.directories.releasedir(ino, fh)
        return tuple(sorted(name for name in names if name not in (b".", b"..")))

    def _xattr(self, op: o.SetXattr | o.GetXattr | o.ListXattr | o.RemoveXattr) -> Value:
        if not isinstance(op, o.ListXattr):
            check_xattr(op)
        attr = self._end(op.path, op.follow).attr
        if not isinstance(op, o.ListXattr):
            self._may_xattr(attr, op.name, changes=not isinstance(op, o.GetXattr))
        match op:
            case o.SetXattr(_, name, value, flags):
                self._fs.xattrs.setxattr(self._caller, attr.ino, name, value, flags)
            case o.GetXattr(_, name):
                return self._fs.xattrs.getxattr(self._caller, attr.ino, name)
            case o.ListXattr():
                names = self._fs.xattrs.listxattr(self._caller, attr.ino)
                return tuple(sorted(filter(is_comparable, names)))
            case o.RemoveXattr(_, name):
                self._fs.xattrs.removexattr(self._caller, attr.ino, name)
            case _:
                assert_never(op)
        return None

    def _flags(self, op: o.GetFlags | o.SetFlags) -> Value:
        """As chattr(1): what is opened for it."""
        handle = self._open(op.path, os.O_RDONLY)
        try:
            if handle.is_pipe:
                fail(errno.ENOTTY)
            if isinstance(op, o.GetFlags):
                return self._fs.xattrs.getflags(self._caller, handle.attr.ino)
            self._fs.xattrs.setflags(self._caller, handle.attr.ino, op.flags)
        finally:
            fsfiles.close(self._fs, self._caller, handle)
        return None

    def _may_xattr(self, attr: Attr, name: bytes, changes: bool) -> None:
        """What xattr_permission() says of user.* before it asks for rights."""
        if not name.startswith(USER_PREFIX):
            return
        if not attr.is_dir and not stat.S_ISREG(attr.mode):
            fail(errno.EPERM if changes else errno.ENODATA)
        if changes and attr.flags & FIXED:
            fail(errno.EPERM)
        strange = self._caller.uid not in (0, attr.uid)
        if attr.is_dir and attr.mode & STICKY and changes and strange:
            fail(errno.EPERM)


def _stat_value(attr: Attr) -> o.StatValue:
    kind = stat.S_IFMT(attr.mode)
    return o.StatValue(
        type=kind,
        perm=stat.S_IMODE(attr.mode),
        nlink=attr.nlink,
        uid=attr.uid,
        gid=attr.gid,
        size=0 if attr.is_dir else attr.size,
        rdev=attr.rdev if kind in (stat.S_IFCHR, stat.S_IFBLK) else 0,
        mtime=o.explicit(attr.mtime_ns),
    )


_CONFORMS: type[Driver] = FsDriver

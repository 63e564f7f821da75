"""The language of `ops` spoken to the kernel: each operation as the system calls it stands for.

Runs in helper processes (see `helper`), whose root directory and user are already the right ones.
`ctypes` only where `os` can't say it: renameat2, UTIME_NOW and UTIME_OMIT, the errno of access.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import assert_never

from tests.model import ops as o
from tests.model.inodes import FLAGS
from tests.model.ops import Op, Result, Slot, Target, Value

_LIBC = ctypes.CDLL(None, use_errno=True)
_AT_FDCWD = -100
_AT_SYMLINK_NOFOLLOW = 0x100
FS_IOC_GETFLAGS = 0x80086601  # linux/fs.h
FS_IOC_SETFLAGS = 0x40086602
CTIME_S = 20.0  # a FUSE kernel is told of it a moment after the ioctl, whose answer has no room


class _Timespec(ctypes.Structure):
    _fields_ = (("sec", ctypes.c_int64), ("nsec", ctypes.c_int64))


_long = ctypes.c_long


def _check(answer: int) -> None:
    if answer < 0:
        raise OSError(ctypes.get_errno(), "libc")


class Kernel:
    """Runs operations as the user this process is; keeps the user's slots."""

    def __init__(self) -> None:
        self._fds: dict[Slot, int] = {}

    def run(self, op: Op) -> Result:
        try:
            return Result(0, self._perform(op))
        except OSError as error:
            return Result(error.errno or errno.EIO)

    def close_all(self) -> None:
        for slot in list(self._fds):
            self._close(slot)

    def _close(self, slot: Slot) -> None:
        os.close(self._fd(slot))
        del self._fds[slot]

    def _fd(self, slot: Slot) -> int:
        if slot not in self._fds:
            raise OSError(errno.EBADF, "empty slot")
        return self._fds[slot]

    def _place(self, file: Target) -> bytes | int:
        return file if isinstance(file, bytes) else self._fd(file)

    def _perform(self, op: Op) -> Value:
        match op:
            case o.Open(slot, path, flags, mode, umask):
                if slot in self._fds:
                    self._close(slot)
                with _umask(umask):
                    self._fds[slot] = os.open(path, flags | os.O_NONBLOCK, mode)
            case o.Close(slot):
                self._close(slot)
            case o.Read(file, offset, size):
                return self._read(file, offset, size)
            case o.Write(file, offset, data):
                return self._write(file, offset, data)
            case o.Truncate(file, size):
                os.truncate(self._place(file), size)
            case o.Fallocate(slot, mode, offset, length):
                _check(_LIBC.fallocate(self._fd(slot), mode, _long(offset), _long(length)))
            case o.Chmod(file, mode):
                os.chmod(self._place(file), mode)
            case o.Stat(file, follow):
                if isinstance(file, bytes):
                    return o.stat_value(os.stat(file, follow_symlinks=follow))
                return o.stat_value(os.fstat(self._fd(file)))
            case o.SetXattr() | o.GetXattr() | o.ListXattr() | o.RemoveXattr():
                return _xattr(op)
            case o.GetFlags(path):
                return get_flags(path)
            case o.SetFlags(path, flags):
                set_flags(path, flags)
            case o.Chown() | o.Utimens() | o.Access() | o.Listdir() | o.Readlink() | o.Stamp():
                return _attribute(op)
            case _:
                _change_names(op)
        return None

    def _read(self, file: Target, offset: int, size: int) -> bytes:
        if not isinstance(file, bytes):
            return os.pread(self._fd(file), size, offset)
        fd = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
        try:
            return os.pread(fd, size, offset)
        finally:
            os.close(fd)

    def _write(self, file: Target, offset: int, data: bytes) -> int:
        if not isinstance(file, bytes):
            return os.pwrite(self._fd(file), data, offset)
        fd = os.open(file, os.O_WRONLY | os.O_NONBLOCK)
        try:
            return os.pwrite(fd, data, offset)
        finally:
            os.close(fd)


def _change_names(
    op: o.Mkdir | o.Rmdir | o.Mknod | o.Symlink | o.Link | o.Unlink | o.Rename,
) -> None:
    match op:
        case o.Mkdir(path, mode, umask):
            with _umask(umask):
                os.mkdir(path, mode)
        case o.Rmdir(path):
            os.rmdir(path)
        case o.Mknod(path, mode, rdev, umask):
            with _umask(umask):
                os.mknod(path, mode, rdev)
        case o.Symlink(target, path):
            os.symlink(target, path)
        case o.Link(old, new):
            os.link(old, new)
        case o.Unlink(path):
            os.unlink(path)
        case o.Rename(old, new, flags):
            _check(_LIBC.renameat2(_AT_FDCWD, old, _AT_FDCWD, new, flags))
        case _:
            assert_never(op)


def _attribute(
    op: o.Chown | o.Utimens | o.Access | o.Listdir | o.Readlink | o.Stamp,
) -> Value:
    match op:
        case o.Chown(path, uid, gid, follow):
            os.chown(path, uid, gid, follow_symlinks=follow)
        case o.Utimens():
            return _utimens(op)
        case o.Access(path, mask):
            _check(_LIBC.access(path, mask))
        case o.Listdir(path):
            return tuple(sorted(os.listdir(path)))
        case o.Readlink(path):
            return os.readlink(path)
        case o.Stamp(path):
            status = os.lstat(path)
            return o.StampValue(status.st_ino, status.st_mtime_ns, status.st_ctime_ns)
        case _:
            assert_never(op)
    return None


def _timespec(time_ns: int) -> _Timespec:
    special = {o.NOW: o.UTIME_NOW, o.OMIT: o.UTIME_OMIT}.get(time_ns)
    if special is not None:
        return _Timespec(0, special)
    return _Timespec(*divmod(time_ns, 10**9))


def _utimens(op: o.Utimens) -> Value:
    times = (_Timespec * 2)(_timespec(op.atime), _timespec(op.mtime))
    flags = 0 if op.follow else _AT_SYMLINK_NOFOLLOW
    _check(_LIBC.utimensat(_AT_FDCWD, op.path, times, flags))
    if op.atime == op.mtime == o.OMIT:
        return o.TimesValue(None, None)
    status = os.stat(op.path, follow_symlinks=op.follow)
    atime = o.explicit(status.st_atime_ns) if op.atime >= 0 else None
    return o.TimesValue(atime, o.explicit(status.st_mtime_ns))


def _xattr(op: o.SetXattr | o.GetXattr | o.ListXattr | o.RemoveXattr) -> Value:
    match op:
        case o.SetXattr(path, name, value, flags, follow):
            os.setxattr(path, name, value, flags, follow_symlinks=follow)
        case o.GetXattr(path, name, follow):
            return os.getxattr(path, name, follow_symlinks=follow)
        case o.ListXattr(path, follow):
            found = (os.fsencode(name) for name in os.listxattr(path, follow_symlinks=follow))
            return tuple(sorted(filter(is_comparable, found)))
        case o.RemoveXattr(path, name, follow):
            os.removexattr(path, name, follow_symlinks=follow)
        case _:
            assert_never(op)
    return None


def is_comparable(name: bytes) -> bool:
    """Whether an xattr is one that all file systems must agree on."""
    return name.startswith((b"user.", b"system.posix_acl_"))


@contextmanager
def _umask(mask: int) -> Iterator[None]:
    os.umask(mask)
    try:
        yield
    finally:
        os.umask(0)


def get_flags(path: bytes) -> int:
    """FS_IOC_GETFLAGS: those flags that all file systems must agree on."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        return _all_flags(fd) & FLAGS
    finally:
        os.close(fd)


def set_flags(path: bytes, flags: int) -> None:
    """FS_IOC_SETFLAGS; what a file system has for itself (ext4: extents) stays as it is."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        flags |= _all_flags(fd) & ~FLAGS
        before = os.fstat(fd).st_ctime_ns
        fcntl.ioctl(fd, FS_IOC_SETFLAGS, flags.to_bytes(8, sys.byteorder))
        give_up = time.monotonic() + CTIME_S
        while os.fstat(fd).st_ctime_ns == before and time.monotonic() < give_up:
            pass
    finally:
        os.close(fd)


def _all_flags(fd: int) -> int:
    flags = bytearray(8)  # the ioctl says that it takes a long, and takes an int
    fcntl.ioctl(fd, FS_IOC_GETFLAGS, flags)
    return int.from_bytes(flags[:4], sys.byteorder)


def _release() -> None:
    """Take all flags from what can't be removed with them."""
    for directory, _, files in os.walk(b"/"):
        set_flags(directory, 0)
        for name in files:
            path = os.path.join(directory, name)
            if stat.S_ISREG(os.lstat(path).st_mode):
                set_flags(path, 0)


def wipe() -> None:
    """Empty the root directory and give it back its first mode and owner. Root only."""
    try:
        _empty()
    except PermissionError:
        _release()
        _empty()
    try:
        if get_flags(b"/"):
            set_flags(b"/", 0)
    except OSError as error:
        if error.errno != errno.ENOTTY:  # there are none
            raise
    for entry in os.listxattr(b"/"):
        if is_comparable(os.fsencode(entry)):
            os.removexattr(b"/", entry)
    os.chown(b"/", 0, 0)
    os.chmod(b"/", 0o777)
    os.utime(b"/")


def _empty() -> None:
    for directory, names, files in os.walk(b"/", topdown=False):
        for name in files:
            os.unlink(os.path.join(directory, name))
        for name in names:
            path = os.path.join(directory, name)
            (os.unlink if stat.S_ISLNK(os.lstat(path).st_mode) else os.rmdir)(path)

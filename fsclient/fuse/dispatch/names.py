"""Requests about names and attributes: the rows of the opcode table and their handlers.

Called through the table in `fuse/dispatch`. Each `_parse_*` turns a request's body into the
arguments of its handler; each handler calls one method of the file system and packs what it
answers.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from typing import Final

from fsclient.fuse.wire import abi, pack
from fsclient.fuse.wire.operation import Operation
from fsclient.fuse.wire.parse import BODY, name_at, no_args, one_name, split_at
from fsclient.fuse.wire.protocol import (
    FATTR_ATIME,
    FATTR_ATIME_NOW,
    FATTR_FH,
    FATTR_GID,
    FATTR_KILL_SUIDGID,
    FATTR_MODE,
    FATTR_MTIME,
    FATTR_MTIME_NOW,
    FATTR_SIZE,
    FATTR_UID,
    GETATTR_FH,
    Opcode,
)
from fsclient.kernel.contract import FileSystem, SetAttr
from fsmeta.types import NAME_MAX, Caller, Ino

_NOTHING: Final = SetAttr()
_KILL_SUID: Final = SetAttr(kill_suid=True)


def _lookup(fs: FileSystem, caller: Caller, parent: Ino, name: bytes) -> bytes:
    return pack.entry_out(fs.lookup(caller, parent, name))


def _parse_forget(view: memoryview, _end: int) -> tuple[int]:
    (lookups,) = abi.FORGET_IN.unpack_from(view, BODY)
    return (lookups,)


def _forget(fs: FileSystem, _caller: Caller, ino: Ino, lookups: int) -> None:
    fs.forget(ino, lookups)


def _parse_batch_forget(view: memoryview, end: int) -> tuple[list[tuple[int, int]]]:
    (count,) = abi.BATCH_FORGET_IN.unpack_from(view, BODY)
    begin = BODY + abi.BATCH_FORGET_IN.size
    count = min(count, (end - begin) // abi.FORGET_ONE.size)
    ones = view[begin : begin + count * abi.FORGET_ONE.size]
    return ([(ino, lookups) for ino, lookups in abi.FORGET_ONE.iter_unpack(ones)],)


def _batch_forget(
    fs: FileSystem, _caller: Caller, _ino: Ino, forgotten: list[tuple[int, int]]
) -> None:
    for ino, lookups in forgotten:
        fs.forget(Ino(ino), lookups)


def _parse_getattr(view: memoryview, _end: int) -> tuple[int | None]:
    flags, fh = abi.GETATTR_IN.unpack_from(view, BODY)
    return (fh if flags & GETATTR_FH else None,)


def _getattr(fs: FileSystem, caller: Caller, ino: Ino, fh: int | None) -> bytes:
    return pack.attr_out(fs.getattr(caller, ino, fh))


def _parse_statx(view: memoryview, _end: int) -> tuple[int | None]:
    flags, fh, _sx_flags, _sx_mask = abi.STATX_IN.unpack_from(view, BODY)
    return (fh if flags & GETATTR_FH else None,)


def _statx(fs: FileSystem, caller: Caller, ino: Ino, fh: int | None) -> bytes:
    return pack.statx_out(fs.getattr(caller, ino, fh))


def _parse_setattr(view: memoryview, _end: int) -> tuple[SetAttr, int | None]:
    values = abi.SETATTR_IN.unpack_from(view, BODY)
    valid, fh, size, _owner, atime, mtime, _ctime = values[:7]
    atime_nsec, mtime_nsec, _ctime_nsec, mode, uid, gid = values[7:]
    atime_now = bool(valid & FATTR_ATIME_NOW)
    mtime_now = bool(valid & FATTR_MTIME_NOW)
    want = SetAttr(
        mode=mode & 0o7777 if valid & FATTR_MODE else None,
        uid=uid if valid & FATTR_UID else None,
        gid=gid if valid & FATTR_GID else None,
        size=size if valid & FATTR_SIZE else None,
        atime_ns=atime * pack.NS + atime_nsec if valid & FATTR_ATIME and not atime_now else None,
        mtime_ns=mtime * pack.NS + mtime_nsec if valid & FATTR_MTIME and not mtime_now else None,
        atime_now=atime_now,
        mtime_now=mtime_now,
        kill_suid=bool(valid & FATTR_KILL_SUIDGID),
    )
    return want, fh if valid & FATTR_FH else None


def _setattr(fs: FileSystem, caller: Caller, ino: Ino, want: SetAttr, fh: int | None) -> bytes:
    """A request for nothing comes before a write that drops S_ISUID: file_remove_privs().

    The kernel keeps the mode of our answer and asks no more, so the bit must be gone in it, or a
    user that overwrites a program could still run it as its owner. Root keeps the bit.
    """
    if want == _NOTHING and caller.uid != 0:
        want = _KILL_SUID
    return pack.attr_out(fs.setattr(caller, ino, want, fh))


def _readlink(fs: FileSystem, caller: Caller, ino: Ino) -> bytes:
    return fs.readlink(caller, ino)


def _parse_symlink(view: memoryview, end: int) -> tuple[bytes, bytes]:
    name, target = split_at(view, BODY, end)
    return name, target[:-1]


def _symlink(fs: FileSystem, caller: Caller, parent: Ino, name: bytes, target: bytes) -> bytes:
    return pack.entry_out(fs.symlink(caller, parent, name, target))


def _parse_mknod(view: memoryview, end: int) -> tuple[bytes, int, int, int]:
    mode, rdev, umask = abi.MKNOD_IN.unpack_from(view, BODY)
    return name_at(view, BODY + abi.MKNOD_IN.size, end), mode, rdev, umask


def _mknod(
    fs: FileSystem, caller: Caller, parent: Ino, name: bytes, mode: int, rdev: int, umask: int
) -> bytes:
    return pack.entry_out(fs.mknod(caller, parent, name, mode, rdev, umask))


def _parse_mkdir(view: memoryview, end: int) -> tuple[bytes, int, int]:
    mode, umask = abi.MKDIR_IN.unpack_from(view, BODY)
    return name_at(view, BODY + abi.MKDIR_IN.size, end), mode, umask


def _mkdir(
    fs: FileSystem, caller: Caller, parent: Ino, name: bytes, mode: int, umask: int
) -> bytes:
    return pack.entry_out(fs.mkdir(caller, parent, name, mode, umask))


def _parse_link(view: memoryview, end: int) -> tuple[int, bytes]:
    (ino,) = abi.LINK_IN.unpack_from(view, BODY)
    return ino, name_at(view, BODY + abi.LINK_IN.size, end)


def _link(fs: FileSystem, caller: Caller, parent: Ino, ino: int, name: bytes) -> bytes:
    return pack.entry_out(fs.link(caller, Ino(ino), parent, name))


def _unlink(fs: FileSystem, caller: Caller, parent: Ino, name: bytes) -> bytes:
    fs.unlink(caller, parent, name)
    return b""


def _rmdir(fs: FileSystem, caller: Caller, parent: Ino, name: bytes) -> bytes:
    fs.rmdir(caller, parent, name)
    return b""


def _parse_rename(view: memoryview, end: int) -> tuple[int, int, bytes, bytes]:
    (new_parent,) = abi.RENAME_IN.unpack_from(view, BODY)
    return (new_parent, 0, *_two_names(view, BODY + abi.RENAME_IN.size, end))


def _parse_rename2(view: memoryview, end: int) -> tuple[int, int, bytes, bytes]:
    new_parent, flags = abi.RENAME2_IN.unpack_from(view, BODY)
    return (new_parent, flags, *_two_names(view, BODY + abi.RENAME2_IN.size, end))


def _two_names(view: memoryview, begin: int, end: int) -> tuple[bytes, bytes]:
    name, rest = split_at(view, begin, end)
    if len(rest) - 1 > NAME_MAX:
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
    return name, rest[:-1]


def _rename(
    fs: FileSystem,
    caller: Caller,
    parent: Ino,
    new_parent: int,
    flags: int,
    name: bytes,
    new_name: bytes,
) -> bytes:
    fs.rename(caller, parent, name, Ino(new_parent), new_name, flags)
    return b""


def _parse_access(view: memoryview, _end: int) -> tuple[int]:
    (mask,) = abi.ACCESS_IN.unpack_from(view, BODY)
    return (mask,)


def _access(fs: FileSystem, caller: Caller, ino: Ino, mask: int) -> bytes:
    fs.access(caller, ino, mask)
    return b""


def _statfs(fs: FileSystem, caller: Caller, ino: Ino) -> bytes:
    return pack.statfs_out(fs.statfs(caller, ino))


OPERATIONS: Final[Mapping[Opcode, Operation]] = {
    Opcode.LOOKUP: Operation("lookup", one_name, _lookup),
    Opcode.FORGET: Operation("forget", _parse_forget, _forget, False),
    Opcode.BATCH_FORGET: Operation("batch_forget", _parse_batch_forget, _batch_forget, False),
    Opcode.GETATTR: Operation("getattr", _parse_getattr, _getattr),
    Opcode.STATX: Operation("statx", _parse_statx, _statx),
    Opcode.SETATTR: Operation("setattr", _parse_setattr, _setattr),
    Opcode.READLINK: Operation("readlink", no_args, _readlink),
    Opcode.SYMLINK: Operation("symlink", _parse_symlink, _symlink),
    Opcode.MKNOD: Operation("mknod", _parse_mknod, _mknod),
    Opcode.MKDIR: Operation("mkdir", _parse_mkdir, _mkdir),
    Opcode.LINK: Operation("link", _parse_link, _link),
    Opcode.UNLINK: Operation("unlink", one_name, _unlink),
    Opcode.RMDIR: Operation("rmdir", one_name, _rmdir),
    Opcode.RENAME: Operation("rename", _parse_rename, _rename),
    Opcode.RENAME2: Operation("rename", _parse_rename2, _rename),
    Opcode.ACCESS: Operation("access", _parse_access, _access),
    Opcode.STATFS: Operation("statfs", no_args, _statfs),
}

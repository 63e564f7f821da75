"""Requests about extended attributes: the rows of the opcode table and their handlers.

Called through the table in `fuse/dispatch`. The size of a buffer is the kernel's to tell and ours
to check: 0 asks how many bytes there are, too few is ERANGE.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from typing import Final

from fsclient.fuse.wire import abi
from fsclient.fuse.wire.operation import Operation
from fsclient.fuse.wire.parse import BODY, one_name, split_at
from fsclient.fuse.wire.protocol import SETXATTR_ACL_KILL_SGID, Opcode
from fsclient.kernel.contract import FileSystem
from fsclient.kernel.later import Later
from fsmeta.types import Caller, Ino


def _parse_setxattr(view: memoryview, end: int) -> tuple[bytes, bytes, int, bool]:
    size, flags, setxattr_flags = abi.SETXATTR_IN.unpack_from(view, BODY)
    name, rest = split_at(view, BODY + abi.SETXATTR_IN.size, end)
    return name, rest[:size], flags, bool(setxattr_flags & SETXATTR_ACL_KILL_SGID)


def _parse_setxattr_old(view: memoryview, end: int) -> tuple[bytes, bytes, int, bool]:
    """The request of a kernel without SETXATTR_EXT (before 5.12)."""
    size, flags = abi.SETXATTR_IN_OLD.unpack_from(view, BODY)
    name, rest = split_at(view, BODY + abi.SETXATTR_IN_OLD.size, end)
    return name, rest[:size], flags, False


def _setxattr(
    fs: FileSystem,
    caller: Caller,
    ino: Ino,
    name: bytes,
    value: bytes,
    flags: int,
    kill_sgid: bool,
) -> bytes:
    fs.xattrs.setxattr(caller, ino, name, value, flags, kill_sgid)
    return b""


def _parse_getxattr(view: memoryview, end: int) -> tuple[int, bytes]:
    (size,) = abi.GETXATTR_IN.unpack_from(view, BODY)
    name, _ = split_at(view, BODY + abi.GETXATTR_IN.size, end)
    return size, name


def _getxattr(
    fs: FileSystem, caller: Caller, ino: Ino, size: int, name: bytes
) -> bytes | Later[bytes]:
    later = fs.xattrs.question(caller, ino, name)
    if later is not None:
        return later.map(lambda value: _sized(value(), size))
    return _sized(fs.xattrs.getxattr(caller, ino, name), size)


def _parse_listxattr(view: memoryview, _end: int) -> tuple[int]:
    (size,) = abi.GETXATTR_IN.unpack_from(view, BODY)
    return (size,)


def _listxattr(fs: FileSystem, caller: Caller, ino: Ino, size: int) -> bytes:
    names = fs.xattrs.listxattr(caller, ino)
    return _sized(b"".join(name + b"\0" for name in names), size)


def _sized(value: bytes, size: int) -> bytes:
    """`value`, or its length where that was the question. Raises: ERANGE."""
    if size == 0:
        return abi.GETXATTR_OUT.pack(len(value))
    if len(value) > size:
        raise OSError(errno.ERANGE, os.strerror(errno.ERANGE))
    return value


def _removexattr(fs: FileSystem, caller: Caller, ino: Ino, name: bytes) -> bytes:
    fs.xattrs.removexattr(caller, ino, name)
    return b""


OPERATIONS: Final[Mapping[Opcode, Operation]] = {
    Opcode.SETXATTR: Operation("setxattr", _parse_setxattr, _setxattr),
    Opcode.GETXATTR: Operation("getxattr", _parse_getxattr, _getxattr),
    Opcode.LISTXATTR: Operation("listxattr", _parse_listxattr, _listxattr),
    Opcode.REMOVEXATTR: Operation("removexattr", one_name, _removexattr),
}
SETXATTR_OLD: Final = Operation("setxattr", _parse_setxattr_old, _setxattr)

"""The ioctls of chattr(1) and lsattr(1): the row of the opcode table and its handlers.

Called through the table in `fuse/dispatch`. The kernel knows these ioctls: it has checked owner and
capability, and passes the value itself, not its address. All others are ENOTTY, isatty(3) of each
file that Python opens among them.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from struct import Struct
from typing import Final

from fsclient.fuse.wire import abi
from fsclient.fuse.wire.operation import Operation
from fsclient.fuse.wire.parse import BODY
from fsclient.fuse.wire.protocol import Opcode
from fsclient.kernel.contract import FileSystem
from fsmeta.types import FLAG_APPEND, FLAG_IMMUTABLE, FLAG_NOATIME, FLAG_NODUMP, Caller, Ino

_FLAGS: Final = Struct("=I")
_XATTR: Final = Struct("=IIIII8x")  # fsxattr: xflags extsize nextents projid cowextsize
assert _XATTR.size == 28

_XFLAGS: Final = {  # FS_XFLAG_* by FS_*_FL
    FLAG_IMMUTABLE: 0x08,
    FLAG_APPEND: 0x10,
    FLAG_NOATIME: 0x40,
    FLAG_NODUMP: 0x80,
}
_OUT_BYTES_MAX: Final = 4096  # more than any ioctl here answers
_DONE: Final = abi.IOCTL_OUT.pack(0, 0, 0, 0)


def _parse_ioctl(view: memoryview, end: int) -> tuple[int, bytes, int]:
    _fh, _flags, cmd, _arg, _in_size, out_size = abi.IOCTL_IN.unpack_from(view, BODY)
    return cmd, view[BODY + abi.IOCTL_IN.size : end].tobytes(), out_size


def _ioctl(
    fs: FileSystem, caller: Caller, ino: Ino, cmd: int, given: bytes, out_size: int
) -> bytes:
    match cmd:
        case abi.FS_IOC_GETFLAGS:
            return _value(_FLAGS.pack(fs.xattrs.getflags(caller, ino)), out_size)
        case abi.FS_IOC_FSGETXATTR:
            xflags = sum(_XFLAGS[bit] for bit in _XFLAGS if fs.xattrs.getflags(caller, ino) & bit)
            return _value(_XATTR.pack(xflags, 0, 0, 0, 0), out_size)
        case abi.FS_IOC_SETFLAGS if len(given) >= _FLAGS.size:
            fs.xattrs.setflags(caller, ino, _FLAGS.unpack_from(given)[0])
        case abi.FS_IOC_FSSETXATTR if len(given) >= _XATTR.size:
            fs.xattrs.setflags(caller, ino, _flags_of(given))
        case _:
            raise OSError(errno.ENOTTY, f"ioctl {cmd:#x}")
    return _DONE


def _value(value: bytes, out_size: int) -> bytes:
    """An answer of the length that the kernel has room for."""
    out_size = min(out_size, _OUT_BYTES_MAX)
    return _DONE + value.ljust(out_size, b"\0")[:out_size]


def _flags_of(given: bytes) -> int:
    """Raises: EOPNOTSUPP for what only XFS has: extent sizes, projects."""
    xflags, extsize, _nextents, projid, cowextsize = _XATTR.unpack_from(given)
    if extsize or projid or cowextsize or xflags & ~sum(_XFLAGS.values()):
        raise OSError(errno.EOPNOTSUPP, f"fsxattr with flags {xflags:#x}")
    return sum(bit for bit, xflag in _XFLAGS.items() if xflags & xflag)


OPERATIONS: Final[Mapping[Opcode, Operation]] = {
    Opcode.IOCTL: Operation("ioctl", _parse_ioctl, _ioctl),
}

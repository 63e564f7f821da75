"""How long a request of each opcode is at least: what is shorter was cut on its way.

Called by workers. The kernel of a mount sends nothing shorter; whatever else speaks to us might.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fsclient.fuse.wire import abi
from fsclient.fuse.wire.protocol import OPCODES, Opcode

_NUL: Final = 1  # of a name, which may be empty here
_BODIES: Final[Mapping[Opcode, int]] = {
    Opcode.LOOKUP: _NUL,
    Opcode.FORGET: abi.FORGET_IN.size,
    Opcode.BATCH_FORGET: abi.BATCH_FORGET_IN.size,
    Opcode.GETATTR: abi.GETATTR_IN.size,
    Opcode.SETATTR: abi.SETATTR_IN.size,
    Opcode.STATX: abi.STATX_IN.size,
    Opcode.SYMLINK: 2 * _NUL,
    Opcode.MKNOD: abi.MKNOD_IN.size + _NUL,
    Opcode.MKDIR: abi.MKDIR_IN.size + _NUL,
    Opcode.UNLINK: _NUL,
    Opcode.RMDIR: _NUL,
    Opcode.RENAME: abi.RENAME_IN.size + 2 * _NUL,
    Opcode.RENAME2: abi.RENAME2_IN.size + 2 * _NUL,
    Opcode.LINK: abi.LINK_IN.size + _NUL,
    Opcode.OPEN: abi.OPEN_IN.size,
    Opcode.OPENDIR: abi.OPEN_IN.size,
    Opcode.CREATE: abi.CREATE_IN.size + _NUL,
    Opcode.TMPFILE: abi.CREATE_IN.size,
    Opcode.READ: abi.READ_IN.size,
    Opcode.READDIR: abi.READ_IN.size,
    Opcode.READDIRPLUS: abi.READ_IN.size,
    Opcode.WRITE: abi.WRITE_IN.size,
    Opcode.FLUSH: abi.FLUSH_IN.size,
    Opcode.RELEASE: abi.RELEASE_IN.size,
    Opcode.RELEASEDIR: abi.RELEASE_IN.size,
    Opcode.FSYNC: abi.FSYNC_IN.size,
    Opcode.FSYNCDIR: abi.FSYNC_IN.size,
    Opcode.SETXATTR: abi.SETXATTR_IN_OLD.size + _NUL,
    Opcode.GETXATTR: abi.GETXATTR_IN.size + _NUL,
    Opcode.LISTXATTR: abi.GETXATTR_IN.size,
    Opcode.REMOVEXATTR: _NUL,
    Opcode.ACCESS: abi.ACCESS_IN.size,
    Opcode.INTERRUPT: abi.INTERRUPT_IN.size,
    Opcode.GETLK: abi.LK_IN.size,
    Opcode.SETLK: abi.LK_IN.size,
    Opcode.SETLKW: abi.LK_IN.size,
    Opcode.IOCTL: abi.IOCTL_IN.size,
    Opcode.FALLOCATE: abi.FALLOCATE_IN.size,
    Opcode.LSEEK: abi.LSEEK_IN.size,
    Opcode.COPY_FILE_RANGE: abi.COPY_FILE_RANGE_IN.size,
    Opcode.COPY_FILE_RANGE_64: abi.COPY_FILE_RANGE_IN.size,
}
LEAST: Final = [abi.IN_BYTES] * OPCODES
"""By opcode, the header included."""
for _opcode, _size in _BODIES.items():
    LEAST[_opcode] += _size

UNANSWERED: Final = frozenset((Opcode.FORGET, Opcode.BATCH_FORGET, Opcode.INTERRUPT))

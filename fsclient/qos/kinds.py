"""What requests cost, and what waits for them.

Most requests keep one program waiting. Some keep others waiting, too, because the kernel holds a
lock meanwhile; and some have no program that waits for them by itself, but a place in a queue of
the kernel that all share. Pure functions.
"""

from __future__ import annotations

from enum import Enum
from mmap import PAGESIZE
from os import O_DIRECT
from struct import Struct
from typing import Final

from fsclient.fuse.wire.parse import BODY
from fsclient.fuse.wire.protocol import WRITE_CACHE, Opcode
from fsclient.qos.limiter import RequestCost

PAGES_MINOR: Final = 45  # up to this minor of the kernel's FUSE a page is read by itself
_READ: Final = int(Opcode.READ)
_WRITE: Final = int(Opcode.WRITE)
_SIZE: Final = Struct("=16xI")  # of READ and WRITE
_FLAGS: Final = Struct("=20xI8xI")  # of the same: its own, and those of the open file
# no program waits for them, or they wait for something else, or they end what is held
FREE: Final = frozenset(
    (
        Opcode.FORGET,
        Opcode.BATCH_FORGET,
        Opcode.RELEASE,
        Opcode.RELEASEDIR,
        Opcode.FLUSH,
        Opcode.INTERRUPT,
        Opcode.DESTROY,
        Opcode.INIT,
        Opcode.STATFS,
        Opcode.GETLK,
        Opcode.SETLK,
        Opcode.SETLKW,
    )
)
# whose answer begins with the number of an inode
FOUND: Final = frozenset(
    (
        Opcode.LOOKUP,
        Opcode.CREATE,
        Opcode.MKNOD,
        Opcode.MKDIR,
        Opcode.SYMLINK,
        Opcode.TMPFILE,
    )
)
# they hold the lock of a directory, for which all wait that use a name in it
_NAMES: Final = frozenset(
    (
        *FOUND,
        Opcode.LINK,
        Opcode.UNLINK,
        Opcode.RMDIR,
        Opcode.RENAME,
        Opcode.RENAME2,
        Opcode.READDIR,
        Opcode.READDIRPLUS,
    )
)
_ONE: Final = RequestCost()


class RequestKind(Enum):
    """What waits for a request."""

    PROGRAM = 1  # the one that made it
    LOCKED = 2  # and perhaps others, for a lock of the kernel
    READ_AHEAD = 3  # none by itself
    WRITTEN_MAP = 4  # none by itself; pages of a map are written back


BACKGROUND: Final = (RequestKind.READ_AHEAD, RequestKind.WRITTEN_MAP)


def cost_of(opcode: int, view: memoryview) -> RequestCost:
    """What a request costs, by what it asks for."""
    if opcode == _READ:
        return RequestCost(read=_SIZE.unpack_from(view, BODY)[0])
    if opcode == _WRITE:
        return RequestCost(write=_SIZE.unpack_from(view, BODY)[0])
    return _ONE


def kind_of(opcode: int, view: memoryview, cost: RequestCost, is_direct: bool) -> RequestKind:
    """`is_direct`: the file is read past the kernel's pages."""
    if opcode in _NAMES:
        return RequestKind.LOCKED
    if opcode not in (_READ, _WRITE):
        return RequestKind.PROGRAM
    own, opened = _FLAGS.unpack_from(view, BODY)
    if opcode == _WRITE:
        return RequestKind.WRITTEN_MAP if own & WRITE_CACHE else RequestKind.PROGRAM
    if is_direct or opened & O_DIRECT:
        return RequestKind.PROGRAM
    return RequestKind.READ_AHEAD if cost.read > PAGESIZE else RequestKind.LOCKED

"""Requests about file locks: the rows of the opcode table and their handlers.

Called through the table in `fuse/dispatch`. See `dispatch/names` for the shape of parsers and
handlers. A request that waits has no answer here: the thread that learns the outcome answers it by
its id. The kernel counts bytes from the first to the last of a range, and has checked how the file
is open.
"""

from __future__ import annotations

import fcntl
from collections.abc import Mapping
from functools import partial
from typing import Final, NamedTuple

from fsclient.fuse.wire import abi
from fsclient.fuse.wire.operation import Operation
from fsclient.fuse.wire.parse import BODY
from fsclient.fuse.wire.protocol import LK_FLOCK, Opcode
from fsclient.kernel.contract import FileLock, FileSystem
from fsclient.kernel.later import Later, Outcome
from fsmeta.types import Caller, Ino

_FREE: Final = abi.LK_OUT.pack(0, 0, fcntl.F_UNLCK, 0)


class _LockIn(NamedTuple):
    """What GETLK, SETLK and SETLKW ask for; `kind` is F_RDLCK, F_WRLCK or F_UNLCK."""

    request: int
    fh: int
    owner: int
    kind: int
    lock: FileLock
    flock: bool


def _parse_lock(view: memoryview, _end: int) -> tuple[_LockIn]:
    _, _, request = abi.IN_HEADER.unpack_from(view)[:3]
    fh, owner, first, last, kind, pid, flags = abi.LK_IN.unpack_from(view, BODY)
    lock = FileLock(kind == fcntl.F_WRLCK, first, last + 1, pid)
    return (_LockIn(request, fh, owner, kind, lock, bool(flags & LK_FLOCK)),)


def _getlk(fs: FileSystem, _caller: Caller, ino: Ino, asked: _LockIn) -> bytes:
    bar = fs.locks.getlk(ino, asked.owner, asked.lock)
    if bar is None:
        return _FREE
    kind = fcntl.F_WRLCK if bar.write else fcntl.F_RDLCK
    return abi.LK_OUT.pack(bar.begin, bar.end - 1, kind, bar.pid)


def _setlk(
    fs: FileSystem, _caller: Caller, _ino: Ino, asked: _LockIn, wait: bool
) -> bytes | Later[bytes] | None:
    request, fh, owner, kind, lock, flock = asked
    if kind == fcntl.F_UNLCK:
        later = fs.locks.unlock(fh, owner, lock, flock)
        return b"" if later is None else later.map(_done)
    return b"" if fs.locks.setlk(fh, owner, lock, flock, request, wait) else None


def _done(outcome: Outcome[None]) -> bytes:
    outcome()
    return b""


OPERATIONS: Final[Mapping[Opcode, Operation]] = {
    Opcode.GETLK: Operation("getlk", _parse_lock, _getlk),
    Opcode.SETLK: Operation("setlk", _parse_lock, partial(_setlk, wait=False)),
    Opcode.SETLKW: Operation("setlkw", _parse_lock, partial(_setlk, wait=True)),
}

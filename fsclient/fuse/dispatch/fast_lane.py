"""Requests that are answered before a caller or an operation is looked at: the fast lane.

Called by workers, through `Dispatcher.lanes`: for an opcode a function of (inode, request, end of
its body) that returns the answer behind its header, or None where the request has to take the usual
way. What may be answered so is decided by the file system (`QuickAnswers`).
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Final, TypeAlias

from fsclient.fuse.wire import abi, pack
from fsclient.fuse.wire.parse import BODY
from fsclient.fuse.wire.protocol import OPCODES, ROOT_ID, Opcode
from fsclient.kernel.contract import EntryOut, QuickAnswers
from fsmeta.types import Ino

Lane: TypeAlias = Callable[[Ino, memoryview, int], bytes | None]

_FH: Final = Struct("=Q")  # what FLUSH and RELEASE begin with, as in abi.FLUSH_IN, abi.RELEASE_IN


def no_lanes() -> list[Lane | None]:
    """For a file system that answers nothing quickly."""
    return [None] * OPCODES


def lanes_of(quick: QuickAnswers, absent_s: float) -> list[Lane | None]:
    """By opcode; the kernel may cache for `absent_s` that a name leads nowhere."""
    absent = pack.entry_out(EntryOut(None, absent_s, 0.0))
    is_absent, stat, flush, release = quick.is_absent, quick.stat, quick.flush, quick.release
    attr_out, fh_at = pack.attr_out, _FH.unpack_from
    open_plainly, open_in, open_out = quick.open, abi.OPEN_IN.unpack_from, pack.open_out

    def lookup(parent: Ino, view: memoryview, end: int) -> bytes | None:
        return absent if is_absent(parent, view[BODY : end - 1].tobytes()) else None

    def getattr_(ino: Ino, _view: memoryview, _end: int) -> bytes | None:
        found = stat(ino)
        return None if found is None else attr_out(found)

    def open_(ino: Ino, view: memoryview, _end: int) -> bytes | None:
        opened = open_plainly(ino, open_in(view, BODY)[0])
        return None if opened is None else open_out(opened)

    def flush_(ino: Ino, view: memoryview, _end: int) -> bytes | None:
        return b"" if flush(ino, fh_at(view, BODY)[0]) else None

    def release_(ino: Ino, view: memoryview, _end: int) -> bytes | None:
        return b"" if release(ino, fh_at(view, BODY)[0]) else None

    lanes = no_lanes()
    lanes[Opcode.LOOKUP], lanes[Opcode.GETATTR] = lookup, getattr_
    lanes[Opcode.OPEN] = open_
    lanes[Opcode.FLUSH], lanes[Opcode.RELEASE] = flush_, release_
    return lanes


def lane_below(lane: Lane | None, root: Ino) -> Lane | None:
    """`lane` for a kernel whose root is the directory `root`."""
    if lane is None:
        return None
    inner = lane

    def below(ino: Ino, view: memoryview, end: int) -> bytes | None:
        return inner(root if ino == ROOT_ID else ino, view, end)

    return below

"""Requests about ranges of open files, and O_TMPFILE: rows of the opcode table and their handlers.

Called through the table in `fuse/dispatch`. See `dispatch/names` for the shape of parsers and
handlers. The kernel checks most of it before it asks: it refuses fallocate modes other than those
of `fsmeta.ops.data.ranges` (COLLAPSE_RANGE and INSERT_RANGE among them), and copies that overlap.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from struct import Struct
from typing import Final

from fsclient.fuse.wire import abi, pack
from fsclient.fuse.wire.operation import Operation
from fsclient.fuse.wire.parse import BODY
from fsclient.fuse.wire.protocol import Opcode
from fsclient.kernel.contract import CopyRange, FileSystem
from fsclient.kernel.later import Later
from fsmeta.types import FILE_SIZE_MAX, Caller, Ino

COPY_MAX_BYTES: Final = 1 << 31  # the answer to COPY_FILE_RANGE has 32 bits; a page's multiple


def _parse_fallocate(view: memoryview, _end: int) -> tuple[int, int, int, int]:
    fh, offset, length, mode = abi.FALLOCATE_IN.unpack_from(view, BODY)
    return fh, mode, offset, length


def _fallocate(
    fs: FileSystem, caller: Caller, ino: Ino, fh: int, mode: int, offset: int, length: int
) -> bytes:
    fs.ranges.fallocate(caller, ino, fh, mode, offset, length)
    return b""


def _parse_lseek(view: memoryview, _end: int) -> tuple[int, int, int]:
    fh, offset, whence = abi.LSEEK_IN.unpack_from(view, BODY)
    return fh, offset, whence


def _lseek(
    fs: FileSystem, caller: Caller, ino: Ino, fh: int, offset: int, whence: int
) -> bytes | Later[bytes]:
    found = fs.ranges.lseek(caller, ino, fh, offset, whence)
    if isinstance(found, Later):
        return found.map(lambda outcome: abi.LSEEK_OUT.pack(outcome()))
    return abi.LSEEK_OUT.pack(found)


def _parse_copy(view: memoryview, _end: int) -> tuple[CopyRange]:
    *copy, _flags = abi.COPY_FILE_RANGE_IN.unpack_from(view, BODY)
    return (CopyRange(*copy),)


def _copy(
    fs: FileSystem,
    caller: Caller,
    ino: Ino,
    copy: CopyRange,
    answer: Struct = abi.WRITE_OUT,
    most: int = COPY_MAX_BYTES,
) -> bytes:
    copy = copy._replace(length=min(copy.length, most))
    return answer.pack(fs.ranges.copy_file_range(caller, ino, copy))


_copy_64: Final = partial(_copy, answer=abi.COPY_FILE_RANGE_OUT, most=FILE_SIZE_MAX)


def _parse_tmpfile(view: memoryview, _end: int) -> tuple[int, int, int]:
    flags, mode, umask, _open_flags = abi.CREATE_IN.unpack_from(view, BODY)
    return mode, flags, umask


def _tmpfile(
    fs: FileSystem, caller: Caller, parent: Ino, mode: int, flags: int, umask: int
) -> bytes:
    return pack.create_out(*fs.tmpfile(caller, parent, mode, flags, umask))


OPERATIONS: Final[Mapping[Opcode, Operation]] = {
    Opcode.FALLOCATE: Operation("fallocate", _parse_fallocate, _fallocate),
    Opcode.LSEEK: Operation("lseek", _parse_lseek, _lseek),
    Opcode.COPY_FILE_RANGE: Operation("copy_file_range", _parse_copy, _copy),
    Opcode.COPY_FILE_RANGE_64: Operation("copy_file_range", _parse_copy, _copy_64),
    Opcode.TMPFILE: Operation("tmpfile", _parse_tmpfile, _tmpfile),
}

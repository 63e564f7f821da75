"""Requests about open files and directories: the rows of the opcode table and their handlers.

Called through the table in `dispatch`. See `dispatch_names` for the shape of parsers and handlers.

Directory pages. Every item taken from a readdirplus iterator counts as a lookup, so an item is only
taken while the longest possible name still fits; the next request resumes at the last cookie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from fsclient.filesystem import DirItem, FileSystem
from fsclient.fuse import abi, pack
from fsclient.fuse.operation import Operation
from fsclient.fuse.pack import Answer
from fsclient.fuse.parse import BODY, name_at, no_args
from fsclient.fuse.protocol import (
    FSYNC_FDATASYNC,
    OPEN_KILL_SUIDGID,
    WRITE_KILL_SUIDGID,
    Opcode,
)
from fsmeta.errors import StoreError
from fsmeta.types import NAME_MAX, Caller, Ino

_PADDING: Final = tuple(b"\0" * (-length % 8) for length in range(8))  # behind a name, by len % 8
_DIRENT_MAX: Final = abi.align8(abi.DIRENT.size + NAME_MAX)
_DIRENTPLUS_MAX: Final = abi.align8(abi.DIRENTPLUS.size + NAME_MAX)
_WRITE_DATA: Final = BODY + abi.WRITE_IN.size


def _parse_create(view: memoryview, end: int) -> tuple[bytes, int, int, bool]:
    flags, mode, _umask, open_flags = abi.CREATE_IN.unpack_from(view, BODY)
    name = name_at(view, BODY + abi.CREATE_IN.size, end)
    return name, mode, flags, bool(open_flags & OPEN_KILL_SUIDGID)


def _create(
    fs: FileSystem,
    caller: Caller,
    parent: Ino,
    name: bytes,
    mode: int,
    flags: int,
    kill_suid: bool,
) -> bytes:
    return pack.create_out(*fs.create(caller, parent, name, mode, flags, kill_suid))


def _parse_open(view: memoryview, _end: int) -> tuple[int, bool]:
    flags, open_flags = abi.OPEN_IN.unpack_from(view, BODY)
    return flags, bool(open_flags & OPEN_KILL_SUIDGID)


def _open(fs: FileSystem, caller: Caller, ino: Ino, flags: int, kill_suid: bool) -> bytes:
    return pack.open_out(fs.open(caller, ino, flags, kill_suid))


def _parse_read(view: memoryview, _end: int) -> tuple[int, int, int]:
    fh, offset, size, _read_flags, _owner, _flags = abi.READ_IN.unpack_from(view, BODY)
    return fh, offset, size


def _read(fs: FileSystem, caller: Caller, ino: Ino, fh: int, offset: int, size: int) -> Answer:
    return fs.read(caller, ino, fh, offset, size)


def _parse_write(view: memoryview, end: int) -> tuple[int, int, memoryview, bool]:
    fh, offset, _size, flags, _owner, _flags = abi.WRITE_IN.unpack_from(view, BODY)
    return fh, offset, view[_WRITE_DATA:end], bool(flags & WRITE_KILL_SUIDGID)


def _write(
    fs: FileSystem,
    caller: Caller,
    ino: Ino,
    fh: int,
    offset: int,
    data: memoryview,
    kill_suid: bool,
) -> bytes:
    return abi.WRITE_OUT.pack(fs.write(caller, ino, fh, offset, data, kill_suid))


def _parse_flush(view: memoryview, _end: int) -> tuple[int]:
    fh, _owner = abi.FLUSH_IN.unpack_from(view, BODY)
    return (fh,)


def _flush(fs: FileSystem, caller: Caller, ino: Ino, fh: int) -> bytes:
    fs.flush(caller, ino, fh)
    return b""


def _parse_fsync(view: memoryview, _end: int) -> tuple[int, bool]:
    fh, flags = abi.FSYNC_IN.unpack_from(view, BODY)
    return fh, bool(flags & FSYNC_FDATASYNC)


def _fsync(fs: FileSystem, caller: Caller, ino: Ino, fh: int, data_only: bool) -> bytes:
    fs.fsync(caller, ino, fh, data_only)
    return b""


def _parse_release(view: memoryview, _end: int) -> tuple[int]:
    fh, _flags, _release_flags, _owner = abi.RELEASE_IN.unpack_from(view, BODY)
    return (fh,)


def _release(fs: FileSystem, _caller: Caller, ino: Ino, fh: int) -> bytes:
    fs.release(ino, fh)
    return b""


def _opendir(fs: FileSystem, caller: Caller, ino: Ino, _flags: int, _kill_suid: bool) -> bytes:
    return pack.open_out(fs.opendir(caller, ino))


def _readdir(fs: FileSystem, caller: Caller, ino: Ino, fh: int, cookie: int, size: int) -> bytes:
    return _page(fs.readdir(caller, ino, fh, cookie, False), size, _DIRENT_MAX, _dirent)


def _readdirplus(
    fs: FileSystem, caller: Caller, ino: Ino, fh: int, cookie: int, size: int
) -> bytes:
    return _page(fs.readdir(caller, ino, fh, cookie, True), size, _DIRENTPLUS_MAX, _direntplus)


def _dirent(item: DirItem) -> bytes:
    name, ino, kind, cookie, _ = item
    return abi.DIRENT.pack(ino, cookie, len(name), kind)


def _direntplus(item: DirItem) -> bytes:
    name, ino, kind, cookie, entry = item
    return abi.DIRENTPLUS.pack(*pack.direntplus_head(entry), ino, cookie, len(name), kind)


def _page(
    items: Iterator[DirItem], size: int, longest: int, head_of: Callable[[DirItem], bytes]
) -> bytes:
    """As many records as surely fit in `size`.

    An error behind the first record is left for the next request to meet again: records taken have
    been counted as lookups, so they must reach the kernel.
    """
    page: list[bytes] = []
    room = size
    try:
        while room >= longest and (item := next(items, None)) is not None:
            head = head_of(item)
            name = item[0]
            padding = _PADDING[len(name) & 7]
            page += (head, name, padding)
            room -= len(head) + len(name) + len(padding)
    except (OSError, StoreError):
        if not page:
            raise
    return b"".join(page)


def _fsyncdir(fs: FileSystem, caller: Caller, ino: Ino, fh: int, _data_only: bool) -> bytes:
    fs.fsyncdir(caller, ino, fh)
    return b""


def _releasedir(fs: FileSystem, _caller: Caller, ino: Ino, fh: int) -> bytes:
    fs.releasedir(ino, fh)
    return b""


def _nothing(_fs: FileSystem, _caller: Caller, _ino: Ino) -> bytes:
    """DESTROY, SYNCFS: fsync(2) and the unmount command do the work."""
    return b""


OPERATIONS: Final[Mapping[Opcode, Operation]] = {
    Opcode.CREATE: Operation("create", _parse_create, _create),
    Opcode.OPEN: Operation("open", _parse_open, _open),
    Opcode.READ: Operation("read", _parse_read, _read),
    Opcode.WRITE: Operation("write", _parse_write, _write),
    Opcode.FLUSH: Operation("flush", _parse_flush, _flush),
    Opcode.FSYNC: Operation("fsync", _parse_fsync, _fsync),
    Opcode.RELEASE: Operation("release", _parse_release, _release),
    Opcode.OPENDIR: Operation("opendir", _parse_open, _opendir),
    Opcode.READDIR: Operation("readdir", _parse_read, _readdir),
    Opcode.READDIRPLUS: Operation("readdirplus", _parse_read, _readdirplus),
    Opcode.FSYNCDIR: Operation("fsyncdir", _parse_fsync, _fsyncdir),
    Opcode.RELEASEDIR: Operation("releasedir", _parse_release, _releasedir),
    Opcode.SYNCFS: Operation("syncfs", no_args, _nothing),
    Opcode.DESTROY: Operation("destroy", no_args, _nothing),
}

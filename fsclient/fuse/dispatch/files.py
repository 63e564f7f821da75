"""Requests about open files and directories: the rows of the opcode table and their handlers.

Called through the table in `fuse/dispatch`. See `dispatch/names` for the shape of parsers and
handlers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Final, NamedTuple

from fsclient.fuse.wire import abi, listing, pack
from fsclient.fuse.wire.operation import Operation
from fsclient.fuse.wire.pack import Answer
from fsclient.fuse.wire.parse import BODY, name_at, no_args
from fsclient.fuse.wire.protocol import (
    FSYNC_FDATASYNC,
    OPEN_KILL_SUIDGID,
    READ_LOCKOWNER,
    WRITE_CACHE,
    WRITE_KILL_SUIDGID,
    WRITE_LOCKOWNER,
    Opcode,
)
from fsclient.kernel.contract import FIRST_VIRTUAL_INO, FileSystem, OpenOut, WriteHow
from fsclient.kernel.later import Later, Outcome
from fsmeta.types import Caller, Ino

_new: Final = tuple.__new__  # makes a NamedTuple in half the time of its constructor
_WRITE_DATA: Final = BODY + abi.WRITE_IN.size
_HOW_MASK: Final = WRITE_CACHE | WRITE_LOCKOWNER | WRITE_KILL_SUIDGID
assert not _HOW_MASK & os.O_APPEND, "both are in one key"


class _CreateIn(NamedTuple):
    """What CREATE asks for: `FileSystem.create`."""

    name: bytes
    mode: int
    flags: int
    kill_suid: bool
    umask: int


def _parse_create(view: memoryview, end: int) -> tuple[_CreateIn]:
    flags, mode, umask, open_flags = abi.CREATE_IN.unpack_from(view, BODY)
    name = name_at(view, BODY + abi.CREATE_IN.size, end)
    kill_suid = bool(open_flags & OPEN_KILL_SUIDGID)
    return (_new(_CreateIn, (name, mode, flags, kill_suid, umask)),)


def _create(fs: FileSystem, caller: Caller, parent: Ino, asked: _CreateIn) -> bytes:
    return pack.create_out(*fs.create(caller, parent, *asked))


def _parse_open(view: memoryview, _end: int) -> tuple[int, bool]:
    flags, open_flags = abi.OPEN_IN.unpack_from(view, BODY)
    return flags, bool(open_flags & OPEN_KILL_SUIDGID)


def _open(
    fs: FileSystem, caller: Caller, ino: Ino, flags: int, kill_suid: bool
) -> bytes | Later[bytes]:
    opened = fs.begin_open(caller, ino, flags, kill_suid)
    return opened.map(_opened_later) if isinstance(opened, Later) else pack.open_out(opened)


def _opened_later(outcome: Outcome[OpenOut]) -> bytes:
    return pack.open_out(outcome())


def _parse_read(view: memoryview, _end: int) -> tuple[int, int, int, bool]:
    fh, offset, size, how, _owner, _flags = abi.READ_IN.unpack_from(view, BODY)
    return fh, offset, size, bool(how & READ_LOCKOWNER)


def _read(
    fs: FileSystem, caller: Caller, ino: Ino, fh: int, offset: int, size: int, past_pages: bool
) -> Answer | Later[Answer]:
    if ino >= FIRST_VIRTUAL_INO:
        return fs.read_virtual(ino, fh, offset, size)
    return fs.read(caller, ino, fh, offset, size, past_pages)


class _WriteIn(NamedTuple):
    """What WRITE brings; `how` are its own flags, `flags` are those of open(2)."""

    fh: int
    offset: int
    data: memoryview
    how: int
    flags: int


def _parse_write(view: memoryview, end: int) -> tuple[_WriteIn]:
    fh, offset, _size, how, _owner, flags = abi.WRITE_IN.unpack_from(view, BODY)
    return (_new(_WriteIn, (fh, offset, view[_WRITE_DATA:end], how, flags)),)


def _write_how(how: int, appends: int) -> WriteHow:
    append = bool(appends and not how & WRITE_CACHE)
    return WriteHow(bool(how & WRITE_KILL_SUIDGID), append, bool(how & WRITE_LOCKOWNER))


# made once: by the flags of WRITE, and O_APPEND
_HOWS: Final = {
    how | appends: _write_how(how, appends)
    for how in range(_HOW_MASK + 1)
    for appends in (0, os.O_APPEND)
}


def _write(fs: FileSystem, caller: Caller, ino: Ino, asked: _WriteIn) -> bytes | Later[bytes]:
    fh, offset, data, flags_in, flags = asked
    how = _HOWS[flags_in & _HOW_MASK | flags & os.O_APPEND]
    taken = fs.write(caller, ino, fh, offset, data, how)
    answer = abi.WRITE_OUT.pack(taken)
    if how.past_pages:
        later = fs.written_past_pages(ino, fh, offset, taken, bool(flags & os.O_DIRECT))
        if later is not None:
            return later.map(partial(_settled, answer))
    return answer


def _settled(answer: bytes, outcome: Outcome[None]) -> bytes:
    outcome()
    return answer


def _parse_flush(view: memoryview, _end: int) -> tuple[int, int]:
    fh, owner = abi.FLUSH_IN.unpack_from(view, BODY)
    return fh, owner


def _flush(fs: FileSystem, caller: Caller, ino: Ino, fh: int, owner: int) -> bytes | Later[bytes]:
    later = fs.flush(caller, ino, fh, owner)
    return b"" if later is None else later.map(partial(_settled, b""))


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
    return pack.open_out(fs.directories.opendir(caller, ino))


def _readdir(
    fs: FileSystem, caller: Caller, ino: Ino, fh: int, cookie: int, size: int, _: bool
) -> bytes:
    names, cookies = fs.directories.readdir(caller, ino, fh, cookie, size // abi.DIRENT.size)
    return listing.dirents(names, cookies, size)


def _readdirplus(
    fs: FileSystem, caller: Caller, ino: Ino, fh: int, cookie: int, size: int, _: bool
) -> bytes:
    fits = partial(listing.fitting, size=size)
    return listing.dirents_plus(*fs.directories.readdirplus(caller, ino, fh, cookie, fits))


def _fsyncdir(fs: FileSystem, caller: Caller, ino: Ino, fh: int, _data_only: bool) -> bytes:
    fs.directories.fsyncdir(caller, ino, fh)
    return b""


def _releasedir(fs: FileSystem, _caller: Caller, ino: Ino, fh: int) -> bytes:
    fs.directories.releasedir(ino, fh)
    return b""


def _syncfs(fs: FileSystem, _caller: Caller, _ino: Ino) -> Later[bytes]:
    return fs.syncfs().map(partial(_settled, b""))


def _nothing(_fs: FileSystem, _caller: Caller, _ino: Ino) -> bytes:
    """DESTROY: the unmount command does the work."""
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
    Opcode.SYNCFS: Operation("syncfs", no_args, _syncfs),
    Opcode.DESTROY: Operation("destroy", no_args, _nothing),
}

"""`Meta` as a `FileSystem`: names, attributes and slices without any data side.

What a slice holds is kept in a dict, so that writing, truncating and reading exercise the records
of chunks and nothing else. One client, one thread.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from itertools import count

from fsclient.filesystem import Buffer, Entry, FileSystem, Opened, Stat
from fsmeta import access
from fsmeta.engine import Meta
from fsmeta.ops.rename import Place
from fsmeta.runtime import SystemRuntime
from fsmeta.types import (
    CHUNK_BYTES,
    Attr,
    Caller,
    Dentry,
    Ino,
    SetAttr,
    Slice,
    SliceId,
    SliceKind,
    StatFs,
)

_RUNTIME = SystemRuntime()
_READ, _WRITE = access.READ, access.WRITE
_MASKS = {os.O_RDONLY: _READ, os.O_WRONLY: _WRITE, os.O_RDWR: _READ | _WRITE}


def _entry(attr: Attr) -> Entry:
    return Entry(attr, 0.0, 0.0)


class MetaFS:
    """Every verb is `Meta`'s own; handles are inode numbers and whether they may write."""

    def __init__(self, meta: Meta) -> None:
        self.meta = meta
        self._data: dict[SliceId, bytes] = {}
        self._fhs = count(1)
        self._writable: dict[int, bool] = {}

    def lookup(self, caller: Caller, parent: Ino, name: bytes) -> Entry:
        return _entry(self.meta.lookup(caller, parent, name))

    def forget(self, ino: Ino, lookups: int) -> None:
        del ino, lookups

    def getattr(self, caller: Caller, ino: Ino, fh: int | None) -> Stat:
        del fh
        return Stat(self.meta.getattr(caller, ino), 0.0)

    def setattr(self, caller: Caller, ino: Ino, want: SetAttr, fh: int | None) -> Stat:
        if want.size is not None and fh is not None:
            want = want._replace(mtime_now=True, opened=self._writable[fh])
        return Stat(self.meta.setattr(caller, ino, want).after, 0.0)

    def readlink(self, caller: Caller, ino: Ino) -> bytes:
        return self.meta.readlink(caller, ino)

    def mknod(self, caller: Caller, parent: Ino, name: bytes, mode: int, rdev: int) -> Entry:
        return _entry(self.meta.create(caller, parent, name, mode, rdev))

    def mkdir(self, caller: Caller, parent: Ino, name: bytes, mode: int) -> Entry:
        return _entry(self.meta.create(caller, parent, name, 0o040000 | mode))

    def symlink(self, caller: Caller, parent: Ino, name: bytes, target: bytes) -> Entry:
        return _entry(self.meta.symlink(caller, parent, name, target))

    def link(self, caller: Caller, ino: Ino, parent: Ino, name: bytes) -> Entry:
        return _entry(self.meta.link(caller, ino, parent, name))

    def unlink(self, caller: Caller, parent: Ino, name: bytes) -> None:
        self.meta.unlink(caller, parent, name)

    def rmdir(self, caller: Caller, parent: Ino, name: bytes) -> None:
        self.meta.rmdir(caller, parent, name)

    def rename(
        self,
        caller: Caller,
        parent: Ino,
        name: bytes,
        new_parent: Ino,
        new_name: bytes,
        flags: int,
    ) -> None:
        self.meta.rename(caller, Place(parent, name), Place(new_parent, new_name), flags)

    # --- files

    def _opened(self, flags: int) -> Opened:
        fh = next(self._fhs)
        self._writable[fh] = flags & os.O_ACCMODE != os.O_RDONLY
        return Opened(fh)

    def create(
        self,
        caller: Caller,
        parent: Ino,
        name: bytes,
        mode: int,
        flags: int,
        kill_suid: bool = False,
    ) -> tuple[Entry, Opened]:
        del kill_suid
        attr = self.meta.create(caller, parent, name, mode)
        return _entry(attr), self._opened(flags)

    def open(self, caller: Caller, ino: Ino, flags: int, kill_suid: bool = False) -> Opened:
        mask = _MASKS[flags & os.O_ACCMODE] | (_WRITE if flags & os.O_TRUNC else 0)
        access.require(caller, self.meta.getattr(caller, ino), mask)
        if flags & os.O_TRUNC:
            want = SetAttr(size=0, mtime_now=True, kill_suid=kill_suid)
            self.meta.setattr(caller, ino, want)
        return self._opened(flags)

    def read(self, caller: Caller, ino: Ino, fh: int, offset: int, size: int) -> Sequence[Buffer]:
        del fh
        end = min(offset + size, self.meta.getattr(caller, ino).size)
        assert end <= CHUNK_BYTES, "one chunk is enough here"
        content = bytearray(max(0, end))
        for piece in self.meta.read_chunk(ino, 0):
            whole = b"" if piece.kind is SliceKind.HOLE else self._data[piece.id]
            part = whole[piece.off : piece.off + piece.length].ljust(piece.length, b"\0")
            content[piece.pos : piece.end] = part
        return [bytes(content[offset:end])]

    def write(
        self, caller: Caller, ino: Ino, fh: int, offset: int, data: memoryview, kill_suid: bool
    ) -> int:
        assert self._writable[fh]
        if kill_suid and self.meta.getattr(caller, ino).mode & 0o6000:
            self.meta.setattr(caller, ino, SetAttr(kill_suid=True))
        sid, size = self.meta.new_slice_id(), len(data)
        self._data[sid] = bytes(data)
        piece = Slice(offset, sid, size, 0, size)
        self.meta.write_slices(ino, [(0, piece)], offset + size, _RUNTIME.now_ns())
        return size

    def flush(self, caller: Caller, ino: Ino, fh: int) -> None:
        del caller, ino, fh

    def fsync(self, caller: Caller, ino: Ino, fh: int, data_only: bool) -> None:
        del caller, ino, fh, data_only

    def release(self, ino: Ino, fh: int) -> None:
        del ino, self._writable[fh]

    # --- directories

    def opendir(self, caller: Caller, ino: Ino) -> Opened:
        attr = self.meta.getattr(caller, ino)
        if not attr.is_dir:
            raise OSError(errno.ENOTDIR, "not a directory")
        access.require(caller, attr, _READ)
        return self._opened(os.O_RDONLY)

    def readdir(
        self, caller: Caller, ino: Ino, fh: int, begin: int, at_most: int
    ) -> Sequence[Dentry]:
        del caller, fh
        names, cursor = self.meta.names(ino)
        assert cursor is None, "one page is enough here"
        return sorted(names)[begin : begin + at_most]

    def entries(self, ino: Ino, names: Sequence[Dentry]) -> Sequence[Entry | None]:
        del ino
        return [None for _ in names]

    def fsyncdir(self, caller: Caller, ino: Ino, fh: int) -> None:
        del caller, ino, fh

    def releasedir(self, ino: Ino, fh: int) -> None:
        self.release(ino, fh)

    # --- the rest

    def statfs(self, caller: Caller, ino: Ino) -> StatFs:
        del caller, ino
        return self.meta.statfs()

    def access(self, caller: Caller, ino: Ino, mask: int) -> None:
        self.meta.access(caller, ino, mask)

    def setxattr(self, caller: Caller, ino: Ino, name: bytes, value: bytes, flags: int) -> None:
        self.meta.setxattr(caller, ino, name, value, flags)

    def getxattr(self, caller: Caller, ino: Ino, name: bytes) -> bytes:
        return self.meta.getxattr(caller, ino, name)

    def listxattr(self, caller: Caller, ino: Ino) -> list[bytes]:
        return self.meta.listxattr(caller, ino)

    def removexattr(self, caller: Caller, ino: Ino, name: bytes) -> None:
        self.meta.removexattr(caller, ino, name)

    def purge(self) -> None:
        """Delete what has no name and no handle: nothing is open."""
        self.meta.purge(self.meta.orphans(1 << 30))
        dead = self.meta.dead_slices(1 << 30)
        for slices in dead.values():
            for sid, _ in slices:
                del self._data[sid]
        self.meta.forget_dead(list(dead))


def _conforms(fs: MetaFS) -> FileSystem:
    return fs

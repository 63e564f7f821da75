"""`Meta` as a `FileSystem`: names, attributes and slices without any data side.

What a slice holds is kept in a dict, so that writing, truncating and reading exercise the records
of chunks and nothing else. One client, one thread.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from itertools import count

from fsclient.kernel.contract import (
    PLAIN_WRITE,
    Buffer,
    CopyRange,
    Entries,
    EntryOut,
    FileLock,
    FileSystem,
    Fits,
    OpenOut,
    Stat,
    WriteHow,
)
from fsclient.kernel.later import Later
from fsmeta.meta.meta import Meta
from fsmeta.ops.data.ranges import Span
from fsmeta.ops.names.create import NewNode
from fsmeta.ops.names.rename import DentryLocation
from fsmeta.rules import access
from fsmeta.runtime import SystemRuntime
from fsmeta.types import (
    AT_END,
    CHUNK_BYTES,
    Attr,
    Caller,
    Dentry,
    Ino,
    SetAttr,
    Slice,
    SliceId,
    StatFs,
)

_RUNTIME = SystemRuntime()
_READ, _WRITE = access.READ, access.WRITE
_MASKS = {os.O_RDONLY: _READ, os.O_WRONLY: _WRITE, os.O_RDWR: _READ | _WRITE}


def _entry(attr: Attr) -> EntryOut:
    return EntryOut(attr, 0.0, 0.0)


class MetaFS:
    """Every verb is `Meta`'s own; handles are inode numbers and whether they may write."""

    def __init__(self, meta: Meta) -> None:
        self.ranges = self.locks = self.directories = self.xattrs = self  # no part is of its own
        self.meta = meta
        self._data: dict[SliceId, bytes] = {}
        self._fhs = count(1)
        self._writable: dict[int, bool] = {}

    def lookup(self, caller: Caller, parent: Ino, name: bytes) -> EntryOut:
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

    def mknod(
        self, caller: Caller, parent: Ino, name: bytes, mode: int, rdev: int, umask: int = 0
    ) -> EntryOut:
        return _entry(self.meta.create(caller, parent, name, mode, rdev, umask))

    def mkdir(
        self, caller: Caller, parent: Ino, name: bytes, mode: int, umask: int = 0
    ) -> EntryOut:
        return _entry(self.meta.create(caller, parent, name, 0o040000 | mode, 0, umask))

    def symlink(self, caller: Caller, parent: Ino, name: bytes, target: bytes) -> EntryOut:
        return _entry(self.meta.symlink(caller, parent, name, target))

    def link(self, caller: Caller, ino: Ino, parent: Ino, name: bytes) -> EntryOut:
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
        self.meta.rename(
            caller, DentryLocation(parent, name), DentryLocation(new_parent, new_name), flags
        )

    # --- files

    def _opened(self, flags: int) -> OpenOut:
        fh = next(self._fhs)
        self._writable[fh] = flags & os.O_ACCMODE != os.O_RDONLY
        return OpenOut(fh)

    def create(
        self,
        caller: Caller,
        parent: Ino,
        name: bytes,
        mode: int,
        flags: int,
        kill_suid: bool = False,
        umask: int = 0,
    ) -> tuple[EntryOut, OpenOut]:
        del kill_suid
        attr = self.meta.create(caller, parent, name, mode, 0, umask)
        return _entry(attr), self._opened(flags)

    def begin_open(self, caller: Caller, ino: Ino, flags: int, kill_suid: bool = False) -> OpenOut:
        return self.open(caller, ino, flags, kill_suid)

    def open(self, caller: Caller, ino: Ino, flags: int, kill_suid: bool = False) -> OpenOut:
        mask = _MASKS[flags & os.O_ACCMODE] | (_WRITE if flags & os.O_TRUNC else 0)
        attr = self.meta.getattr(caller, ino)
        self.meta.require(caller, attr, mask)
        access.require_opening(
            attr, bool(mask & _WRITE), bool(flags & os.O_APPEND), bool(flags & os.O_TRUNC)
        )
        if flags & os.O_TRUNC:
            want = SetAttr(size=0, mtime_now=True, kill_suid=kill_suid)
            self.meta.setattr(caller, ino, want)
        return self._opened(flags)

    def read(
        self, caller: Caller, ino: Ino, fh: int, offset: int, size: int, past_pages: bool = False
    ) -> Sequence[Buffer]:
        del fh, past_pages
        end = min(offset + size, self.meta.getattr(caller, ino).size)
        assert end <= CHUNK_BYTES, "one chunk is enough here"
        content = bytearray(max(0, end))
        for piece in self.meta.read_chunk(ino, 0):
            whole = self._data[piece.id] if piece.stored else b""
            part = whole[piece.off : piece.off + piece.length].ljust(piece.length, b"\0")
            content[piece.pos : piece.end] = part
        return [bytes(content[offset:end])]

    def write(
        self,
        caller: Caller,
        ino: Ino,
        fh: int,
        offset: int,
        data: memoryview,
        how: WriteHow = PLAIN_WRITE,
    ) -> int:
        assert self._writable[fh]
        if how.kill_suid and self.meta.getattr(caller, ino).mode & 0o6000:
            self.meta.setattr(caller, ino, SetAttr(kill_suid=True))
        sid, size = self.meta.new_slice_id(), len(data)
        self._data[sid] = bytes(data)
        piece = Slice(offset, sid, size, 0, size)
        index = AT_END if how.append else 0
        self.meta.write_slices(ino, [(index, piece)], offset + size, _RUNTIME.now_ns())
        return size

    def read_virtual(self, ino: Ino, fh: int, offset: int, size: int) -> Sequence[Buffer]:
        raise AssertionError(f"no virtual file {ino} {fh} {offset} {size}")

    def written_past_pages(
        self, ino: Ino, fh: int, offset: int, size: int, o_direct: bool
    ) -> Later[None] | None:
        del ino, fh, offset, size, o_direct
        return None

    def flush(self, caller: Caller, ino: Ino, fh: int, owner: int = 0) -> None:
        del caller, ino, fh, owner

    def getlk(self, ino: Ino, owner: int, lock: FileLock) -> FileLock | None:
        raise OSError(errno.ENOLCK, f"no locks here: {ino} {owner} {lock}")

    def setlk(
        self, fh: int, owner: int, lock: FileLock, flock: bool, request: int, wait: bool
    ) -> bool:
        raise OSError(errno.ENOLCK, f"no locks: {fh} {owner} {lock} {flock} {request} {wait}")

    def unlock(self, fh: int, owner: int, lock: FileLock, flock: bool) -> None:
        raise OSError(errno.ENOLCK, f"no locks here: {fh} {owner} {lock} {flock}")

    def cancel(self, request: int) -> bool:
        del request
        return False

    def fsync(self, caller: Caller, ino: Ino, fh: int, data_only: bool) -> None:
        del caller, ino, fh, data_only

    def release(self, ino: Ino, fh: int) -> None:
        del ino, self._writable[fh]

    def tmpfile(
        self, caller: Caller, parent: Ino, mode: int, flags: int, umask: int = 0
    ) -> tuple[EntryOut, OpenOut]:
        linkable = not flags & os.O_EXCL
        node = NewNode(self.meta.new_ino(), 0o100000 | mode, umask=umask)
        attr = self.meta.ranges.tmpfile(caller, parent, node, linkable)
        return _entry(attr), self._opened(flags)

    def fallocate(
        self, caller: Caller, ino: Ino, fh: int, mode: int, offset: int, length: int
    ) -> None:
        del caller, fh
        self.meta.ranges.fallocate(ino, mode, offset, offset + length)

    def lseek(self, caller: Caller, ino: Ino, fh: int, offset: int, whence: int) -> int:
        raise NotImplementedError("tested on the VFS and on mounts")

    def copy_file_range(self, caller: Caller, ino: Ino, copy: CopyRange) -> int:
        del caller
        span = Span(ino, copy.offset, copy.offset + copy.length)
        copied = self.meta.ranges.copy_file_range(span, copy.ino_out, copy.offset_out)
        return copied.end - copy.offset_out

    # --- directories

    def opendir(self, caller: Caller, ino: Ino) -> OpenOut:
        attr = self.meta.getattr(caller, ino)
        if not attr.is_dir:
            raise OSError(errno.ENOTDIR, "not a directory")
        self.meta.require(caller, attr, _READ)
        return self._opened(os.O_RDONLY)

    def readdir(
        self, caller: Caller, ino: Ino, fh: int, cookie: int, at_most: int
    ) -> tuple[Sequence[Dentry], Sequence[int]]:
        del caller, fh
        names, cursor = self.meta.names(ino)
        assert cursor is None, "one page is enough here"
        page = sorted(names)[cookie : cookie + at_most]
        return page, range(cookie + 1, cookie + len(page) + 1)

    def readdirplus(
        self, caller: Caller, ino: Ino, fh: int, cookie: int, fits: Fits
    ) -> tuple[Sequence[Dentry], Sequence[int], Entries]:
        names, cookies = self.readdir(caller, ino, fh, cookie, 1000)
        names = names[: fits(names)]
        return names, cookies[: len(names)], Entries.none(len(names))

    def syncfs(self) -> Later[None]:
        return Later(lambda take: take(lambda: None))

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

    def setxattr(
        self,
        caller: Caller,
        ino: Ino,
        name: bytes,
        value: bytes,
        flags: int,
        kill_sgid: bool = False,
    ) -> None:
        self.meta.setxattr(caller, ino, name, value, flags, kill_sgid)

    def question(self, caller: Caller, ino: Ino, name: bytes) -> Later[bytes] | None:
        del caller, ino, name
        return None

    def getxattr(self, caller: Caller, ino: Ino, name: bytes) -> bytes:
        return self.meta.getxattr(caller, ino, name)

    def listxattr(self, caller: Caller, ino: Ino) -> list[bytes]:
        return self.meta.listxattr(caller, ino)

    def removexattr(self, caller: Caller, ino: Ino, name: bytes) -> None:
        self.meta.removexattr(caller, ino, name)

    def getflags(self, caller: Caller, ino: Ino) -> int:
        return self.meta.getflags(caller, ino)

    def setflags(self, caller: Caller, ino: Ino, flags: int) -> None:
        self.meta.setflags(caller, ino, flags)

    def purge(self) -> None:
        """Delete what has no name and no handle: nothing is open."""
        deletion = self.meta.deletion
        deletion.purge(deletion.orphans(1 << 30))
        assert deletion.take_lead()
        number = deletion.next_round()
        assert number is not None
        for field, dead in deletion.dead_slices(1 << 30).items():
            uses = deletion.last_uses(number, {field: dead})
            assert uses is not None
            for sid, _ in uses.gone:
                del self._data[sid]
            deletion.forget_dead({field: dead}, uses.shared)


def _conforms(fs: MetaFS) -> FileSystem:
    return fs

"""`VFS`: the file system behind a kernel transport, and what tests drive without a kernel.

It puts metadata and data together: names and attributes come from `Meta`, with what this mount has
written and not committed laid over them; file contents go through `FileIO`. What the kernel may
believe, and for how long, is `Coherence`'s to say. `.stats` and the like are `VirtualFiles`.

Threading: any method from any thread.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator, Sequence
from typing import Final

from fsclient.coherence import Coherence
from fsclient.file_io import DataSide, FileIO
from fsclient.filesystem import Buffer, DirItem, Entry, FileSystem, Opened, Stat
from fsclient.open_files import DirHandle, OpenFiles
from fsclient.virtual import VirtualFiles
from fsmeta import access
from fsmeta.engine import Meta
from fsmeta.errors import Corrupt
from fsmeta.ops.rename import Place
from fsmeta.runtime import Runtime
from fsmeta.types import CHUNK_BYTES, ROOT_INO, Attr, Caller, Dentry, FileType, Ino, SetAttr, StatFs

ATTRS_AT_ONCE: Final = 128  # entries of a plus page; the kernel's buffer holds 25 to 250

INFO_XATTR: Final = b"user.slicefs.info"  # answers `slicefs info`; not stored, not listed
INFO_CHUNKS_MAX: Final = 64  # what fits in an xattr value of 64 KiB when chunks are tidy


class VFS:
    """One mount's view of a volume."""

    def __init__(self, meta: Meta, data: DataSide, virtual: VirtualFiles, runtime: Runtime) -> None:
        self._meta = meta
        self._runtime = runtime
        self.files = OpenFiles(meta, runtime)
        self.io = FileIO(meta, data, self.files, runtime)
        self.coherence = Coherence(meta, runtime)
        self._virtual = virtual
        self._corrupt: Corrupt | None = None  # set once; everything that writes is EROFS then

    def freeze(self, error: Corrupt) -> None:
        """The metadata is corrupt: change nothing any more."""
        self._corrupt = error

    def _require_writable(self) -> None:
        if self._corrupt is not None:
            raise OSError(errno.EROFS, f"read-only since {self._corrupt}")

    def _require_name(self, parent: Ino, name: bytes, code: int = errno.EPERM) -> None:
        """Raises: EROFS; `code` for the name of a virtual file."""
        self._require_writable()
        if parent == ROOT_INO and self._virtual.has(name):
            raise OSError(code, f"{name.decode()} is SliceFS's own")

    def _entry(self, parent: Ino, name: bytes, attr: Attr) -> Entry:
        return self.coherence.entry(parent, name, self.files.overlay(attr))

    # --- names -----------------------------------------------------------------------------------

    def lookup(self, caller: Caller, parent: Ino, name: bytes) -> Entry:
        if parent == ROOT_INO and self._virtual.has(name):
            return self._virtual.lookup(name)
        try:
            attr = self._meta.lookup(caller, parent, name)
        except OSError as error:
            if error.errno == errno.ENOENT:
                absent = self.coherence.absent(parent, name)
                if absent is not None:
                    return absent
            raise
        return self._entry(parent, name, attr)

    def forget(self, ino: Ino, lookups: int) -> None:
        del lookups
        self.coherence.forget(ino)

    def mknod(self, caller: Caller, parent: Ino, name: bytes, mode: int, rdev: int) -> Entry:
        self._require_name(parent, name, errno.EEXIST)
        if not stat.S_IFMT(mode):
            mode |= stat.S_IFREG
        return self._entry(parent, name, self._meta.create(caller, parent, name, mode, rdev))

    def mkdir(self, caller: Caller, parent: Ino, name: bytes, mode: int) -> Entry:
        self._require_name(parent, name, errno.EEXIST)
        mode = stat.S_IFDIR | mode & 0o7777
        return self._entry(parent, name, self._meta.create(caller, parent, name, mode))

    def symlink(self, caller: Caller, parent: Ino, name: bytes, target: bytes) -> Entry:
        self._require_name(parent, name, errno.EEXIST)
        return self._entry(parent, name, self._meta.symlink(caller, parent, name, target))

    def link(self, caller: Caller, ino: Ino, parent: Ino, name: bytes) -> Entry:
        self._require_name(parent, name, errno.EEXIST)
        return self._entry(parent, name, self._meta.link(caller, ino, parent, name))

    def unlink(self, caller: Caller, parent: Ino, name: bytes) -> None:
        self._require_name(parent, name)
        self._meta.unlink(caller, parent, name)

    def rmdir(self, caller: Caller, parent: Ino, name: bytes) -> None:
        self._require_name(parent, name)
        self._meta.rmdir(caller, parent, name)

    def rename(
        self,
        caller: Caller,
        parent: Ino,
        name: bytes,
        new_parent: Ino,
        new_name: bytes,
        flags: int,
    ) -> None:
        self._require_name(parent, name)
        self._require_name(new_parent, new_name)
        self._meta.rename(caller, Place(parent, name), Place(new_parent, new_name), flags)

    def readlink(self, caller: Caller, ino: Ino) -> bytes:
        return self._meta.readlink(caller, ino)

    # --- attributes ------------------------------------------------------------------------------

    def getattr(self, caller: Caller, ino: Ino, fh: int | None) -> Stat:
        del fh
        if self._virtual.owns(ino):
            return self._virtual.getattr(ino)
        return self.coherence.stat(self.files.overlay(self._meta.getattr(caller, ino)))

    def setattr(self, caller: Caller, ino: Ino, want: SetAttr, fh: int | None) -> Stat:
        self._require_writable()
        if self._virtual.owns(ino):
            return self._virtual.getattr(ino)  # `> .control` truncates
        # who may write to the open file may truncate it, whatever its mode is by now
        if want.size is not None and fh is not None and self.io.handle(fh).writable:
            caller = caller._replace(checked=True)
        if want.size is not None or want.mtime_ns is not None or want.mtime_now:
            # data written before must not bring its own, later mtime with it
            attr = self.io.truncate(caller, ino, want)
        else:
            attr = self._meta.setattr(caller, ino, want)
        file = self.files.get(ino)
        if file is not None:
            file.suid = bool(attr.mode & 0o6000)
        return self.coherence.stat(self.files.overlay(attr))

    def access(self, caller: Caller, ino: Ino, mask: int) -> None:
        self._meta.access(caller, ino, mask)

    def setxattr(self, caller: Caller, ino: Ino, name: bytes, value: bytes, flags: int) -> None:
        self._require_writable()
        self._meta.setxattr(caller, ino, name, value, flags)

    def getxattr(self, caller: Caller, ino: Ino, name: bytes) -> bytes:
        if self._virtual.owns(ino):
            raise OSError(errno.ENODATA, "a virtual file has no attributes")
        if name == INFO_XATTR:
            return self._describe(caller, ino)
        return self._meta.getxattr(caller, ino, name)

    def _describe(self, caller: Caller, ino: Ino) -> bytes:
        """Where an inode's data is, as JSON: what `slicefs info` shows."""
        attr = self._meta.getattr(caller, ino)
        chunks = []
        for index in range(min(-(-attr.size // CHUNK_BYTES), INFO_CHUNKS_MAX)):
            slices = self._meta.read_chunk(ino, index)
            chunks.append({"index": index, "slices": [each._asdict() for each in slices]})
        shown = {"ino": ino, "parent": attr.parent, "size": attr.size, "space": attr.space}
        return json.dumps({**shown, "chunks": [] if attr.is_dir else chunks}).encode()

    def listxattr(self, caller: Caller, ino: Ino) -> list[bytes]:
        return [] if self._virtual.owns(ino) else self._meta.listxattr(caller, ino)

    def removexattr(self, caller: Caller, ino: Ino, name: bytes) -> None:
        self._require_writable()
        self._meta.removexattr(caller, ino, name)

    def statfs(self, caller: Caller, ino: Ino) -> StatFs:
        del caller, ino
        return self._meta.statfs()

    # --- files -----------------------------------------------------------------------------------

    def create(
        self, caller: Caller, parent: Ino, name: bytes, mode: int, flags: int
    ) -> tuple[Entry, Opened]:
        self._require_name(parent, name, errno.EEXIST)
        mode = stat.S_IFREG | mode & 0o7777
        try:
            attr = self._meta.create(caller, parent, name, mode)
        except OSError as error:
            if error.errno != errno.EEXIST or flags & os.O_EXCL:
                raise
            return self._open_existing(caller, parent, name, flags)
        return self._entry(parent, name, attr), self.io.created(attr, flags)

    def _open_existing(
        self, caller: Caller, parent: Ino, name: bytes, flags: int
    ) -> tuple[Entry, Opened]:
        """Somebody else made the file since the kernel looked: O_CREAT without O_EXCL opens it."""
        attr = self._meta.lookup(caller, parent, name)
        if attr.type is FileType.DIR:
            raise OSError(errno.EISDIR, "is a directory")
        # the kernel judged the directory, not this file
        opened = self.io.open(caller._replace(checked=False), attr.ino, flags)
        attr = self._meta.getattr(caller, attr.ino)
        return self._entry(parent, name, attr), opened

    def open(self, caller: Caller, ino: Ino, flags: int) -> Opened:
        if self._virtual.owns(ino):
            return self._virtual.open(ino)
        if flags & (os.O_ACCMODE | os.O_TRUNC):
            self._require_writable()
        return self.io.open(caller, ino, flags)

    def read(self, caller: Caller, ino: Ino, fh: int, offset: int, size: int) -> Sequence[Buffer]:
        del caller
        if self._virtual.owns(ino):
            return self._virtual.read(fh, offset, size)
        return self.io.read(fh, offset, size)

    def write(
        self, caller: Caller, ino: Ino, fh: int, offset: int, data: memoryview, kill_suid: bool
    ) -> int:
        del caller, ino
        self._require_writable()
        return self.io.write(fh, offset, data, kill_suid)

    def flush(self, caller: Caller, ino: Ino, fh: int) -> None:
        del caller
        if not self._virtual.owns(ino):
            self.io.flush(fh)

    def fsync(self, caller: Caller, ino: Ino, fh: int, data_only: bool) -> None:
        del caller, data_only
        if not self._virtual.owns(ino):
            self.io.fsync(fh)

    def release(self, ino: Ino, fh: int) -> None:
        if self._virtual.owns(ino):
            self._virtual.release(fh)
        else:
            self.io.release(fh)

    # --- directories -----------------------------------------------------------------------------

    def opendir(self, caller: Caller, ino: Ino) -> Opened:
        if not caller.checked:
            attr = self._meta.getattr(caller, ino)
            if not attr.is_dir:
                raise OSError(errno.ENOTDIR, "not a directory")
            access.require(caller, attr, access.READ)
        return Opened(self.files.enter_dir(ino))

    def readdir(
        self, caller: Caller, ino: Ino, fh: int, cookie: int, plus: bool
    ) -> Iterator[DirItem]:
        handle = self.files.dir_handle(fh)
        if cookie == 0 and handle.entries:
            handle.rewind()
        if not handle.entries:
            self._read_dots(caller, handle)
        at = cookie
        while True:
            while at >= len(handle.entries) and handle.cursor is not None:
                self._read_page(handle)
            page = handle.entries[at : at + ATTRS_AT_ONCE]
            if not page:
                return
            # the kernel asks for the attributes of `.` and `..` itself when it wants them
            named = [each.ino for each in page if each.name not in (b".", b"..")]
            attrs = self._meta.attrs(named) if plus and named else {}
            for dentry in page:
                at += 1
                dots = at <= 2
                yield self._item(ino, dentry, at, None if dots else attrs.get(dentry.ino))

    def _read_dots(self, caller: Caller, handle: DirHandle) -> None:
        attr = self._meta.getattr(caller, handle.ino)
        parent = attr.ino if handle.ino == ROOT_INO else attr.parent
        handle.entries = [
            Dentry(b".", handle.ino, FileType.DIR),
            Dentry(b"..", parent or handle.ino, FileType.DIR),
        ]

    def _read_page(self, handle: DirHandle) -> None:
        assert handle.cursor is not None
        page, handle.cursor = self._meta.names(handle.ino, handle.cursor)
        for dentry in page:
            if dentry.name not in handle.seen:
                handle.seen.add(dentry.name)
                handle.entries.append(dentry)

    def _item(self, parent: Ino, dentry: Dentry, cookie: int, attr: Attr | None) -> DirItem:
        entry = None if attr is None else self._entry(parent, dentry.name, attr)
        return DirItem(dentry.name, dentry.ino, dentry.type, cookie, entry)

    def fsyncdir(self, caller: Caller, ino: Ino, fh: int) -> None:
        del caller, ino, fh
        self._meta.sync()

    def releasedir(self, ino: Ino, fh: int) -> None:
        del ino
        self.files.leave(fh)


def _conforms(vfs: VFS) -> FileSystem:
    return vfs

"""`VFS`: the file system behind a kernel transport, and what tests drive without a kernel.

It puts metadata and data together: names and attributes come from `Meta`, with what this mount has
written and not committed laid over them; file contents go through `FileIO`. What the kernel may
believe, and for how long, is `Coherence`'s to say. `.stats` and the like are `VirtualFiles`.

Threading: any method from any thread.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from typing import Final

from fsclient.coherence import Coherence
from fsclient.describe import describe, page_of
from fsclient.file_io import DataSide, FileIO
from fsclient.filesystem import Buffer, Entry, FileSystem, Opened, Stat
from fsclient.open_files import DirHandle, OpenFile, OpenFiles
from fsclient.virtual import VirtualFiles
from fsmeta import access
from fsmeta.engine import Meta
from fsmeta.errors import Corrupt
from fsmeta.ops.rename import Place
from fsmeta.runtime import Runtime
from fsmeta.types import (
    ROOT_CALLER,
    ROOT_INO,
    Attr,
    Caller,
    Dentry,
    FileType,
    Ino,
    SetAttr,
    StatFs,
)

REMOVED_MAX: Final = 10_000  # inodes without names that the kernel has not forgotten; about 4 MB


class VFS:
    """One mount's view of a volume."""

    def __init__(self, meta: Meta, data: DataSide, virtual: VirtualFiles, runtime: Runtime) -> None:
        self._meta = meta
        self._runtime = runtime
        self.files = OpenFiles(meta, runtime)
        self.coherence = Coherence(meta, runtime)
        self.io = FileIO(meta, data, self.files, self.coherence, runtime)
        self._virtual = virtual
        self._corrupt: Corrupt | None = None  # set once; everything that writes is EROFS then
        self._removed: dict[Ino, Attr] = {}  # lost their last name here; each step is atomic

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
        """What `name` leads to, given attributes that have just been asked for."""
        file = self.files.get(attr.ino)
        if file is None or file.writer is None:
            return self.coherence.entry(parent, name, attr)
        entry = self.coherence.entry(parent, name, self._getattr_written(file))
        return entry._replace(attr_ttl=0.0)

    def _stat(self, attr: Attr) -> Stat:
        """Attributes that have just been asked for, for the kernel.

        Of a file that is being written here it may believe nothing: it invalidates `st_blocks` when
        it sends a write, and not when we commit it.
        """
        file = self.files.get(attr.ino)
        if file is None or file.writer is None:
            return self.coherence.stat(attr)
        return Stat(self._getattr_written(file), 0.0)

    def _getattr_written(self, file: OpenFile) -> Attr:
        """Attributes with what is written here and not committed."""
        while True:
            commits = file.commits
            attr = file.overlay(self._meta.getattr(ROOT_CALLER, file.ino))
            if file.commits == commits:
                return attr

    def _lost_name(self, left: Attr) -> None:
        """What the kernel still refers to it may ask about, even when it has been deleted."""
        if left.nlink == 0:
            if len(self._removed) >= REMOVED_MAX:
                self._removed.clear()
            self._removed[left.ino] = left

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
        self._removed.pop(ino, None)
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
        self._lost_name(self._meta.unlink(caller, parent, name))

    def rmdir(self, caller: Caller, parent: Ino, name: bytes) -> None:
        self._require_name(parent, name)
        self._lost_name(self._meta.rmdir(caller, parent, name))

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
        old, new = Place(parent, name), Place(new_parent, new_name)
        replaced = self._meta.rename(caller, old, new, flags).replaced
        if replaced is not None:
            self._lost_name(replaced)

    def readlink(self, caller: Caller, ino: Ino) -> bytes:
        return self._meta.readlink(caller, ino)

    # --- attributes ------------------------------------------------------------------------------

    def getattr(self, caller: Caller, ino: Ino, fh: int | None) -> Stat:
        del fh
        if self._virtual.owns(ino):
            return self._virtual.getattr(ino)
        try:
            attr = self._meta.getattr(caller, ino)
        except OSError as error:
            removed = self._removed.get(ino)
            if error.errno != errno.ESTALE or removed is None:
                raise
            attr = removed
        return self._stat(attr)

    def setattr(self, caller: Caller, ino: Ino, want: SetAttr, fh: int | None) -> Stat:
        self._require_writable()
        if self._virtual.owns(ino):
            return self._virtual.getattr(ino)  # truncate(2) changes nothing
        if want.size is not None and fh is not None:
            # ftruncate(2): who may write to the open file may, whatever its mode is by now
            want = want._replace(mtime_now=True, opened=self.io.handle(fh).writable)
        return self._stat(self.io.setattr(caller, ino, want))

    def access(self, caller: Caller, ino: Ino, mask: int) -> None:
        self._meta.access(caller, ino, mask)

    def setxattr(self, caller: Caller, ino: Ino, name: bytes, value: bytes, flags: int) -> None:
        self._require_writable()
        self._meta.setxattr(caller, ino, name, value, flags)

    def getxattr(self, caller: Caller, ino: Ino, name: bytes) -> bytes:
        if self._virtual.owns(ino):
            raise OSError(errno.ENODATA, "a virtual file has no attributes")
        page = page_of(name)
        if page is not None:
            return describe(self._meta, self._meta.getattr(caller, ino), page)
        return self._meta.getxattr(caller, ino, name)

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
        self,
        caller: Caller,
        parent: Ino,
        name: bytes,
        mode: int,
        flags: int,
        kill_suid: bool = False,
    ) -> tuple[Entry, Opened]:
        self._require_name(parent, name, errno.EEXIST)
        mode = stat.S_IFREG | mode & 0o7777
        try:
            attr = self._meta.create(caller, parent, name, mode)
        except OSError as error:
            if error.errno != errno.EEXIST or flags & os.O_EXCL:
                raise
            return self._open_existing(caller, parent, name, flags, kill_suid)
        return self._entry(parent, name, attr), self.io.created(attr, flags)

    def _open_existing(
        self, caller: Caller, parent: Ino, name: bytes, flags: int, kill_suid: bool
    ) -> tuple[Entry, Opened]:
        """Somebody else made the file since the kernel looked: O_CREAT without O_EXCL opens it.

        The kernel has judged the directory, not this file. Where we can't, ESTALE makes it look the
        name up and judge what it finds.
        """
        attr = self._meta.lookup(caller, parent, name)
        if attr.type is FileType.DIR:
            raise OSError(errno.EISDIR, "is a directory")
        if attr.type is not FileType.REG:
            raise OSError(errno.ESTALE, "is no plain file")
        try:
            opened = self.io.open(caller._replace(checked=False), attr.ino, flags, kill_suid)
        except PermissionError as error:
            if not caller.checked:
                raise
            raise OSError(errno.ESTALE, "groups that we don't know may say yes") from error
        try:
            return self._entry(parent, name, self._meta.getattr(caller, attr.ino)), opened
        except BaseException:
            self.io.release(opened.fh)
            raise

    def open(self, caller: Caller, ino: Ino, flags: int, kill_suid: bool = False) -> Opened:
        if self._virtual.owns(ino):
            return self._virtual.open(ino)
        if flags & (os.O_ACCMODE | os.O_TRUNC):
            self._require_writable()
        return self.io.open(caller, ino, flags, kill_suid)

    def read(self, caller: Caller, ino: Ino, fh: int, offset: int, size: int) -> Sequence[Buffer]:
        del caller
        if self._virtual.owns(ino):
            return self._virtual.read(fh, offset, size)
        return self.io.read(fh, offset, size)

    def write(
        self, caller: Caller, ino: Ino, fh: int, offset: int, data: memoryview, kill_suid: bool
    ) -> int:
        del ino
        self._require_writable()
        return self.io.write(caller, fh, offset, data, kill_suid)

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
        fh = self.files.enter_dir(ino)
        try:
            handle = self.files.dir_handle(fh)
            self._read_dots(caller, handle)
            self._read_page(handle)  # now rather than later: from here on we hear of changes
        except BaseException:
            self.files.leave(fh)
            raise
        cache, keep = self.coherence.listing(ino)
        return Opened(fh, keep_cache=keep, cache_dir=cache)

    def readdir(
        self, caller: Caller, ino: Ino, fh: int, begin: int, at_most: int
    ) -> Sequence[Dentry]:
        del ino
        handle = self.files.dir_handle(fh)
        if begin == 0 and handle.begun:
            handle.rewind()
            self._read_dots(caller, handle)
        handle.begun = True
        while begin >= len(handle.entries) and handle.cursor is not None:
            self._read_page(handle)
        return handle.entries[begin : begin + at_most]

    def entries(self, ino: Ino, names: Sequence[Dentry]) -> Sequence[Entry | None]:
        unknown = self.coherence.unknown(ino, names)
        if not unknown:
            return [None] * len(names)
        attrs = self._meta.attrs([child for _, child, _ in unknown])
        found = {name: attrs[child] for name, child, _ in unknown if child in attrs}
        entries = self.coherence.entries(ino, found)
        for name, attr in found.items():
            if self.files.get(attr.ino) is not None:
                entries[name] = self._entry(ino, name, attr)
        return [entries.get(name) for name, _, _ in names]

    def _read_dots(self, caller: Caller, handle: DirHandle) -> None:
        ino = handle.file.ino
        attr = self._meta.getattr(caller, ino)
        parent = ino if ino == ROOT_INO else attr.parent
        handle.entries = [
            Dentry(b".", ino, FileType.DIR),
            Dentry(b"..", parent or ino, FileType.DIR),
        ]

    def _read_page(self, handle: DirHandle) -> None:
        assert handle.cursor is not None
        page, handle.cursor = self._meta.names(handle.file.ino, handle.cursor)
        seen = handle.seen
        if seen or handle.cursor is not None:  # there is more than one page
            page = [dentry for dentry in page if dentry[0] not in seen]
            seen.update([dentry[0] for dentry in page])
        handle.entries.extend(page)

    def fsyncdir(self, caller: Caller, ino: Ino, fh: int) -> None:
        del caller, ino, fh
        self._meta.sync()

    def releasedir(self, ino: Ino, fh: int) -> None:
        del ino
        self.files.leave(fh)


def _conforms(vfs: VFS) -> FileSystem:
    return vfs

"""`VFS`: the file system behind a kernel transport, and what tests drive without a kernel.

It puts metadata and data together: names and attributes come from `Meta` and are told as `AttrView`
says; file contents go through `FileIO`, listings through `Directories`. Here it is decided whose an
inode or a name is (the volume's, the trash's, a snapshot's, a virtual file's), and that nothing
changes where nothing may.

Threading: any method from any thread.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence

from fsclient.control.clone_jobs import Cloner
from fsclient.control.compact_xattr import COMPACT_XATTR, Compaction
from fsclient.control.control_xattrs import ControlXattrs
from fsclient.control.durable_xattr import Durable
from fsclient.files.atimes import Atimes
from fsclient.files.data_services import DataServices
from fsclient.files.file_io import FileIO
from fsclient.files.file_ranges import FileRanges
from fsclient.files.open_files import OpenFiles
from fsclient.files.setid_bits import overruling
from fsclient.kernel import snapshot_view, trash_view
from fsclient.kernel.cache_leases import CacheLeases
from fsclient.kernel.contract import Buffer, EntryOut, FileLock, FileSystem, OpenOut, Stat
from fsclient.kernel.later import Later
from fsclient.kernel.virtual import VirtualFiles
from fsclient.vfs import nfs_handles
from fsclient.vfs.attr_view import AttrView
from fsclient.vfs.directories import Directories
from fsclient.vfs.locks import FileLocks
from fsclient.vfs.lookup_counts import LookupCounts
from fsclient.vfs.xattrs import Xattrs
from fsclient.writeback.writeback import WriteBack
from fsmeta.admin.snapshots import remove as remove_snapshot
from fsmeta.errors import StoreError
from fsmeta.meta.meta import Meta
from fsmeta.ops.names.rename import DentryLocation
from fsmeta.runtime import Runtime
from fsmeta.schema.locks import Kind
from fsmeta.schema.snapshot_inos import SHELF_NAME, is_shelf
from fsmeta.schema.trash import TRASH_INO, TRASH_NAME
from fsmeta.types import ROOT_INO, Caller, Dentry, FileType, Ino, SetAttr, StatFs


class VFS:
    """One mount's view of a volume."""

    def __init__(
        self, meta: Meta, data: DataServices, virtual: VirtualFiles, runtime: Runtime
    ) -> None:
        self._meta = meta
        self.coherence = CacheLeases(meta, runtime)
        self.atimes = Atimes(meta, self.coherence, runtime)
        self.files = OpenFiles(meta, self.atimes, runtime)
        self.io = FileIO(meta, data, self.files, self.coherence, runtime)
        self.lookups = LookupCounts(runtime, self._gone)
        self._shown = AttrView(meta, self.files, self.coherence, self.lookups)
        self._directories = Directories(meta, self.files, self.coherence, runtime)
        self._ranges = FileRanges(meta, self.files, self.io)
        self.xattrs = Xattrs(meta)
        cloner = Cloner(meta, self.io, self.coherence, runtime)
        compaction = Compaction(meta, self.io, data.blocks, self.files, runtime)
        self.questions = ControlXattrs(meta, cloner, Durable(meta, self.io, runtime), compaction)
        self.locks = FileLocks(meta, self.io, self.files, self.coherence, runtime)
        self.cancel = self.locks.cancel
        self._virtual = virtual
        self._corrupt: StoreError | None = None  # set once; everything that writes is EROFS then
        self.durable: WriteBack | None = None  # of a mount that writes back
        self._nameless = self.files.nameless
        self.root = ROOT_INO  # of the mount; set before anything is served

    def freeze(self, error: StoreError) -> None:
        """The metadata is corrupt, or has gone back: change nothing any more."""
        self._corrupt = error
        self.atimes.freeze()

    def is_frozen(self) -> bool:
        """Whether `freeze` was called."""
        return self._corrupt is not None

    def _require_writable(self) -> None:
        if self._corrupt is not None:
            raise OSError(errno.EROFS, f"read-only since {self._corrupt}")

    def _require_changeable(self, ino: Ino) -> None:
        self._require_writable()
        trash_view.require_changeable(ino)

    def _begin_change(self, parent: Ino, name: bytes, code: int = errno.EPERM) -> None:
        """A name is about to be made or taken away. Raises: EROFS; `code` for a virtual file's."""
        self._require_writable()
        if parent == self.root and (
            self._virtual.has(name) or (name == TRASH_NAME and parent == ROOT_INO)
        ):
            raise OSError(code, f"{name.decode()} is SliceFS's own")
        if parent >= TRASH_INO:
            trash_view.require_name(parent, making=code == errno.EEXIST)
        self.files.changes_names(parent)

    # --- names -----------------------------------------------------------------------------------

    def lookup(self, caller: Caller, parent: Ino, name: bytes) -> EntryOut:
        if name in nfs_handles.DOTS:
            asked = self._shown.now()
            return self._shown.unnamed(nfs_handles.find(self._meta, parent, name), asked)
        if parent == self.root:
            if self._virtual.has(name):
                return self._virtual.lookup(name)
            if name == TRASH_NAME and parent == ROOT_INO:
                return trash_view.top()
        elif parent >= TRASH_INO:
            entry = trash_view.lookup(self._meta, caller, parent, name)
            if entry.attr is not None:
                self.lookups.add(entry.attr.ino)
                self._nameless.note(entry.attr)
            return entry
        asked = self._shown.now()
        try:
            attr = self._meta.lookup(caller, parent, name)
        except OSError as error:
            if error.errno == errno.ENOENT:
                if name == SHELF_NAME:
                    return snapshot_view.lookup_shelf(self._meta, parent)
                absent = self.coherence.absent(parent, name)
                if absent is not None:
                    return absent
            raise
        return self._shown.entry(parent, name, attr, asked)

    def forget(self, ino: Ino, lookups: int) -> None:
        self.lookups.forget(ino, lookups)

    def _gone(self, ino: Ino) -> None:
        self._nameless.drop(ino)
        self.coherence.forget(ino)

    def mknod(
        self, caller: Caller, parent: Ino, name: bytes, mode: int, rdev: int, umask: int = 0
    ) -> EntryOut:
        self._begin_change(parent, name, errno.EEXIST)
        if not stat.S_IFMT(mode):
            mode |= stat.S_IFREG
        attr = self._meta.create(caller, parent, name, mode, rdev, umask)
        return self._shown.entry(parent, name, attr)

    def mkdir(
        self, caller: Caller, parent: Ino, name: bytes, mode: int, umask: int = 0
    ) -> EntryOut:
        self._begin_change(parent, name, errno.EEXIST)
        mode = stat.S_IFDIR | mode & 0o7777
        attr = self._meta.create(caller, parent, name, mode, 0, umask)
        return self._shown.entry(parent, name, attr)

    def symlink(self, caller: Caller, parent: Ino, name: bytes, target: bytes) -> EntryOut:
        self._begin_change(parent, name, errno.EEXIST)
        return self._shown.entry(parent, name, self._meta.symlink(caller, parent, name, target))

    def link(self, caller: Caller, ino: Ino, parent: Ino, name: bytes) -> EntryOut:
        self._begin_change(parent, name, errno.EEXIST)
        asked = self._shown.now()
        attr = self._meta.link(caller, ino, parent, name)
        self._nameless.drop(ino)  # O_TMPFILE
        return self._shown.entry(parent, name, attr, asked)

    def unlink(self, caller: Caller, parent: Ino, name: bytes) -> None:
        self._begin_change(parent, name)
        try:
            removed = self._meta.unlink(caller, parent, name)
        except OSError as error:
            removed = self._meta.unlink(overruling(caller, error), parent, name)
        self._nameless.note(removed)

    def rmdir(self, caller: Caller, parent: Ino, name: bytes) -> None:
        if is_shelf(parent):
            self._require_writable()
            remove_snapshot(self._meta, caller, parent, name)
            return
        self._begin_change(parent, name)
        try:
            removed = self._meta.rmdir(caller, parent, name)
        except OSError as error:
            removed = self._meta.rmdir(overruling(caller, error), parent, name)
        self._nameless.note(removed)

    def rename(
        self,
        caller: Caller,
        parent: Ino,
        name: bytes,
        new_parent: Ino,
        new_name: bytes,
        flags: int,
    ) -> None:
        self._begin_change(parent, name)
        self._begin_change(new_parent, new_name)
        old, new = DentryLocation(parent, name), DentryLocation(new_parent, new_name)
        try:
            replaced = self._meta.rename(caller, old, new, flags).replaced
        except OSError as error:
            replaced = self._meta.rename(overruling(caller, error), old, new, flags).replaced
        if replaced is not None:
            self._nameless.note(replaced)

    def readlink(self, caller: Caller, ino: Ino) -> bytes:
        self.atimes.followed(ino)
        return self._meta.readlink(caller, ino)

    # --- attributes ------------------------------------------------------------------------------

    def getattr(self, caller: Caller, ino: Ino, fh: int | None) -> Stat:
        del fh
        if self._virtual.owns(ino):
            return self._virtual.getattr(ino)
        asked = self._shown.now()
        try:
            return self._shown.stat(self._meta.getattr(caller, ino), asked)
        except OSError as error:
            removed = self._nameless.last(ino)
            if error.errno != errno.ESTALE or removed is None:
                raise
        return self._shown.stat(removed)

    def setattr(self, caller: Caller, ino: Ino, want: SetAttr, fh: int | None) -> Stat:
        self._require_changeable(ino)
        if self._virtual.owns(ino):
            return self._virtual.getattr(ino)  # truncate(2) changes nothing
        if want.size is not None and fh is not None:
            # ftruncate(2): who may write to the open file may, whatever its mode is by now
            want = want._replace(mtime_now=True, opened=self.io.handle(fh).writable)
        asked = self._shown.now()
        return self._shown.stat(self.io.setattr(caller, ino, want), asked)

    def access(self, caller: Caller, ino: Ino, mask: int) -> None:
        self._meta.access(caller, ino, mask)

    def setxattr(
        self,
        caller: Caller,
        ino: Ino,
        name: bytes,
        value: bytes,
        flags: int,
        kill_sgid: bool = False,
    ) -> None:
        self._require_changeable(ino)
        if not self.questions.ask(caller, self.root, ino, name, value):
            self.xattrs.setxattr(caller, ino, name, value, flags, kill_sgid)

    def question(self, caller: Caller, ino: Ino, name: bytes) -> Later[bytes] | None:
        if self._virtual.owns(ino):
            return None
        if name == COMPACT_XATTR:
            self._require_changeable(ino)
        return self.questions.later(caller, ino, name, self.durable)

    def getxattr(self, caller: Caller, ino: Ino, name: bytes) -> bytes:
        if self._virtual.owns(ino):
            raise OSError(errno.ENODATA, "a virtual file has no attributes")
        answer = self.questions.answer(caller, ino, name, self.durable)
        return self.xattrs.getxattr(caller, ino, name) if answer is None else answer

    def listxattr(self, caller: Caller, ino: Ino) -> list[bytes]:
        return [] if self._virtual.owns(ino) else self.xattrs.listxattr(caller, ino)

    def removexattr(self, caller: Caller, ino: Ino, name: bytes) -> None:
        self._require_changeable(ino)
        self.xattrs.removexattr(caller, ino, name)

    def getflags(self, caller: Caller, ino: Ino) -> int:
        return 0 if self._virtual.owns(ino) else self._meta.getflags(caller, ino)

    def setflags(self, caller: Caller, ino: Ino, flags: int) -> None:
        self._require_changeable(ino)
        if self._virtual.owns(ino):
            raise OSError(errno.EOPNOTSUPP, "a virtual file has no flags")
        self._meta.setflags(caller, ino, flags)
        self.coherence.stale(ino)  # the answer to an ioctl has no room for a ctime

    def statfs(self, caller: Caller, ino: Ino) -> StatFs:
        del caller
        return self.io.room.statfs(self.root if self._virtual.owns(ino) else ino)

    # --- files -----------------------------------------------------------------------------------

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
        self._begin_change(parent, name, errno.EEXIST)
        mode = stat.S_IFREG | mode & 0o7777
        try:
            attr = self._meta.create(caller, parent, name, mode, 0, umask)
        except OSError as error:
            if error.errno != errno.EEXIST or flags & os.O_EXCL:
                raise
            return self._open_existing(caller, parent, name, flags, kill_suid)
        return self._shown.entry(parent, name, attr), self.io.created(attr, flags)

    def _open_existing(
        self, caller: Caller, parent: Ino, name: bytes, flags: int, kill_suid: bool
    ) -> tuple[EntryOut, OpenOut]:
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
            return self._shown.entry(parent, name, self._meta.getattr(caller, attr.ino)), opened
        except BaseException:
            self.io.release(opened.fh)
            raise

    def open(self, caller: Caller, ino: Ino, flags: int, kill_suid: bool = False) -> OpenOut:
        if self._virtual.owns(ino):
            return self._virtual.open(ino)
        if flags & (os.O_ACCMODE | os.O_TRUNC):
            self._require_writable()
        return self.io.open(caller, ino, flags, kill_suid)

    def read(
        self, caller: Caller, ino: Ino, fh: int, offset: int, size: int, past_pages: bool = False
    ) -> Sequence[Buffer]:
        del caller
        if self._virtual.owns(ino):
            return self._virtual.read(fh, offset, size)
        return self.io.read(fh, offset, size, past_pages)

    def read_virtual(
        self, ino: Ino, fh: int, offset: int, size: int
    ) -> Sequence[Buffer] | Later[Sequence[Buffer]]:
        del ino
        return self._virtual.read_or_wait(fh, offset, size)

    def write(
        self,
        caller: Caller,
        ino: Ino,
        fh: int,
        offset: int,
        data: memoryview,
        kill_suid: bool,
        append: bool = False,
        past_pages: bool = False,
    ) -> int:
        del ino
        self._require_writable()
        return self.io.write(caller, fh, offset, data, kill_suid, append, past_pages)

    def written_past_pages(
        self, ino: Ino, fh: int, offset: int, size: int, o_direct: bool
    ) -> Later[None] | None:
        del ino
        return self.io.written_past_pages(fh, offset, size, o_direct)

    def flush(self, caller: Caller, ino: Ino, fh: int, owner: int = 0) -> Later[None] | None:
        del caller
        if self._virtual.owns(ino):
            return None
        if ino not in self.files.locked:
            self.io.flush(fh)
            return None
        later = None
        try:
            self.io.flush(fh)
            later = self.locks.closed(ino, owner)
        finally:
            if later is None:
                self.locks.told(ino, owner)
        return later

    def fsync(self, caller: Caller, ino: Ino, fh: int, data_only: bool) -> None:
        del caller, data_only
        if not self._virtual.owns(ino):
            self.io.fsync(fh)
            if self.durable is not None:
                self.durable.require_whole(ino)

    def release(self, ino: Ino, fh: int) -> None:
        if self._virtual.owns(ino):
            self._virtual.release(fh)
            return
        self.io.release(fh)
        if ino in self.files.locked:
            self.locks.released(ino, fh)

    # --- locks -----------------------------------------------------------------------------------

    def getlk(self, ino: Ino, fh: int, owner: int, lock: FileLock) -> FileLock | None:
        del fh
        return self.locks.getlk(ino, owner, lock)

    def setlk(
        self, fh: int, owner: int, lock: FileLock, flock: bool, request: int, wait: bool
    ) -> bool:
        self._require_writable()
        kind = Kind.FLOCK if flock else Kind.POSIX
        return self.locks.setlk(fh, kind, owner, lock, request, wait)

    def unlock(self, fh: int, owner: int, lock: FileLock, flock: bool) -> Later[None] | None:
        kind = Kind.FLOCK if flock else Kind.POSIX
        return self.locks.unlock(fh, kind, owner, lock.begin, lock.end)

    def tmpfile(
        self, caller: Caller, parent: Ino, mode: int, flags: int, umask: int = 0
    ) -> tuple[EntryOut, OpenOut]:
        self._require_writable()
        mode = stat.S_IFREG | mode & 0o7777
        attr, opened = self._ranges.tmpfile(caller, parent, mode, flags, umask)
        self.lookups.add(attr.ino)
        self._nameless.note(attr)
        return EntryOut(attr, 0.0, 0.0), opened

    def fallocate(
        self, caller: Caller, ino: Ino, fh: int, mode: int, offset: int, length: int
    ) -> None:
        del caller, ino
        self._require_writable()
        self._ranges.fallocate(fh, mode, offset, length)

    def lseek(self, caller: Caller, ino: Ino, fh: int, offset: int, whence: int) -> int:
        del caller
        if self._virtual.owns(ino):
            raise OSError(errno.EINVAL, "a virtual file has no holes")
        return self._ranges.lseek(fh, offset, whence)

    def copy_file_range(
        self,
        caller: Caller,
        ino: Ino,
        fh: int,
        offset: int,
        ino_out: Ino,
        fh_out: int,
        offset_out: int,
        length: int,
    ) -> int:
        del caller, ino, ino_out
        self._require_writable()
        return self._ranges.copy_file_range(fh, offset, fh_out, offset_out, length)

    # --- directories -----------------------------------------------------------------------------

    def opendir(self, caller: Caller, ino: Ino) -> OpenOut:
        return self._directories.opendir(caller, ino, ino == self.root)

    def readdir(
        self, caller: Caller, ino: Ino, fh: int, cookie: int, at_most: int
    ) -> tuple[Sequence[Dentry], Sequence[int]]:
        return self._directories.readdir(caller, fh, cookie, at_most, ino == self.root)

    def entries(self, ino: Ino, names: Sequence[Dentry]) -> Sequence[EntryOut | None]:
        return self._shown.entries(ino, names)

    def fsyncdir(self, caller: Caller, ino: Ino, fh: int) -> None:
        del caller, fh
        self._meta.sync()
        if self.durable is not None:
            self.durable.require_whole(ino)

    def syncfs(self) -> Later[None]:
        return self.questions.durable.syncfs()

    def releasedir(self, ino: Ino, fh: int) -> None:
        del ino
        self.files.leave(fh)


def _conforms(vfs: VFS) -> FileSystem:
    return vfs

"""`VFS`: the file system behind a kernel transport, and what tests drive without a kernel.

Names and attributes come from `Meta` and are shown as `AttrView` says; contents go through
`FileIO`. Here it is decided whose an inode or a name is; `MountRules` says what may change.
Locks, ranges, directories and xattrs are parts. Threading: any method from any thread.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence

from fsclient.control.control_xattrs import ControlPorts, ControlXattrs
from fsclient.files.data_services import DataServices
from fsclient.files.file_io import FileIO
from fsclient.files.file_ranges import FileRanges
from fsclient.files.handles.atimes import Atimes
from fsclient.files.handles.open_files import OpenFiles
from fsclient.files.setid_bits import overruling
from fsclient.files.slice_committer import IGNORED, CommitPorts
from fsclient.kernel import snapshot_view, trash_view
from fsclient.kernel.cache_leases import CacheLeases
from fsclient.kernel.contract import (
    PLAIN_WRITE,
    Buffer,
    EntryOut,
    FileSystem,
    OpenOut,
    Stat,
    WriteHow,
)
from fsclient.kernel.later import Later
from fsclient.kernel.virtual import VirtualFiles
from fsclient.survival.records import NOT_KEPT, Keeper
from fsclient.vfs import nfs_handles
from fsclient.vfs.attr_view import AttrView
from fsclient.vfs.directories import Directories
from fsclient.vfs.existing_files import ExistingFiles
from fsclient.vfs.fast_lane import FastLane
from fsclient.vfs.locks.file_locks import FileLocks
from fsclient.vfs.lookup_counts import LookupCounts
from fsclient.vfs.mount_rules import MountRules
from fsclient.vfs.range_requests import RangeRequests
from fsclient.vfs.xattrs import Xattrs
from fsclient.writeback.writeback import WriteBack
from fsmeta.admin.snapshots import remove as remove_snapshot
from fsmeta.errors import StoreError
from fsmeta.meta.meta import Meta
from fsmeta.ops.names.rename import DentryLocation
from fsmeta.runtime import Runtime
from fsmeta.schema.snapshot_inos import SHELF_NAME, is_snapshot_dir
from fsmeta.schema.trash import TRASH_INO, TRASH_NAME
from fsmeta.types import ROOT_INO, Caller, Ino, SetAttr, StatFs


class VFS:
    """One mount's view of a volume."""

    def __init__(
        self,
        meta: Meta,
        data: DataServices,
        virtual: VirtualFiles,
        runtime: Runtime,
        keeper: Keeper = NOT_KEPT,
        ports: CommitPorts = IGNORED,
        durable: WriteBack | None = None,  # of a mount that writes back
    ) -> None:
        self._meta = meta
        leases = self.coherence = CacheLeases(meta, runtime)
        self.atimes = Atimes(meta, self.coherence, runtime)
        files = self.files = OpenFiles(meta, self.atimes, runtime, data.blocks)
        io = self.io = FileIO(meta, data, files, leases, runtime, keeper, ports)
        self.lookups = LookupCounts(runtime, self._gone)
        self.fast_lane = FastLane(meta, io, files, leases, virtual)
        self.shown = AttrView(meta, files, leases, self.lookups)
        self._existing = ExistingFiles(meta, io, self.shown)
        self._virtual, self._nameless = virtual, files.nameless
        self.rules = MountRules(files, virtual, durable)
        self._begin_change = self.rules.begin_change
        self._require_writable = self.rules.require_writable
        self.is_frozen = self.rules.is_frozen
        self.directories = Directories(meta, files, self.shown, leases, self.rules, runtime, keeper)
        self._ranges = FileRanges(meta, files, io)
        self.ranges = RangeRequests(self._ranges, self.rules, virtual, runtime)
        asked = ControlPorts(virtual.end_streams, self.atimes.look_again, durable)
        self.questions = ControlXattrs(meta, io, data, files, leases, runtime, asked)
        self.syncfs = self.questions.durable.syncfs
        self.xattrs = Xattrs(meta, self.rules, self.questions, virtual, leases.notices)
        self.locks = FileLocks(meta, io, files, leases, runtime, self._require_writable, keeper)
        self.access = meta.access

    @property
    def root(self) -> Ino:
        """The root of the mount; set before anything is served."""
        return self.rules.root

    @root.setter
    def root(self, ino: Ino) -> None:
        self.rules.root = ino

    def freeze(self, error: StoreError) -> None:
        """The metadata is corrupt, or has gone back: change nothing any more."""
        self.rules.freeze(error)
        self.atimes.freeze()

    # --- names -----------------------------------------------------------------------------------

    def lookup(self, caller: Caller, parent: Ino, name: bytes) -> EntryOut:
        if name in nfs_handles.DOTS:
            asked = self.shown.now()
            return self.shown.unnamed(nfs_handles.find(self._meta, parent, name), asked)
        if parent == self.rules.root:
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
        asked = self.shown.now()
        try:
            attr = self._meta.lookup(caller, parent, name)
        except OSError as error:
            if error.errno == errno.ENOENT:
                if name == SHELF_NAME:
                    return snapshot_view.lookup_snapshot_dir(self._meta, parent)
                absent = self.shown.absent(parent, name)
                if absent is not None:
                    return absent
            raise
        return self.shown.entry(parent, name, attr, asked)

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
        return self.shown.entry(parent, name, attr)

    def mkdir(
        self, caller: Caller, parent: Ino, name: bytes, mode: int, umask: int = 0
    ) -> EntryOut:
        self._begin_change(parent, name, errno.EEXIST)
        mode = stat.S_IFDIR | mode & 0o7777
        attr = self._meta.create(caller, parent, name, mode, 0, umask)
        return self.shown.made(parent, name, attr)

    def symlink(self, caller: Caller, parent: Ino, name: bytes, target: bytes) -> EntryOut:
        self._begin_change(parent, name, errno.EEXIST)
        return self.shown.entry(parent, name, self._meta.symlink(caller, parent, name, target))

    def link(self, caller: Caller, ino: Ino, parent: Ino, name: bytes) -> EntryOut:
        self._begin_change(parent, name, errno.EEXIST)
        asked = self.shown.now()
        attr = self._meta.link(caller, ino, parent, name)
        self._nameless.drop(ino)  # O_TMPFILE
        return self.shown.entry(parent, name, attr, asked)

    def unlink(self, caller: Caller, parent: Ino, name: bytes) -> None:
        self._begin_change(parent, name)
        try:
            removed = self._meta.unlink(caller, parent, name)
        except OSError as error:
            removed = self._meta.unlink(overruling(caller, error), parent, name)
        self._nameless.note(removed)

    def rmdir(self, caller: Caller, parent: Ino, name: bytes) -> None:
        if is_snapshot_dir(parent):
            self._require_writable()
            self.questions.require_unconfined()
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
        asked = self.shown.now()
        try:
            return self.shown.stat(self._meta.getattr(caller, ino), asked)
        except OSError as error:
            removed = self._nameless.last(ino)
            if error.errno != errno.ESTALE or removed is None:
                raise
        return self.shown.stat(removed)

    def setattr(self, caller: Caller, ino: Ino, want: SetAttr, fh: int | None) -> Stat:
        self.rules.require_changeable(ino)
        if self._virtual.owns(ino):
            return self._virtual.getattr(ino)  # truncate(2) changes nothing
        if want.size is not None and fh is not None:
            # ftruncate(2): a writable handle suffices, whatever the mode is by now
            want = want._replace(mtime_now=True, opened=self.io.handle(fh).writable)
        asked = self.shown.now()
        return self.shown.stat(self.io.setattr(caller, ino, want), asked)

    def statfs(self, caller: Caller, ino: Ino) -> StatFs:
        del caller
        return self.io.room.statfs(self.rules.root if self._virtual.owns(ino) else ino)

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
            return self._existing.open(caller, parent, name, flags, kill_suid)
        return self.shown.made(parent, name, attr), self.io.created(attr, flags)

    def open(self, caller: Caller, ino: Ino, flags: int, kill_suid: bool = False) -> OpenOut:
        if self._virtual.owns(ino):
            return self._virtual.open(caller, ino, flags)
        if flags & (os.O_ACCMODE | os.O_TRUNC):
            self._require_writable()
        return self.io.open(caller, ino, flags, kill_suid)

    def begin_open(
        self, caller: Caller, ino: Ino, flags: int, kill_suid: bool = False
    ) -> OpenOut | Later[OpenOut]:
        if self._virtual.owns(ino):
            return self._virtual.open(caller, ino, flags)
        if flags & (os.O_ACCMODE | os.O_TRUNC):
            self._require_writable()
        return self.io.begin_open(caller, ino, flags, kill_suid)

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
        how: WriteHow = PLAIN_WRITE,
    ) -> int:
        del ino
        self._require_writable()
        return self.io.write(caller, fh, offset, data, how)

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
            self.rules.require_whole(ino)

    def release(self, ino: Ino, fh: int) -> None:
        if self._virtual.owns(ino):
            self._virtual.release(fh)
            return
        self.io.release(fh)
        if ino in self.files.locked:
            self.locks.released(ino, fh)

    def tmpfile(
        self, caller: Caller, parent: Ino, mode: int, flags: int, umask: int = 0
    ) -> tuple[EntryOut, OpenOut]:
        self._require_writable()
        mode = stat.S_IFREG | mode & 0o7777
        attr, opened = self._ranges.tmpfile(caller, parent, mode, flags, umask)
        self.lookups.add(attr.ino)
        self._nameless.note(attr)
        return EntryOut(attr, 0.0, 0.0), opened


_CONFORMS: type[FileSystem] = VFS

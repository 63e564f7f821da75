"""`SurvivingVFS`: the file system of a mount that outlives its process.

The kernel sends again what the last process has not answered. Most of it is simply done: reads,
writes to a place, attributes, locks. What must not be done twice is looked up in what that process
has left: changes of names whose commit was applied, and appends that were taken as a whole. Those
are answered as if they had just been done.

Called as `VFS`. Threading: any method from any thread; the tables lose entries and get none.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Final, NamedTuple

from fsclient.files.data_services import DataServices
from fsclient.files.slice_committer import IGNORED, CommitPorts
from fsclient.kernel.contract import PLAIN_WRITE, Buffer, EntryOut, OpenOut, WriteHow
from fsclient.kernel.later import Later
from fsclient.kernel.virtual import VirtualFiles
from fsclient.survival.kept import request
from fsclient.survival.survival import Survival
from fsclient.vfs.directories import Directories
from fsclient.vfs.fast_lane import FastLane
from fsclient.vfs.vfs import VFS
from fsclient.vfs.xattrs import Xattrs
from fsclient.writeback.writeback import WriteBack
from fsmeta.meta.meta import Meta
from fsmeta.runtime import Runtime
from fsmeta.types import ROOT_CALLER, Caller, Ino

_HANDLES_BIT: Final = 32  # of one worker; the next one has others


class PastRequests(NamedTuple):
    """What is known of requests that the last worker has not answered, by request."""

    names: dict[int, Ino]  # changes of names that were applied, with the inode they made, or 0
    appends: dict[int, int]  # with the bytes that were taken
    openings: dict[int, int]  # handles that were made


class _KeptFastLane(FastLane):
    """The fast lane, with a record for each handle.

    An OPEN that the last worker has served takes the usual way, which closes what it has opened.
    """

    def __init__(self, vfs: SurvivingVFS, meta: Meta, virtual: VirtualFiles) -> None:
        super().__init__(meta, vfs.io, vfs.files, vfs.coherence, virtual)
        self._vfs = vfs
        self._keeper = vfs.io.keeper

    def open(self, ino: Ino, flags: int) -> OpenOut | None:
        openings = self._vfs.past.openings  # of another table once the mount is taken over
        if openings and request() in openings:
            return None
        opened = super().open(ino, flags)
        if opened is not None:
            self._keeper.opened(opened.fh, ino, flags, False)
        return opened

    def release(self, ino: Ino, fh: int) -> bool:
        left = super().release(ino, fh)
        if left:
            self._keeper.closed(fh)
        return left


class _KeptDirectories(Directories):
    """Open directories, with a record for each handle."""

    def __init__(self, vfs: SurvivingVFS, meta: Meta, runtime: Runtime) -> None:
        keeper = vfs.io.keeper
        super().__init__(meta, vfs.files, vfs.shown, vfs.coherence, vfs.rules, runtime, keeper)
        self._vfs = vfs

    def opendir(self, caller: Caller, ino: Ino) -> OpenOut:
        self._vfs.drop_opening()
        return super().opendir(caller, ino)

    def releasedir(self, ino: Ino, fh: int) -> None:
        super().releasedir(ino, fh)
        self._keeper.closed(fh)


class _KeptXattrs(Xattrs):
    """Extended attributes, of which none is changed twice."""

    def __init__(self, vfs: SurvivingVFS, meta: Meta, virtual: VirtualFiles) -> None:
        super().__init__(meta, vfs.rules, vfs.questions, virtual, vfs.coherence.notices)
        self._vfs = vfs

    def setxattr(
        self,
        caller: Caller,
        ino: Ino,
        name: bytes,
        value: bytes,
        flags: int,
        kill_sgid: bool = False,
    ) -> None:
        if self._vfs.done() is None:
            super().setxattr(caller, ino, name, value, flags, kill_sgid)

    def removexattr(self, caller: Caller, ino: Ino, name: bytes) -> None:
        if self._vfs.done() is None:
            super().removexattr(caller, ino, name)


class SurvivingVFS(VFS):
    """See the module."""

    def __init__(
        self,
        meta: Meta,
        data: DataServices,
        virtual: VirtualFiles,
        runtime: Runtime,
        survival: Survival,
        ports: CommitPorts = IGNORED,
        durable: WriteBack | None = None,
    ) -> None:
        super().__init__(meta, data, virtual, runtime, survival.kept, ports, durable)
        self.files.number_from((survival.generation << _HANDLES_BIT) + 1)
        self.past = PastRequests({}, {}, {})
        self.fast_lane = _KeptFastLane(self, meta, virtual)
        self.directories = _KeptDirectories(self, meta, runtime)
        self.xattrs = _KeptXattrs(self, meta, virtual)

    # --- what was done ---------------------------------------------------------------------------

    def done(self) -> Ino | None:
        """The inode that the calling thread's request has made, 0 where it makes none; None where
        the request is new, or nothing came of it."""
        names = self.past.names
        return names.pop(request(), None) if names else None

    def drop_opening(self) -> None:
        """The calling thread's request opens something; what it has opened before is unknown to
        the kernel."""
        openings = self.past.openings
        fh = openings.pop(request(), None) if openings else None
        if fh is not None:
            handle = self.files.find_file_handle(fh)
            self.files.leave(fh)
            self.io.keeper.closed(fh)
            if handle is not None and handle.counted:
                self.io.passthrough.closed(handle.file.ino)

    def _made(self, parent: Ino, name: bytes, ino: Ino) -> EntryOut:
        return self.shown.entry(parent, name, self._meta.getattr(ROOT_CALLER, ino))

    # --- names -----------------------------------------------------------------------------------

    def mknod(
        self, caller: Caller, parent: Ino, name: bytes, mode: int, rdev: int, umask: int = 0
    ) -> EntryOut:
        ino = self.done()
        if ino is not None:
            return self._made(parent, name, ino)
        return super().mknod(caller, parent, name, mode, rdev, umask)

    def mkdir(
        self, caller: Caller, parent: Ino, name: bytes, mode: int, umask: int = 0
    ) -> EntryOut:
        ino = self.done()
        if ino is not None:
            return self._made(parent, name, ino)
        return super().mkdir(caller, parent, name, mode, umask)

    def symlink(self, caller: Caller, parent: Ino, name: bytes, target: bytes) -> EntryOut:
        ino = self.done()
        if ino is not None:
            return self._made(parent, name, ino)
        return super().symlink(caller, parent, name, target)

    def link(self, caller: Caller, ino: Ino, parent: Ino, name: bytes) -> EntryOut:
        done = self.done()
        if done is not None:
            return self._made(parent, name, done)
        return super().link(caller, ino, parent, name)

    def unlink(self, caller: Caller, parent: Ino, name: bytes) -> None:
        if self.done() is None:
            super().unlink(caller, parent, name)

    def rmdir(self, caller: Caller, parent: Ino, name: bytes) -> None:
        if self.done() is None:
            super().rmdir(caller, parent, name)

    def rename(
        self,
        caller: Caller,
        parent: Ino,
        name: bytes,
        new_parent: Ino,
        new_name: bytes,
        flags: int,
    ) -> None:
        if self.done() is None:
            super().rename(caller, parent, name, new_parent, new_name, flags)

    # --- handles ---------------------------------------------------------------------------------

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
        self.drop_opening()
        ino = self.done()
        if ino is None:
            return super().create(caller, parent, name, mode, flags, kill_suid, umask)
        attr = self._meta.getattr(ROOT_CALLER, ino)
        return self.shown.entry(parent, name, attr), self.io.created(attr, flags)

    def open(self, caller: Caller, ino: Ino, flags: int, kill_suid: bool = False) -> OpenOut:
        self.drop_opening()
        return super().open(caller, ino, flags, kill_suid)

    def begin_open(
        self, caller: Caller, ino: Ino, flags: int, kill_suid: bool = False
    ) -> OpenOut | Later[OpenOut]:
        self.drop_opening()
        return super().begin_open(caller, ino, flags, kill_suid)

    def tmpfile(
        self, caller: Caller, parent: Ino, mode: int, flags: int, umask: int = 0
    ) -> tuple[EntryOut, OpenOut]:
        self.drop_opening()
        return super().tmpfile(caller, parent, mode, flags, umask)

    def release(self, ino: Ino, fh: int) -> None:
        handle = self.files.find_file_handle(fh)
        if handle is not None and handle.counted:
            self.io.keeper.closed(fh)  # before: the next client must not name what is given back
        try:
            super().release(ino, fh)
        except OSError as error:
            if error.errno != errno.EBADF:
                raise
            self.locks.released(ino, fh)  # the last worker has closed the handle, and died then
        self.io.keeper.closed(fh)

    def read_virtual(
        self, ino: Ino, fh: int, offset: int, size: int
    ) -> Sequence[Buffer] | Later[Sequence[Buffer]]:
        self._virtual.reopen(ino, fh)
        return super().read_virtual(ino, fh, offset, size)

    def write(
        self,
        caller: Caller,
        ino: Ino,
        fh: int,
        offset: int,
        data: memoryview,
        how: WriteHow = PLAIN_WRITE,
    ) -> int:
        if how.append and self.past.appends:
            taken = self.past.appends.pop(request(), None)
            if taken is not None:
                return taken
        return super().write(caller, ino, fh, offset, data, how)

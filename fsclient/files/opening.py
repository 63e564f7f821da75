"""open(2): permission, the handle, and what the kernel may do with its pages from then on.

`FileIO` has one. A handle is entered first, as `data/deletion` asks what is open; where something
fails behind that it is released again. An attached file that is opened for writing gets bytes of
its own before. Threading: any method from any thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple, Protocol

from fsclient.files.direct_io import DirectIO
from fsclient.files.file_reads import FileReads
from fsclient.files.handles.open_files import FileHandle, OpenFile, OpenFiles
from fsclient.files.handles.page_cache_validity import PageCacheValidity
from fsclient.kernel.cache_leases import CacheLeases
from fsclient.kernel.contract import OpenOut
from fsclient.kernel.copy_up_queue import CopyUpQueue
from fsclient.kernel.later import Later
from fsclient.kernel.open_flags import access_mask, needs_bytes, require_flags
from fsclient.kernel.passthrough import Passthrough
from fsclient.survival.records import NOT_KEPT, Keeper
from fsmeta.meta.meta import Meta
from fsmeta.runtime import Runtime
from fsmeta.schema.trash import TRASH_INO
from fsmeta.types import ROOT_CALLER, Attr, Caller, Ino, SetAttr

_new: Final = tuple.__new__  # makes a NamedTuple in half the time of its constructor


class FileChanges(Protocol):
    """What an open may have to do with a file beside: `FileIO`."""

    def release(self, fh: int) -> None: ...
    def setattr(self, caller: Caller, ino: Ino, want: SetAttr) -> Attr: ...
    def take_bytes(
        self, ino: Ino, stopped: Callable[[], bool] | None = None, keep: int | None = None
    ) -> None: ...


class PageRules(NamedTuple):
    """What decides which pages the kernel may keep, and which reads and writes go past them."""

    versions: PageCacheValidity
    direct: DirectIO
    passthrough: Passthrough
    reads: FileReads


class FileOpening:
    """See the module."""

    def __init__(
        self,
        meta: Meta,
        files: OpenFiles,
        coherence: CacheLeases,
        runtime: Runtime,
        keeper: Keeper,
        pages: PageRules,
        io: FileChanges,
    ) -> None:
        self._meta = meta
        self._files = files
        self._coherence = coherence
        self._keeper = keeper
        self._keeps = keeper is not NOT_KEPT  # else it is not even asked
        self._versions, self._direct, self._passthrough, self._reads = pages
        self._io = io
        self._copies = CopyUpQueue(runtime, io.take_bytes)

    def created(self, attr: Attr, flags: int) -> OpenOut:
        """The handle of a file just made."""
        self._versions.begin(attr)
        fh, handle = self._files.enter(attr.ino, flags)
        handle.file.learn(attr, 0)
        direct = self._direct.created(handle, flags)
        if self._keeps:
            self._keeper.opened(fh, attr.ino, flags, False, handle.direct)
        return _new(OpenOut, (fh, True, direct, False, self._no_flush(handle), 0))

    def open(self, caller: Caller, ino: Ino, flags: int, kill_suid: bool) -> OpenOut:
        """open(2) of what exists. Raises: EACCES, EISDIR, ESTALE."""
        opened = self.begin_open(caller, ino, flags, kill_suid, now=True)
        assert isinstance(opened, OpenOut), "it did not wait"
        return opened

    def begin_open(
        self, caller: Caller, ino: Ino, flags: int, kill_suid: bool, now: bool = False
    ) -> OpenOut | Later[OpenOut]:
        """As `open`; where an object is copied first, that comes later, unless it must be `now`."""
        fh, handle = self._files.enter(ino, flags)  # first: `data/deletion` asks what is open
        try:
            commits = handle.file.commits
            attr = self._permitted(caller, handle.file, flags)
            if not needs_bytes(attr, flags):
                return self._open(caller, fh, handle, flags, kill_suid, attr, commits)
            if not now:
                complete = partial(self._complete_open, caller, fh, handle, flags)
                return self._copies.later(ino, complete, partial(self._io.release, fh))
            self._io.take_bytes(ino)
            return self._open_copied(caller, fh, handle, flags)
        except BaseException:
            self._io.release(fh)
            raise

    def _complete_open(self, caller: Caller, fh: int, handle: FileHandle, flags: int) -> OpenOut:
        try:
            return self._open_copied(caller, fh, handle, flags)
        except BaseException:
            self._io.release(fh)
            raise

    def _open_copied(self, caller: Caller, fh: int, handle: FileHandle, flags: int) -> OpenOut:
        commits = handle.file.commits
        attr = self._meta.getattr(ROOT_CALLER, handle.file.ino)
        return self._open(caller, fh, handle, flags, False, attr, commits)

    def _permitted(self, caller: Caller, file: OpenFile, flags: int) -> Attr:
        """The attributes of a file that `caller` may open. Raises: EACCES, EPERM, ESTALE."""
        attr = self._meta.open(caller, file.ino)
        if attr.nlink == 0 or attr.parent >= TRASH_INO:
            self._files.nameless.require_openable(attr, file.handles - 1)
        self._meta.require(caller, attr, access_mask(flags))
        if attr.flags:
            require_flags(attr, flags)
        return attr

    def _open(
        self,
        caller: Caller,
        fh: int,
        handle: FileHandle,
        flags: int,
        kill_suid: bool,
        attr: Attr,
        commits: int,
    ) -> OpenOut:
        """Open what is permitted; `attr` was asked for at `commits`, as `OpenFile.learn` has it."""
        file = handle.file
        if flags & os.O_TRUNC:
            mode = attr.mode
            want = SetAttr(size=0, mtime_now=True, kill_suid=kill_suid, opened=True)
            attr = self._io.setattr(caller, file.ino, want)
            if attr.mode != mode:
                self._coherence.notices.stale(file.ino)  # the answer to OPEN has no room for a mode
        else:
            file.learn(attr, commits)
        self._coherence.opened(attr)
        direct = self._direct.opened(handle, flags)
        same = self._versions.still(attr, kept=not (direct and file.mixed))
        if not same:
            handle.expected = self._versions.expect(attr)
        if same is False:
            self._reads.forget_chunks(file)
        backing = None
        if self._passthrough.may_pass(attr):
            backing = self._passthrough.opened(attr)
            handle.counted = True
        handle.kept = bool(same) and not direct and not backing
        if self._keeps:
            self._keeper.opened(fh, file.ino, flags, False, handle.direct, backing)
        return OpenOut(
            fh,
            keep_cache=handle.kept,
            direct_io=direct,
            no_flush=self._no_flush(handle),
            backing=backing or 0,
        )

    def open_plainly(self, ino: Ino) -> OpenOut | None:
        """`open` for reading by a permitted caller, of a file that is known, has a name and was not
        written here; None for any other. Raises: Corrupt."""
        files = self._files
        fh, handle = files.enter(ino, os.O_RDONLY)
        file, attr = handle.file, None
        commits = file.commits
        try:
            if file.writer is None and ino not in files.locked and not self._direct.writes:
                attr = self._meta.open_known(ino)
        finally:
            if attr is None or attr.nlink == 0 or attr.parent >= TRASH_INO or attr.flags:
                self._io.release(fh)
                attr = None
        if attr is None:
            return None
        file.learn(attr, commits)
        self._coherence.opened(attr)
        same = self._versions.still(attr)
        if not same:
            handle.expected = self._versions.expect(attr)
        if same is False:
            self._reads.forget_chunks(file)
        handle.kept = bool(same)
        return _new(OpenOut, (fh, handle.kept, False, False, True, 0))

    def _no_flush(self, handle: FileHandle) -> bool:
        """Whether close(2) need not tell us: nothing to be stored, no locks to be dropped."""
        return not handle.writable and handle.file.ino not in self._files.locked

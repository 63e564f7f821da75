"""read, write, flush, fsync, release: where a handle meets slices and blocks.

`FileOpening` opens files, `UnstoredWrites` stores what was written. What a writer commits goes
through `SliceCommitter`, and whether the kernel may keep its pages over an open is known to
`PageCacheValidity`.

Threading: called by the transport's threads, several for one file at once.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

from fsclient.attached.copy_up import CopyUp
from fsclient.files.data_services import DataServices
from fsclient.files.direct_io import DirectIO
from fsclient.files.file_reads import FileReads
from fsclient.files.handles.open_files import FileHandle, OpenFile, OpenFiles
from fsclient.files.handles.page_cache_validity import PageCacheValidity
from fsclient.files.opening import FileOpening, PageRules
from fsclient.files.quota_precheck import QuotaPrecheck
from fsclient.files.setid_bits import DROP_SETGID, JUST_DROP, leaves_setgid, require_drop
from fsclient.files.slice_committer import IGNORED, CommitPorts, SliceCommitter
from fsclient.files.unstored_writes import UnstoredWrites
from fsclient.files.write_errors import WriteErrors
from fsclient.kernel.cache_leases import CacheLeases
from fsclient.kernel.contract import PLAIN_WRITE, Buffer, WriteHow
from fsclient.kernel.later import Later
from fsclient.kernel.passthrough import Passthrough
from fsclient.survival.records import NOT_KEPT, Keeper, Unsaved
from fsdata.attached.objects import AttachedObjects
from fsdata.files.write_services import WriteServices
from fsdata.files.writer import FileWriter
from fsmeta.errors import ShowsObject
from fsmeta.meta.meta import Meta
from fsmeta.ops.names.attach import attached_object
from fsmeta.runtime import Runtime
from fsmeta.types import (
    FILE_SIZE_MAX,
    ROOT_CALLER,
    Attr,
    Caller,
    Ino,
    SetAttr,
)

_new: Final = tuple.__new__  # makes a NamedTuple in half the time of its constructor
WHOLE_PIECE_BYTES: Final = 4 << 20  # of a file that is read as a whole


class FileIO:
    """Reads and writes through handles."""

    def __init__(
        self,
        meta: Meta,
        data: DataServices,
        files: OpenFiles,
        coherence: CacheLeases,
        runtime: Runtime,
        keeper: Keeper = NOT_KEPT,
        ports: CommitPorts = IGNORED,
    ) -> None:
        self._coherence = coherence
        self._meta = meta
        self._data = data
        self._files = files
        self._runtime = runtime
        self.keeper = keeper
        self._keeps = keeper is not NOT_KEPT  # else it is not even asked
        self._versions = PageCacheValidity(runtime)
        self._locked = PageCacheValidity(runtime)  # what the kernel caches of files that are locked
        self.commits = SliceCommitter(
            meta, files, coherence, self._versions, self._locked, keeper, ports
        )
        keep = keeper.written if self._keeps else None
        self._side = WriteServices(
            runtime, data.blocks, data.budget, data.uploads, self.commits, keep
        )
        self.room = QuotaPrecheck(meta, data.uploads, runtime)
        self.direct = DirectIO(files)
        find = partial(meta.run, attached_object, ROOT_CALLER)
        self.attached = AttachedObjects(runtime, find, data.attached)
        self.copy_up = CopyUp(
            meta, data.blocks, data.uploads, self.attached, runtime, self.room.require_space
        )
        self.reads = FileReads(meta, data, self.attached, runtime)
        self.unsynced = files.unsynced
        self.losses = WriteErrors(runtime)
        self.passthrough = Passthrough(runtime, data.whole, self._pieces)
        self.unstored = UnstoredWrites(meta, files, self.losses, runtime)
        self.flush_file = self.unstored.flush_file
        self.flush_all = self.unstored.flush_all
        pages = PageRules(self._versions, self.direct, self.passthrough, self.reads)
        opening = FileOpening(meta, files, coherence, runtime, keeper, pages, self)
        self.created = opening.created  # bound, as they are hot
        self.open = opening.open
        self.begin_open = opening.begin_open
        self.open_plainly = opening.open_plainly

    # --- handles ---------------------------------------------------------------------------------

    def _pieces(self, attr: Attr) -> Iterator[Buffer]:
        """All bytes of a file that is not changed."""
        fh, handle = self._files.enter(attr.ino, os.O_RDONLY)
        try:
            handle.file.learn(attr, handle.file.commits)
            for at in range(0, attr.size, WHOLE_PIECE_BYTES):
                yield from self.read(fh, at, min(WHOLE_PIECE_BYTES, attr.size - at))
        finally:
            self.release(fh)

    def release(self, fh: int) -> None:
        """The last close(2) of a handle."""
        handle = self._files.file_handle(fh)
        if self._files.is_last(handle) and handle.file.dirty:
            self.unstored.last_flush(handle.file)
        gone = self._files.leave(fh)
        if handle.counted:
            self.passthrough.closed(handle.file.ino)
        if gone is None:
            return
        if gone.unprivileged is not None:
            self.keeper.unprivileged(gone.ino, None)
        if gone.writer is not None:
            lost = gone.dirty
            gone.writer.discard()
            if lost:  # the kernel has seen it written: its size and pages are the file's again
                self._coherence.notices.stale(gone.ino)
                self._coherence.notices.stale_pages(gone.ino)

    def _is_opened(self, handle: FileHandle) -> None:
        """A request shows that the kernel has had the answer to OPEN, and dropped old pages.

        RELEASE does not: it comes for opens, too, that have failed behind ours.
        """
        expected, handle.expected = handle.expected, None
        if expected is not None:
            self._versions.dropped(handle.file.ino, expected)

    # --- data ------------------------------------------------------------------------------------

    def read(self, fh: int, offset: int, size: int, past_pages: bool = False) -> Sequence[Buffer]:
        """At most `size` bytes at `offset`. Raises: EBADF, and what `FileReader.read` does."""
        handle = self._files.file_handle(fh)
        file = handle.file
        if handle.expected is not None:
            self._is_opened(handle)
        if not past_pages:
            file.paged = True
            self._coherence.reading(file.ino)
        if file.lost:
            _require_locks(handle)
        if file.writer is not None and file.writer.slices.misplaced:
            self.flush_file(file)
        return self.reads.read(handle, offset, size)

    def take_bytes(
        self, ino: Ino, stopped: Callable[[], bool] | None = None, keep: int | None = None
    ) -> None:
        """Have an attached file hold its bytes, `keep` at most, so that they can be changed.

        Raises: as `CopyUp.run`.
        """
        file = self._files.get(ino)
        commits = None if file is None else file.commits
        changed = self.copy_up.run(ino, keep, stopped)
        if changed is None:
            return
        now = self._files.get(ino)
        if now is not None:
            now.committed(changed.after, commits if now is file else None)
        self.commits.changed(ino, changed)
        self._coherence.notices.stale(ino)  # it takes space now

    def write(
        self,
        caller: Caller,
        fh: int,
        offset: int,
        data: memoryview,
        how: WriteHow = PLAIN_WRITE,
    ) -> int:
        """Take `data` for `offset`, or, of an append, for the end of the file wherever that is by
        then.

        Returns how many bytes, fewer where the rest does not fit.
        Raises: EBADF, EFBIG, ENOSPC, EDQUOT, and what earlier writes met.
        """
        handle = self._files.file_handle(fh)
        if not handle.writable:
            raise OSError(errno.EBADF, "not open for writing")
        if offset + len(data) > FILE_SIZE_MAX:
            raise OSError(errno.EFBIG, f"write to {offset}")
        file = handle.file
        if handle.expected is not None:
            self._is_opened(handle)
        if file.lost:
            _require_locks(handle)
        if self._keeps and not self.keeper.has_room(len(data)):
            self._make_room(file, len(data))
        kill_suid, append, past_pages = how
        taken = self.room.admit(file, max(offset, file.length) if append else offset, len(data))
        try:
            if kill_suid:
                file.unprivileged = caller
                self.keeper.unprivileged(file.ino, caller)
            if not past_pages:
                file.paged = True
            file.mtime_ns = self._runtime.now_ns()  # first: a commit may follow at once
            self._put(file, offset, data[:taken], append)
        finally:
            self.room.entered(taken)
        return taken

    def _put(self, file: OpenFile, offset: int, data: memoryview, append: bool) -> None:
        """Have the writer of `file` take `data`."""
        if not append:
            self._writer(file).write(offset, data)
        else:
            if self._keeps:
                self.keeper.appending()
            if self._writer(file).append(max(offset, file.length), data) != offset:
                self._coherence.notices.stale_pages(file.ino)  # the kernel has put them elsewhere
            if self._keeps:
                self.keeper.appended(len(data))
        if file.mixed:
            self._coherence.notices.stale_pages(file.ino)  # maps can have brought old ones back

    def _make_room(self, file: OpenFile, size: int) -> None:
        """Commit what is written, so that the next writes can be kept for the next worker."""
        self.flush_file(file)
        if not self.keeper.has_room(size):
            self.unstored.flush_open(None)

    def written_past_pages(
        self, fh: int, offset: int, size: int, o_direct: bool
    ) -> Later[None] | None:
        """`FileSystem.written_past_pages`."""
        file = self._files.file_handle(fh).file
        if not self.direct.leaves_pages(file, o_direct):
            return None
        return self._coherence.notices.drop_range(file.ino, offset, offset + size)

    def _writer(self, file: OpenFile) -> FileWriter:
        return file.writer or self._files.writer(file, self._side)

    def write_again(self, write: Unsaved) -> None:
        """Take a write that an earlier process had taken and not committed."""
        fh, handle = self._files.enter(write.ino, os.O_WRONLY)
        file = handle.file
        try:
            file.mtime_ns = write.mtime_ns
            data = memoryview(write.data)
            if write.append:
                self._writer(file).append(max(write.offset, file.length), data)
            else:
                self._writer(file).write(write.offset, data)
        finally:
            if self._files.is_last(handle):
                self.unstored.last_flush(file)
            self._files.leave(fh)

    def flush(self, fh: int) -> None:
        """close(2) of one descriptor: everything written is stored when this returns."""
        self.flush_file(self.handle(fh).file)

    def fsync(self, fh: int) -> None:
        """fsync(2): as `flush`, and it survives a loss of power."""
        self.unstored.fsync(self.handle(fh).file)

    def setattr(self, caller: Caller, ino: Ino, want: SetAttr) -> Attr:
        """chmod(2), chown(2), utimensat(2), truncate(2); in order with what is written here."""
        file = self._files.get(ino)
        follows = file is not None and _follows_writes(want)
        if file is not None and follows:
            self.flush_file(file)
        commits = None if file is None else file.commits
        try:
            attr = self._setattr(caller, ino, want)
        except ShowsObject:
            self.take_bytes(ino, keep=want.size)
            commits = None if file is None else file.commits
            attr = self._setattr(caller, ino, want)
        now = self._files.get(ino)  # it may have been opened meanwhile
        if want.size is not None and now is not None:
            now.committed(attr, commits if now is file else None)
        if file is not None and follows and want.mode is not None:
            file.unprivileged = None  # whose data are committed, or written at the same time
            self.keeper.unprivileged(ino, None)
        return attr

    def _setattr(self, caller: Caller, ino: Ino, want: SetAttr) -> Attr:
        """A time that we set makes no pages of the kernel old; and an empty file has none."""
        if want == JUST_DROP:
            require_drop(caller, self._meta.getattr(caller, ino), self._files)
        before, after = self._meta.setattr(caller, ino, want)
        if want.kill_suid and leaves_setgid(caller, before, after.mode):
            after = self._meta.setattr(caller, ino, DROP_SETGID).after
        if want.size is None or before.size == 0:
            self._versions.moved(before, after)
        if self._files.locked:
            self._locked.moved(before, after)
        return after

    def handle(self, fh: int) -> FileHandle:
        """Raises: EBADF, EIO."""
        handle = self._files.file_handle(fh)
        if handle.file.lost:
            _require_locks(handle)
        return handle

    # --- what a lock means for data --------------------------------------------------------------

    def refresh(self, file: OpenFile, attr: Attr, commits: int, then: Callable[[], None]) -> bool:
        """A lock was taken, and `attr` is what other clients have left; `commits` as in `learn`.

        False where the kernel has to forget pages, size and times first; that calls `then`.
        """
        file.learn(attr, commits)
        if self._locked.still(attr):
            return True
        self.reads.forget_chunks(file)
        expected = [(each, each.expect(attr)) for each in (self._locked, self._versions)]

        def dropped() -> None:
            for each, version in expected:
                each.dropped(attr.ino, version)

        return not self._coherence.notices.drop_pages(attr.ino, dropped, then)


def _follows_writes(want: SetAttr) -> bool:
    """Whether what was written before must not be committed after this.

    It would bring its own, later mtime with it, and drop S_ISUID.
    """
    times = want.mtime_ns is not None or want.mtime_now
    setuid = want.mode is not None and want.mode & (stat.S_ISUID | stat.S_ISGID) != 0
    return want.size is not None or times or setuid


def _require_locks(handle: FileHandle) -> None:
    """Raises: EIO where a program may rely on a lost lock that it had through `handle`."""
    if handle.fh in handle.file.lost:
        raise OSError(errno.EIO, f"inode {handle.file.ino}: its locks were lost with the session")

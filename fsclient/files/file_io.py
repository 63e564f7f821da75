"""open, read, write, flush, fsync, release: where a handle meets slices and blocks.

What a writer commits goes through `SliceCommitter`, and whether the kernel may keep its pages over
an open is known to `PageCacheValidity`.

Threading: called by the transport's threads, several for one file at once.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence

from fsclient.files.data_services import DataServices
from fsclient.files.direct_io import DirectIO
from fsclient.files.open_files import FileHandle, OpenFile, OpenFiles
from fsclient.files.page_cache_validity import PageCacheValidity
from fsclient.files.quota_precheck import QuotaPrecheck
from fsclient.files.setid_bits import DROP_SETGID, JUST_DROP, leaves_setgid, require_drop
from fsclient.files.slice_committer import SliceCommitter
from fsclient.files.unsynced_slices import UnsyncedSlices
from fsclient.files.write_errors import Failed, WriteErrors, flush_together
from fsclient.kernel.cache_leases import CacheLeases
from fsclient.kernel.contract import Buffer, OpenOut
from fsclient.kernel.later import Later
from fsdata.files.reader import FileReader
from fsdata.files.write_services import WriteServices
from fsdata.files.writer import FileWriter
from fsmeta.errors import StoreError
from fsmeta.meta.meta import Meta
from fsmeta.rules import access
from fsmeta.runtime import Runtime
from fsmeta.schema.trash import TRASH_INO
from fsmeta.types import FILE_SIZE_MAX, ROOT_CALLER, Attr, Caller, Ino, SetAttr, SliceId


class FileIO:
    """Reads and writes through handles."""

    def __init__(
        self,
        meta: Meta,
        data: DataServices,
        files: OpenFiles,
        coherence: CacheLeases,
        runtime: Runtime,
    ) -> None:
        self._coherence = coherence
        self._meta = meta
        self._data = data
        self._files = files
        self._runtime = runtime
        self._versions = PageCacheValidity(runtime)
        self._locked = PageCacheValidity(
            runtime
        )  # what the kernel believes of files that are locked
        self.commits = SliceCommitter(meta, files, coherence, self._versions, self._locked)
        self._side = WriteServices(runtime, data.blocks, data.budget, data.uploads, self.commits)
        self.room = QuotaPrecheck(meta, data.uploads, runtime)
        self.direct = DirectIO(files)
        self.unsynced = UnsyncedSlices(meta, data.blocks, runtime)
        files.on_last = self.unsynced.closed
        self.losses = WriteErrors(runtime)

    # --- handles ---------------------------------------------------------------------------------

    def created(self, attr: Attr, flags: int) -> OpenOut:
        """The handle of a file just made."""
        self._versions.still(attr)
        fh, handle = self._files.enter(attr.ino, flags)
        handle.file.learn(attr, 0)
        return OpenOut(
            fh,
            keep_cache=True,
            direct_io=self.direct.created(handle, flags),
            no_flush=self._no_flush(handle),
        )

    def open(self, caller: Caller, ino: Ino, flags: int, kill_suid: bool) -> OpenOut:
        """open(2) of what exists. Raises: EACCES, EISDIR, ESTALE."""
        # first the handle, then the file's fate: who deletes orphans asks what is open
        # (`data/deletion`)
        fh, handle = self._files.enter(ino, flags)
        try:
            return self._open(caller, fh, handle, flags, kill_suid)
        except BaseException:
            self.release(fh)
            raise

    def _open(
        self, caller: Caller, fh: int, handle: FileHandle, flags: int, kill_suid: bool
    ) -> OpenOut:
        file = handle.file
        commits = file.commits
        attr = self._meta.open(caller, file.ino)
        if attr.nlink == 0 or attr.parent >= TRASH_INO:
            self._files.nameless.require_openable(attr, file.handles - 1)
        self._meta.require(caller, attr, _mask(flags))
        if attr.flags:
            _require_flags(attr, flags)
        if flags & os.O_TRUNC:
            mode = attr.mode
            want = SetAttr(size=0, mtime_now=True, kill_suid=kill_suid, opened=True)
            attr = self.setattr(caller, file.ino, want)
            if attr.mode != mode:
                self._coherence.stale(file.ino)  # the answer to OPEN has no room for a mode
        else:
            file.learn(attr, commits)
        self._coherence.opened(attr)
        direct = self.direct.opened(handle, flags)
        same = self._versions.still(attr, kept=not (direct and file.mixed))
        if same is False:
            self._forget_chunks(file)
        handle.kept = bool(same) and not direct
        return OpenOut(
            fh,
            keep_cache=handle.kept,
            direct_io=direct,
            no_flush=self._no_flush(handle),
        )

    def _no_flush(self, handle: FileHandle) -> bool:
        """Whether close(2) need not tell us: nothing to be stored, no locks to be dropped."""
        return not handle.writable and handle.file.ino not in self._files.locked

    def release(self, fh: int) -> None:
        """The last close(2) of a handle."""
        handle = self._files.file_handle(fh)
        if self._files.is_last(handle) and handle.file.dirty:
            self._last_flush(handle.file)
        gone = self._files.leave(fh)
        if gone is None:
            return
        if gone.writer is not None:
            lost = gone.dirty
            gone.writer.discard()
            if lost:  # the kernel has seen it written: its size and pages are the file's again
                self._coherence.stale(gone.ino)
                self._coherence.stale_pages(gone.ino)

    def _last_flush(self, file: OpenFile) -> None:
        """What close(2) could not store has one more chance; then it is lost, and we say so."""
        assert file.writer is not None
        try:
            file.writer.flush()
        except (OSError, StoreError) as error:
            self.losses.closed(file.ino, error)

    # --- data ------------------------------------------------------------------------------------

    def read(self, fh: int, offset: int, size: int, past_pages: bool = False) -> Sequence[Buffer]:
        """At most `size` bytes at `offset`. Raises: EBADF, and what `FileReader.read` does."""
        handle = self._files.file_handle(fh)
        file = handle.file
        if not past_pages:
            file.paged = True
            self._coherence.reading(file.ino)
        if file.lost:
            _require_locks(handle)
        if handle.reader is None:
            handle.reader = self._new_reader(file)
        if file.writer is not None and file.writer.misplaced:
            self.flush_file(file)
        length = self._length(file, offset + size)
        generation = self._data.epoch.begin()
        try:
            while True:
                pieces = handle.reader.read(offset, size, length)
                if not _end_in_zero(pieces) or not self._was_cut(file):
                    return pieces
                length = file.known_length
        finally:
            self._data.epoch.end(generation)

    def _new_reader(self, file: OpenFile) -> FileReader:
        def peek(sid: SliceId, off: int, length: int) -> list[Buffer] | None:
            writer = file.writer
            return None if writer is None else writer.peek(sid, off, length)

        return FileReader(
            self._runtime, self._data.blocks, file.slices, peek, self._data.prefetcher
        )

    def _length(self, file: OpenFile, end: int) -> int:
        """How long the file is, asked anew where a read may go beyond what we know."""
        while end > file.known_length:
            commits = file.commits
            attr = self._meta.getattr(ROOT_CALLER, file.ino)
            if attr.size == file.length:
                break
            if file.learn(attr, commits):
                self._forget_chunks(file)
                break
        return file.known_length

    def _was_cut(self, file: OpenFile) -> bool:
        """Whether others have cut the file since its length was asked for.

        Its slices may be newer than its length; what was cut off then reads as zeros.
        """
        if not file.unsure:
            return False
        before = file.known_length
        commits = file.ask_length()
        attr = self._meta.getattr(ROOT_CALLER, file.ino)
        if attr.size == file.length:
            return False
        if file.learn(attr, commits):
            self._forget_chunks(file)
        return file.known_length < before

    def _forget_chunks(self, file: OpenFile) -> None:
        """Others changed the file: its slices are to be as new as its size.

        News of one row may be on their way while another read has brought part of it already.
        """
        file.forget_chunks()
        self._meta.forget_chunks([file.ino])

    def write(
        self,
        caller: Caller,
        fh: int,
        offset: int,
        data: memoryview,
        kill_suid: bool,
        append: bool,
        past_pages: bool = False,
    ) -> int:
        """Take `data` for `offset`, or for the end of the file wherever that is by then.

        Returns how many bytes, fewer where the rest does not fit.
        Raises: EBADF, EFBIG, ENOSPC, EDQUOT, and what earlier writes met.
        """
        handle = self._files.file_handle(fh)
        if not handle.writable:
            raise OSError(errno.EBADF, "not open for writing")
        if offset + len(data) > FILE_SIZE_MAX:
            raise OSError(errno.EFBIG, f"write to {offset}")
        file = handle.file
        if file.lost:
            _require_locks(handle)
        taken = self.room.admit(file, max(offset, file.length) if append else offset, len(data))
        try:
            if kill_suid:
                file.unprivileged = caller
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
        elif self._writer(file).append(max(offset, file.length), data) != offset:
            self._coherence.stale_pages(file.ino)  # the kernel has put them elsewhere
        if file.mixed:
            self._coherence.stale_pages(file.ino)  # maps can have brought old ones back

    def written_past_pages(
        self, fh: int, offset: int, size: int, o_direct: bool
    ) -> Later[None] | None:
        """`FileSystem.written_past_pages`."""
        file = self._files.file_handle(fh).file
        if not self.direct.leaves_pages(file, o_direct):
            return None
        return self._coherence.drop_range(file.ino, offset, offset + size)

    def _writer(self, file: OpenFile) -> FileWriter:
        return file.writer or self._files.writer(file, self._side)

    def flush(self, fh: int) -> None:
        """close(2) of one descriptor: everything written is stored when this returns."""
        self.flush_file(self.handle(fh).file)

    def flush_file(self, file: OpenFile) -> None:
        """Store and commit what has been written to `file`. Raises: what failed."""
        if file.writer is not None and file.writer.dirty:
            file.writer.flush()

    def fsync(self, fh: int) -> None:
        """fsync(2): as `flush`, and it survives a loss of power."""
        self._sync(self.handle(fh).file)
        self._meta.sync()

    def syncfs(self) -> None:
        """syncfs(2): as fsync(2) of each file that this mount has written."""
        for file in self._files.all():
            self._sync(file)
        self.unsynced.sync_all()
        self._meta.sync()

    def _sync(self, file: OpenFile) -> None:
        if file.writer is not None:
            file.writer.flush(durable=True)
        self.unsynced.sync(file.ino)

    def setattr(self, caller: Caller, ino: Ino, want: SetAttr) -> Attr:
        """chmod(2), chown(2), utimensat(2), truncate(2); in order with what is written here."""
        file = self._files.get(ino)
        follows = file is not None and _follows_writes(want)
        if file is not None and follows:
            self.flush_file(file)
        commits = None if file is None else file.commits
        attr = self._setattr(caller, ino, want)
        now = self._files.get(ino)  # it may have been opened meanwhile
        if want.size is not None and now is not None:
            now.committed(attr, commits if now is file else None)
        if file is not None and follows and want.mode is not None:
            file.unprivileged = None  # whose data are committed, or written at the same time
        return attr

    def _setattr(self, caller: Caller, ino: Ino, want: SetAttr) -> Attr:
        """A time that we set does not make the kernel's pages old; and an empty file has none."""
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

    def flush_all(self) -> list[Failed]:
        """Store everything there is, many files at a time; what could not be."""
        return flush_together(self._runtime, self.flush_file, self._files.all())

    def flush_open(self, ino: Ino | None) -> None:
        """Store what is written to a file that is open, or to any. Raises: what failed first."""
        for file in self._files.all():
            if ino is None or file.ino == ino:
                self.flush_file(file)

    def has_unstored(self, ino: Ino | None) -> bool:
        """Whether anything is written and not stored: to a file, or to any."""
        return any(file.dirty for file in self._files.all() if ino is None or file.ino == ino)

    def handle(self, fh: int) -> FileHandle:
        """Raises: EBADF, EIO."""
        handle = self._files.file_handle(fh)
        if handle.file.lost:
            _require_locks(handle)
        return handle

    # --- what a lock means for data --------------------------------------------------------------

    def refresh(self, file: OpenFile, attr: Attr, commits: int) -> bool:
        """A lock was taken, and `attr` is what others have left; `commits` as in `learn`.

        False where the kernel is to forget pages, size and times before anybody goes on.
        """
        same = self._locked.still(attr)
        file.learn(attr, commits)
        if same:
            return True
        self._versions.still(attr)
        self._forget_chunks(file)
        return False

    def store_or_void(self, file: OpenFile) -> None:
        """A lock goes, and what was written under it must not be stored after that."""
        if file.dirty:
            self._last_flush(file)
        if file.dirty:
            self._files.set_lost(file, file.lost, void=True)


def _end_in_zero(pieces: Sequence[Buffer]) -> bool:
    return len(pieces) > 0 and len(pieces[-1]) > 0 and pieces[-1][-1] == 0


def _follows_writes(want: SetAttr) -> bool:
    """Whether what was written before must not be committed after this.

    It would bring its own, later mtime with it, and drop S_ISUID.
    """
    times = want.mtime_ns is not None or want.mtime_now
    setuid = want.mode is not None and want.mode & (stat.S_ISUID | stat.S_ISGID) != 0
    return want.size is not None or times or setuid


def _require_locks(handle: FileHandle) -> None:
    """Raises: EIO where somebody may believe in a lock that it had through `handle`."""
    if handle.fh in handle.file.lost:
        raise OSError(errno.EIO, f"inode {handle.file.ino}: its locks were lost with the session")


def _require_flags(attr: Attr, flags: int) -> None:
    """Raises: EPERM where open(2) with `flags` would not only append to an append-only file."""
    writes = flags & os.O_ACCMODE != os.O_RDONLY
    access.require_opening(attr, writes, bool(flags & os.O_APPEND), bool(flags & os.O_TRUNC))


def _mask(flags: int) -> int:
    """What open(2) flags ask for, as access(2) bits."""
    mode = flags & os.O_ACCMODE
    mask = 0 if mode == os.O_WRONLY else access.READ
    if mode != os.O_RDONLY or flags & os.O_TRUNC:
        mask |= access.WRITE
    return mask

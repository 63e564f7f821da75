"""open, read, write, flush, fsync, release: where a handle meets slices and blocks.

The kernel's page cache is kept over an open when the file's (mtime, size) are what they were when
its pages were read. What we change ourselves moves that mark along: the kernel has the pages that
were written, and a time that was set makes none of them old.

Threading: called by the transport's threads, several for one file at once.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from fsclient.coherence import Coherence
from fsclient.filesystem import Buffer, Opened
from fsclient.open_files import FileHandle, OpenFile, OpenFiles
from fsdata.blocks import BlockStore
from fsdata.budget import Budget
from fsdata.epoch import ReadEpoch
from fsdata.prefetch import Prefetcher
from fsdata.reader import FileReader
from fsdata.uploads import UploadPool
from fsdata.writer import FileWriter, WriteSide
from fsmeta import access
from fsmeta.engine import Meta
from fsmeta.errors import StoreError
from fsmeta.runtime import Runtime
from fsmeta.types import (
    FILE_SIZE_MAX,
    ROOT_CALLER,
    Attr,
    Caller,
    Ino,
    SetAttr,
    Slice,
    SliceId,
    StatFs,
)

log = logging.getLogger(__name__)

VERSIONS_MAX: Final = 200_000  # files whose pages may be kept; about 30 MB
USAGE_TTL_S: Final = 1.0  # how old the volume's usage may be when a write is measured against it


class PageVersions:
    """Which (mtime, size) of a file the kernel's pages show."""

    def __init__(self, runtime: Runtime) -> None:
        self._lock = runtime.lock()
        self._known: OrderedDict[Ino, tuple[int, int]] = OrderedDict()  # guarded by _lock

    def still(self, attr: Attr) -> bool | None:
        """Whether pages read earlier show `attr`'s version; None where there are none we know of.

        From now on they do.
        """
        version = (attr.mtime_ns, attr.size)
        with self._lock:
            before = self._known.get(attr.ino)
            self._known[attr.ino] = version
            self._known.move_to_end(attr.ino)
            if len(self._known) > VERSIONS_MAX:
                self._known.popitem(last=False)
        return None if before is None else before == version

    def moved(self, before: Attr, after: Attr) -> None:
        """We changed the file ourselves: pages that showed `before` show `after`."""
        with self._lock:
            if self._known.get(before.ino) == (before.mtime_ns, before.size):
                self._known[after.ino] = (after.mtime_ns, after.size)


class DataSide:
    """What file data passes through; one of each for a mount."""

    def __init__(
        self,
        blocks: BlockStore,
        budget: Budget,
        uploads: UploadPool,
        prefetcher: Prefetcher,
        epoch: ReadEpoch,
    ) -> None:
        self.blocks = blocks
        self.budget = budget
        self.uploads = uploads
        self.prefetcher = prefetcher
        self.epoch = epoch


class FileIO:
    """Reads and writes through handles."""

    def __init__(
        self,
        meta: Meta,
        data: DataSide,
        files: OpenFiles,
        coherence: Coherence,
        runtime: Runtime,
    ) -> None:
        self._coherence = coherence
        self._meta = meta
        self._data = data
        self._files = files
        self._runtime = runtime
        self._versions = PageVersions(runtime)
        self._side = WriteSide(runtime, data.blocks, data.budget, data.uploads, self)
        self._usage = StatFs(0, 0, 0, 0)  # replaced whole
        self._usage_at = 0.0
        self.on_many_slices = _ignore  # told (inode, chunk index, slices) after each commit

    # --- what FileWriter asks of the metadata ----------------------------------------------------

    def new_slice_id(self) -> SliceId:
        return self._meta.new_slice_id()

    def commit(
        self, ino: Ino, batch: Sequence[tuple[int, Slice]], length: int, mtime_ns: int
    ) -> None:
        """Slices are stored: make them part of the file, and show them to its readers.

        The file gets the time of its last write, which stat(2) has been showing since.
        """
        file = self._files.get(ino)
        unprivileged = None
        if file is not None:
            mtime_ns, unprivileged = file.mtime_ns, file.unprivileged
        before, after = self._meta.write_slices(ino, batch, length, mtime_ns, unprivileged)
        self._versions.moved(before, after)
        if file is not None:
            file.committed(after)
        if after.mode != before.mode:
            self._coherence.stale(ino)
        for index in dict.fromkeys(index for index, _ in batch):
            self.on_many_slices(ino, index)

    # --- handles ---------------------------------------------------------------------------------

    def created(self, attr: Attr, flags: int) -> Opened:
        """The handle of a file just made."""
        self._versions.still(attr)
        fh, handle = self._files.enter(attr.ino, flags)
        handle.file.learn(attr, 0)
        return Opened(fh, keep_cache=True, no_flush=not handle.writable)

    def open(self, caller: Caller, ino: Ino, flags: int, kill_suid: bool) -> Opened:
        """open(2) of what exists. Raises: EACCES, EISDIR, ESTALE."""
        # first the handle, then the file's fate: who deletes orphans asks what is open (`reclaim`)
        fh, handle = self._files.enter(ino, flags)
        try:
            return self._open(caller, fh, handle, flags, kill_suid)
        except BaseException:
            self._files.leave(fh)
            raise

    def _open(
        self, caller: Caller, fh: int, handle: FileHandle, flags: int, kill_suid: bool
    ) -> Opened:
        file = handle.file
        commits = file.commits
        attr = self._meta.open(caller, file.ino)
        if attr.nlink == 0 and file.handles == 1:
            raise OSError(errno.ESTALE, f"inode {file.ino} has no name")
        access.require(caller, attr, _mask(flags))
        if flags & os.O_TRUNC:
            mode = attr.mode
            want = SetAttr(size=0, mtime_now=True, kill_suid=kill_suid, opened=True)
            attr = self.setattr(caller, file.ino, want)
            if attr.mode != mode:
                self._coherence.stale(file.ino)  # the answer to OPEN has no room for a mode
        else:
            file.learn(attr, commits)
        same = self._versions.still(attr)
        if same is False and not file.dirty:
            self._forget_chunks(file)
        return Opened(fh, keep_cache=bool(same), no_flush=not handle.writable)

    def release(self, fh: int) -> None:
        """The last close(2) of a handle."""
        file = self._files.file_handle(fh).file
        if file.handles == 1 and file.dirty:
            self._last_flush(file)
        gone = self._files.leave(fh)
        if gone is None:
            return
        if gone.writer is not None:
            gone.writer.discard()

    def _last_flush(self, file: OpenFile) -> None:
        """What close(2) could not store has one more chance; then it is lost, and we say so."""
        assert file.writer is not None
        try:
            file.writer.flush()
        except (OSError, StoreError) as error:
            log.error("inode %d: data written and not stored is lost: %s", file.ino, error)

    # --- data ------------------------------------------------------------------------------------

    def read(self, fh: int, offset: int, size: int) -> Sequence[Buffer]:
        """At most `size` bytes at `offset`. Raises: EBADF, and what `FileReader.read` does."""
        handle = self._files.file_handle(fh)
        file = handle.file
        if handle.reader is None:
            handle.reader = self._new_reader(file)
        length = self._length(file, offset + size)
        generation = self._data.epoch.begin()
        try:
            return handle.reader.read(offset, size, length)
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
        writer = file.writer
        if writer is not None and writer.dirty:
            return max(writer.length, file.length)
        if end > file.length:
            size = self._meta.getattr(ROOT_CALLER, file.ino).size
            if size != file.length:
                self._forget_chunks(file)
            file.length = size
        return file.length

    def _forget_chunks(self, file: OpenFile) -> None:
        """Others changed the file: its slices are to be as new as its size.

        News of one row may be on their way while another read has brought part of it already.
        """
        file.forget_chunks()
        self._meta.forget_chunks([file.ino])

    def write(self, caller: Caller, fh: int, offset: int, data: memoryview, kill_suid: bool) -> int:
        """Take `data` for `offset`. Raises: EBADF, EFBIG, ENOSPC, and what earlier writes met."""
        handle = self._files.file_handle(fh)
        if not handle.writable:
            raise OSError(errno.EBADF, "not open for writing")
        if offset + len(data) > FILE_SIZE_MAX:
            raise OSError(errno.EFBIG, f"write to {offset}")
        file = handle.file
        if self._meta.format.capacity:
            self._require_space(len(data))
        if kill_suid:
            file.unprivileged = caller
        file.mtime_ns = self._runtime.now_ns()  # first: a commit may follow at once
        self._writer(file).write(offset, data)
        return len(data)

    def _writer(self, file: OpenFile) -> FileWriter:
        return file.writer or self._files.writer(file, self._side)

    def _require_space(self, size: int) -> None:
        """Refuse early what the commit would refuse anyway. Raises: ENOSPC."""
        now = self._runtime.monotonic()
        if now - self._usage_at > USAGE_TTL_S:
            self._usage, self._usage_at = self._meta.statfs(), now
        pending = self._data.budget.gauges().writing
        if self._usage.space_used + pending + size > self._usage.space_limit:
            self._usage_at = 0.0
            raise OSError(errno.ENOSPC, "the volume is full")

    def flush(self, fh: int) -> None:
        """close(2) of one descriptor: everything written is stored when this returns."""
        self.flush_file(self._files.file_handle(fh).file)

    def flush_file(self, file: OpenFile) -> None:
        """Store and commit what has been written to `file`. Raises: what failed."""
        if file.writer is not None and file.writer.dirty:
            file.writer.flush()

    def fsync(self, fh: int) -> None:
        """fsync(2): as `flush`, and it survives a loss of power."""
        writer = self._files.file_handle(fh).file.writer
        if writer is not None:
            writer.flush(durable=True)
        self._meta.sync()

    def setattr(self, caller: Caller, ino: Ino, want: SetAttr) -> Attr:
        """chmod(2), chown(2), utimensat(2), truncate(2); in order with what is written here."""
        file = self._files.get(ino)
        if file is None or not _follows_writes(want):
            return self._setattr(caller, ino, want)
        self.flush_file(file)
        commits = file.commits
        attr = self._setattr(caller, ino, want)
        file.learn(attr, commits)
        if want.mode is not None:
            file.unprivileged = None  # whose data are committed, or written at the same time
        return attr

    def _setattr(self, caller: Caller, ino: Ino, want: SetAttr) -> Attr:
        """A time that we set does not make the kernel's pages old; and an empty file has none."""
        before, after = self._meta.setattr(caller, ino, want)
        if want.size is None or before.size == 0:
            self._versions.moved(before, after)
        return after

    def flush_all(self) -> list[tuple[Ino, Exception]]:
        """Store everything there is; what could not be."""
        failed: list[tuple[Ino, Exception]] = []
        for file in self._files.all():
            try:
                self.flush_file(file)
            except (OSError, StoreError) as error:
                failed.append((file.ino, error))
        return failed

    def handle(self, fh: int) -> FileHandle:
        """Raises: EBADF."""
        return self._files.file_handle(fh)


def _follows_writes(want: SetAttr) -> bool:
    """Whether what was written before must not be committed after this.

    It would bring its own, later mtime with it, and drop S_ISUID.
    """
    times = want.mtime_ns is not None or want.mtime_now
    setuid = want.mode is not None and want.mode & (stat.S_ISUID | stat.S_ISGID) != 0
    return want.size is not None or times or setuid


def _ignore(ino: Ino, index: int) -> None:
    """Nobody compacts."""


def _mask(flags: int) -> int:
    """What open(2) flags ask for, as access(2) bits."""
    mode = flags & os.O_ACCMODE
    mask = 0 if mode == os.O_WRONLY else access.READ
    if mode != os.O_RDONLY or flags & os.O_TRUNC:
        mask |= access.WRITE
    return mask

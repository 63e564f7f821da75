"""fallocate, lseek, copy_file_range, O_TMPFILE: what `FileIO` does not do with an open file.

All but lseek are changes of metadata; what was written here before is stored first, so that they
find it. lseek looks at what is committed and what is pending, as a read does.

Threading: called by the transport's threads.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence

from fsclient.files.file_io import FileIO
from fsclient.files.handles.open_files import OpenFile, OpenFiles
from fsclient.kernel.contract import OpenOut
from fsmeta.admin.quota_admin import change_settings
from fsmeta.meta.meta import Meta
from fsmeta.ops.data.ranges import PUNCH_HOLE, Span
from fsmeta.ops.names.create import NewNode
from fsmeta.rules.context import Changed
from fsmeta.rules.settings import RESERVED_VERSION, VolumeFormat
from fsmeta.slices import resolve
from fsmeta.types import CHUNK_BYTES, FILE_SIZE_MAX, Attr, Caller, Ino, Slice

log = logging.getLogger(__name__)

LOOK_AT_ONCE = 16  # chunks that lseek looks at; what takes more is no work of a serving thread


class FileRanges:
    """Ranges of open files, and files without names."""

    def __init__(self, meta: Meta, files: OpenFiles, io: FileIO) -> None:
        self._meta = meta
        self._files = files
        self._io = io

    def tmpfile(
        self, caller: Caller, parent: Ino, mode: int, flags: int, umask: int
    ) -> tuple[Attr, OpenOut]:
        """open(2) with O_TMPFILE. Raises: ENOENT, EACCES."""
        # first the handle, then the orphan: deleting orphans asks what is open (`data/deletion`)
        ino = self._meta.new_ino()
        fh, handle = self._files.enter(ino, flags)
        try:
            node = NewNode(ino, mode, umask=umask)
            attr = self._meta.ranges.tmpfile(caller, parent, node, not flags & os.O_EXCL)
        except BaseException:
            self._files.leave(fh)
            raise
        handle.file.learn(attr, 0)
        self._io.keeper.opened(fh, ino, flags, False)
        return attr, OpenOut(fh, keep_cache=True, no_flush=not handle.writable)

    def fallocate(self, fh: int, mode: int, begin: int, length: int) -> None:
        """Raises: EBADF, EOPNOTSUPP, EFBIG, ENOSPC, EDQUOT."""
        file = self._writable(fh)
        end = begin + length
        if end > FILE_SIZE_MAX:
            raise OSError(errno.EFBIG, f"fallocate to {end}")
        self._io.flush_file(file)
        if mode & PUNCH_HOLE:
            self._fallocate(file, mode, begin, end)
            return
        with self._io.room.reserving(file.ino, length):
            self._allow_reserving()
            self._fallocate(file, mode, begin, end)

    def _fallocate(self, file: OpenFile, mode: int, begin: int, end: int) -> None:
        commits = file.commits
        changed = self._meta.ranges.fallocate(file.ino, mode, begin, end)
        self._changed(file, changed, commits, (begin, end - 1))

    def _allow_reserving(self) -> None:
        """Raise the version before the first reservation, so that earlier clients refuse it.

        Those that are there now are not locked out by what any user may call: nothing is reserved
        while there are some.
        """
        if self._meta.format.version >= RESERVED_VERSION:
            return
        if not self._meta.sessions.all_know(RESERVED_VERSION):
            log.info("fallocate(2) reserves nothing: clients of an earlier version are mounted")
            return
        change_settings(self._meta, VolumeFormat.with_reserved)
        self._meta.refresh_settings()

    def copy_file_range(
        self, fh_in: int, offset_in: int, fh_out: int, offset_out: int, length: int
    ) -> int:
        """Share slices; how many bytes that were, perhaps fewer than asked for.

        Raises: EBADF, EINVAL, EFBIG, ENOSPC.
        """
        source, target = self._io.handle(fh_in).file, self._writable(fh_out)
        self._io.flush_file(source)
        self._io.flush_file(target)
        commits = target.commits
        span = Span(source.ino, offset_in, min(offset_in + length, FILE_SIZE_MAX))
        end, changed = self._meta.ranges.copy_file_range(span, target.ino, offset_out)
        if end > offset_out:
            self._io.unsynced.shared(target.ino)
            self._changed(target, changed, commits, (offset_out, end - 1))
        return end - offset_out

    def _writable(self, fh: int) -> OpenFile:
        handle = self._io.handle(fh)
        if not handle.writable:
            raise OSError(errno.EBADF, "not open for writing")
        return handle.file

    def _changed(
        self, file: OpenFile, changed: Changed, commits: int, ends: tuple[int, int]
    ) -> None:
        """The kernel itself has dropped the pages of the range that `ends` are of."""
        file.committed(changed.after, commits)
        self._io.commits.changed(file.ino, changed, ends)

    # --- holes -----------------------------------------------------------------------------------

    def lseek(self, fh: int, offset: int, whence: int) -> int | None:
        """Where the next data or hole begins, at `offset` or behind it; the end is a hole.

        None where more than LOOK_AT_ONCE chunks are to be looked at: `lseek_far` does that.
        Raises: ENXIO at and beyond the end, and where no data follow; EINVAL.
        """
        if whence not in (os.SEEK_DATA, os.SEEK_HOLE):
            raise OSError(errno.EINVAL, f"lseek whence {whence}")
        file, size, chunks = self._behind(fh, offset)
        if file.attached:
            return offset if whence == os.SEEK_DATA else size
        near = chunks[:LOOK_AT_ONCE]
        found = _look(file, near, offset, size, whence)
        return _or_end(found, size, whence) if found is not None or near == chunks else None

    def lseek_far(self, fh: int, offset: int, whence: int, stopped: Callable[[], bool]) -> int:
        """As `lseek`, however long it takes. Raises: ENXIO; EINTR once `stopped`."""
        file, size, chunks = self._behind(fh, offset)
        looked = chunks if whence == os.SEEK_HOLE else self._holding(file, chunks)
        found = _look(file, _unless(stopped, looked), offset, size, whence)
        return _or_end(found, size, whence)

    def _behind(self, fh: int, offset: int) -> tuple[OpenFile, int, range]:
        """An open file, its size, and the chunks from `offset` on. Raises: ENXIO."""
        file = self._io.handle(fh).file
        size = self._files.getattr(file).size
        if not 0 <= offset < size:
            raise OSError(errno.ENXIO, "beyond the end")
        return file, size, range(offset // CHUNK_BYTES, -(-size // CHUNK_BYTES))

    def _holding(self, file: OpenFile, chunks: range) -> Iterable[int]:
        """Those of `chunks` that may hold something, in order."""
        pending = set() if file.writer is None else file.writer.pending_chunks()
        found = pending | set(self._meta.ranges.chunks(file.ino))
        return sorted(index for index in found if index in chunks)


def _look(file: OpenFile, chunks: Iterable[int], offset: int, size: int, whence: int) -> int | None:
    """Where in `chunks` something begins, at `offset` or behind it; None where it does not."""
    for index in chunks:
        base = index * CHUNK_BYTES
        begin = max(offset - base, 0)
        find = _data_in if whence == os.SEEK_DATA else _hole_in
        found = find(file.slices(index), begin)
        if found is not None and base + found < size:
            return base + found
    return None


def _data_in(slices: Sequence[Slice], begin: int) -> int | None:
    """Where data begins in a chunk."""
    for part in resolve(slices):
        if part.slice is not None and part.end > begin:
            return max(begin, part.pos)
    return None


def _hole_in(slices: Sequence[Slice], begin: int) -> int | None:
    """Where a hole begins in a chunk."""
    for part in resolve(slices):
        if part.slice is not None and part.pos <= begin < part.end:
            begin = part.end
    return begin if begin < CHUNK_BYTES else None


def _or_end(found: int | None, size: int, whence: int) -> int:
    """What was found, or the end, which is a hole. Raises: ENXIO."""
    if found is None and whence == os.SEEK_DATA:
        raise OSError(errno.ENXIO, "no data follow")
    return size if found is None else found


def _unless(stopped: Callable[[], bool], chunks: Iterable[int]) -> Iterator[int]:
    """`chunks`, until no request waits for what is found in them. Raises: EINTR."""
    for index in chunks:
        if stopped():
            raise OSError(errno.EINTR, "interrupted")
        yield index

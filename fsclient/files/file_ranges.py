"""fallocate, lseek, copy_file_range, O_TMPFILE: what `FileIO` does not do with an open file.

All but lseek are changes of metadata; what was written here before is stored first, so that they
find it. lseek looks at what is committed and what is pending, as a read does.

Threading: called by the transport's threads.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable

from fsclient.files.file_io import FileIO
from fsclient.files.open_files import OpenFile, OpenFiles
from fsclient.kernel.contract import OpenOut
from fsmeta.meta.meta import Meta
from fsmeta.ops.data.ranges import Span
from fsmeta.ops.names.create import NewNode
from fsmeta.rules.context import Changed
from fsmeta.slices import resolve
from fsmeta.types import CHUNK_BYTES, FILE_SIZE_MAX, Attr, Caller, Ino

LIST_FROM = 16  # chunks; where there may be more, those that hold something are listed first


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
        # first the handle, then the orphan: who deletes orphans asks what is open (`data/deletion`)
        ino = self._meta.new_ino()
        fh, handle = self._files.enter(ino, flags)
        try:
            node = NewNode(ino, mode, umask=umask)
            attr = self._meta.ranges.tmpfile(caller, parent, node, not flags & os.O_EXCL)
        except BaseException:
            self._files.leave(fh)
            raise
        handle.file.learn(attr, 0)
        return attr, OpenOut(fh, keep_cache=True, no_flush=not handle.writable)

    def fallocate(self, fh: int, mode: int, begin: int, length: int) -> None:
        """Raises: EBADF, EOPNOTSUPP, EFBIG, ENOSPC."""
        file = self._writable(fh)
        end = begin + length
        if end > FILE_SIZE_MAX:
            raise OSError(errno.EFBIG, f"fallocate to {end}")
        self._io.room.require_space(length)
        self._io.flush_file(file)
        commits = file.commits
        self._changed(file, self._meta.ranges.fallocate(file.ino, mode, begin, end), commits)

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
            self._io.unsynced.shared(target)
            self._changed(target, changed, commits)
        return end - offset_out

    def _writable(self, fh: int) -> OpenFile:
        handle = self._io.handle(fh)
        if not handle.writable:
            raise OSError(errno.EBADF, "not open for writing")
        return handle.file

    def _changed(self, file: OpenFile, changed: Changed, commits: int) -> None:
        """The kernel has dropped the pages of the range itself."""
        file.committed(changed.after, commits)
        self._io.commits.changed(file.ino, changed)

    # --- holes -----------------------------------------------------------------------------------

    def lseek(self, fh: int, offset: int, whence: int) -> int:
        """Where the next data or hole begins, at `offset` or behind it; the end is a hole.

        Raises: ENXIO at and beyond the end, and where no data follow; EINVAL.
        """
        if whence not in (os.SEEK_DATA, os.SEEK_HOLE):
            raise OSError(errno.EINVAL, f"lseek whence {whence}")
        file = self._io.handle(fh).file
        size = self._files.getattr(file).size
        if not 0 <= offset < size:
            raise OSError(errno.ENXIO, "beyond the end")
        if whence == os.SEEK_DATA:
            return self._next_data(file, offset, size)
        return self._next_hole(file, offset, size)

    def _next_data(self, file: OpenFile, offset: int, size: int) -> int:
        for index in self._holding(file, offset // CHUNK_BYTES, -(-size // CHUNK_BYTES)):
            base = index * CHUNK_BYTES
            for part in resolve(file.slices(index)):
                if part.slice is not None and base + part.end > offset:
                    found = max(offset, base + part.pos)
                    if found < size:
                        return found
        raise OSError(errno.ENXIO, "no data follow")

    def _next_hole(self, file: OpenFile, offset: int, size: int) -> int:
        while offset < size:
            index, pos = divmod(offset, CHUNK_BYTES)
            end = pos
            for part in resolve(file.slices(index)):
                if part.slice is not None and part.pos <= end < part.end:
                    end = part.end
            if end < CHUNK_BYTES:
                return min(index * CHUNK_BYTES + end, size)
            offset = (index + 1) * CHUNK_BYTES
        return size

    def _holding(self, file: OpenFile, begin: int, end: int) -> Iterable[int]:
        """The chunks among `begin..end` that may hold something, in order."""
        if end - begin <= LIST_FROM:
            return range(begin, end)
        pending = set() if file.writer is None else file.writer.pending_chunks()
        found = pending | set(self._meta.ranges.chunks(file.ino))
        return sorted(index for index in found if begin <= index < end)

"""Files and directories that are open here, and what is known of a file while it is.

All handles of an inode share one `OpenFile`: its writer with the bytes not committed yet, its
length, and the slices of its chunks. A handle has its own `FileReader`, because read-ahead is the
handle's. An open directory has an `OpenFile` only so that it is held when it loses its name.

Attributes that were asked for before a commit of ours and used after it would take back what the
commit has brought. So `commits` counts them, each after the store has it and before its bytes leave
the writer: attributes are true with the overlay of that moment if the count is still the same.

Threading: the table is guarded by its lock; an `OpenFile` is used by many threads at once, its
writer has its own locks and its other fields are replaced whole.
"""

from __future__ import annotations

import errno
import os
from typing import Final

from fsdata.reader import FileReader
from fsdata.writer import FileWriter, WriteSide
from fsmeta import access
from fsmeta.engine import Meta
from fsmeta.runtime import Lock, Runtime
from fsmeta.types import ROOT_CALLER, Attr, Caller, Dentry, Ino, Slice

CHUNKS_TTL_S: Final = 1.0  # how long slices are believed where the store does not vouch


class OpenFile:
    """What all handles of one inode share."""

    def __init__(self, meta: Meta, runtime: Runtime, lock: Lock, ino: Ino) -> None:
        self.ino = ino
        self.handles = 0  # guarded by the table
        self.writer: FileWriter | None = None  # made under the table's lock, once
        self.length = 0  # as far as we know; a read beyond it asks again; written under _lock
        self.commits = 0  # of ours to this file; written under _lock
        # who wrote last without CAP_FSETID; each commit drops S_ISUID then, until chmod(2) sets it
        self.unprivileged: Caller | None = None
        self.mtime_ns = 0  # of the last write
        self._lock = lock  # the table's
        self._meta = meta
        self._clock = runtime.monotonic
        self._chunks: dict[int, tuple[float, list[Slice]]] = {}  # replaced entry by entry

    def learn(self, attr: Attr, commits: int) -> None:
        """The file was just opened or truncated: what is known from before may be old.

        `commits` is the count from before `attr` was asked for.
        """
        with self._lock:
            if self.commits != commits or self.dirty:
                return
            self.length = attr.size
            self._chunks = {}
            if self.writer is not None:
                self.writer.set_length(attr.size)

    def committed(self, attr: Attr) -> None:
        """A commit of ours has made the file what `attr` says."""
        with self._lock:
            self.commits += 1
            self.length = attr.size
            self._chunks = {}

    @property
    def dirty(self) -> bool:
        """Whether anything written here is not committed yet."""
        writer = self.writer
        return writer is not None and writer.dirty

    def overlay(self, attr: Attr) -> Attr:
        """Attributes as this mount sees them: with what it has written and not yet committed.

        All is as it will be after the commit; only `used` counts what is overwritten twice.
        """
        writer = self.writer
        if writer is None or not writer.dirty:
            return attr
        mtime = self.mtime_ns
        size = max(attr.size, writer.length)
        unprivileged = self.unprivileged
        return attr._replace(
            mode=attr.mode if unprivileged is None else access.drop_suid(unprivileged, attr),
            size=size,
            used=min(size, attr.used + writer.pending_bytes),
            mtime_ns=mtime,
            ctime_ns=max(attr.ctime_ns, mtime),
        )

    def slices(self, index: int) -> list[Slice]:
        """Committed slices of a chunk and then pending ones, for `FileReader`."""
        writer = self.writer
        # pending first: a slice that is committed in between is then seen twice, not never
        pending = writer.pending(index) if writer is not None else []
        return [*self._committed(index), *pending] if pending else self._committed(index)

    def _committed(self, index: int) -> list[Slice]:
        if self._meta.vouches_inode(self.ino):
            return self._read_chunk(index)
        now = self._clock()
        chunks = self._chunks  # what is read now must not outlive a `forget_chunks` meanwhile
        known = chunks.get(index)
        if known is not None and now < known[0]:
            return known[1]
        slices = self._read_chunk(index)
        chunks[index] = (now + CHUNKS_TTL_S, slices)
        return slices

    def _read_chunk(self, index: int) -> list[Slice]:
        """Raises: ESTALE where the file has been purged, which must not read as a hole.

        That happens to who lost its lease, and so what it held open.
        """
        slices = self._meta.read_chunk(self.ino, index)
        if not slices:
            self._meta.getattr(ROOT_CALLER, self.ino)
        return slices

    def forget_chunks(self) -> None:
        """Read the slices anew: there are more, or they were replaced."""
        self._chunks = {}


class FileHandle:
    """One open(2) of a file."""

    def __init__(self, file: OpenFile, flags: int) -> None:
        self.file = file
        self.writable = flags & os.O_ACCMODE != os.O_RDONLY
        self.reader: FileReader | None = None  # made at the first read


class DirHandle:
    """One opendir(3): the names read so far, in the order their cookies count."""

    def __init__(self, file: OpenFile) -> None:
        self.file = file
        self.entries: list[Dentry] = []
        self.seen: set[bytes] = set()
        self.cursor: bytes | None = b""  # where the next page begins; None at the end
        self.begun = False  # somebody has read from it

    def rewind(self) -> None:
        """rewinddir(3): read the directory anew."""
        self.entries = []
        self.seen = set()
        self.cursor = b""


class OpenFiles:
    """The table of handles and of the files behind them."""

    def __init__(self, meta: Meta, runtime: Runtime) -> None:
        self._meta = meta
        self._runtime = runtime
        self._lock = runtime.lock()
        self._next = 1  # guarded by _lock
        self._handles: dict[int, FileHandle | DirHandle] = {}  # guarded by _lock
        self._files: dict[Ino, OpenFile] = {}  # guarded by _lock

    def enter(self, ino: Ino, flags: int) -> tuple[int, FileHandle]:
        """A new handle of a file; its file knows nothing yet if it was not open."""
        with self._lock:
            handle = FileHandle(self._share(ino), flags)
            return self._add(handle), handle

    def enter_dir(self, ino: Ino) -> int:
        """A new handle of a directory."""
        with self._lock:
            return self._add(DirHandle(self._share(ino)))

    def _share(self, ino: Ino) -> OpenFile:
        file = self._files.get(ino)
        if file is None:
            file = self._files[ino] = OpenFile(self._meta, self._runtime, self._lock, ino)
        file.handles += 1
        return file

    def _add(self, handle: FileHandle | DirHandle) -> int:
        fh = self._next
        self._next += 1
        self._handles[fh] = handle
        return fh

    def file_handle(self, fh: int) -> FileHandle:
        """Raises: EBADF."""
        handle = self._handles.get(fh)
        if not isinstance(handle, FileHandle):
            raise OSError(errno.EBADF, f"no open file {fh}")
        return handle

    def dir_handle(self, fh: int) -> DirHandle:
        """Raises: EBADF."""
        handle = self._handles.get(fh)
        if not isinstance(handle, DirHandle):
            raise OSError(errno.EBADF, f"no open directory {fh}")
        return handle

    def writer(self, file: OpenFile, side: WriteSide) -> FileWriter:
        """The file's writer, made at the first write."""
        with self._lock:
            if file.writer is None:
                file.writer = FileWriter(side, file.ino, file.length)
            return file.writer

    def leave(self, fh: int) -> OpenFile | None:
        """A handle is closed; returns its file if that was the last one."""
        with self._lock:
            handle = self._handles.pop(fh, None)
            if handle is None:
                return None
            if isinstance(handle, FileHandle) and handle.reader is not None:
                handle.reader.close()
            handle.file.handles -= 1
            if handle.file.handles:
                return None
            del self._files[handle.file.ino]
            return handle.file

    def get(self, ino: Ino) -> OpenFile | None:
        """The file, if it is open here."""
        return self._files.get(ino)

    def all(self) -> list[OpenFile]:
        """Everything that is open now."""
        with self._lock:
            return list(self._files.values())

    def handle_count(self) -> int:
        """Open files and directories: a gauge."""
        return len(self._handles)

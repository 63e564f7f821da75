"""Files and directories that are open here, and what is known of a file while it is.

All handles of an inode share one `OpenFile`: its writer with the bytes not committed yet, its
length, and the slices of its chunks. A handle has its own `FileReader`, because read-ahead is the
handle's. An open directory has an `OpenFile` only so that it is held when it loses its name.

Attributes that were asked for before a commit of ours and used after it would take back what the
commit has brought. So `commits` counts them, truncations too, each after the store has it and
before its bytes leave the writer: attributes are true with the overlay of that moment if the count
is still the same. A length that is too small is asked about by the next read, one that is too large
by a read that finds zeros there: in doubt it is the smaller one.

Threading: the table is guarded by its lock; an `OpenFile` is used by many threads at once, its
writer has its own locks and its other fields are replaced whole.
"""

from __future__ import annotations

import errno
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Final

from fsclient.files.handles.atimes import Atimes
from fsclient.files.handles.page_cache_validity import ExpectedVersion
from fsclient.files.handles.unlinked_inodes import UnlinkedInodes
from fsclient.files.handles.unsynced_slices import UnsyncedSlices
from fsclient.listings.dir_stream import DirStream
from fsdata.attached.objects import AttachedReader
from fsdata.blocks.blocks import BlockStore
from fsdata.files.reader import FileReader
from fsdata.files.write_services import WriteServices
from fsdata.files.writer import FileWriter
from fsmeta.meta.meta import Meta
from fsmeta.rules import access
from fsmeta.runtime import Lock, Runtime
from fsmeta.schema.keys import DIR_PREFIX, INODE_PREFIX, id_of
from fsmeta.types import FLAG_ATTACHED, ROOT_CALLER, Attr, Caller, Ino, Slice

CHUNKS_KEPT_MAX: Final = 1024  # chunks whose slices are cached so, of a file
CHUNKS_TTL_S: Final = 1.0  # how long slices are cached without a lease
CLOSED_MAX: Final = 4096  # closed files of which we know when; of older ones all is in doubt


class OpenFile:
    """What all handles of one inode share."""

    # what a file begins with, here and not in __init__: most files that are opened need no more
    handles = 0  # guarded by the table
    leaving = 0  # those of them that are being closed; guarded by the table
    writer: FileWriter | None = None  # made under the table's lock, once
    length = 0  # committed, as far as we know; a read beyond asks; written under _lock
    commits = 0  # of ours to this file; written under _lock
    attached = False  # the file shows an object of a bucket
    unsure = False  # slices were read since `length` was asked for, and may be newer
    # the last writer without CAP_FSETID; each commit drops S_ISUID then, until chmod(2) sets it
    unprivileged: Caller | None = None
    mtime_ns = 0  # of the last write
    direct = 0  # handles that write past the kernel's pages; guarded by the table
    mixed = False  # and other handles have the file open; guarded by the table
    paged = False  # since it is open the kernel has filled pages of it
    lost: frozenset[int] = frozenset()  # handles whose locks went with our session
    renames = 0  # of a directory: another number after each change of names

    def __init__(self, meta: Meta, clock: Callable[[], float], lock: Lock, ino: Ino) -> None:
        self.ino = ino
        self._lock = lock  # the table's
        self._meta = meta
        self._clock = clock
        self._chunks: dict[int, tuple[float, list[Slice]]] = {}  # replaced entry by entry

    def ask_length(self) -> int:
        """The attributes are about to be asked for; what `learn` is to be given with them."""
        self.unsure = False
        return self.commits

    def learn(self, attr: Attr, commits: int) -> bool:
        """The store says `attr`: what is known from before may be old.

        `commits` is the count from before `attr` was asked for; False where it is another one now.
        """
        with self._lock:
            if self.commits != commits:
                return False
            self.length = attr.size
            self.attached = attr.flags & FLAG_ATTACHED != 0
            self._chunks = {}
            return True

    def committed(self, attr: Attr, commits: int | None) -> None:
        """A commit of ours has made the file what `attr` says.

        `commits` is the count from before it; None if it was not read. What was committed
        meanwhile may have come before it or after.
        """
        with self._lock:
            self.length = attr.size if self.commits == commits else min(self.length, attr.size)
            self.attached = attr.flags & FLAG_ATTACHED != 0
            self.commits += 1
            self._chunks = {}

    @property
    def known_length(self) -> int:
        """With what is written here and not committed; the store may know more."""
        writer = self.writer
        return max(0 if writer is None else writer.end, self.length)

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
        size = max(attr.size, writer.end)
        unprivileged = self.unprivileged
        return attr._replace(
            mode=attr.mode if unprivileged is None else access.drop_suid(unprivileged, attr),
            size=size,
            used=max(attr.used, min(size, attr.used + writer.pending_bytes)),
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
        if self._meta.is_inode_leased(self.ino):
            return self._read_chunk(index)
        now = self._clock()
        chunks = self._chunks  # what is read now must not outlive a `forget_chunks` meanwhile
        known = chunks.get(index)
        if known is not None and now < known[0]:
            return known[1]
        slices = self._read_chunk(index)
        if len(chunks) >= CHUNKS_KEPT_MAX:
            chunks.clear()
        chunks[index] = (now + CHUNKS_TTL_S, slices)
        return slices

    def _read_chunk(self, index: int) -> list[Slice]:
        """Raises: ESTALE where the file has been purged, which must not read as a hole.

        That happens to a client that lost its lease, and so what it held open.
        """
        slices = self._meta.read_chunk(self.ino, index)
        self.unsure = True
        if not slices:
            self._meta.getattr(ROOT_CALLER, self.ino)
        return slices

    def forget_chunks(self) -> None:
        """Read the slices anew: there are more, or they were replaced."""
        self._chunks = {}


class FileHandle:
    """One open(2) of a file."""

    fh = 0  # given by the table
    reader: FileReader | AttachedReader | None = None  # made at the first read
    kept = False  # the kernel had pages of the file, so reads may never reach us
    direct = False  # it writes past the kernel's pages; guarded by the table
    leaving = False  # it is being closed; guarded by the table
    since_ns = 0  # when it was opened, where reading through it moves atime
    counted = False  # by `kernel/passthrough`
    expected: ExpectedVersion | None = None  # until a request shows that OPEN has had its answer

    def __init__(self, file: OpenFile, flags: int) -> None:
        self.file = file
        self.append = flags & os.O_APPEND != 0
        self.writable = flags & os.O_ACCMODE != os.O_RDONLY

    @property
    def was_read(self) -> bool:
        """Whether a program has read from it, as far as we can know."""
        return self.reader is not None or (self.kept and self.file.length > 0)


class DirHandle:
    """One opendir(3)."""

    def __init__(self, file: OpenFile, listing: DirStream) -> None:
        self.fh = 0
        self.file = file
        self.listing = listing
        self.begun = False  # a program has read from it
        self.kept = False  # the kernel has a listing, as `FileHandle.kept`
        self.since_ns = 0
        self.renames = 0  # of its directory, when the listing began

    @property
    def was_read(self) -> bool:
        """As that of a file."""
        return self.begun or self.kept


class OpenFiles:
    """The table of handles and of the files behind them."""

    def __init__(self, meta: Meta, atimes: Atimes, runtime: Runtime, blocks: BlockStore) -> None:
        """`files/handles/atimes` is told of what was read."""
        self._meta = meta
        self._runtime = runtime
        self.nameless = UnlinkedInodes()
        self._atimes = atimes
        self._lock = runtime.lock()
        self._next = 1  # guarded by _lock
        self._handles: dict[int, FileHandle | DirHandle] = {}  # guarded by _lock
        self._files: dict[Ino, OpenFile] = {}  # guarded by _lock
        self._renames = count(1)
        self.closings = 0  # last closes of files that were written here; written under _lock
        self._closed: OrderedDict[Ino, int] = OrderedDict()  # at which of them; guarded by _lock
        self._forgotten = 0  # the latest that `_closed` had no room for; guarded by _lock
        self.locked: set[Ino] = set()  # whose locks a program here has asked for
        self.unsynced = UnsyncedSlices(meta, blocks, runtime)
        meta.on_change(self._changed, first=True)  # the kernel, once told, reads anew

    def _changed(self, rows: Sequence[bytes] | None) -> None:
        """Other clients changed `rows` (None: perhaps all): what was read of them is old."""
        if not self._files:
            return
        for row in rows or ():
            if row[:1] == DIR_PREFIX:
                self.changes_names(Ino(id_of(row)))
        if rows is None:
            for each in list(self._files):
                self.changes_names(each)
        inos = (
            self._files if rows is None else [id_of(row) for row in rows if row[:1] == INODE_PREFIX]
        )
        for ino in list(inos):
            file = self._files.get(Ino(ino))
            if file is not None:
                file.forget_chunks()

    def enter(self, ino: Ino, flags: int) -> tuple[int, FileHandle]:
        """A new handle of a file; its file knows nothing yet if it was not open."""
        with self._lock:
            handle = FileHandle(self._share(ino), flags)
            if self._atimes.on and _moves_atime(flags):
                handle.since_ns = self._runtime.now_ns()
            return self._add(handle), handle

    def enter_dir(self, ino: Ino, listing: DirStream) -> tuple[int, DirHandle]:
        """A new handle of a directory, which lists it with `listing`."""
        with self._lock:
            handle = DirHandle(self._share(ino), listing)
            if self._atimes.directories:
                handle.since_ns = self._runtime.now_ns()
            return self._add(handle), handle

    def number_from(self, fh: int) -> None:
        """New handles are numbered from here on, which no earlier process did."""
        with self._lock:
            self._next = max(self._next, fh)

    def restore(self, fh: int, ino: Ino, flags: int, listing: DirStream | None) -> None:
        """A handle that an earlier process has given to the kernel; with `listing` a directory's.

        Of files the kernel may have pages, and so reads them without asking.
        """
        with self._lock:
            file = self._share(ino)
            handle: FileHandle | DirHandle
            if listing is None:
                handle = FileHandle(file, flags)
                file.paged = True
            else:
                handle = DirHandle(file, listing)
            handle.kept = True
            handle.fh = fh
            self._handles[fh] = handle

    def restore_direct(self, fh: int) -> None:
        """A restored handle goes past the kernel's pages."""
        handle = self.file_handle(fh)
        with self._lock:
            handle.direct = True
            handle.file.direct += 1
            handle.file.mixed = True

    def _share(self, ino: Ino) -> OpenFile:
        file = self._files.get(ino)
        if file is None:
            file = self._files[ino] = OpenFile(self._meta, self._runtime.monotonic, self._lock, ino)
        file.handles += 1
        return file

    def _add(self, handle: FileHandle | DirHandle) -> int:
        fh = self._next
        self._next += 1
        handle.fh = fh
        self._handles[fh] = handle
        return fh

    def find_file_handle(self, fh: int) -> FileHandle | None:
        """None where there is none, or it is a directory's."""
        handle = self._handles.get(fh)
        return handle if isinstance(handle, FileHandle) else None

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

    def writer(self, file: OpenFile, side: WriteServices) -> FileWriter:
        """The file's writer, made at the first write."""
        with self._lock:
            if file.writer is None:
                file.writer = FileWriter(side, file.ino)
            return file.writer

    def set_lost(self, file: OpenFile, handles: frozenset[int], void: bool) -> None:
        """These handles are not to be used. `void`: nor what was written and is not stored."""
        with self._lock:
            file.lost = handles
            writer = None
            if void:
                writer, file.writer = file.writer, None
                file.length = 0
                file.forget_chunks()
        if writer is not None:
            writer.discard()

    def enter_direct(self, handle: FileHandle, begins: bool) -> bool:
        """Whether a new handle goes past the kernel's pages, see `files/direct_io`.

        It does while another one writes past them, or if it `begins` to and is the only one.
        """
        with self._lock:
            file = handle.file
            if file.direct:
                file.mixed = True
            elif not begins or file.handles != 1:
                return False
            if handle.writable:
                handle.direct = True
                file.direct += 1
            return True

    def is_last(self, handle: FileHandle) -> bool:
        """Whether no other handle stays, now that this one is about to `leave`.

        Of several that leave at the same time one is told so.
        """
        with self._lock:
            if not handle.leaving:
                handle.leaving = True
                handle.file.leaving += 1
            return handle.file.leaving == handle.file.handles

    def is_clean(self, fh: int) -> bool:
        """Whether a handle is one of a file of which all that was written here is stored."""
        handle = self._handles.get(fh)
        if not isinstance(handle, FileHandle):
            return False
        file = handle.file
        return (file.writer is None or not file.writer.dirty) and not file.lost

    def leave_clean(self, fh: int) -> bool:
        """`leave` of a handle of a file that was not written here; False for any other."""
        with self._lock:
            handle = self._handles.get(fh)
            if not isinstance(handle, FileHandle):
                return False
            file = handle.file
            if file.writer is not None or handle.leaving:
                return False
            del self._handles[fh]
            if handle.reader is not None:
                handle.reader.close()
            if handle.since_ns and handle.was_read:
                self._atimes.used(file.ino, handle.since_ns)
            if handle.direct:
                file.direct -= 1
                file.mixed = file.mixed and file.direct > 0
            file.handles -= 1
            if not file.handles:
                self.unsynced.closed(file.ino, file.writer)
                del self._files[file.ino]
            return True

    def leave(self, fh: int) -> OpenFile | None:
        """A handle is closed; returns its file if that was the last one."""
        with self._lock:
            handle = self._handles.pop(fh, None)
            if handle is None:
                return None
            if isinstance(handle, FileHandle) and handle.reader is not None:
                handle.reader.close()
            if handle.since_ns and handle.was_read:
                self._atimes.used(handle.file.ino, handle.since_ns)
            handle.file.handles -= 1
            if isinstance(handle, FileHandle):
                handle.file.leaving -= handle.leaving
            if isinstance(handle, FileHandle) and handle.direct:
                handle.file.direct -= 1
                handle.file.mixed = handle.file.mixed and handle.file.direct > 0
            if handle.file.handles:
                return None
            self.unsynced.closed(handle.file.ino, handle.file.writer)
            if handle.file.writer is not None:
                self._note_closing(handle.file.ino)
            del self._files[handle.file.ino]
            return handle.file

    def _note_closing(self, ino: Ino) -> None:
        """See `closed_since`. The caller holds the lock."""
        self.closings += 1
        self._closed[ino] = self.closings
        self._closed.move_to_end(ino)
        if len(self._closed) > CLOSED_MAX:
            _, self._forgotten = self._closed.popitem(last=False)

    def closed_since(self, ino: Ino, closings: int) -> bool:
        """Whether what the store said of a file when there were so many `closings` may lack what
        was written here: the last handle went meanwhile, and with it what is to be laid over."""
        if self.closings == closings:
            return False
        with self._lock:
            return self._closed.get(ino, self._forgotten) > closings

    def getattr(self, file: OpenFile) -> Attr:
        """Attributes with what is written here and not committed."""
        while True:
            commits = file.commits
            attr = file.overlay(self._meta.getattr(ROOT_CALLER, file.ino))
            if file.commits == commits:
                return attr

    def get(self, ino: Ino) -> OpenFile | None:
        """The file, if it is open here."""
        return self._files.get(ino)

    def changes_names(self, parent: Ino) -> None:
        """Names in a directory are about to change, or another client has changed them: see
        `DirHandle.renames`."""
        file = self._files.get(parent)
        if file is not None:
            file.renames = next(self._renames)

    def name_changes(self, ino: Ino) -> int:
        """`OpenFile.renames` of an open directory."""
        file = self._files.get(ino)
        return 0 if file is None else file.renames

    def is_written(self, ino: Ino) -> bool:
        """Whether a program has the file open for writing here."""
        return any(
            isinstance(handle, FileHandle) and handle.file.ino == ino and handle.writable
            for handle in list(self._handles.values())
        )

    def open_among(self, inos: Iterable[Ino]) -> list[Ino]:
        """Those of `inos` that are open here."""
        return [ino for ino in inos if ino in self._files] if self._files else []

    def all(self) -> list[OpenFile]:
        """Everything that is open now."""
        with self._lock:
            return list(self._files.values())

    def has_handle(self, fh: int) -> bool:
        """Whether a handle is open."""
        return fh in self._handles

    def handle_count(self) -> int:
        """Open files and directories: a gauge."""
        return len(self._handles)


def _moves_atime(flags: int) -> bool:
    """Whether reading through what was opened with these flags moves atime."""
    return flags & os.O_ACCMODE != os.O_WRONLY and not flags & os.O_NOATIME

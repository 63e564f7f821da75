"""Zero-message opens: a read-only mount whose kernel opens files and directories without asking.

OPEN, OPENDIR and FLUSH answer ENOSYS once, and the kernel does without them for the life of the
mount (FUSE_NO_OPEN_SUPPORT, Linux 5.1). It then keeps pages and listings over each open, until a
notification ends them, and sends reads without a handle: `implicit_handles` has those. What the
file system leases for long is cached for LASTING_S. So a data set that was read once is read again
without a request.

- LOOKUP: an attribute that is cached for a moment only is asked for once more, because the second
  answer comes with a lease, and no open asks for it later.
- Virtual files have a size here: the kernel reads as far as it goes. LOOKUP makes their content,
  which stays until the next one. Streams are not there.
- What changes anything is EROFS, also after `mount -o remount,rw`: no handle names the writer.

Locks stay in the kernel (`session/init`): without FLUSH and RELEASE the client would not learn that
they end.

Called by `Dispatcher` through the opcode table. Threading: any thread.
"""

from __future__ import annotations

import errno
from functools import partial
from typing import Final

from fsclient.fuse.dispatch import ranges
from fsclient.fuse.dispatch.implicit_handles import ImplicitHandles
from fsclient.fuse.wire import abi, listing, pack
from fsclient.fuse.wire.operation import Operation
from fsclient.fuse.wire.pack import Answer
from fsclient.fuse.wire.parse import no_args
from fsclient.fuse.wire.protocol import Opcode
from fsclient.kernel.contract import (
    FIRST_VIRTUAL_INO,
    LASTING_S,
    LEASED_S,
    Buffer,
    Entries,
    EntryOut,
    FileSystem,
    Stat,
)
from fsclient.kernel.later import Later
from fsmeta.runtime import Runtime
from fsmeta.types import ROOT_CALLER, Attr, Caller, Ino

VIRTUAL_MAX_BYTES: Final = 16 << 20  # of a virtual file; the largest, `.stats`, has some 20 kB
_TREE: Final = ROOT_CALLER._replace(checked=True)  # the kernel has checked the open
_LSEEK: Final = ranges.OPERATIONS[Opcode.LSEEK]

_UNASKED: Final = (Opcode.OPEN, Opcode.OPENDIR, Opcode.FLUSH)
_NOTHING_TO_STORE: Final = (Opcode.FSYNC, Opcode.FSYNCDIR)
_CHANGES: Final = (
    Opcode.SETATTR,
    Opcode.MKNOD,
    Opcode.MKDIR,
    Opcode.SYMLINK,
    Opcode.LINK,
    Opcode.UNLINK,
    Opcode.RMDIR,
    Opcode.RENAME,
    Opcode.RENAME2,
    Opcode.CREATE,
    Opcode.TMPFILE,
    Opcode.WRITE,
    Opcode.FALLOCATE,
    Opcode.COPY_FILE_RANGE,
    Opcode.COPY_FILE_RANGE_64,
    Opcode.SETXATTR,
    Opcode.REMOVEXATTR,
)


class ZeroMessageOpens:
    """The rows of the opcode table that such a mount has in place of the usual ones."""

    def __init__(self, fs: FileSystem, runtime: Runtime) -> None:
        self._fs = fs
        self._files = ImplicitHandles("file-handles", runtime, self._open, fs.release)
        self._dirs = ImplicitHandles(
            "dir-handles", runtime, self._opendir, fs.directories.releasedir
        )
        self._virtual: dict[Ino, tuple[Attr, bytes]] = {}  # as of the last LOOKUP

    def amend(self, table: list[Operation | None]) -> None:
        """Put the rows into a table that has all operations."""
        for opcode in _UNASKED:
            table[opcode] = None
        for opcode in _CHANGES:
            table[opcode] = _row(table, opcode)._replace(parse=no_args, handle=_refuse)
        for opcode in _NOTHING_TO_STORE:
            table[opcode] = _row(table, opcode)._replace(parse=no_args, handle=_nothing)
        for opcode, handle in (
            (Opcode.LOOKUP, self._lookup),
            (Opcode.GETATTR, self._getattr),
            (Opcode.STATX, self._statx),
            (Opcode.READ, self._read),
            (Opcode.LSEEK, self._lseek),
            (Opcode.READDIR, self._readdir),
            (Opcode.READDIRPLUS, self._readdirplus),
        ):
            table[opcode] = _row(table, opcode)._replace(handle=handle)

    def close(self) -> None:
        """End all handles, once no request is under way any more."""
        self._files.close()
        self._dirs.close()

    def adopt(self, ino: Ino, fh: int, is_dir: bool) -> None:
        """A handle is open that an earlier process of this mount has made."""
        (self._dirs if is_dir else self._files).adopt(ino, fh)

    def _open(self, ino: Ino) -> int:
        return self._fs.open(_TREE, ino, 0).fh

    def _opendir(self, ino: Ino) -> int:
        return self._fs.directories.opendir(_TREE, ino).fh

    # --- names and attributes --------------------------------------------------------------------

    def _lookup(self, fs: FileSystem, caller: Caller, parent: Ino, name: bytes) -> bytes:
        entry = fs.lookup(caller, parent, name)
        attr = entry.attr
        if attr is None:
            return pack.entry_out(_lasting(entry))
        if attr.ino >= FIRST_VIRTUAL_INO:
            return pack.entry_out(EntryOut(self._make(fs, caller, attr), 0.0, 0.0))
        if 0 < entry.attr_ttl < LEASED_S:
            shown, ttl = fs.getattr(caller, attr.ino, None)
            entry = entry._replace(attr=shown, attr_ttl=ttl)
        return pack.entry_out(_lasting(entry))

    def _make(self, fs: FileSystem, caller: Caller, attr: Attr) -> Attr:
        """Make the content of a virtual file; its attributes with a size. Raises: ENOENT."""
        fh = fs.open(caller, attr.ino, 0).fh
        try:
            pieces = fs.read_virtual(attr.ino, fh, 0, VIRTUAL_MAX_BYTES)
        finally:
            fs.release(attr.ino, fh)
        if isinstance(pieces, Later):
            raise OSError(errno.ENOENT, "a stream needs opens")
        content = b"".join(pieces)
        attr = attr._replace(size=len(content))
        self._virtual[attr.ino] = attr, content
        return attr

    def _stat(self, fs: FileSystem, caller: Caller, ino: Ino) -> Stat:
        if ino >= FIRST_VIRTUAL_INO:
            return Stat(self._made(fs, ino)[0], 0.0)
        attr, ttl = fs.getattr(caller, ino, None)
        return Stat(attr, LASTING_S if ttl >= LEASED_S else ttl)

    def _getattr(self, fs: FileSystem, caller: Caller, ino: Ino, _fh: int | None) -> bytes:
        return pack.attr_out(self._stat(fs, caller, ino))

    def _statx(self, fs: FileSystem, caller: Caller, ino: Ino, _fh: int | None) -> bytes:
        return pack.statx_out(self._stat(fs, caller, ino))

    # --- files and directories -------------------------------------------------------------------

    def _read(
        self,
        fs: FileSystem,
        caller: Caller,
        ino: Ino,
        _fh: int,
        offset: int,
        size: int,
        past_pages: bool,
    ) -> Answer:
        if ino >= FIRST_VIRTUAL_INO:
            return self._read_virtual(fs, ino, offset, size)
        handle = self._files.take(ino, caller.pid)
        try:
            return fs.read(caller, ino, handle.fh, offset, size, past_pages)
        finally:
            self._files.put(handle)

    def _read_virtual(self, fs: FileSystem, ino: Ino, offset: int, size: int) -> list[Buffer]:
        return [self._made(fs, ino)[1][offset : offset + size]]

    def _made(self, fs: FileSystem, ino: Ino) -> tuple[Attr, bytes]:
        """A virtual file as of its last LOOKUP; where another process has answered that, as of now.
        Raises: ENOENT.
        """
        if ino not in self._virtual:
            self._make(fs, ROOT_CALLER, fs.getattr(ROOT_CALLER, ino, None).attr)
        return self._virtual[ino]

    def _lseek(
        self, fs: FileSystem, caller: Caller, ino: Ino, _fh: int, offset: int, whence: int
    ) -> Answer | Later[Answer] | None:
        if ino >= FIRST_VIRTUAL_INO:
            raise OSError(errno.EINVAL, "a virtual file has no holes")
        handle = self._files.take(ino, caller.pid)
        try:
            return _LSEEK.handle(fs, caller, ino, handle.fh, offset, whence)
        finally:
            self._files.put(handle)

    def _readdir(
        self,
        fs: FileSystem,
        caller: Caller,
        ino: Ino,
        _fh: int,
        cookie: int,
        size: int,
        _past_pages: bool,
    ) -> bytes:
        handle = self._dirs.take(ino, caller.pid)
        try:
            at_most = size // abi.DIRENT.size
            names, cookies = fs.directories.readdir(caller, ino, handle.fh, cookie, at_most)
        finally:
            self._dirs.put(handle)
        return listing.dirents(names, cookies, size)

    def _readdirplus(
        self,
        fs: FileSystem,
        caller: Caller,
        ino: Ino,
        _fh: int,
        cookie: int,
        size: int,
        _past_pages: bool,
    ) -> bytes:
        handle = self._dirs.take(ino, caller.pid)
        try:
            fits = partial(listing.fitting, size=size)
            names, cookies, found = fs.directories.readdirplus(caller, ino, handle.fh, cookie, fits)
        finally:
            self._dirs.put(handle)
        return listing.dirents_plus(names, cookies, _lasting_entries(found))


def _row(table: list[Operation | None], opcode: Opcode) -> Operation:
    row = table[opcode]
    assert row is not None, "the table has all operations"
    return row


def _lasting(entry: EntryOut) -> EntryOut:
    """What is leased lasts until it is taken back."""
    attr, entry_ttl, attr_ttl = entry
    return EntryOut(
        attr,
        LASTING_S if entry_ttl >= LEASED_S else entry_ttl,
        LASTING_S if attr_ttl >= LEASED_S else attr_ttl,
    )


def _lasting_entries(found: Entries) -> Entries:
    """The same for a listing."""
    return Entries(
        found.records,
        LASTING_S if found.entry_ttl >= LEASED_S else found.entry_ttl,
        LASTING_S if found.attr_ttl >= LEASED_S else found.attr_ttl,
        {at: _lasting(entry) for at, entry in found.odd.items()},
    )


def _refuse(_fs: FileSystem, _caller: Caller, _ino: Ino) -> bytes:
    raise OSError(errno.EROFS, "mounted read-only: to write, unmount and mount again")


def _nothing(_fs: FileSystem, _caller: Caller, _ino: Ino) -> bytes:
    return b""

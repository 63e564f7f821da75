"""Open files and directories on pyfuse3, which names them by their handle alone.

READ, WRITE, FLUSH, FSYNC and RELEASE come without inode, flags or caller, so these are kept by
handle from open to release; the caller is the opener. What the kernel says of a single write is not
seen either:

- Whether it appends. A handle of O_APPEND for writing alone always does. One that may be mapped
  also carries pages that the kernel writes back, to where they belong; these begin at a page's
  boundary, and so a write that does goes to the offset that the kernel names.
- Whether its writer may keep S_ISUID: judged by the opener, where writes go past the pages. Before
  others the kernel sends a SETATTR.

Called by the operations, in worker threads. Threading: several at once; a handle is released when
nothing else is asked of it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from fsclient.fuse.pyfuse3.translate import Translator
from fsclient.fuse.wire.listing import fitting
from fsclient.kernel.contract import (
    FIRST_VIRTUAL_INO,
    Buffer,
    EntryOut,
    FileSystem,
    OpenOut,
    WriteHow,
)
from fsclient.kernel.later import Later, Outcome
from fsmeta.types import Caller, Dentry, Ino

PAGE_BYTES: Final = 4096
LISTING_BYTES: Final = 4096  # what a READDIRPLUS has room for at least, and mostly
NAME_LEAST_BYTES: Final = 160  # of an answer to it, for one name
_DOTS: Final = (b".", b"..")
_ROOT: Final = Caller(0, 0, (), 0, True)


class Handle:
    """What is open."""

    def __init__(self, caller: Caller, ino: Ino, flags: int, direct: bool) -> None:
        self.caller = caller
        self.ino = ino
        self.flags = flags
        self.direct = direct
        self.room = 0  # of an answer to READDIRPLUS, once one was full

    def appends(self, offset: int) -> bool:
        """Whether a write to `offset` goes to the end of the file, wherever that is."""
        if not self.flags & os.O_APPEND:
            return False
        return self.flags & os.O_ACCMODE == os.O_WRONLY or offset % PAGE_BYTES != 0


class Handles:
    """The open files and directories of a mount."""

    def __init__(
        self,
        fs: FileSystem,
        translator: Translator,
        reply: Callable[[Any, bytes, Any, int], bool],
        shown: Callable[[EntryOut], EntryOut],
    ) -> None:
        """`reply` is pyfuse3's `readdir_reply`; `shown` is asked what the kernel is told."""
        self._fs = fs
        self._translator = translator
        self._reply = reply
        self._shown = shown
        self._open: dict[int, Handle] = {}

    def ino_of(self, fh: int) -> Ino:
        """For logs: 0 where it is not open."""
        handle = self._open.get(fh)
        return Ino(0) if handle is None else handle.ino

    def _find(self, fh: int) -> Handle:
        handle = self._open.get(fh)
        if handle is None:
            raise OSError(errno.EBADF, f"handle {fh} is not open")
        return handle

    def enter(self, caller: Caller, ino: Ino, flags: int, opened: OpenOut) -> Any:
        """Remember what was just opened; pyfuse3's record of it."""
        self._open[opened.fh] = Handle(caller, ino, flags, opened.direct_io)
        return self._translator.opened(opened)

    def read(self, fh: int, offset: int, size: int) -> Buffer | Later[Buffer]:
        """READ."""
        handle = self._find(fh)
        ino, past_pages = handle.ino, self._is_past_pages(handle)
        if ino >= FIRST_VIRTUAL_INO:
            pieces = self._fs.read_virtual(ino, fh, offset, size)
            if isinstance(pieces, Later):
                return pieces.map(_joined_later)
            return _joined(pieces)
        return _joined(self._fs.read(handle.caller, ino, fh, offset, size, past_pages))

    def write(self, fh: int, offset: int, data: bytes) -> int | Later[int]:
        """WRITE."""
        handle = self._find(fh)
        past_pages, append = self._is_past_pages(handle), handle.appends(offset)
        kill_suid = past_pages and handle.caller.uid != 0
        how = WriteHow(kill_suid, append, past_pages)
        taken = self._fs.write(handle.caller, handle.ino, fh, offset, memoryview(data), how)
        if past_pages:
            o_direct = bool(handle.flags & os.O_DIRECT)
            later = self._fs.written_past_pages(handle.ino, fh, offset, taken, o_direct)
            if later is not None:
                return later.map(partial(_settled, taken))
        return taken

    @staticmethod
    def _is_past_pages(handle: Handle) -> bool:
        return handle.direct or bool(handle.flags & os.O_DIRECT)

    def flush(self, fh: int) -> Later[None] | None:
        """FLUSH."""
        handle = self._find(fh)
        return self._fs.flush(handle.caller, handle.ino, fh)

    def fsync(self, fh: int, data_only: bool) -> None:
        """FSYNC."""
        handle = self._find(fh)
        self._fs.fsync(handle.caller, handle.ino, fh, data_only)

    def release(self, fh: int) -> None:
        """RELEASE."""
        handle = self._find(fh)
        del self._open[fh]
        self._fs.release(handle.ino, fh)

    def opendir(self, caller: Caller, ino: Ino) -> int:
        """OPENDIR; the handle."""
        opened = self._fs.directories.opendir(caller, ino)
        self._open[opened.fh] = Handle(caller, ino, 0, False)
        return opened.fh

    def fsyncdir(self, fh: int) -> None:
        """FSYNCDIR."""
        handle = self._find(fh)
        self._fs.directories.fsyncdir(handle.caller, handle.ino, fh)

    def releasedir(self, fh: int) -> None:
        """RELEASEDIR."""
        handle = self._find(fh)
        del self._open[fh]
        self._fs.directories.releasedir(handle.ino, fh)

    def readdir(self, fh: int, cookie: int, token: Any) -> None:
        """READDIRPLUS, the only request for names. How much fits, pyfuse3 tells when it is full:
        the handle remembers it."""
        handle, counted, used = self._find(fh), list[Ino](), 0
        try:
            while not handle.room or used + NAME_LEAST_BYTES <= handle.room:
                room = handle.room - used if handle.room else LISTING_BYTES
                names, cookies, entries = self._fs.directories.readdirplus(
                    handle.caller, handle.ino, fh, cookie, partial(fitting, size=room)
                )
                if not names:
                    return
                told = entries.each(names)
                counted += [each.attr.ino for each in told if each and each.attr]
                for dentry, following, entry in zip(names, cookies, told, strict=True):
                    record = self._record(handle, dentry, entry, counted)
                    if record is None:
                        continue
                    if not self._reply(token, dentry.name, record, following):
                        handle.room = used
                        return
                    used += fitting_bytes(dentry)
                    if dentry.name not in _DOTS:
                        counted.remove(dentry.ino)
                cookie = cookies[-1]
        finally:
            for ino in counted:  # lookups that the kernel has not been told of
                self._fs.forget(ino, 1)

    def _record(
        self, handle: Handle, dentry: Dentry, entry: EntryOut | None, counted: list[Ino]
    ) -> Any | None:
        """What is told of a name: all there is, or nothing where it has gone.

        The answer has one field for the number of an inode and for the node that the name leads to,
        so a name without the node would be one without a number, which libc leaves out.
        """
        if dentry.name in _DOTS:
            return self._translator.dots(dentry)
        if entry is None:
            try:
                entry = self._fs.lookup(_ROOT, handle.ino, dentry.name)
            except FileNotFoundError:
                return None
            if entry.attr is None:
                return None
            counted.append(entry.attr.ino)
        return self._translator.entry(self._shown(entry))


def fitting_bytes(dentry: Dentry) -> int:
    """What a name takes of an answer to READDIRPLUS."""
    return 152 + (len(dentry.name) + 7) // 8 * 8


def _joined(pieces: Sequence[Buffer]) -> Buffer:
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _joined_later(outcome: Outcome[Sequence[Buffer]]) -> Buffer:
    return _joined(outcome())


def _settled(taken: int, outcome: Outcome[None]) -> int:
    outcome()
    return taken

"""Which opens go past the kernel's pages, so that every read(2) and write(2) comes to us.

Appends do, to stay in one piece. With `--direct-writes` so do files that are written from their
beginning, because copying the data into pages takes as long as taking it does. The kernel drops the
pages of a range before it sends a direct write, so a process with pages of the file could put old
ones back. Therefore only the single opener of a file begins with it, every later opener goes past
the pages, too, and pages made by maps and sendfile(2) are dropped: after each write, which is late
by a moment, and by the first open that uses pages again.

A read of pages that runs beside a write past them can leave old bytes in them, and zeros behind an
append. The kernel drops what the write covers once more when it is answered, but not for handles
that we made direct (before 6.18; before 6.6 it drops nothing ahead of those, either). No flag
tells. So where the kernel has filled pages of a file, they are dropped between a write past them
and its answer: `leaves_pages`. Writes with O_DIRECT are synchronous here, see `fuse/session/init`.

Called by `FileIO`; any thread.
"""

from __future__ import annotations

import os
from typing import Final

from fsclient.files.handles.open_files import FileHandle, OpenFile, OpenFiles

DROPS_AFTER_MINOR: Final = 45  # of the FUSE protocol: Linux 6.18


class DirectIO:
    """Decides for a mount."""

    def __init__(self, files: OpenFiles) -> None:
        self._files = files
        self.writes = False  # `--direct-writes`; set before the mount is reported as ready
        self._drops_before = True  # what the kernel does for handles that are direct
        self._drops_after = True

    def obey(self, kernel_minor: int, drops_before: bool) -> None:
        """What the kernel is, of a mount that is not yet served."""
        self._drops_before = drops_before
        self._drops_after = kernel_minor >= DROPS_AFTER_MINOR

    def leaves_pages(self, file: OpenFile, o_direct: bool) -> bool:
        """Whether a write past the pages of `file` may leave some that are no longer true."""
        if o_direct or self._drops_after:
            return False
        return file.paged or not self._drops_before

    def created(self, handle: FileHandle, flags: int) -> bool:
        """Whether the handle of a file just made is direct."""
        return self.opened(handle, flags | os.O_TRUNC)

    def opened(self, handle: FileHandle, flags: int) -> bool:
        """Whether a new handle is direct; `flags` are those of open(2)."""
        if flags & (os.O_ACCMODE | os.O_APPEND) == os.O_WRONLY | os.O_APPEND:
            # Through its pages the kernel cuts a write(2) at the first that it does not hold. A
            # handle that only appends has no use for them; mapping a file needs permission to read.
            return True
        if not self.writes:
            return False
        return self._files.enter_direct(
            handle, begins=flags & (os.O_ACCMODE | os.O_TRUNC) == os.O_WRONLY | os.O_TRUNC
        )

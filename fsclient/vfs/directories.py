"""opendir, readdir, releasedir: where a handle of a directory meets a listing of its names.

A listing begins with opendir(3), and not with the first read: from then on we hear of changes. It
begins anew with rewinddir(3), and where this mount has changed names since.

Called by `VFS`. Threading: any thread.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from functools import partial

from fsclient.files.dir_stream import DirStream, Pages
from fsclient.files.open_files import DirHandle, OpenFiles
from fsclient.kernel.cache_leases import CacheLeases
from fsclient.kernel.contract import OpenOut
from fsmeta.admin import trash_expiry
from fsmeta.meta.meta import Meta
from fsmeta.rules import access
from fsmeta.runtime import Runtime
from fsmeta.schema.snapshot_inos import SHELVES
from fsmeta.schema.trash import TRASH_INO
from fsmeta.types import Caller, Dentry, FileType, Ino


class Directories:
    """Open directories of a mount."""

    def __init__(
        self, meta: Meta, files: OpenFiles, coherence: CacheLeases, runtime: Runtime
    ) -> None:
        self._meta = meta
        self._files = files
        self._coherence = coherence
        self._runtime = runtime
        self._pages = Pages(runtime)

    def opendir(self, caller: Caller, ino: Ino, top: bool) -> OpenOut:
        """`top`: it is the root of the mount. Raises: ENOTDIR, EACCES."""
        if not caller.checked:
            attr = self._meta.getattr(caller, ino)
            if not attr.is_dir:
                raise OSError(errno.ENOTDIR, "not a directory")
            self._meta.require(caller, attr, access.READ)
        read = partial(self._meta.names if ino != TRASH_INO else self._trash_names, ino)
        listing = DirStream(ino, read, self._pages, self._runtime)
        fh, handle = self._files.enter_dir(ino, listing)
        try:
            self._begin(caller, handle, top)
        except BaseException:
            self._files.leave(fh)
            raise
        cache, keep = (False, False) if ino >= SHELVES else self._coherence.listing(ino)
        handle.kept = keep
        return OpenOut(fh, keep_cache=keep, cache_dir=cache)

    def readdir(
        self, caller: Caller, fh: int, cookie: int, at_most: int, top: bool
    ) -> tuple[Sequence[Dentry], Sequence[int]]:
        """Some of the names behind `cookie`, and their cookies. Raises: EBADF."""
        handle = self._files.dir_handle(fh)
        if cookie == 0 and (handle.begun or handle.renames != handle.file.renames):
            self._begin(caller, handle, top)
        handle.begun = True
        return handle.listing.behind(cookie, at_most)

    def _begin(self, caller: Caller, handle: DirHandle, top: bool) -> None:
        ino = handle.file.ino
        handle.renames = handle.file.renames
        attr = self._meta.getattr(caller, ino)
        parent = ino if top else attr.parent
        dots = Dentry(b".", ino, FileType.DIR), Dentry(b"..", parent or ino, FileType.DIR)
        handle.listing.begin(dots)

    def _trash_names(self, ino: Ino, cursor: bytes | None) -> tuple[list[Dentry], bytes | None]:
        del ino, cursor
        return trash_expiry.listing(self._meta), None

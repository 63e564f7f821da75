"""opendir, readdir, releasedir: where a handle of a directory meets a listing of its names.

The kernel gets names with their inodes only as long as they are known to lead there: a page may
have been read before a name was changed, by this mount or another. Then the names that are about to
be sent are looked up anew, all in one request.

A listing begins with opendir(3), and not with the first read: from then on the mount learns of
changes. It begins anew with rewinddir(3), and where this mount has changed names since.

Called through `VFS.directories`. Threading: any thread.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from functools import partial

from fsclient.files.handles.open_files import DirHandle, OpenFiles
from fsclient.kernel.cache_leases import SHORT_S, CacheLeases
from fsclient.kernel.contract import DirectoryCalls, Entries, Fits, OpenOut
from fsclient.listings.dir_stream import DirStream, Part
from fsclient.listings.pages import Pages
from fsclient.survival.records import NOT_KEPT, Keeper
from fsclient.vfs.attr_view import AttrView
from fsclient.vfs.mount_rules import MountRules
from fsmeta.admin import trash_expiry
from fsmeta.dentries import Dentries
from fsmeta.meta.meta import Meta
from fsmeta.rules import access
from fsmeta.runtime import Runtime
from fsmeta.schema.keys import inode_rows
from fsmeta.schema.snapshot_inos import SEALED_INO, SHELVES
from fsmeta.schema.trash import TRASH_INO
from fsmeta.types import Attr, Caller, Dentry, FileType, Ino


class Directories:
    """Open directories of a mount."""

    def __init__(
        self,
        meta: Meta,
        files: OpenFiles,
        shown: AttrView,
        coherence: CacheLeases,
        rules: MountRules,
        runtime: Runtime,
        keeper: Keeper = NOT_KEPT,
    ) -> None:
        self._meta = meta
        self._files = files
        self._shown = shown
        self._coherence = coherence
        self._rules = rules
        self._runtime = runtime
        self._keeper = keeper
        self.pages = Pages(runtime, keeper=keeper)

    def opendir(self, caller: Caller, ino: Ino) -> OpenOut:
        """Raises: ENOTDIR, EACCES, ESTALE."""
        top = ino == self._rules.root
        if not caller.checked:
            attr = self._meta.getattr(caller, ino)
            if not attr.is_dir:
                raise OSError(errno.ENOTDIR, "not a directory")
            self._meta.require(caller, attr, access.READ)
        fh, handle = self._files.enter_dir(ino, self._listing(ino))
        try:
            attr = self._begin(caller, handle)
            if ino < TRASH_INO and not top and not self._files.nameless.is_seen(attr):
                self._files.nameless.require_seen(self._meta.open(caller, ino))  # asked anew
        except BaseException:
            self._leave(fh)
            raise
        if ino >= SHELVES:
            cache, keep = False, False
        else:
            cache, keep = (True, True) if ino >= SEALED_INO else self._coherence.listing(ino)
        handle.kept = keep
        self._keeper.opened(fh, ino, 0, True)
        return OpenOut(fh, keep_cache=keep, cache_dir=cache)

    def _listing(self, ino: Ino) -> DirStream:
        read = partial(self._meta.listed if ino != TRASH_INO else self._trash_names, ino)
        changes = partial(self._files.name_changes, ino)
        return DirStream(ino, read, self.pages, self._runtime, changes)

    def restore(self, fh: int, ino: Ino) -> None:
        """A handle that an earlier process has given to the kernel: its listing goes on."""
        self._files.restore(fh, ino, 0, self._listing(ino))

    def readdir(
        self, caller: Caller, ino: Ino, fh: int, cookie: int, at_most: int
    ) -> tuple[Sequence[Dentry], Sequence[int]]:
        """Some of the names behind `cookie`, and their cookies. Raises: EBADF."""
        del ino
        return self._begun(caller, fh, cookie).listing.behind(cookie, at_most)

    def readdirplus(
        self, caller: Caller, ino: Ino, fh: int, cookie: int, fits: Fits
    ) -> tuple[Sequence[Dentry], Sequence[int], Entries]:
        """`readdir`, with what the names lead to. Raises: EBADF."""
        handle = self._begun(caller, fh, cookie)
        ino, listing = handle.file.ino, handle.listing
        part = listing.part(cookie, fits)
        changes = handle.file.renames
        told = part.names
        if changes != part.changes or not self._is_fresh(ino, part):
            still = self._meta.still_named(ino, told) if told else ()
            told = told.pick([at for at, is_so in enumerate(still) if is_so])
        following = part.following.inos if cookie != 0 else ()
        entries = self._shown.entries(ino, part.names, told, following)
        if handle.file.renames != changes:  # meanwhile: the kernel has to ask again
            entries = entries.doubtful()
        if cookie != 0 and ino != TRASH_INO:  # last: two that fill the cache would undo each other
            listing.read_ahead(self._bring)
        return part.names, part.cookies, entries

    def _is_fresh(self, ino: Ino, part: Part) -> bool:
        """Whether the mount would know if a name led elsewhere since it was read."""
        young = self._runtime.monotonic() - part.read_at <= SHORT_S
        return young or self._meta.are_names_leased(ino)

    def _bring(self, names: Dentries) -> None:
        """What names lead to is about to be listed: remember it, if it may be cached until then."""
        if self._meta.store.has_leases():
            self._meta.attr_records(inode_rows(names.inos))

    def fsyncdir(self, caller: Caller, ino: Ino, fh: int) -> None:
        """What a mount that writes back can't promise of `ino` is an error."""
        del caller, fh
        self._meta.sync()
        self._rules.require_whole(ino)

    def releasedir(self, ino: Ino, fh: int) -> None:
        """Raises: EBADF."""
        del ino
        self._leave(fh)

    def _leave(self, fh: int) -> None:
        listing = self._files.dir_handle(fh).listing
        self._files.leave(fh)
        listing.close()

    def _begun(self, caller: Caller, fh: int, cookie: int) -> DirHandle:
        """A handle whose listing has begun. Raises: EBADF."""
        handle = self._files.dir_handle(fh)
        again = cookie == 0 and (handle.begun or handle.renames != handle.file.renames)
        if again or not handle.listing.is_begun:
            self._begin(caller, handle)
        handle.begun = True
        return handle

    def _begin(self, caller: Caller, handle: DirHandle) -> Attr:
        ino = handle.file.ino
        handle.renames = handle.file.renames
        attr = self._meta.getattr(caller, ino)
        parent = ino if ino == self._rules.root else attr.parent
        dots = Dentry(b".", ino, FileType.DIR), Dentry(b"..", parent or ino, FileType.DIR)
        handle.listing.begin(dots)
        return attr

    def _trash_names(self, ino: Ino, cursor: bytes | None) -> tuple[Dentries, bytes | None]:
        del ino, cursor
        return Dentries.of(trash_expiry.listing(self._meta)), None


_CONFORMS: type[DirectoryCalls] = Directories

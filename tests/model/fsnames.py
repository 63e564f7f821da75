"""The kernel's part of the verbs on names above a `FileSystem`.

`bare` leaves out what the kernel would find out by lookups of its own before it calls: the verb is
called as it is when another client was quicker, and must say the same.
"""

from __future__ import annotations

import errno
import os
import stat

from fsclient.kernel.contract import EntryOut, FileSystem
from fsmeta.types import PATH_MAX, Caller, Ino
from tests.model.fswalk import Found, FsWalk, Place
from tests.model.inodes import SGID, STICKY, SUID, fail
from tests.model.names import RMDIR_ODD
from tests.model.ops import RENAME_EXCHANGE, RENAME_NOREPLACE
from tests.model.tree import LastKind, Sysctls


class FsNames:
    """Verbs on names by one caller, for one operation."""

    def __init__(
        self, fs: FileSystem, caller: Caller, sysctls: Sysctls, bare: bool, held: list[Ino]
    ) -> None:
        self._fs = fs
        self._caller = caller
        self._sysctls = sysctls
        self._bare = bare
        self._held = held

    def walk(self) -> FsWalk:
        return FsWalk(self._fs, self._caller, self._sysctls, self._held)

    def _free(self, path: bytes, directory: bool = False) -> Place:
        """filename_create()."""
        walk = self.walk()
        place = walk.parent(path)
        if place.kind is not LastKind.NORM:
            fail(errno.EEXIST)
        odd = place.slash and not directory
        if (odd or not self._bare) and walk.find(place) is not None:
            fail(errno.EEXIST)
        if odd:
            fail(errno.ENOENT)
        return place

    def _made(self, entry: EntryOut) -> None:
        assert entry.attr is not None
        self._held.append(entry.attr.ino)

    def mkdir(self, path: bytes, mode: int, umask: int) -> None:
        at = self._free(path, directory=True)
        mode &= 0o777 | STICKY
        self._made(self._fs.mkdir(self._caller, at.parent, at.name, mode, umask))

    def mknod(self, path: bytes, mode: int, rdev: int, umask: int) -> None:
        kind = stat.S_IFMT(mode) or stat.S_IFREG
        device = kind in (stat.S_IFCHR, stat.S_IFBLK)
        if kind == stat.S_IFDIR:
            fail(errno.EPERM)
        if not device and kind not in (stat.S_IFREG, stat.S_IFIFO, stat.S_IFSOCK):
            fail(errno.EINVAL)
        at = self._free(path)
        whiteout = kind == stat.S_IFCHR and rdev == 0
        if device and not whiteout and self._caller.uid != 0:
            if self._bare and self.walk().find(at) is not None:
                fail(errno.EEXIST)
            self._fs.access(self._caller, at.parent, os.W_OK | os.X_OK)
            fail(errno.EPERM)
        mode = kind | stat.S_IMODE(mode)
        rdev = rdev if device else 0
        made = self._fs.mknod(self._caller, at.parent, at.name, mode, rdev, umask)
        self._made(made)

    def symlink(self, target: bytes, path: bytes) -> None:
        if not target:
            fail(errno.ENOENT)
        if len(target) >= PATH_MAX:
            fail(errno.ENAMETOOLONG)
        at = self._free(path)
        self._made(self._fs.symlink(self._caller, at.parent, at.name, target))

    def link(self, old: bytes, new: bytes) -> None:
        found = self.walk().end(old, follow=False)
        at = self._free(new)
        if self._sysctls.hardlinks and not self._linkable(found):
            if self._bare and self.walk().find(at) is not None:
                fail(errno.EEXIST)
            fail(errno.EPERM)
        self._made(self._fs.link(self._caller, found.attr.ino, at.parent, at.name))

    def _linkable(self, found: Found) -> bool:
        """may_linkat() with fs.protected_hardlinks set."""
        mode = found.attr.mode
        if self._caller.uid in (0, found.attr.uid):
            return True
        if not stat.S_ISREG(mode) or mode & SUID or mode & (SGID | 0o010) == SGID | 0o010:
            return False
        try:
            self._fs.access(self._caller, found.attr.ino, os.R_OK | os.W_OK)
        except PermissionError:
            return False
        return True

    def unlink(self, path: bytes) -> None:
        walk = self.walk()
        at = walk.parent(path)
        if at.kind is not LastKind.NORM:
            fail(errno.EISDIR)
        found = None if self._bare and not at.slash else self._must_find(walk, at)
        if at.slash and found is not None:
            fail(errno.EISDIR if found.is_dir else errno.ENOTDIR)
        self._fs.unlink(self._caller, at.parent, at.name)

    def rmdir(self, path: bytes) -> None:
        walk = self.walk()
        at = walk.parent(path)
        if at.kind is not LastKind.NORM:
            fail(RMDIR_ODD[at.kind])
        if not self._bare:
            self._must_find(walk, at)
        self._fs.rmdir(self._caller, at.parent, at.name)

    @staticmethod
    def _must_find(walk: FsWalk, at: Place) -> Found:
        found = walk.find(at)
        return fail(errno.ENOENT) if found is None else found

    def rename(self, old: bytes, new: bytes, flags: int) -> None:
        both = RENAME_NOREPLACE | RENAME_EXCHANGE
        if flags & ~both or flags == both:
            fail(errno.EINVAL)
        old_walk, new_walk = self.walk(), self.walk()
        source_at = old_walk.parent(old)
        if source_at.kind is LastKind.NORM:
            old_walk.search(source_at)
        target_at = new_walk.parent(new)
        if target_at.kind is LastKind.NORM:
            new_walk.search(target_at)
        if source_at.kind is not LastKind.NORM:
            fail(errno.EBUSY)
        if target_at.kind is not LastKind.NORM:
            fail(errno.EEXIST if flags & RENAME_NOREPLACE else errno.EBUSY)
        if not self._bare or source_at.slash or target_at.slash:
            source = self._must_find(old_walk, source_at)
            target = new_walk.find(target_at)
            if self._is_done(source_at, source, target_at, target, flags):
                return
        self._fs.rename(
            self._caller, source_at.parent, source_at.name, target_at.parent, target_at.name, flags
        )

    @staticmethod
    def _is_done(
        source_at: Place, source: Found, target_at: Place, target: Found | None, flags: int
    ) -> bool:
        """What the kernel knows without asking; True: there is nothing to do."""
        exchange = flags & RENAME_EXCHANGE
        if target is not None and flags & RENAME_NOREPLACE:
            fail(errno.EEXIST)
        if target is None and exchange:
            fail(errno.ENOENT)
        if exchange and target_at.slash and target is not None and not target.is_dir:
            fail(errno.ENOTDIR)
        if not source.is_dir and (source_at.slash or (target_at.slash and not exchange)):
            fail(errno.ENOTDIR)
        if source_at.parent != target_at.parent:
            if source.attr.ino in target_at.chain:
                fail(errno.EINVAL)
            if target is not None and target.attr.ino in source_at.chain:
                fail(errno.EINVAL if exchange else errno.ENOTEMPTY)
        return target is not None and source.attr.ino == target.attr.ino

"""The kernel's part of a path resolution above a `FileSystem`: one lookup for each component.

As `tree.Walk`, but every fact comes from the file system, which also judges who may search. Only
for `.` and `..`, which the kernel never looks up, it is asked by `access`.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import NamedTuple

from fsclient.kernel.contract import FileSystem
from fsmeta.types import NAME_MAX, PATH_MAX, ROOT_INO, Attr, Caller, Ino
from tests.model.inodes import STICKY, fail
from tests.model.tree import LINKS_MAX, LastKind, Sysctls

_DOTS = {b".": LastKind.DOT, b"..": LastKind.DOTDOT}
_SHARED = STICKY | 0o002  # the mode of /tmp


class Place(NamedTuple):
    """A path resolved up to its last component."""

    chain: tuple[Ino, ...]  # the directories from the root on; the last one is the parent
    name: bytes
    kind: LastKind
    slash: bool

    @property
    def parent(self) -> Ino:
        return self.chain[-1]

    @property
    def up(self) -> tuple[Ino, ...]:
        return self.chain[:-1] or self.chain


class Found(NamedTuple):
    """The end of a path."""

    attr: Attr
    chain: tuple[Ino, ...]  # of a directory, itself included

    @property
    def kind(self) -> int:
        return stat.S_IFMT(self.attr.mode)

    @property
    def is_dir(self) -> bool:
        return self.attr.is_dir

    @property
    def is_link(self) -> bool:
        return stat.S_ISLNK(self.attr.mode)


class FsWalk:
    """One path resolution by one caller; `held` collects what must be forgotten afterwards."""

    def __init__(self, fs: FileSystem, caller: Caller, sysctls: Sysctls, held: list[Ino]) -> None:
        self._fs = fs
        self._caller = caller
        self._sysctls = sysctls
        self._held = held
        self._links = 0

    def parent(self, path: bytes) -> Place:
        """Everything but the last component."""
        if not path:
            fail(errno.ENOENT)
        if len(path) >= PATH_MAX:
            fail(errno.ENAMETOOLONG)
        return self._parent((ROOT_INO,), path)

    def _parent(self, chain: tuple[Ino, ...], path: bytes) -> Place:
        if path.startswith(b"/"):
            chain = (ROOT_INO,)
        names = [name for name in path.split(b"/") if name]
        if not names:
            return Place(chain, b"", LastKind.ROOT, False)
        for name in names[:-1]:
            kind = _DOTS.get(name, LastKind.NORM)
            chain = self._end(Place(chain, name, kind, True), True).chain
        kind = _DOTS.get(names[-1], LastKind.NORM)
        place = Place(chain, names[-1], kind, path.endswith(b"/"))
        if kind is not LastKind.NORM:
            self.search(place)
        return place

    def search(self, place: Place) -> None:
        """Raises: EACCES where the caller may not search the parent."""
        self._fs.access(self._caller, place.parent, os.X_OK)

    def find(self, place: Place) -> Found | None:
        """What the last component names, symlinks not followed."""
        match place.kind:
            case LastKind.ROOT | LastKind.DOT:
                return self._directory(place.chain)
            case LastKind.DOTDOT:
                return self._directory(place.up)
        try:
            attr = self._fs.lookup(self._caller, place.parent, place.name).attr
        except FileNotFoundError:
            return None
        if attr is None:
            return None
        self._held.append(attr.ino)
        assert len(place.name) <= NAME_MAX, "a name this long can't exist"
        return Found(attr, (*place.chain, attr.ino) if attr.is_dir else ())

    def _directory(self, chain: tuple[Ino, ...]) -> Found:
        return Found(self._fs.getattr(self._caller, chain[-1], None).attr, chain)

    def follow(self, place: Place, link: Attr) -> Place:
        """Where the symlink `link` found at `place` leads, up to its last component."""
        self._links += 1
        if self._links > LINKS_MAX:
            fail(errno.ELOOP)
        if self._sysctls.symlinks and link.uid != self._caller.uid:
            parent = self._fs.getattr(self._caller, place.parent, None).attr
            if parent.mode & _SHARED == _SHARED and link.uid != parent.uid:
                fail(errno.EACCES)
        return self._parent(place.chain, self._fs.readlink(self._caller, link.ino))

    def _end(self, place: Place, follow: bool) -> Found:
        if place.kind not in (LastKind.NORM, LastKind.ROOT):
            self.search(place)
        found = self.find(place)
        if found is None:
            fail(errno.ENOENT)
        if found.is_link and (follow or place.slash):
            found = self._end(self.follow(place, found.attr), True)
        if place.slash and not found.is_dir:
            fail(errno.ENOTDIR)
        return found

    def end(self, path: bytes, follow: bool = True) -> Found:
        """What `path` names."""
        return self._end(self.parent(path), follow)

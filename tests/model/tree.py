"""The model's state, and how a path leads through it: path_resolution(7) as fs/namei.c has it.

`Walk` is one resolution by one user; it counts the symlinks of that resolution. Order of errors at
each component: search permission of the directory, length of the name, existence, type.
"""

from __future__ import annotations

import errno
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from fsmeta.types import NAME_MAX, PATH_MAX
from tests.model.inodes import INHERITED, SGID, STICKY, Inode, X, born_mode, fail, require
from tests.model.ops import RECENT_BEGIN_NS, ROOT, Slot, User

LINKS_MAX = 40  # MAXSYMLINKS


class Sysctls(NamedTuple):
    """fs.protected_*: rules of the kernel's above any file system."""

    hardlinks: int = 1
    symlinks: int = 0
    regular: int = 0
    fifos: int = 0

    @classmethod
    def of_host(cls) -> Sysctls:
        return cls(*(_protected(name) for name in cls._fields))


def _protected(name: str) -> int:
    return int(Path(f"/proc/sys/fs/protected_{name}").read_text())


@dataclass(slots=True)
class Handle:
    """An open file."""

    inode: Inode
    readable: bool
    writable: bool
    append: bool


class Tree:
    """All inodes, who has what open, and the clock: one tick an operation."""

    def __init__(self, sysctls: Sysctls) -> None:
        self.sysctls = sysctls
        self.clock = RECENT_BEGIN_NS
        self.handles: dict[tuple[User, Slot], Handle] = {}
        self._numbers = 0
        self.root = self._number(stat.S_IFDIR | 0o777, ROOT.uid, ROOT.gid, nlink=2)

    def _number(self, mode: int, uid: int, gid: int, nlink: int = 1) -> Inode:
        self._numbers += 1
        return Inode(self._numbers, mode, uid, gid, nlink, mtime=self.clock, ctime=self.clock)

    def touch(self, *inodes: Inode) -> None:
        """Content or names have changed."""
        for inode in inodes:
            inode.mtime = inode.ctime = self.clock

    def touch_ctime(self, *inodes: Inode) -> None:
        for inode in inodes:
            inode.ctime = self.clock

    def make(self, user: User, parent: Inode, name: bytes, mode: int) -> Inode:
        """A new inode under a new name; inode_init_owner()."""
        inherits = parent.mode & SGID
        inode = self._number(
            born_mode(user, parent, mode), user.uid, parent.gid if inherits else user.gid
        )
        parent.entries[name] = inode
        if inode.is_dir:
            inode.mode |= inherits
            inode.nlink = 2
            inode.parent = parent
            parent.nlink += 1
        inode.flags = parent.flags & INHERITED
        self.touch(parent)
        return inode

    def paths(self) -> Iterator[tuple[bytes, Inode]]:
        """Every name and its inode, parents first, names in order."""
        todo = [(b"/", self.root)]
        while todo:
            path, inode = todo.pop()
            yield path, inode
            prefix = path.rstrip(b"/") + b"/"
            todo.extend(
                (prefix + name, child)
                for name, child in sorted(inode.entries.items(), reverse=True)
            )


class LastKind(Enum):
    """What the last component of a path is; LAST_* of the kernel."""

    NORM = 0
    DOT = 1
    DOTDOT = 2
    ROOT = 3


class Last(NamedTuple):
    """A path resolved up to its last component; `parent` is the end itself for ROOT."""

    parent: Inode
    name: bytes
    kind: LastKind
    slash: bool  # slashes follow


_DOTS = {b".": LastKind.DOT, b"..": LastKind.DOTDOT}


class Walk:
    """One path resolution."""

    def __init__(self, tree: Tree, user: User) -> None:
        self._tree = tree
        self._user = user
        self._links = 0

    def parent(self, path: bytes) -> Last:
        """filename_parentat(): everything but the last component.

        Raises: ENOENT, ENAMETOOLONG, EACCES, ENOTDIR, ELOOP.
        """
        if not path:
            fail(errno.ENOENT)
        if len(path) >= PATH_MAX:
            fail(errno.ENAMETOOLONG)
        return self._parent(self._tree.root, path)

    def _parent(self, here: Inode, path: bytes) -> Last:
        if path.startswith(b"/"):
            here = self._tree.root
        names = [name for name in path.split(b"/") if name]
        if not names:
            return Last(here, b"", LastKind.ROOT, False)
        for name in names[:-1]:
            here = self._end(Last(here, name, _DOTS.get(name, LastKind.NORM), True), True)
        require(self._user, here, X)
        kind = _DOTS.get(names[-1], LastKind.NORM)
        return Last(here, names[-1], kind, path.endswith(b"/"))

    def find(self, last: Last) -> Inode | None:
        """The inode that the last component names, symlinks not followed."""
        match last.kind:
            case LastKind.ROOT | LastKind.DOT:
                return last.parent
            case LastKind.DOTDOT:
                return last.parent.parent or last.parent
        require(self._user, last.parent, X)
        if len(last.name) > NAME_MAX:
            fail(errno.ENAMETOOLONG)
        return last.parent.entries.get(last.name)

    def follow(self, last: Last, link: Inode) -> Last:
        """Where the symlink `link` found at `last` leads, up to its last component."""
        self._links += 1
        if self._links > LINKS_MAX:
            fail(errno.ELOOP)
        trap = self._tree.sysctls.symlinks and last.parent.mode & (STICKY | 0o002) == (
            STICKY | 0o002
        )
        if trap and link.uid not in (self._user.uid, last.parent.uid):
            fail(errno.EACCES)
        return self._parent(last.parent, link.target)

    def _end(self, last: Last, follow: bool) -> Inode:
        if last.kind is LastKind.ROOT:
            return last.parent
        require(self._user, last.parent, X)
        inode = self.find(last)
        if inode is None:
            fail(errno.ENOENT)
        if inode.is_link and (follow or last.slash):
            inode = self._end(self.follow(last, inode), True)
        if last.slash and not inode.is_dir:
            fail(errno.ENOTDIR)
        return inode

    def end(self, path: bytes, follow: bool = True) -> Inode:
        """filename_lookup(): what `path` names.

        Raises: ENOENT, ENAMETOOLONG, EACCES, ENOTDIR, ELOOP.
        """
        return self._end(self.parent(path), follow)

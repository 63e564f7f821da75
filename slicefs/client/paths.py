"""From a path to an inode: what the kernel does for a mount, with the rights of the caller.

Names are looked up one by one through the VFS, which judges each directory. Symbolic links are
followed as path_resolution(7) says; an absolute target begins at the volume's root, because a
volume without a mount has no other. Lookups are taken back at once: there is no kernel that holds
them.

Called by `names`, `files` and `Client`. Threading: any thread; a view has no state.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Final, NamedTuple, TypeAlias, TypeVar

from fsclient.kernel.contract import EntryOut
from fsmeta.errors import StoreError
from fsmeta.types import Attr, Caller, FileType, Ino
from slicefs.client.connection import Connection, as_oserror

T = TypeVar("T")
Path: TypeAlias = "str | bytes | os.PathLike[str] | os.PathLike[bytes]"

LINKS_MAX: Final = 40  # as Linux follows them
STALE_RETRIES: Final = 5  # a name can be exchanged between its lookup and its use
_DOTS: Final = (b"", b".")


class PathEntry(NamedTuple):
    """Where a name is or would be; `attr` is None where there is nothing."""

    parent: Ino
    name: bytes  # "" for a root
    attr: Attr | None

    def found(self) -> Attr:
        """Raises: ENOENT."""
        if self.attr is None:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        return self.attr


class CallerView:
    """A volume as one caller sees it."""

    def __init__(self, connection: Connection, caller: Caller, umask: int, top: bytes) -> None:
        """Relative paths begin at `top`."""
        self.connection = connection
        self.vfs = connection.vfs
        self.caller = caller
        self.umask = umask
        self.kills = caller.uid != 0  # without CAP_FSETID writing drops set-id bits
        self._top = top

    def run(self, path: Path | None, verb: Callable[[], T]) -> T:
        """`verb`, again where names changed under it. Raises: OSError alone."""
        for _ in range(STALE_RETRIES):
            try:
                return verb()
            except OSError as error:
                if error.errno != errno.ESTALE:
                    raise as_oserror(error, path) from error.__cause__
            except StoreError as error:
                raise as_oserror(error, path) from error
        try:
            return verb()
        except (OSError, StoreError) as error:
            raise as_oserror(error, path) from error

    def as_oserror(self, error: Exception, path: Path | None = None) -> OSError:
        """What the caller sees of `error`."""
        return as_oserror(error, path)

    def entry(self, entry: EntryOut) -> Attr:
        """The attributes in an answer, whose lookup is taken back. Raises: ENOENT."""
        if entry.attr is None:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        self.vfs.forget(entry.attr.ino, 1)
        return entry.attr

    def lookup(self, parent: Ino, name: bytes) -> Attr:
        """One name in a directory. Raises: ENOENT, EACCES, ENOTDIR."""
        return self.entry(self.vfs.lookup(self.caller, parent, name))

    def root(self) -> Attr:
        """The volume's root."""
        return self.vfs.getattr(self.caller, self.vfs.root, None).attr

    def find(self, path: Path, follow: bool = True) -> Attr:
        """What is at a path. Raises: ENOENT, ENOTDIR, EACCES, ELOOP."""
        return self.place(path, follow).found()

    def place(self, path: Path, follow: bool = True) -> PathEntry:
        """Where a path leads: the directory must be there, its last name need not.

        Raises: ENOENT, ENOTDIR, EACCES, ELOOP, EINVAL for a NUL.
        """
        text = os.fsencode(path)
        if b"\0" in text:
            raise ValueError("a path with a NUL byte")
        if not text:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        if not text.startswith(b"/"):
            text = self._top + b"/" + text
        return self._walk(text, follow)

    def _walk(self, text: bytes, follow: bool) -> PathEntry:
        """`text` from the root on."""
        must_be_dir = text.endswith((b"/", b"/."))
        todo = [word for word in reversed(text.split(b"/")) if word not in _DOTS]
        trail = [self.root()]  # the directories that lead to where we are
        names: list[bytes] = [b""]
        links = 0
        while todo:
            name = todo.pop()
            here = trail[-1]
            if not here.is_dir:
                raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            if name == b"..":
                if len(trail) > 1:
                    trail.pop()
                    names.pop()
                continue
            try:
                attr = self.lookup(here.ino, name)
            except FileNotFoundError:
                if todo:
                    raise
                return PathEntry(here.ino, name, None)
            if attr.type is FileType.LNK and (todo or follow or must_be_dir):
                links += 1
                if links > LINKS_MAX:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                target = self.vfs.readlink(self.caller, attr.ino)
                if target.startswith(b"/"):
                    del trail[1:], names[1:]
                must_be_dir = must_be_dir or (not todo and target.endswith((b"/", b"/.")))
                todo += [word for word in reversed(target.split(b"/")) if word not in _DOTS]
                continue
            trail.append(attr)
            names.append(name)
        if must_be_dir and not trail[-1].is_dir:
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        parent = trail[-2].ino if len(trail) > 1 else trail[-1].ino
        return PathEntry(parent, names[-1], trail[-1])

    def target(self, path: Path) -> PathEntry:
        """Where a name is to be made, exchanged or removed: a link at its end is not followed.

        Raises: EBUSY for the root, and as `place`.
        """
        place = self.place(path, follow=False)
        if not place.name:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        return place

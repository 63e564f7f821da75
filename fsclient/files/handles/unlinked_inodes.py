"""Inodes that have lost their last name, and which of them this mount may open all the same.

A kernel caches names for a while. A name that another mount has removed leads to an inode that may
still be there: in the trash, or held open somewhere. Opening it would ignore the deletion, so that
is ESTALE, upon which the kernel looks the name up again. But what lost its name *here* the kernel
opens by no name, only through a descriptor that it has (/proc/self/fd); and what was looked up in
`.trash` has just been found there.

Threading: any thread; each step is atomic.
"""

from __future__ import annotations

import errno
from typing import Final

from fsmeta.schema.trash import TRASH_INO
from fsmeta.types import Attr, Ino

NAMELESS_MAX: Final = 10_000  # that the kernel has not forgotten; about 4 MB


class UnlinkedInodes:
    """What the kernel still refers to, by no name or by one in the trash."""

    def __init__(self) -> None:
        self._known: dict[Ino, Attr] = {}

    def note(self, attr: Attr) -> None:
        """It may have lost its last name here, or was looked up in the trash."""
        if attr.nlink == 0 or attr.parent >= TRASH_INO:
            if len(self._known) >= NAMELESS_MAX:
                self._known.clear()
            self._known[attr.ino] = attr

    def drop(self, ino: Ino) -> None:
        """The kernel has forgotten it, or it has a name again."""
        self._known.pop(ino, None)

    def last(self, ino: Ino) -> Attr | None:
        """What was left of one that had no name any more, not even in the trash."""
        attr = self._known.get(ino)
        return attr if attr is not None and attr.nlink == 0 else None

    def is_seen(self, attr: Attr) -> bool:
        """Whether a directory has a name, or has lost it here, or was looked up in the trash."""
        return (attr.nlink > 0 and attr.parent < TRASH_INO) or attr.ino in self._known

    def require_seen(self, attr: Attr) -> None:
        """`is_seen`. Raises: ESTALE."""
        if not self.is_seen(attr):
            raise OSError(errno.ESTALE, f"inode {attr.ino} has no name")

    def require_openable(self, attr: Attr, handles: int) -> None:
        """Where a file has no name but in the trash. `handles`: how often it is open here.

        Raises: ESTALE.
        """
        if attr.ino not in self._known or (attr.nlink == 0 and handles == 0):
            raise OSError(errno.ESTALE, f"inode {attr.ino} has no name")

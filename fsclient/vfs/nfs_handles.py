"""Inodes that the kernel asks for by number: open_by_handle_at(2), and what exports a mount by NFS.

A handle names an inode and its generation. Where the kernel has dropped that inode it looks up `.`
in it, and `..` to find its way to the root. Inode numbers are never used twice, so the generation
is always 1, and a handle is good on every mount of the volume. What has lost its last name is
ESTALE, in the trash, too, as it is for an open(2) by an old name (`nameless`).

Called by `VFS.lookup`. Threading: any thread.
"""

from __future__ import annotations

import errno
from typing import Final

from fsmeta.meta.meta import Meta
from fsmeta.schema.trash import TRASH_INO
from fsmeta.types import ROOT_CALLER, ROOT_INO, Attr, Ino

DOTS: Final = (b".", b"..")


def find(meta: Meta, ino: Ino, name: bytes) -> Attr:
    """What one of DOTS leads to. Raises: ESTALE."""
    attr = _named(meta, ino)
    if name == b"." or ino == ROOT_INO:
        return attr
    if not attr.is_dir:
        raise OSError(errno.ESTALE, f"inode {ino} is no directory")
    return _named(meta, attr.parent)


def _named(meta: Meta, ino: Ino) -> Attr:
    if ino >= TRASH_INO:
        raise OSError(errno.ESTALE, f"inode {ino} is not stored")
    attr = meta.getattr(ROOT_CALLER, ino)
    if attr.nlink == 0 or attr.parent >= TRASH_INO:
        raise OSError(errno.ESTALE, f"inode {ino} has no name")
    return attr

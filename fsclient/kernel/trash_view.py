"""The trash as a mount shows it: `.trash` at the root, in it a directory for each hour.

`.trash` is listed nowhere and root's alone. Its directories are not stored: they have no attributes
to be changed, and nothing is made in them. Called by the VFS. Threading: any thread.
"""

from __future__ import annotations

import errno

from fsclient.kernel.cache_leases import SHORT_S
from fsclient.kernel.contract import EntryOut
from fsmeta.admin.trash_expiry import hours
from fsmeta.meta.meta import Meta
from fsmeta.rules import access
from fsmeta.schema.trash import TRASH_INO, directory_attr, hour_of_name, is_trash
from fsmeta.types import Caller, Ino


def top() -> EntryOut:
    """`.trash` itself."""
    return EntryOut(directory_attr(TRASH_INO), SHORT_S, SHORT_S)


def lookup(meta: Meta, caller: Caller, parent: Ino, name: bytes) -> EntryOut:
    """What a name in the trash leads to. Raises: ENOENT, EACCES.

    The kernel may keep nothing of it: it does not know that its unlinks fill it.
    """
    if parent != TRASH_INO:
        return EntryOut(meta.lookup(caller, parent, name), 0.0, 0.0)
    access.require(caller, directory_attr(TRASH_INO), access.EXECUTE)
    hour = hour_of_name(name)
    if hour is None or hour not in hours(meta):
        raise OSError(errno.ENOENT, "no such hour in the trash")
    return EntryOut(directory_attr(hour), 0.0, SHORT_S)


def require_changeable(ino: Ino) -> None:
    """Raises: EPERM for the directories of the trash, which are not stored."""
    if is_trash(ino):
        raise OSError(errno.EPERM, "the trash has no attributes of its own")


def require_name(parent: Ino, making: bool) -> None:
    """Raises: EPERM where names are not to be made or changed."""
    if parent == TRASH_INO or (parent > TRASH_INO and making):
        raise OSError(errno.EPERM, "nothing is made in the trash, and its hours stay")

"""The hours of the trash: which there are, and emptying one. Functions over `Meta`; any thread."""

from __future__ import annotations

from typing import Final

from fsmeta.engine import Meta
from fsmeta.ops import remove, trash
from fsmeta.trash import hour_name
from fsmeta.types import ROOT_CALLER, Dentry, FileType, Ino

_EXPIRE_BATCH: Final = 100  # inodes a commit


def hours(meta: Meta) -> list[Ino]:
    """The directories in the trash, the oldest first."""
    return meta.run(trash.hours, ROOT_CALLER)


def listing(meta: Meta) -> list[Dentry]:
    """What is in `.trash`."""
    return [Dentry(hour_name(ino), ino, FileType.DIR) for ino in hours(meta)]


def whole_name(meta: Meta, ino: Ino, entry: bytes) -> bytes:
    """The whole name that something in the trash had; `entry` is what its name there says."""
    return meta.run(trash.origin_name, ROOT_CALLER, ino, entry)


def expire(meta: Meta, hour: Ino) -> int:
    """Delete some of what is in an hour of the trash; how many there were. 0: it is empty."""
    names, _ = meta.names(hour)
    for begin in range(0, len(names), _EXPIRE_BATCH):
        batch = names[begin : begin + _EXPIRE_BATCH]
        meta.run(remove.expire, ROOT_CALLER, hour, batch)
    if not names:
        meta.run(trash.forget_hour, ROOT_CALLER, hour)
    return len(names)

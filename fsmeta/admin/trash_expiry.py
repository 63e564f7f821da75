"""The hours of the trash: which there are, and emptying one. Functions over `Meta`; any thread."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import Final

from fsmeta.meta.meta import Meta
from fsmeta.meta.trash import NOTE_S
from fsmeta.ops.names import remove, trash
from fsmeta.schema.trash import hour_name
from fsmeta.types import ROOT_CALLER, Dentry, FileType, Ino

FORGET_S: Final = 6 * NOTE_S  # notes are that old at most, when commits take no longer than five
_EXPIRE_BATCH: Final = 100  # inodes a commit


def hours(meta: Meta) -> dict[Ino, bytes]:
    """The directories in the trash, the oldest first, and what was noted of each."""
    return meta.run(trash.hours, ROOT_CALLER)


def listing(meta: Meta) -> list[Dentry]:
    """What is in `.trash`."""
    return [Dentry(hour_name(ino), ino, FileType.DIR) for ino in hours(meta)]


def whole_name(meta: Meta, ino: Ino, entry: bytes) -> bytes:
    """The whole name that something in the trash had; `entry` is what its name there says."""
    return meta.run(trash.origin_name, ROOT_CALLER, ino, entry)


def expire(meta: Meta, hour: Ino) -> int:
    """Delete some of what is in an hour of the trash; how many went. 0: it is empty."""
    return next(expiring(meta, hour))


def expiring(meta: Meta, hour: Ino) -> Iterator[int]:
    """Delete all that is in an hour of the trash; yields after each page how many went.

    It ends after a pass over the whole hour by which nothing went.
    """
    gone = 1
    while gone:
        gone = 0
        cursor: bytes | None = b""
        while cursor is not None:
            names, cursor = meta.names(hour, cursor)
            of_page = 0
            for begin in range(0, len(names), _EXPIRE_BATCH):
                batch = names[begin : begin + _EXPIRE_BATCH]
                of_page += meta.run(remove.expire, ROOT_CALLER, hour, batch)
            gone += of_page
            yield of_page


def forget(meta: Meta, hour: Ino, noted: bytes) -> bool:
    """Take an empty hour from the list of hours; False where it is not empty.

    The caller has seen `noted` unchanged for FORGET_S, by a clock that does not jump: so no client
    puts anything there.
    """
    try:
        return meta.run(trash.forget_hour, ROOT_CALLER, hour, noted)
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
        return False

"""Inode numbers of snapshots: of their inodes, which never change, and of the directories for them.

An inode of a snapshot is known by its number, SEALED_INO and a number from the volume's supply, so
a verb refuses to change it without a read. The snapshots of a directory are listed in its *shelf*,
an inode by its number alone, as an hour of the trash is (`trash`): SHELVES and the directory's own
number. Only the names in a shelf are stored, in a row as those of any directory.

Called by the verbs and by the VFS; pure.
"""

from __future__ import annotations

from typing import Final

from fsmeta.schema.inode import DIR_SIZE
from fsmeta.schema.trash import TRASH_INO
from fsmeta.types import Attr, Ino

SHELF_NAME: Final = b".snapshots"
SEALED_INO: Final = Ino(1 << 60)  # far above any id a volume hands out
SHELVES: Final = Ino(SEALED_INO + (1 << 59))
assert SHELVES < TRASH_INO


def is_snapshot_ino(ino: int) -> bool:
    """Whether this is in a snapshot, or a shelf: nothing about it is changed."""
    return SEALED_INO <= ino < TRASH_INO


def is_snapshot_dir(ino: int) -> bool:
    """Whether this lists the snapshots of a directory."""
    return SHELVES <= ino < TRASH_INO


def sealed(ino: Ino) -> Ino:
    """The number in a snapshot that is made of one from the volume's supply."""
    assert ino < SHELVES - SEALED_INO, "ids have run out"
    return Ino(SEALED_INO + ino)


def snapshot_dir_of(directory: Ino) -> Ino:
    """What lists the snapshots of `directory`."""
    assert directory < SEALED_INO, "there are no snapshots of snapshots"
    return Ino(SHELVES + directory)


def source_of(snapshot_dir: Ino) -> Ino:
    """Of which directory a shelf lists the snapshots."""
    return Ino(snapshot_dir - SHELVES)


def snapshot_dir_attr(snapshot_dir: Ino) -> Attr:
    """What stat(2) shows of a shelf: users that may look into its directory may look into it."""
    return Attr(
        snapshot_dir, 0o40555, 0, 0, 0, 0, source_of(snapshot_dir), 0, DIR_SIZE, 2, 0, 0, 0, 0
    )

"""Inode numbers and names of the trash: its directories have no inode rows.

`.trash` and the directory of each hour are inodes by their number alone: the hours since the epoch
on top of TRASH_INO. So the first client to delete something in an hour creates nothing that other
clients could be creating as well. Only the names in them are stored, in rows as those of any
directory; the table T lists the hours.

Called by the verbs and by the VFS; pure.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final, NamedTuple

from fsmeta.schema.inode import DIR_SIZE
from fsmeta.types import NAME_MAX, ROOT_INO, Attr, Ino

TRASH_NAME: Final = b".trash"
TRASH_INO: Final = Ino(1 << 61)  # far above any id a volume hands out, below the virtual files'
HOUR_NS: Final = 3600 * 10**9
_HOURS_MAX: Final = 1 << 32
_LAYOUT: Final = "%Y-%m-%d-%H"  # in UTC


def is_trash(ino: int) -> bool:
    """Whether this is `.trash` or an hour's directory."""
    return TRASH_INO <= ino < TRASH_INO + _HOURS_MAX


def hour_at(now_ns: int) -> Ino:
    """The directory for what is deleted now; never `.trash` itself, whatever the clock says."""
    return Ino(TRASH_INO + min(max(now_ns // HOUR_NS, 1), _HOURS_MAX - 1))


def hour_name(ino: Ino) -> bytes:
    """The name of an hour's directory in `.trash`, like `2026-11-21-19`."""
    begin = datetime.fromtimestamp((ino - TRASH_INO) * 3600, UTC)
    return begin.strftime(_LAYOUT).encode()


def hour_of_name(name: bytes) -> Ino | None:
    """The directory that `hour_name` names so; None for what is no such name."""
    try:
        begin = datetime.strptime(name.decode("ascii"), _LAYOUT).replace(tzinfo=UTC)
    except ValueError:
        return None
    hour = hour_at(int(begin.timestamp()) * 10**9)
    return hour if hour > TRASH_INO and hour_name(hour) == name else None


class Origin(NamedTuple):
    """Where something in the trash comes from; of a long name only the beginning."""

    parent: Ino
    ino: Ino
    name: bytes


def entry_name(origin: Origin) -> bytes:
    """The name in the trash, `PARENT-INO-NAME`, cut where it would be too long."""
    return (b"%d-%d-" % origin[:2] + origin.name)[:NAME_MAX]


def origin_of(entry: bytes) -> Origin | None:
    """What `entry_name` has made a name of."""
    parts = entry.split(b"-", 2)
    if len(parts) != 3 or not parts[0].isdigit() or not parts[1].isdigit() or not parts[2]:
        return None
    return Origin(Ino(int(parts[0])), Ino(int(parts[1])), parts[2])


def is_cut(origin: Origin) -> bool:
    """Whether `entry_name` keeps only a part of the name."""
    return len(entry_name(origin)) != len(b"%d-%d-" % origin[:2]) + len(origin.name)


def directory_attr(ino: Ino) -> Attr:
    """What stat(2) shows of `.trash` or of an hour's directory: it is root's alone."""
    parent = ROOT_INO if ino == TRASH_INO else TRASH_INO
    begin_ns = (ino - TRASH_INO) * HOUR_NS
    return Attr(
        ino, 0o40700, 0, 0, 0, 0, parent, begin_ns, DIR_SIZE, 2, 0, begin_ns, begin_ns, begin_ns
    )

"""Whether flock(2) on a file keeps out every host that can have the file.

Staging directories and cache disks are kept apart by such locks. On a disk of this host they do
that, in all containers, too. On a network it depends: many file systems keep them to the host that
asked, and no host can find that out by itself. So what is known to be good is named here.

Threading: functions only.
"""

from __future__ import annotations

import os
from typing import Final, NamedTuple

# without a device of their own, and of one kernel all the same
_OF_ONE_HOST: Final = frozenset(
    ("bcachefs", "btrfs", "ecryptfs", "overlay", "ramfs", "tmpfs", "zfs")
)
_ASK_A_SERVER: Final = frozenset(("ceph", "gpfs", "lustre", "nfs", "nfs4"))
_KEPT_LOCAL: Final = frozenset(("local_lock=all", "local_lock=flock", "localflock", "noflock"))


class _Filesystem(NamedTuple):
    """What a directory is on."""

    mountpoint: str
    fstype: str
    options: frozenset[str]


def locks_may_be_unseen(path: str) -> str:
    """The type of the file system of `path`, if other hosts may not see locks there; else "".

    What can't be found out is taken for a disk.
    """
    try:
        if os.major(os.stat(path).st_dev):
            return ""  # a disk, or one that a cluster shares and locks
        place = _place(os.path.realpath(path))
    except OSError:
        return ""
    if place is None or place.fstype in _OF_ONE_HOST:
        return ""
    if place.fstype in _ASK_A_SERVER and not place.options & _KEPT_LOCAL:
        return ""
    return place.fstype


def _place(path: str) -> _Filesystem | None:
    """Raises: OSError."""
    found = None
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            each = _parse(line)
            above = each.mountpoint.rstrip("/")
            if path != above and not path.startswith(f"{above}/"):
                continue
            # the deepest, and of those on one directory the one that was mounted last
            if found is None or len(each.mountpoint) >= len(found.mountpoint):
                found = each
    return found


def _parse(line: str) -> _Filesystem:
    """See proc_pid_mountinfo(5); a path with spaces is not found, and what is above it is."""
    fields = line.split()
    dash = fields.index("-")
    return _Filesystem(fields[4], fields[dash + 1], frozenset(fields[-1].split(",")))

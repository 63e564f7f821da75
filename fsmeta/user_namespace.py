"""The user namespace that this process runs in, and what its ids are outside of it.

A volume holds ids as the host has them: a mount in a container or in `unshare --user` translates,
so a file has one owner, wherever it is looked at. That is what a local disk does, too. Linux tells
of one step, to the namespace above; from there on ids are taken as they are.

Called by `serve`, which has the session translate, and by what compares ids with those of this
process. Threading: any.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Final, NamedTuple

NOT_MAPPED: Final = 0xFFFFFFFF  # the kernel takes it for an id that no process has
_EVERY_ID: Final = NOT_MAPPED  # how many there are


class IdRange(NamedTuple):
    """A line of /proc/self/uid_map."""

    inside: int
    outside: int
    length: int


class IdMap(NamedTuple):
    """Which ids of a namespace are which outside of it."""

    ranges: tuple[IdRange, ...]

    def outward(self, inside: int) -> int:
        """What `inside` is outside; NOT_MAPPED where it is nothing."""
        for first, outside, length in self.ranges:
            if first <= inside < first + length:
                return outside + inside - first
        return NOT_MAPPED

    def inward(self, outside: int) -> int:
        """What `outside` is inside; NOT_MAPPED where it is nothing."""
        for inside, first, length in self.ranges:
            if first <= outside < first + length:
                return inside + outside - first
        return NOT_MAPPED

    @property
    def is_plain(self) -> bool:
        """Whether it changes nothing."""
        return self.ranges == (IdRange(0, 0, _EVERY_ID),)


class UserNamespace(NamedTuple):
    """The users and groups of a namespace."""

    uids: IdMap
    gids: IdMap


@cache
def own_namespace() -> UserNamespace | None:
    """That of this process; None where ids are those of the host."""
    found = UserNamespace(_read_map("/proc/self/uid_map"), _read_map("/proc/self/gid_map"))
    return None if found.uids.is_plain and found.gids.is_plain else found


def has_system_paths() -> bool:
    """Whether files of the system, below /var, are this process's: it is root, and that counts."""
    return os.geteuid() == 0 and (own_namespace() is None or os.access("/var/log", os.W_OK))


def own_uid() -> int:
    """The effective user of this process, as volumes have it."""
    namespace = own_namespace()
    return os.geteuid() if namespace is None else namespace.uids.outward(os.geteuid())


def own_gid() -> int:
    """The effective group of this process, as volumes have it."""
    namespace = own_namespace()
    return os.getegid() if namespace is None else namespace.gids.outward(os.getegid())


def own_groups() -> tuple[int, ...]:
    """The supplementary groups of this process, as volumes have them."""
    return tuple(map(gid_outward, os.getgroups()))


def gid_outward(gid: int) -> int:
    """A group that the kernel has told this process of, as volumes have it."""
    namespace = own_namespace()
    return gid if namespace is None else namespace.gids.outward(gid)


def _read_map(path: str) -> IdMap:
    try:
        with open(path, encoding="ascii") as lines:
            return IdMap(tuple(IdRange(*map(int, line.split())) for line in lines))
    except OSError:  # a kernel without user namespaces
        return IdMap((IdRange(0, 0, _EVERY_ID),))

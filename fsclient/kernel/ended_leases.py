"""What the kernel is to be told of leases that have ended. Called by `CacheLeases`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from fsmeta.types import Ino

log = logging.getLogger(__name__)

Lease: TypeAlias = tuple[Ino, bytes | None]  # (directory, name), or (inode, None)
Notice: TypeAlias = Callable[[], None]


class EndedLeases(NamedTuple):
    """What the kernel is to forget."""

    inodes: list[Ino]  # attributes and pages
    twice: list[Lease]  # names and listings: the kernel caches an answer on its way


class Repeat(NamedTuple):
    """What the kernel is to be told once more."""

    when: float
    leases: Sequence[Lease]
    before: frozenset[int]  # requests that may be answered with what has ended
    told: bool = False  # a second time; only those answers are waited for


def try_to(tell: Notice) -> None:
    """Tell the kernel; an error is of this notification, and does not stop those behind it."""
    try:
        tell()
    except OSError as error:
        log.warning("the kernel was not told of a change: %s", error)

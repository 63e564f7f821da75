"""What the system allows a mount: raised at its start as far as it may be, and shown.

Cache and staging disks, connections and threads of a mount are many more than those of most
programs, and what a shell was limited to is not meant for it. Limits that keep memory in bounds
(`ulimit -v`) are left alone.

Threading: called before a mount serves; by the command that becomes a supervisor, too.
"""

from __future__ import annotations

import logging
import resource
from typing import Final, NamedTuple

log = logging.getLogger(__name__)

FILES_WANTED: Final = 1 << 20  # cache disks alone keep 128 each; as much as most systems ever allow
FILES_FEW: Final = 4096  # fewer are worth a word: caches then keep less open, and connections fail
OOM_SCORE: Final = -500  # programs that use the mount go first; it goes before the system's own
_FILES_MAX: Final = "/proc/sys/fs/nr_open"
_OOM: Final = "/proc/self/oom_score_adj"
_RAISED: Final = (resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE)  # to what root has allowed


class ProcessLimits(NamedTuple):
    """What a mount may use."""

    open_files: int  # -1: without a limit
    file_bytes: int  # of a file on a local disk; -1: without a limit
    threads: int  # of this user; -1: without a limit
    memory_bytes: int  # of address space; -1: without a limit
    oom_score_adj: int | None  # None: it can't be told


def raise_limits() -> ProcessLimits:
    """Raise what is too low for a mount, and log what stays so; what it is now."""
    limits = raise_silently()
    if 0 <= limits.open_files < FILES_FEW:
        log.warning(
            "this mount may have %d files open: raise `ulimit -Hn`, or LimitNOFILE= of its unit, "
            "to %d",
            limits.open_files,
            FILES_WANTED,
        )
    return limits


def raise_silently() -> ProcessLimits:
    """The same before there is a log; processes that this one becomes or starts inherit it."""
    for which in _RAISED:
        _raise(which, resource.RLIM_INFINITY)
    _raise(resource.RLIMIT_NOFILE, _files_wanted())
    _lower_oom_score()
    return find_limits()


def find_limits() -> ProcessLimits:
    """What this process may use."""
    return ProcessLimits(
        _soft(resource.RLIMIT_NOFILE),
        _soft(resource.RLIMIT_FSIZE),
        _soft(resource.RLIMIT_NPROC),
        _soft(resource.RLIMIT_AS),
        _oom_score(),
    )


def _soft(which: int) -> int:
    soft, _ = resource.getrlimit(which)
    return -1 if soft == resource.RLIM_INFINITY else soft


def _files_wanted() -> int:
    """FILES_WANTED, or what the kernel allows at most."""
    try:
        with open(_FILES_MAX, encoding="ascii") as number:
            return min(FILES_WANTED, int(number.read()))
    except (OSError, ValueError):
        return FILES_WANTED


def _raise(which: int, wanted: int) -> None:
    """Raise a limit to `wanted`, or as far as this user may; never lower it."""
    soft, hard = resource.getrlimit(which)
    if _at_least(soft, wanted):
        return
    best = hard if _at_least(wanted, hard) else wanted
    for pair in ((wanted, wanted), (best, hard)):
        try:
            resource.setrlimit(which, pair)
        except (OSError, ValueError) as error:
            log.debug("limit %d is not raised to %d: %s", which, pair[0], error)
        else:
            return


def _at_least(limit: int, other: int) -> bool:
    """Whether a limit allows as much as another."""
    if resource.RLIM_INFINITY in (limit, other):
        return limit == resource.RLIM_INFINITY
    return limit >= other


def _oom_score() -> int | None:
    try:
        with open(_OOM, encoding="ascii") as number:
            return int(number.read())
    except (OSError, ValueError):
        return None


def _lower_oom_score() -> None:
    """Have the kernel end other programs first, unless the administrator has decided otherwise."""
    if _oom_score() != 0:
        return
    try:
        with open(_OOM, "w", encoding="ascii") as number:
            number.write(str(OOM_SCORE))
    except OSError as error:
        log.debug("%s stays: %s", _OOM, error)  # only root may

"""Whether a process of this host that holds a lock is on its way out.

A killed process keeps its locks until the kernel has taken it apart, which a write to a slow
disk or gigabytes of memory can make a second: longer than it takes to mount again.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Final

_PF_EXITING: Final = 0x4  # include/linux/sched.h
_KILLED: Final = 1 << signal.SIGKILL - 1


def is_held_by_exiting(fd: int) -> bool:
    """Whether a process that is being killed has the open file `fd` locked with flock(2).

    False where it can't be told: without /proc, and of processes in another pid namespace.
    """
    return any(_is_exiting(pid) for pid in _holders(os.fstat(fd).st_ino))


def _holders(inode: int) -> Iterator[int]:
    """Processes with an flock(2) on a file of this number, on whichever device; proc_locks(5)."""
    try:
        with open("/proc/locks", encoding="ascii") as lines:
            for line in lines:
                # The kind of a waiting process reads `->`.
                _number, kind, _advisory, _mode, pid, place, *_range = line.split()
                if kind == "FLOCK" and int(place.rpartition(":")[2]) == inode and int(pid) > 0:
                    yield int(pid)
    except OSError:
        return


def _is_exiting(pid: int) -> bool:
    """Killed and not taken apart yet, or writing its core; proc_pid_stat(5), proc_pid_status(5)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            state, *numbers = stat.read().rpartition(b") ")[2].split()
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as status:
            said = dict(line.rstrip("\n").split(":\t", 1) for line in status if ":\t" in line)
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False
    pending = int(said.get("SigPnd", "0"), 16) | int(said.get("ShdPnd", "0"), 16)
    return (
        state in b"ZX"
        or bool(int(numbers[5]) & _PF_EXITING)
        or bool(pending & _KILLED)
        or said.get("CoreDumping") == "1"
    )

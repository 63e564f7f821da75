"""Whether what is left of a killed process is threads that wait for the mount which it served.

They wait in the kernel, where no signal reaches them, for answers that only the next client can
give: see `fuse/session/detached_calls`. Nothing else is kept by them, so that one may begin.

Called by the supervisor; imports the standard library only.
"""

from __future__ import annotations

import os
import signal
from typing import Final

_KILLED: Final = 1 << signal.SIGKILL - 1
_STANDARD: Final = frozenset(("0", "1", "2"))  # descriptors
_ENDED: Final = "ZX"


def only_wait(pid: int, device: int, mountpoint: str) -> bool:
    """Whether all threads of a process that are left were killed, and have nothing open but the
    mount, of which `device` is a descriptor.

    False where that can't be told, and where none is left.
    """
    path = os.readlink(f"/proc/self/fd/{device}")
    try:
        alive = [
            task
            for number in os.listdir(f"/proc/{pid}/task")
            if _is_alive(task := f"/proc/{pid}/task/{number}")
        ]
        return bool(alive) and all(_has_only(task, path, mountpoint) for task in alive)
    except (OSError, ValueError, KeyError):
        return False  # one has ended since, or is not ours to ask


def _is_alive(task: str) -> bool:
    """proc_pid_stat(5)."""
    with open(f"{task}/stat", encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(") ")[2][0] not in _ENDED


def _has_only(task: str, device: str, mountpoint: str) -> bool:
    """A thread that is being taken apart has nothing open, and may be about to close it all."""
    with open(f"{task}/status", encoding="utf-8", errors="replace") as file:
        said = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    if not int(said["SigPnd"], 16) & _KILLED:
        return False
    others = [
        os.readlink(f"{task}/fd/{number}")
        for number in os.listdir(f"{task}/fd")
        if number not in _STANDARD
    ]
    # nothing is asked of what is open: it may be on the mount, which does not answer
    return bool(others) and all(
        each == device or f"{each}/".startswith(f"{mountpoint}/") for each in others
    )

"""A thread whose fsync(2) and fdatasync(2) fail, as on a disk that can't take what was written.

The filter is the thread's own, so other threads go on syncing: seccomp(2).
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
import threading
from collections.abc import Callable
from typing import Final

PR_SET_NO_NEW_PRIVS: Final = 38
PR_SET_SECCOMP: Final = 22
_FILTER: Final = 2
_LOAD, _JUMP_EQUAL, _RETURN = 0x20, 0x15, 0x06  # linux/bpf_common.h
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NUMBERS: Final = {"x86_64": (74, 75), "aarch64": (82, 83)}  # fsync, fdatasync


def can_fail() -> bool:
    """Whether this machine's system calls are known here."""
    return platform.machine() in _NUMBERS


def in_thread_that_can_not_sync(work: Callable[[], object]) -> None:
    """Run `work` in a thread in which nothing can be synced. Raises: what it raises."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            _refuse_syncs()
            work()
        except BaseException as error:  # noqa: BLE001 (raised below)
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


def _refuse_syncs() -> None:
    one, two = _NUMBERS[platform.machine()]
    program = b"".join(
        struct.pack("=HBBI", *each)
        for each in (
            (_LOAD, 0, 0, 0),  # seccomp_data.nr
            (_JUMP_EQUAL, 1, 0, one),
            (_JUMP_EQUAL, 0, 1, two),
            (_RETURN, 0, 0, _ERRNO | errno.EIO),
            (_RETURN, 0, 0, _ALLOW),
        )
    )
    text = ctypes.create_string_buffer(program)
    head = ctypes.create_string_buffer(
        struct.pack("@HP", len(program) // 8, ctypes.addressof(text))
    )
    libc = ctypes.CDLL(None, use_errno=True)
    assert not libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    assert not libc.prctl(PR_SET_SECCOMP, _FILTER, head, 0, 0), ctypes.get_errno()

"""Has glibc keep freed memory: a mount calls this once, before it starts threads.

By default the C allocator returns a freed block's pages to the kernel, and the next block faults
them in again: 25 faults for 100 KiB, which on a virtual machine was two thirds of the time of a
cold read (134 µs against 80 µs, measured). The budget bounds what there is to keep.

There is one heap for all threads. If they had heaps of their own, what one has freed would be of no
use to another: mounts with 64 MiB of buffers that wrote one file after the other grew by 120 MiB
(one heap: 64). Python's own lock makes most threads take turns at the heap anyway.
"""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -2, -3, -8  # malloc.h
MMAP_BYTES = 32 << 20  # the largest that glibc takes: every block comes from the heap
PAD_BYTES = 16 << 20  # grow the heap by four blocks at a time


def keep_freed_memory(limit: int) -> bool:
    """Let up to `limit` freed bytes stay with the process; False where malloc isn't glibc's."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    wanted = (
        (M_MMAP_THRESHOLD, MMAP_BYTES),
        (M_TRIM_THRESHOLD, min(limit, 1 << 30)),
        (M_TOP_PAD, PAD_BYTES),
        (M_ARENA_MAX, 1),
    )
    taken = [mallopt(option, value) == 1 for option, value in wanted]
    return all(taken)

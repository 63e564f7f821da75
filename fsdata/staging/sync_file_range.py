"""Having the kernel begin to write a file's pages to its disk, without waiting for that.

A page that a program has written stays in memory for seconds, or until a program syncs it.
`DirectoryDisk` asks for the write at once: then the disk works while the next bytes come, and
fsync(2) finds most of it done. Python has no sync_file_range(2).

Nothing is promised by it: what fails here is reported by fdatasync(2) of the same descriptor, and
where there is no such call the bytes just go later.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from typing import Final

WRITE: Final = 2  # SYNC_FILE_RANGE_WRITE of linux/fs.h


def _find() -> Callable[[int, int, int, int], int] | None:
    try:
        call = ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError):
        return None
    call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    call.restype = ctypes.c_int
    found: Callable[[int, int, int, int], int] = call
    return found


_SYNC_FILE_RANGE: Final = _find()


def begin_write_out(fd: int, begin: int, end: int) -> None:
    """Have the whole pages of `begin..end` on their way; the last one is not whole, as a rule.

    On disks with checksums an append would have to wait for a page that is being written.
    """
    begin -= begin % mmap.PAGESIZE
    end -= end % mmap.PAGESIZE
    if _SYNC_FILE_RANGE is not None and begin < end:
        _SYNC_FILE_RANGE(fd, begin, end - begin, WRITE)

"""Which pages of a file the kernel has."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path
from typing import Final

PAGE: Final = mmap.PAGESIZE
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


def resident(path: Path) -> int:
    """How many of a file's pages are in memory, for whoever opens it now."""
    size = path.stat().st_size
    found = (ctypes.c_ubyte * (size // PAGE + 1))()
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE) as memory:
        begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        done = _LIBC.mincore(ctypes.c_void_p(begin), ctypes.c_size_t(size), found)
        assert done == 0, os.strerror(ctypes.get_errno())
    return sum(each & 1 for each in found)

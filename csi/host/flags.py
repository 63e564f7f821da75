"""Flags of chattr(1): with `i` or `a` no file is removed, by root neither."""

from __future__ import annotations

import fcntl
import os
import stat
from contextlib import suppress
from typing import Final

_GETFLAGS: Final = 0x80086601  # linux/fs.h
_SETFLAGS: Final = 0x40086602
_APPEND: Final = 0x20
_IMMUTABLE: Final = 0x10


def clear_tree(directory: str) -> None:
    """Let everything in a directory be removed, and itself. Raises: OSError."""
    for place, _, files in os.walk(directory):
        clear(place)
        for name in files:
            with suppress(FileNotFoundError):
                clear(os.path.join(place, name))


def clear(path: str) -> None:
    """Let a file or a directory be removed. Raises: OSError."""
    if stat.S_IFMT(os.lstat(path).st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
        return
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        value = bytearray(8)
        fcntl.ioctl(fd, _GETFLAGS, value)
        flags = int.from_bytes(value[:4], "little")
        if flags & (_APPEND | _IMMUTABLE):
            cleared = flags & ~(_APPEND | _IMMUTABLE)
            fcntl.ioctl(fd, _SETFLAGS, cleared.to_bytes(8, "little"))
    finally:
        os.close(fd)

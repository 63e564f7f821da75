"""Flags of open(2) as FUSE hands them on: what they ask for, and what chattr(1) forbids of it."""

from __future__ import annotations

import os
from typing import Final

from fsmeta.rules import access
from fsmeta.types import FLAG_ATTACHED, Attr

_FMODE_EXEC: Final = 0x20  # linux/fs.h: the kernel opens a program to run it, not to read it


def require_flags(attr: Attr, flags: int) -> None:
    """Raises: EPERM where open(2) with `flags` would not only append to an append-only file."""
    access.require_opening(attr, writes(flags), bool(flags & os.O_APPEND), bool(flags & os.O_TRUNC))


def writes(flags: int) -> bool:
    """Whether a handle with these flags may be written through."""
    return flags & os.O_ACCMODE != os.O_RDONLY


def access_mask(flags: int) -> int:
    """What open(2) flags ask for, as access(2) bits."""
    if flags & _FMODE_EXEC:
        return access.EXECUTE
    mode = flags & os.O_ACCMODE
    mask = 0 if mode == os.O_WRONLY else access.READ
    if mode != os.O_RDONLY or flags & os.O_TRUNC:
        mask |= access.WRITE
    return mask


def needs_bytes(attr: Attr, flags: int) -> bool:
    """Whether an attached file has to hold its bytes before it is opened; O_TRUNC needs none."""
    return bool(attr.flags & FLAG_ATTACHED and writes(flags) and not flags & os.O_TRUNC)

"""The pieces that several requests share: names, groups, the body's place.

Called by the dispatch tables. A request is in a view that begins with its header; `end` is where
its body ends, extensions not counted. Names end in a NUL that the kernel has put there.
"""

from __future__ import annotations

import errno
import os
from typing import Final

from fsclient.fuse.wire.abi import EXT_GROUPS, EXT_HEADER, IN_BYTES
from fsmeta.types import NAME_MAX

BODY: Final = IN_BYTES


def no_args(_view: memoryview, _end: int) -> tuple[()]:
    """A request whose header says it all."""
    return ()


def name_at(view: memoryview, begin: int, end: int) -> bytes:
    """The name that fills `begin` to `end` with its NUL.

    Raises: ENAMETOOLONG; the kernel itself lets 1024 bytes pass.
    """
    name = view[begin : end - 1].tobytes()
    if len(name) > NAME_MAX:
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
    return name


def one_name(view: memoryview, end: int) -> tuple[bytes]:
    """A request whose body is a name."""
    return (name_at(view, BODY, end),)


def split_at(view: memoryview, begin: int, end: int) -> tuple[bytes, bytes]:
    """A NUL-terminated name and the rest behind its NUL."""
    name, _, rest = view[begin:end].tobytes().partition(b"\0")
    if len(name) > NAME_MAX:
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
    return name, rest


def supplementary_groups(view: memoryview, begin: int, end: int) -> tuple[int, ...]:
    """The groups in the extensions of a creation; other extensions are passed over."""
    while begin + EXT_HEADER.size <= end:
        size, kind = EXT_HEADER.unpack_from(view, begin)
        if kind == EXT_GROUPS:
            words = view[begin + EXT_HEADER.size : begin + (end - begin) // 4 * 4].cast("I")
            return tuple(words[1 : 1 + words[0]]) if words else ()
        begin += max(size, EXT_HEADER.size)
    return ()

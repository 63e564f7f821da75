"""ACLs, flags and data of an inode: what `slicefs info` shows, in pages that fit in an xattr.

The name of the page asked for is `user.slicefs.info`, or that and `.CHUNK.SLICE`, where it begins.
It is answered by the VFS as JSON, not stored and not listed; `next` says where the page
after it begins. Chunks without slices are left out: a sparse file may have 2^32 of them.

Threading: functions only.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from fsmeta.meta.meta import Meta
from fsmeta.schema.acl import Acl, describe as describe_acl
from fsmeta.types import (
    FLAG_APPEND,
    FLAG_IMMUTABLE,
    FLAG_NOATIME,
    FLAG_NODUMP,
    XATTR_SIZE_MAX,
    Attr,
)

INFO_XATTR: Final = b"user.slicefs.info"
SLICES_A_PAGE: Final = 350  # a record of the largest numbers takes 170 bytes
FLAG_LETTERS: Final = {
    "i": FLAG_IMMUTABLE,
    "a": FLAG_APPEND,
    "d": FLAG_NODUMP,
    "A": FLAG_NOATIME,
}
_PAGE: Final = re.compile(re.escape(INFO_XATTR) + rb"(?:\.(\d{1,10})\.(\d{1,10}))?")
assert SLICES_A_PAGE * 180 < XATTR_SIZE_MAX, "with a chunk's own record for each"


class Begin(NamedTuple):
    """Where a page begins."""

    chunk: int = 0
    slice: int = 0


def page_of(name: bytes) -> Begin | None:
    """Which page an xattr's name asks for; None where it is another's."""
    found = _PAGE.fullmatch(name)
    if found is None:
        return None
    return Begin() if found[1] is None else Begin(int(found[1]), int(found[2]))


def describe(meta: Meta, attr: Attr, begin: Begin) -> bytes:
    """One page of where the data of `attr` is, as JSON."""
    shown: dict[str, Any] = {"ino": attr.ino, "parent": attr.parent, "size": attr.size}
    shown |= {"space": attr.space, "flags": _letters(attr.flags)}
    acls = [_text(acl) for acl in meta.acls(attr)]
    shown |= zip(("acl", "default_acl"), acls, strict=True)
    chunks: list[dict[str, Any]] = []
    room = SLICES_A_PAGE - sum(len(text) for text in acls if text) // 170
    following = None
    for index in [] if attr.is_dir else meta.ranges.chunks(attr.ino):
        if index < begin.chunk:
            continue
        if room <= 0:
            following = f"{index}.0"
            break
        first = begin.slice if index == begin.chunk else 0
        slices = meta.read_chunk(attr.ino, index)
        taken = slices[first : first + room]
        chunks.append({"index": index, "slices": [each._asdict() for each in taken]})
        room -= len(taken) + 1
        if first + len(taken) < len(slices):
            following = f"{index}.{first + len(taken)}"
            break
    packed = json.dumps({**shown, "chunks": chunks, "next": following}, separators=(",", ":"))
    return packed.encode()


def _letters(flags: int) -> str:
    """Flags as chattr(1) and lsattr(1) name them."""
    return "".join(letter for letter, bit in FLAG_LETTERS.items() if flags & bit)


def _text(acl: Acl | None) -> str | None:
    return None if acl is None else describe_acl(acl)


def ask(path: str) -> Iterator[dict[str, Any]]:
    """The pages of a file on a mount, one after the other. Raises: OSError."""
    name: bytes | None = INFO_XATTR
    while name is not None:
        page = json.loads(os.getxattr(path, name))
        yield page
        name = page["next"] and b"%b.%b" % (INFO_XATTR, page["next"].encode())

"""Answers to READDIR and READDIRPLUS: names packed for the kernel, and what they lead to.

Called by the dispatch tables. A listing with attributes is packed straight from the stored records:
neither `Attr` nor `EntryOut` is made of them. What is written out here twice, and not in terms of
`wire/pack`, is where such a listing spends its time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

from fsclient.fuse.wire import abi
from fsclient.fuse.wire.pack import BLOCK_SIZE_BYTES, GENERATION, NS, entry_out, ttls
from fsclient.kernel.listed import Entries
from fsmeta.dentries import Dentries
from fsmeta.schema.inode import EPOCH_NS, unpack_plain
from fsmeta.types import Dentry

_AT_A_TIME: Final = 256  # names of a listing; those that don't fit at the end are packed in vain
_NO_ENTRY: Final = bytes(abi.ENTRY_OUT.size)
_CONSTANTS: Final = abi.DEVICE.pack(0, BLOCK_SIZE_BYTES, 0)  # device numbers are in records' tails
# What a name takes in a READDIRPLUS, by its length.
_ROOM: Final = [abi.align8(abi.DIRENTPLUS.size + length) for length in range(256)]


def fitting(names: Sequence[Dentry], size: int) -> int:
    """How many names from the beginning fit in `size` as READDIRPLUS has them."""
    some = Dentries.of(names).names[: size // _ROOM[1]]
    ends = list(accumulate([_ROOM[length] for length in map(len, some)]))
    return bisect_right(ends, size)


def dirents(names: Sequence[Dentry], cookies: Sequence[int], size: int) -> bytes:
    """READDIR: as many names as fit in `size`, each with its cookie."""
    columns, shapes = Dentries.of(names), abi.DIRENTS
    pages: list[bytes] = []
    for begin in range(0, len(columns), _AT_A_TIME):
        some = columns[begin : begin + _AT_A_TIME]
        records = [
            shapes[len(name)](ino, cookie, len(name), kind, name)
            for name, ino, kind, cookie in zip(
                some.names, some.inos, some.kinds, cookies[begin : begin + _AT_A_TIME], strict=True
            )
        ]
        page = b"".join(records)
        if len(page) > size:
            pages += _first(records, size)
            break
        pages.append(page)
        size -= len(page)
    return b"".join(pages)


def _first(records: list[bytes], size: int) -> list[bytes]:
    """As many as fit."""
    return records[: bisect_right(list(accumulate(map(len, records))), size)]


def dirents_plus(names: Sequence[Dentry], cookies: Sequence[int], entries: Entries) -> bytes:
    """READDIRPLUS: names with what they lead to; where there is none the kernel skips it."""
    columns, shapes = Dentries.of(names), abi.DIRENTS_PLUS
    validity = abi.VALIDITY.pack(GENERATION, *ttls(entries.entry_ttl, entries.attr_ttl))
    page: list[bytes] = []
    add = page.append
    for name, ino, kind, cookie, record in zip(
        columns.names,
        columns.inos,
        columns.kinds,
        cookies,
        unpack_plain(entries.records),
        strict=True,
    ):
        mode, uid, gid, size, nlink, used, atime, mtime, ctime = record
        length = len(name)
        if not mode:
            entry = entries.odd.get(len(page))
            head = _NO_ENTRY if entry is None else entry_out(entry)
            add(head + abi.DIRENTS[length](ino, cookie, length, kind, name))
            continue
        mtime_s, mtime_ns = divmod(mtime - EPOCH_NS, NS)
        if mtime == ctime == atime:
            atime_s = ctime_s = mtime_s
            atime_ns = ctime_ns = mtime_ns
        else:
            atime_s, atime_ns = divmod(atime - EPOCH_NS, NS)
            ctime_s, ctime_ns = divmod(ctime - EPOCH_NS, NS)
        add(
            shapes[length](
                ino,
                validity,
                ino,
                size,
                (used + 4095) >> 12 << 3,
                atime_s,
                mtime_s,
                ctime_s,
                atime_ns,
                mtime_ns,
                ctime_ns,
                mode,
                nlink,
                uid,
                gid,
                _CONSTANTS,
                ino,
                cookie,
                length,
                kind,
                name,
            )
        )
    return b"".join(page)

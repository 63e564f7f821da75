"""Answers: from the file system's records to the kernel's structs. Pure functions.

Called by the dispatch tables. Inode numbers are node ids, and are never used twice, so the
generation is always 1. A time to live becomes seconds and nanoseconds.

`st_blksize` is what stdio and Python's open() take for their buffers (cp takes at least 128 KiB).
Measured with Python, relative to 4 KiB: buffered writes of 1 kB records run 9, 14 and 20 times as
fast with 64 KiB, 128 KiB and 1 MiB, because each flush is a request; random reads of 4 KiB take
1.6, 1.9 and 5.5 times as long, because each fills the buffer. So: 128 KiB.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Final, TypeAlias

from fsclient.fuse.wire import abi
from fsclient.fuse.wire.protocol import (
    FOPEN_CACHE_DIR,
    FOPEN_DIRECT_IO,
    FOPEN_KEEP_CACHE,
    FOPEN_NOFLUSH,
    FOPEN_PARALLEL_DIRECT_WRITES,
    FOPEN_PASSTHROUGH,
    STATX_BASIC_STATS,
    STATX_BTIME,
)
from fsclient.kernel.contract import Buffer, EntryOut, OpenOut, Stat
from fsmeta.types import FLAG_NOATIME, FLAGS, NAME_MAX, Attr, Dentry, StatFs

Answer: TypeAlias = bytes | Sequence[Buffer]

GENERATION: Final = 1
NS: Final = 1_000_000_000
BLOCK_SIZE_BYTES: Final = 128 << 10
STATFS_BLOCK_BYTES: Final = 4096
UNLIMITED_SPACE_BYTES: Final = 1 << 50  # what df(1) shows of a volume without a limit: 1 PiB
UNLIMITED_INODES: Final = 10 << 20
FLAGS_SHOWN: Final = FLAGS & ~FLAG_NOATIME  # STATX_ATTR_* have the same values

_AT_A_TIME: Final = 256  # records of a listing; those that don't fit at the end are made in vain
_NO_ATTR: Final = (0,) * 16
_NO_ENTRY: Final = bytes(abi.ENTRY_OUT.size)
_NOTHING: Final = EntryOut(None, 0.0, 0.0)


def _attr_fields(attr: Attr) -> tuple[int, ...]:
    """The values of `struct fuse_attr`."""
    ino, mode, uid, gid, rdev, _, _, _, size, nlink, used, atime, mtime, ctime, _, _, _ = attr
    return (
        ino,
        size,
        (used + 4095) >> 12 << 3,  # Attr.space in units of 512 bytes, without two calls
        atime // NS,
        mtime // NS,
        ctime // NS,
        atime % NS,
        mtime % NS,
        ctime % NS,
        mode,
        nlink,
        uid,
        gid,
        rdev,
        BLOCK_SIZE_BYTES,
        0,
    )


def _entry_fields(entry: EntryOut) -> tuple[int, ...]:
    """The values of `struct fuse_entry_out`; node id 0 says that the name leads nowhere."""
    attr, entry_ttl, attr_ttl = entry
    if attr is None:
        return (0, 0, *_ttls(entry_ttl, 0.0), *_NO_ATTR)
    return (attr[0], 1, *_ttls(entry_ttl, attr_ttl), *_attr_fields(attr))


@cache
def _ttls(entry_ttl: float, attr_ttl: float) -> tuple[int, int, int, int]:
    """Both times to live: seconds and seconds, nanoseconds and nanoseconds; few ever differ."""
    seconds, attr_seconds = int(entry_ttl), int(attr_ttl)
    nanos = int((entry_ttl - seconds) * NS)
    return seconds, attr_seconds, nanos, int((attr_ttl - attr_seconds) * NS)


def entry_out(entry: EntryOut) -> bytes:
    """LOOKUP and whatever else makes a name."""
    return abi.ENTRY_OUT.pack(*_entry_fields(entry))


def attr_out(stat: Stat) -> bytes:
    """GETATTR and SETATTR."""
    attr, ttl = stat
    seconds = int(ttl)
    return abi.ATTR_OUT.pack(seconds, int((ttl - seconds) * NS), *_attr_fields(attr))


def open_out(opened: OpenOut) -> bytes:
    """OPEN and OPENDIR."""
    return abi.OPEN_OUT.pack(opened.fh, _open_flags(opened), opened.backing)


def create_out(entry: EntryOut, opened: OpenOut) -> bytes:
    """CREATE: a name and an open file in one."""
    flags = _open_flags(opened)
    return abi.CREATE_OUT.pack(*_entry_fields(entry), opened.fh, flags, opened.backing)


def _open_flags(opened: OpenOut) -> int:
    _, keep_cache, direct_io, cache_dir, no_flush, backing = opened
    flags = FOPEN_KEEP_CACHE if keep_cache else 0
    if direct_io:
        flags |= FOPEN_DIRECT_IO | FOPEN_PARALLEL_DIRECT_WRITES
    if cache_dir:
        flags |= FOPEN_CACHE_DIR
    if no_flush:
        flags |= FOPEN_NOFLUSH
    return flags | FOPEN_PASSTHROUGH if backing else flags


def fitting(names: Sequence[Dentry], size: int) -> Sequence[Dentry]:
    """As many names from the beginning as fit in `size` as READDIRPLUS has them."""
    for count, (name, _, _) in enumerate(names):
        size -= abi.align8(abi.DIRENTPLUS.size + len(name))
        if size < 0:
            return names[:count]
    return names


def dirents(names: Sequence[Dentry], cookies: Sequence[int], size: int) -> bytes:
    """READDIR: as many names as fit in `size`, each with its cookie."""
    pages: list[bytes] = []
    for begin in range(0, len(names), _AT_A_TIME):
        end = begin + _AT_A_TIME
        records = [
            abi.DIRENTS[len(name)](ino, cookie, len(name), kind, name)
            for (name, ino, kind), cookie in zip(names[begin:end], cookies[begin:end], strict=True)
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


def dirents_plus(
    names: Sequence[Dentry], entries: Sequence[EntryOut | None], cookies: Sequence[int]
) -> bytes:
    """READDIRPLUS: names with what they lead to; where that is None the kernel skips it.

    Written out, and not in terms of `_entry_fields`: a listing spends half of its time here.
    """
    page: list[bytes] = []
    for (name, child, kind), entry, cookie in zip(names, entries, cookies, strict=False):
        length = len(name)
        attr, entry_ttl, attr_ttl = entry or _NOTHING
        if attr is None:
            page.append(_NO_ENTRY)
            page.append(abi.DIRENTS[length](child, cookie, length, kind, name))
            continue
        ino, mode, uid, gid, rdev, _, _, _, size, nlink, used, atime, mtime, ctime, _, _, _ = attr
        entry_s, attr_s, entry_ns, attr_ns = _ttls(entry_ttl, attr_ttl)
        seconds = mtime // NS
        nanos = mtime - seconds * NS
        same = mtime == ctime == atime
        page.append(
            abi.DIRENTS_PLUS[length](
                ino,
                1,
                entry_s,
                attr_s,
                entry_ns,
                attr_ns,
                ino,
                size,
                (used + 4095) >> 12 << 3,
                seconds if same else atime // NS,
                seconds,
                seconds if same else ctime // NS,
                nanos if same else atime % NS,
                nanos,
                nanos if same else ctime % NS,
                mode,
                nlink,
                uid,
                gid,
                rdev,
                BLOCK_SIZE_BYTES,
                0,
                child,
                cookie,
                length,
                kind,
                name,
            )
        )
    return b"".join(page)


def statx_out(stat: Stat) -> bytes:
    """STATX with the birth time, which GETATTR cannot carry."""
    attr, ttl = stat
    seconds = int(ttl)
    times = (attr.atime_ns, attr.btime_ns, attr.ctime_ns, attr.mtime_ns)
    return abi.STATX_OUT.pack(
        seconds,
        int((ttl - seconds) * NS),
        STATX_BASIC_STATS | STATX_BTIME,
        BLOCK_SIZE_BYTES,
        attr.flags & FLAGS_SHOWN,
        attr.nlink,
        attr.uid,
        attr.gid,
        attr.mode,
        attr.ino,
        attr.size,
        attr.space // 512,
        FLAGS_SHOWN,
        *(part for time_ns in times for part in divmod(time_ns, NS)),
        os.major(attr.rdev),
        os.minor(attr.rdev),
        0,
        0,
    )


def statfs_out(usage: StatFs) -> bytes:
    """statfs(2). Without a limit the total is a round number of which at least half is free."""
    space = _total(usage.space_used, usage.space_limit, UNLIMITED_SPACE_BYTES)
    inodes = _total(usage.inodes_used, usage.inodes_limit, UNLIMITED_INODES)
    free_blocks = max(0, space - usage.space_used) // STATFS_BLOCK_BYTES
    return abi.STATFS_OUT.pack(
        space // STATFS_BLOCK_BYTES,
        free_blocks,
        free_blocks,
        inodes,
        max(0, inodes - usage.inodes_used),
        STATFS_BLOCK_BYTES,
        NAME_MAX,
        STATFS_BLOCK_BYTES,
    )


def _total(used: int, limit: int, unlimited: int) -> int:
    if limit:
        return limit
    total = unlimited
    while total < 2 * used:
        total *= 2
    return total

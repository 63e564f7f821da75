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
from collections.abc import Sequence
from functools import cache
from typing import Final, TypeAlias

from fsclient.filesystem import Buffer, Entry, Opened, Stat
from fsclient.fuse import abi
from fsclient.fuse.protocol import (
    FOPEN_CACHE_DIR,
    FOPEN_DIRECT_IO,
    FOPEN_KEEP_CACHE,
    FOPEN_NOFLUSH,
    FOPEN_PARALLEL_DIRECT_WRITES,
    STATX_BASIC_STATS,
    STATX_BTIME,
)
from fsmeta.types import NAME_MAX, Attr, Dentry, StatFs

Answer: TypeAlias = bytes | Sequence[Buffer]

GENERATION: Final = 1
NS: Final = 1_000_000_000
BLOCK_SIZE_BYTES: Final = 128 << 10
STATFS_BLOCK_BYTES: Final = 4096
UNLIMITED_SPACE_BYTES: Final = 1 << 50  # what df(1) shows of a volume without a limit: 1 PiB
UNLIMITED_INODES: Final = 10 << 20

_NO_ATTR: Final = (0,) * 16
_NO_ENTRY: Final = bytes(abi.ENTRY_OUT.size)


def _attr_fields(attr: Attr) -> tuple[int, ...]:
    """The values of `struct fuse_attr`."""
    ino, mode, uid, gid, rdev, _, _, _, size, nlink, used, atime, mtime, ctime = attr
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


def _entry_fields(entry: Entry) -> tuple[int, ...]:
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


def entry_out(entry: Entry) -> bytes:
    """LOOKUP and whatever else makes a name."""
    return abi.ENTRY_OUT.pack(*_entry_fields(entry))


def attr_out(stat: Stat) -> bytes:
    """GETATTR and SETATTR."""
    attr, ttl = stat
    seconds = int(ttl)
    return abi.ATTR_OUT.pack(seconds, int((ttl - seconds) * NS), *_attr_fields(attr))


def open_out(opened: Opened) -> bytes:
    """OPEN and OPENDIR."""
    return abi.OPEN_OUT.pack(opened.fh, _open_flags(opened))


def create_out(entry: Entry, opened: Opened) -> bytes:
    """CREATE: a name and an open file in one."""
    return abi.CREATE_OUT.pack(*_entry_fields(entry), opened.fh, _open_flags(opened))


def _open_flags(opened: Opened) -> int:
    _, keep_cache, direct_io, cache_dir, no_flush = opened
    flags = FOPEN_KEEP_CACHE if keep_cache else 0
    if direct_io:
        flags |= FOPEN_DIRECT_IO | FOPEN_PARALLEL_DIRECT_WRITES
    if cache_dir:
        flags |= FOPEN_CACHE_DIR
    if no_flush:
        flags |= FOPEN_NOFLUSH
    return flags


def fitting(names: Sequence[Dentry], size: int, head_bytes: int) -> Sequence[Dentry]:
    """As many names from the beginning as fit in `size`, each behind a head and padded."""
    for count, (name, _, _) in enumerate(names):
        size -= abi.align8(head_bytes + len(name))
        if size < 0:
            return names[:count]
    return names


def dirents(names: Sequence[Dentry], begin: int) -> bytes:
    """READDIR: names, the first of which is number `begin`."""
    page: list[bytes] = []
    cookie = begin
    for name, ino, kind in names:
        cookie += 1
        length = len(name)
        page.append(abi.DIRENTS[length](ino, cookie, length, kind, name))
    return b"".join(page)


def dirents_plus(names: Sequence[Dentry], entries: Sequence[Entry | None], begin: int) -> bytes:
    """READDIRPLUS: names with what they lead to; where that is None the kernel skips it."""
    page: list[bytes] = []
    cookie = begin
    for (name, child, kind), entry in zip(names, entries, strict=True):
        cookie += 1
        length = len(name)
        if entry is None:
            page.append(_NO_ENTRY)
        else:
            page.append(abi.ENTRY_OUT.pack(*_entry_fields(entry)))
        page.append(abi.DIRENTS[length](child, cookie, length, kind, name))
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
        0,
        attr.nlink,
        attr.uid,
        attr.gid,
        attr.mode,
        attr.ino,
        attr.size,
        attr.space // 512,
        0,
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

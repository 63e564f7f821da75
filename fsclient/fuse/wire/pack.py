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
from fsmeta.types import FLAG_NOATIME, FLAGS, NAME_MAX, Attr, StatFs

Answer: TypeAlias = bytes | Sequence[Buffer]

GENERATION: Final = 1
NS: Final = 1_000_000_000
BLOCK_SIZE_BYTES: Final = 128 << 10
STATFS_BLOCK_BYTES: Final = 4096
UNLIMITED_SPACE_BYTES: Final = 1 << 50  # what df(1) shows of a volume without a limit: 1 PiB
UNLIMITED_INODES: Final = 10 << 20
FLAGS_SHOWN: Final = FLAGS & ~FLAG_NOATIME  # STATX_ATTR_* have the same values

_NO_ATTR: Final = (0,) * 16


def _attr_fields(attr: Attr) -> tuple[int, ...]:
    """The values of `struct fuse_attr`."""
    ino, mode, uid, gid, rdev, _, _, _, size, nlink, used, atime, mtime, ctime, _, _, _ = attr
    seconds = mtime // NS
    nanos = mtime - seconds * NS
    same = mtime == ctime == atime  # what was made and not used
    return (
        ino,
        size,
        (used + 4095) >> 12 << 3,  # Attr.space in units of 512 bytes, without two calls
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
    )


def _entry_fields(entry: EntryOut) -> tuple[int, ...]:
    """The values of `struct fuse_entry_out`; node id 0 says that the name leads nowhere."""
    attr, entry_ttl, attr_ttl = entry
    if attr is None:
        return (0, 0, *ttls(entry_ttl, 0.0), *_NO_ATTR)
    return (attr[0], 1, *ttls(entry_ttl, attr_ttl), *_attr_fields(attr))


@cache
def ttls(entry_ttl: float, attr_ttl: float) -> tuple[int, int, int, int]:
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
    seconds, _, nanos, _ = ttls(ttl, 0.0)
    return abi.ATTR_OUT.pack(seconds, nanos, *_attr_fields(attr))


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
    """statfs(2)."""
    return abi.STATFS_OUT.pack(*statfs_fields(usage))


def statfs_fields(usage: StatFs) -> tuple[int, int, int, int, int, int, int, int]:
    """Blocks, those free, those free for users; inodes, those free; block size, longest name,
    fragment size. Without a limit the total is a round number of which at least half is free."""
    space = _total(usage.space_used, usage.space_limit, UNLIMITED_SPACE_BYTES)
    inodes = _total(usage.inodes_used, usage.inodes_limit, UNLIMITED_INODES)
    free_blocks = max(0, space - usage.space_used) // STATFS_BLOCK_BYTES
    return (
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

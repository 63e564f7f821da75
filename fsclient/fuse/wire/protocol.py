"""The constants of `linux/fuse.h`: opcodes, flags and notification codes.

Called by every file of `fsclient/fuse`. Names are the kernel's without their `FUSE_` prefix.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import Final

ROOT_ID: Final = 1
KERNEL_MAJOR: Final = 7
KERNEL_MINOR: Final = 45  # the newest we know (Linux 6.18)
KERNEL_MINOR_LEAST: Final = 31  # Linux 5.4; below it max_pages and friends are missing


class Opcode(IntEnum):
    """What a request asks for."""

    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    READLINK = 5
    SYMLINK = 6
    MKNOD = 8
    MKDIR = 9
    UNLINK = 10
    RMDIR = 11
    RENAME = 12
    LINK = 13
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    FSYNC = 20
    SETXATTR = 21
    GETXATTR = 22
    LISTXATTR = 23
    REMOVEXATTR = 24
    FLUSH = 25
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    FSYNCDIR = 30
    GETLK = 31
    SETLK = 32
    SETLKW = 33
    ACCESS = 34
    CREATE = 35
    INTERRUPT = 36
    BMAP = 37
    DESTROY = 38
    IOCTL = 39
    POLL = 40
    NOTIFY_REPLY = 41
    BATCH_FORGET = 42
    FALLOCATE = 43
    READDIRPLUS = 44
    RENAME2 = 45
    LSEEK = 46
    COPY_FILE_RANGE = 47
    SETUPMAPPING = 48
    REMOVEMAPPING = 49
    SYNCFS = 50
    TMPFILE = 51
    STATX = 52
    COPY_FILE_RANGE_64 = 53


OPCODES: Final = 64  # one more than the largest we index tables by


class Init(IntFlag):
    """INIT flags; bits from 32 on travel in `flags2`."""

    ASYNC_READ = 1 << 0
    POSIX_LOCKS = 1 << 1
    ATOMIC_O_TRUNC = 1 << 3
    EXPORT_SUPPORT = 1 << 4
    BIG_WRITES = 1 << 5
    DONT_MASK = 1 << 6
    SPLICE_WRITE = 1 << 7
    SPLICE_MOVE = 1 << 8
    SPLICE_READ = 1 << 9
    FLOCK_LOCKS = 1 << 10
    HAS_IOCTL_DIR = 1 << 11
    AUTO_INVAL_DATA = 1 << 12
    DO_READDIRPLUS = 1 << 13
    READDIRPLUS_AUTO = 1 << 14
    ASYNC_DIO = 1 << 15
    WRITEBACK_CACHE = 1 << 16
    NO_OPEN_SUPPORT = 1 << 17
    PARALLEL_DIROPS = 1 << 18
    HANDLE_KILLPRIV = 1 << 19
    POSIX_ACL = 1 << 20
    ABORT_ERROR = 1 << 21
    MAX_PAGES = 1 << 22
    CACHE_SYMLINKS = 1 << 23
    NO_OPENDIR_SUPPORT = 1 << 24
    EXPLICIT_INVAL_DATA = 1 << 25
    HANDLE_KILLPRIV_V2 = 1 << 28
    SETXATTR_EXT = 1 << 29
    INIT_EXT = 1 << 30
    CREATE_SUPP_GROUP = 1 << 34
    HAS_EXPIRE_ONLY = 1 << 35
    DIRECT_IO_ALLOW_MMAP = 1 << 36
    PASSTHROUGH = 1 << 37
    HAS_RESEND = 1 << 39
    ALLOW_IDMAP = 1 << 40


# setattr: what the request changes
FATTR_MODE: Final = 1 << 0
FATTR_UID: Final = 1 << 1
FATTR_GID: Final = 1 << 2
FATTR_SIZE: Final = 1 << 3
FATTR_ATIME: Final = 1 << 4
FATTR_MTIME: Final = 1 << 5
FATTR_FH: Final = 1 << 6
FATTR_ATIME_NOW: Final = 1 << 7
FATTR_MTIME_NOW: Final = 1 << 8
FATTR_KILL_SUIDGID: Final = 1 << 11

# open: what the kernel may do with the file
FOPEN_DIRECT_IO: Final = 1 << 0
FOPEN_KEEP_CACHE: Final = 1 << 1
FOPEN_CACHE_DIR: Final = 1 << 3
FOPEN_NOFLUSH: Final = 1 << 5
FOPEN_PARALLEL_DIRECT_WRITES: Final = 1 << 6
FOPEN_PASSTHROUGH: Final = 1 << 7

GETATTR_FH: Final = 1 << 0
WRITE_CACHE: Final = 1 << 0  # pages of a map, written back from where they are
WRITE_LOCKOWNER: Final = 1 << 1  # only what goes past the pages names its lock owner
WRITE_KILL_SUIDGID: Final = 1 << 2
READ_LOCKOWNER: Final = 1 << 1  # as WRITE_LOCKOWNER
OPEN_KILL_SUIDGID: Final = 1 << 0
FSYNC_FDATASYNC: Final = 1 << 0
LK_FLOCK: Final = 1 << 0
SETXATTR_ACL_KILL_SGID: Final = 1 << 0
EXPIRE_ONLY: Final = 1 << 0

NOTIFY_INVAL_INODE: Final = 2
NOTIFY_INVAL_ENTRY: Final = 3
NOTIFY_RESEND: Final = 7  # Linux 6.9
RESENT: Final = 1 << 63  # in the id of a request that is sent again
NOTIFY_INC_EPOCH: Final = 8  # Linux 6.16

# masks of statx(2)
STATX_BASIC_STATS: Final = 0x7FF
STATX_BTIME: Final = 0x800

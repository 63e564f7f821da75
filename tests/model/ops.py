"""The language of path operations that the model, the kernel and SliceFS all speak.

One operation is one system call (or open + call + close where a path stands for a file). Paths are
bytes, absolute in the tree under test. Open files are kept in numbered slots, one set for each
user, so that a file can be used after its name is gone.

What an operation answers is a `Result`: an errno, or a value in which everything that differs
between file systems without being wrong (inode numbers, directory sizes, the clock) has been
removed. Records are immutable and pickle, for they travel to helper processes.
"""

from __future__ import annotations

import os
import stat
from typing import NamedTuple, TypeAlias, get_args

Slot: TypeAlias = int
Target: TypeAlias = bytes | Slot  # a path, or a file that is already open

RENAME_NOREPLACE = 1  # linux/fs.h
RENAME_EXCHANGE = 2
UTIME_NOW = (1 << 30) - 1  # linux/stat.h, in tv_nsec
UTIME_OMIT = (1 << 30) - 2
KEEP_SIZE = 1  # linux/falloc.h
PUNCH_HOLE = 2
NOW = -1  # our words for these two in Utimens; real times are never negative
OMIT = -2
RECENT_BEGIN_NS = 1_600_000_000 * 10**9  # 2020; clocks, real or virtual, are in here
RECENT_END_NS = 3_000_000_000 * 10**9  # 2065; explicit times of Utimens stay out of here


class User(NamedTuple):
    """Who acts."""

    uid: int
    gid: int
    groups: tuple[int, ...] = ()

    def in_group(self, gid: int) -> bool:
        return gid == self.gid or gid in self.groups


ROOT = User(0, 0)
ALICE = User(60001, 60001, (60100,))
BOB = User(60002, 60002, (60100, 60200))
USERS = (ROOT, ALICE, BOB)


class Mkdir(NamedTuple):
    """mkdir(2)."""

    path: bytes
    mode: int = 0o755
    umask: int = 0


class Rmdir(NamedTuple):
    """rmdir(2)."""

    path: bytes


class Mknod(NamedTuple):
    """mknod(2): files, pipes, sockets, devices."""

    path: bytes
    mode: int
    rdev: int = 0
    umask: int = 0


class Symlink(NamedTuple):
    """symlink(2)."""

    target: bytes
    path: bytes


class Link(NamedTuple):
    """link(2): a symlink is linked, not followed."""

    old: bytes
    new: bytes


class Unlink(NamedTuple):
    """unlink(2)."""

    path: bytes


class Rename(NamedTuple):
    """renameat2(2)."""

    old: bytes
    new: bytes
    flags: int = 0


class Open(NamedTuple):
    """Open into `slot`; what was open there is closed first. O_NONBLOCK is always added."""

    slot: Slot
    path: bytes
    flags: int = os.O_RDONLY
    mode: int = 0o644
    umask: int = 0


class Close(NamedTuple):
    """close(2)."""

    slot: Slot


class Read(NamedTuple):
    """pread(2); a path is opened for it."""

    file: Target
    offset: int = 0
    size: int = 1 << 16


class Write(NamedTuple):
    """pwrite(2); a path is opened for it."""

    file: Target
    offset: int
    data: bytes


class Truncate(NamedTuple):
    """truncate(2) of a path, ftruncate(2) of a slot."""

    file: Target
    size: int


class Fallocate(NamedTuple):
    """fallocate(2) of a slot."""

    slot: Slot
    mode: int
    offset: int
    length: int


class Chmod(NamedTuple):
    """chmod(2) of a path, fchmod(2) of a slot."""

    file: Target
    mode: int


class Chown(NamedTuple):
    """`uid` or `gid` of -1 leaves it alone."""

    path: bytes
    uid: int
    gid: int
    follow: bool = True


class Utimens(NamedTuple):
    """Times in ns, or NOW, or OMIT."""

    path: bytes
    atime: int
    mtime: int
    follow: bool = True


class Stat(NamedTuple):
    """stat(2), lstat(2), or fstat(2) of a slot."""

    file: Target
    follow: bool = True


class Access(NamedTuple):
    """access(2)."""

    path: bytes
    mask: int


class Listdir(NamedTuple):
    """The sorted names of a directory, without dots."""

    path: bytes


class Readlink(NamedTuple):
    """readlink(2)."""

    path: bytes


class SetXattr(NamedTuple):
    """setxattr(2); `flags` are XATTR_CREATE and XATTR_REPLACE."""

    path: bytes
    name: bytes
    value: bytes
    flags: int = 0
    follow: bool = True


class GetXattr(NamedTuple):
    """getxattr(2)."""

    path: bytes
    name: bytes
    follow: bool = True


class ListXattr(NamedTuple):
    """listxattr(2): the sorted names of user.* and of ACLs."""

    path: bytes
    follow: bool = True


class RemoveXattr(NamedTuple):
    """removexattr(2)."""

    path: bytes
    name: bytes
    follow: bool = True


class GetFlags(NamedTuple):
    """FS_IOC_GETFLAGS of what is opened for it, as lsattr(1) does."""

    path: bytes


class SetFlags(NamedTuple):
    """FS_IOC_SETFLAGS, as chattr(1) does."""

    path: bytes
    flags: int


class Stamp(NamedTuple):
    """The raw identity and times of a path, for `compare` only: never compared as they are."""

    path: bytes


Op: TypeAlias = (
    Mkdir
    | Rmdir
    | Mknod
    | Symlink
    | Link
    | Unlink
    | Rename
    | Open
    | Close
    | Read
    | Write
    | Truncate
    | Fallocate
    | Chmod
    | Chown
    | Utimens
    | Stat
    | Access
    | Listdir
    | Readlink
    | SetXattr
    | GetXattr
    | ListXattr
    | RemoveXattr
    | GetFlags
    | SetFlags
    | Stamp
)
OP_TYPES: tuple[type[Op], ...] = get_args(Op)


class Step(NamedTuple):
    """An operation and who does it."""

    user: User
    op: Op


class StatValue(NamedTuple):
    """stat(2) without what differs rightly: inode, directory size, blocks, the clock."""

    type: int  # S_IFMT bits
    perm: int
    nlink: int
    uid: int
    gid: int
    size: int  # 0 for directories
    rdev: int
    mtime: int | None  # None: set by the clock


class TimesValue(NamedTuple):
    """What Utimens left behind; None: set by the clock, or not asked for."""

    atime: int | None
    mtime: int | None


class StampValue(NamedTuple):
    """See Stamp."""

    ino: int
    mtime_ns: int
    ctime_ns: int


Value: TypeAlias = int | bytes | tuple[bytes, ...] | StatValue | TimesValue | StampValue | None


class Result(NamedTuple):
    """What an operation answered."""

    errno: int  # 0: it worked
    value: Value = None

    def __str__(self) -> str:
        return f"-{os.strerror(self.errno)}" if self.errno else f"{self.value!r}"


def explicit(time_ns: int) -> int | None:
    """`time_ns` where somebody chose it, None where it came from a clock."""
    return None if RECENT_BEGIN_NS <= time_ns < RECENT_END_NS else time_ns


def stat_value(status: os.stat_result) -> StatValue:
    """What of `status` all file systems must agree on."""
    kind = stat.S_IFMT(status.st_mode)
    device = kind in (stat.S_IFCHR, stat.S_IFBLK)
    return StatValue(
        type=kind,
        perm=stat.S_IMODE(status.st_mode),
        nlink=status.st_nlink,
        uid=status.st_uid,
        gid=status.st_gid,
        size=0 if kind == stat.S_IFDIR else status.st_size,
        rdev=status.st_rdev if device else 0,
        mtime=explicit(status.st_mtime_ns),
    )


def paths_of(op: Op) -> tuple[bytes, ...]:
    """The paths that `op` names, in the order of its arguments."""
    match op:
        case Link(old, new) | Rename(old, new):
            return (old, new)
        case Close() | Fallocate():
            return ()
        case Read(file) | Write(file) | Truncate(file) | Chmod(file) | Stat(file):
            return (file,) if isinstance(file, bytes) else ()
        case _:
            return (op.path,)

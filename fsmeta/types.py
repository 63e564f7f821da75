"""The types of SliceFS: ids, records and flags that every layer shares.

Used by all packages; imports nothing of the project. All records are immutable, so they pass
between threads without locks. Times are in nanoseconds since the epoch, sizes and offsets in bytes;
names and symlink targets are `bytes`.
"""

from __future__ import annotations

import stat
from collections.abc import Collection
from enum import IntEnum
from typing import Final, NamedTuple, NewType

Ino = NewType("Ino", int)
SliceId = NewType("SliceId", int)
SessionId = NewType("SessionId", int)

ROOT_INO = Ino(1)
NO_PARENT = Ino(0)  # the parent of a file that is hard-linked, orphaned or the root's own

NAME_MAX = 255  # bytes; linux/limits.h
PATH_MAX = 4096  # bytes with the NUL; linux/limits.h
SYMLINK_MAX = PATH_MAX - 1
XATTR_NAME_MAX = 255  # linux/limits.h
XATTR_SIZE_MAX = 65536  # bytes of one value; linux/limits.h
LINK_MAX = 65000  # what ext4 allows; statfs(2) users expect a bound

FLAG_IMMUTABLE = 0x10  # chattr +i; FS_*_FL of linux/fs.h
FLAG_APPEND = 0x20  # +a
FLAG_NODUMP = 0x40  # +d
FLAG_NOATIME = 0x80  # +A; reading never moves atime
FLAGS_FIXED = FLAG_IMMUTABLE | FLAG_APPEND  # what only root changes
FLAGS_INHERITED = FLAG_NODUMP | FLAG_NOATIME
FLAGS = FLAGS_FIXED | FLAGS_INHERITED  # those of tmpfs
FLAG_ATTACHED = 0x1000  # a file that shows an object of a bucket; chattr never sees it
FLAG_BEYOND = 0x2000  # a file that may have space reserved beyond its end; nor this
SNAPSHOTS_SHIFT = 16  # a directory's flags count its snapshots from this bit on; never shown

CHUNK_BYTES = 64 << 20  # of a file; the unit in which slices are listed
FILE_SIZE_MAX = CHUNK_BYTES << 32  # 256 PiB: a file's chunks are numbered in 32 bits
BLOCK_BYTES_MAX = 4 << 20  # of a slice; the unit of one object
FRAME_BYTES = 16 << 10  # of a block: what is fetched and verified by itself
FRAME_BYTES_MIN, FRAME_BYTES_MAX = 4 << 10, 64 << 10  # a page; what the first volumes have
SPACE_UNIT_BYTES = 4096  # allocated space is counted in these


def is_name(name: bytes) -> bool:
    """Whether a directory can have a name like this: `.` and `..` are none."""
    if b"/" in name or b"\0" in name:
        return False
    return 0 < len(name) <= NAME_MAX and name not in (b".", b"..")


class AttachedObject(NamedTuple):
    """The object of an S3 bucket that a file shows, as it was at a moment. Nothing is secret.

    Or the file of a directory of the host: `fsdata/attached/directory`.
    """

    endpoint: str  # http(s)://host[:port]; empty: as the client's environment says; or file://
    region: str  # the same
    bucket: str
    key: str
    etag: str  # without quotes


class FileType(IntEnum):
    """The type of an inode, with the values of `d_type` in readdir(3)."""

    FIFO = 1
    CHR = 2
    DIR = 4
    BLK = 6
    REG = 8
    LNK = 10
    SOCK = 12

    @classmethod
    def of_mode(cls, mode: int) -> FileType:
        """The type that `st_mode` carries; plain permission bits mean a regular file."""
        return _OF_MODE[mode >> 12 & 0xF]


FILE_TYPES: Final = {int(kind): kind for kind in FileType}  # cheaper to ask than FileType()
_OF_MODE: Final = {0: FileType.REG, **FILE_TYPES}


class Attr(NamedTuple):
    """Everything stat(2) shows of one inode, and what permission checks need."""

    ino: Ino
    mode: int  # with the S_IFMT bits
    uid: int
    gid: int
    rdev: int
    flags: int  # FS_*_FL of chattr(1)
    parent: Ino  # NO_PARENT when hard-linked
    btime_ns: int
    size: int
    nlink: int
    used: int  # bytes of the file that slices cover; holes do not count
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    acl: int = 0  # id of the access ACL; 0: the mode says it all
    default_acl: int = 0  # id of what a directory passes on
    mark: int = 0  # the epoch of quotas in which it was counted; 0: in none

    @property
    def type(self) -> FileType:
        """The type in `mode`."""
        return FileType.of_mode(self.mode)

    @property
    def is_dir(self) -> bool:
        """Whether this is a directory."""
        return self.mode & 0o170000 == stat.S_IFDIR

    @property
    def space(self) -> int:
        """Allocated bytes as quotas and `st_blocks` count them: `used` in whole 4 KiB units."""
        return space_of(self.used)


def space_of(used: int) -> int:
    """Bytes of quota that `used` covered bytes of one file cost."""
    return -(-used // SPACE_UNIT_BYTES) * SPACE_UNIT_BYTES


def space_room(attr: Attr, left: float) -> int:
    """How many bytes more a file may cover where a limit leaves `left` bytes: its last unit has
    been paid for.
    """
    units = max(0, int(left)) // SPACE_UNIT_BYTES
    return units * SPACE_UNIT_BYTES + attr.space - attr.used


class Caller(NamedTuple):
    """A caller. `checked`: the kernel has checked the mode bits (default_permissions)."""

    uid: int
    gid: int
    groups: Collection[int] = ()
    pid: int = 0
    checked: bool = False

    def in_group(self, gid: int) -> bool:
        """Whether `gid` is one of the caller's groups."""
        return gid == self.gid or gid in self.groups

    def is_stranger(self, gid: int) -> bool:
        """Whether the caller is known not to be in a group; no `checked` one is."""
        return not self.checked and self.uid != 0 and not self.in_group(gid)


class JudgedCaller(Caller):
    """A caller whose request was allowed without the kernel: nothing is checked again, and its
    groups are known."""

    __slots__ = ()

    def is_stranger(self, gid: int) -> bool:
        """As of a caller that the kernel has not checked."""
        return self.uid != 0 and not self.in_group(gid)


ROOT_CALLER = Caller(0, 0)


class SetAttr(NamedTuple):
    """What setattr is to change; None leaves a value alone."""

    mode: int | None = None  # permission bits only
    uid: int | None = None
    gid: int | None = None
    size: int | None = None
    atime_ns: int | None = None
    mtime_ns: int | None = None
    atime_now: bool = False  # UTIME_NOW: our clock, and write permission suffices
    mtime_now: bool = False
    kill_suid: bool = False  # drop S_ISUID and S_ISGID as a write would
    opened: bool = False  # by a handle open for writing: `size` needs no permission
    kill_sgid: bool = False  # with `kill_suid`: S_ISGID goes without group execute, too


class Dentry(NamedTuple):
    """One name in a directory."""

    name: bytes
    ino: Ino
    type: FileType


class SliceKind(IntEnum):
    """What a slice record points to."""

    HOLE = 0  # reads as zeros; what truncate(2) leaves behind
    BLOCKS = 1  # a slice of its own: objects of one block each
    SEGMENT = 2  # a part of a block in which small files of many inodes lie
    RESERVED = 3  # reads as zeros and counts as covered; what fallocate(2) leaves behind


class Slice(NamedTuple):
    """A range of a chunk and where its bytes are. Later slices of a chunk hide earlier ones."""

    pos: int  # offset in the chunk
    id: SliceId
    size: int  # bytes of the whole slice (or segment) that `id` names
    off: int  # where in the slice this range begins
    length: int
    kind: SliceKind = SliceKind.BLOCKS

    @property
    def stored(self) -> bool:
        """Whether it has bytes in the store, which `id` names."""
        return self.kind is not SliceKind.HOLE and self.kind is not SliceKind.RESERVED

    @property
    def end(self) -> int:
        """Where the range ends in the chunk."""
        return self.pos + self.length


# In place of a chunk's index: the slice goes to the end of the file, wherever the commit finds it.
AT_END: Final = -1


class SpaceUsage(NamedTuple):
    """What a volume, directory, user or group takes up."""

    space: int  # bytes in whole SPACE_UNIT_BYTES
    inodes: int


class StatFs(NamedTuple):
    """statfs(2) of the volume; a limit of 0 means none."""

    space_used: int
    space_limit: int
    inodes_used: int
    inodes_limit: int

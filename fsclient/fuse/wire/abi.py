"""The structs of `linux/fuse.h`, as `struct.Struct` with their sizes asserted.

Called by every file of `fsclient/fuse`; imports nothing of the project. Numbers are in the
machine's own byte order, as the kernel's are. Requests start with IN_HEADER; the structs named
`*_IN` follow it, then names, each ended by a NUL. Answers start with OUT_HEADER. Padding words are
`x` bytes, so that an unpacked tuple has only fields we use.

`tests/fsclient/fuse/test_abi.py` compares sizes and constants with an installed C header.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

IN_HEADER: Final = Struct("=IIQQIIIHxx")  # len opcode unique nodeid uid gid pid total_extlen
OUT_HEADER: Final = Struct("=IiQ")  # len error unique
EXT_HEADER: Final = Struct("=II")  # size type
EXT_GROUPS: Final = 32  # the type of an extension with supplementary groups

INIT_IN: Final = Struct("=IIIII44x")  # major minor max_readahead flags flags2
INIT_IN_OLD: Final = Struct("=IIII")  # the same before 7.36
# major minor max_readahead flags max_background congestion_threshold max_write time_gran
# max_pages map_alignment flags2 max_stack_depth
INIT_OUT: Final = Struct("=IIIIHHIIHHII24x")

# ino size blocks atime mtime ctime atimensec mtimensec ctimensec mode nlink uid gid rdev blksize
# flags; times are signed here because the kernel reads them so
_ATTR: Final = "QQQqqqIIIIIIIIII"
ATTR: Final = Struct("=" + _ATTR)
# nodeid generation entry_valid attr_valid entry_valid_nsec attr_valid_nsec attr
_ENTRY: Final = "QQQQII" + _ATTR
_OPEN: Final = "QIi"  # fh open_flags backing_id
ENTRY_OUT: Final = Struct("=" + _ENTRY)
OPEN_OUT: Final = Struct("=" + _OPEN)
CREATE_OUT: Final = Struct("=" + _ENTRY + _OPEN)  # CREATE answers with both
ATTR_OUT: Final = Struct("=QI4x" + _ATTR)  # attr_valid attr_valid_nsec attr
DIRENT: Final = Struct("=QQII")  # ino off namelen type; the name follows
DIRENTPLUS: Final = Struct("=" + _ENTRY + "QQII")

_SX_TIME: Final = "qI4x"
# mask blksize attributes nlink uid gid mode ino size blocks attributes_mask
# atime btime ctime mtime rdev_major rdev_minor dev_major dev_minor
_STATX: Final = "IIQIIIHxxQQQQ" + _SX_TIME * 4 + "IIII112x"
STATX_IN: Final = Struct("=I4xQII")  # getattr_flags fh sx_flags sx_mask
STATX_OUT: Final = Struct("=QI4x16x" + _STATX)  # attr_valid attr_valid_nsec stat

FORGET_IN: Final = Struct("=Q")  # nlookup
FORGET_ONE: Final = Struct("=QQ")  # nodeid nlookup
BATCH_FORGET_IN: Final = Struct("=I4x")  # count
GETATTR_IN: Final = Struct("=I4xQ")  # getattr_flags fh
# valid fh size lock_owner atime mtime ctime atimensec mtimensec ctimensec mode uid gid
SETATTR_IN: Final = Struct("=I4xQQQqqqIIII4xII4x")
MKNOD_IN: Final = Struct("=III4x")  # mode rdev umask
MKDIR_IN: Final = Struct("=II")  # mode umask
RENAME_IN: Final = Struct("=Q")  # newdir
RENAME2_IN: Final = Struct("=QI4x")  # newdir flags
LINK_IN: Final = Struct("=Q")  # oldnodeid
OPEN_IN: Final = Struct("=II")  # flags open_flags
CREATE_IN: Final = Struct("=IIII")  # flags mode umask open_flags
RELEASE_IN: Final = Struct("=QIIQ")  # fh flags release_flags lock_owner
FLUSH_IN: Final = Struct("=Q8xQ")  # fh lock_owner
READ_IN: Final = Struct("=QQIIQI4x")  # fh offset size read_flags lock_owner flags
WRITE_IN: Final = Struct("=QQIIQI4x")  # fh offset size write_flags lock_owner flags
WRITE_OUT: Final = Struct("=I4x")  # size
FSYNC_IN: Final = Struct("=QI4x")  # fh fsync_flags
SETXATTR_IN: Final = Struct("=III4x")  # size flags setxattr_flags
SETXATTR_IN_OLD: Final = Struct("=II")  # the same without SETXATTR_EXT
GETXATTR_IN: Final = Struct("=I4x")  # size
GETXATTR_OUT: Final = Struct("=I4x")  # size
ACCESS_IN: Final = Struct("=I4x")  # mask
STATFS_OUT: Final = Struct("=QQQQQIII4x24x")  # blocks bfree bavail files ffree bsize namelen frsize
INTERRUPT_IN: Final = Struct("=Q")  # unique
FALLOCATE_IN: Final = Struct("=QQQI4x")  # fh offset length mode
LSEEK_IN: Final = Struct("=QqI4x")  # fh offset whence
LSEEK_OUT: Final = Struct("=Q")  # offset
COPY_FILE_RANGE_IN: Final = Struct("=QQQQQQQ")  # fh_in off_in nodeid_out fh_out off_out len flags
COPY_FILE_RANGE_OUT: Final = Struct("=Q")  # bytes_copied; of COPY_FILE_RANGE_64 only
_FILE_LOCK: Final = "QQII"  # start end type pid; the end is the last byte
LK_IN: Final = Struct("=QQ" + _FILE_LOCK + "I4x")  # fh owner lock lk_flags
LK_OUT: Final = Struct("=" + _FILE_LOCK)
IOCTL_IN: Final = Struct("=QIIQII")  # fh flags cmd arg in_size out_size
IOCTL_OUT: Final = Struct("=iIII")  # result flags in_iovs out_iovs

# ioctl(2) on the session's own descriptor; see `backing`
BACKING_MAP: Final = Struct("=i4x8x")  # fd
BACKING_ID: Final = Struct("=i")
DEV_IOC_BACKING_OPEN: Final = 0x4010E501
DEV_IOC_BACKING_CLOSE: Final = 0x4004E502

# linux/fs.h; the first two say that they take a long, and take an int
FS_IOC_GETFLAGS: Final = 0x80086601
FS_IOC_SETFLAGS: Final = 0x40086602
FS_IOC_FSGETXATTR: Final = 0x801C581F
FS_IOC_FSSETXATTR: Final = 0x401C5820

NOTIFY_INVAL_INODE: Final = Struct("=Qqq")  # ino off len
NOTIFY_INVAL_ENTRY: Final = Struct("=QII")  # parent namelen flags; the name and a NUL follow

# What `linux/fuse.h` calls each struct, and its size there.
SIZES: Final[dict[str, tuple[Struct, int]]] = {
    "fuse_in_header": (IN_HEADER, 40),
    "fuse_out_header": (OUT_HEADER, 16),
    "fuse_ext_header": (EXT_HEADER, 8),
    "fuse_init_in": (INIT_IN, 64),
    "fuse_init_out": (INIT_OUT, 64),
    "fuse_attr": (ATTR, 88),
    "fuse_entry_out": (ENTRY_OUT, 128),
    "fuse_open_out": (OPEN_OUT, 16),
    "fuse_attr_out": (ATTR_OUT, 104),
    "fuse_dirent": (DIRENT, 24),
    "fuse_direntplus": (DIRENTPLUS, 152),
    "fuse_statx_in": (STATX_IN, 24),
    "fuse_statx_out": (STATX_OUT, 288),
    "fuse_forget_in": (FORGET_IN, 8),
    "fuse_forget_one": (FORGET_ONE, 16),
    "fuse_batch_forget_in": (BATCH_FORGET_IN, 8),
    "fuse_getattr_in": (GETATTR_IN, 16),
    "fuse_setattr_in": (SETATTR_IN, 88),
    "fuse_mknod_in": (MKNOD_IN, 16),
    "fuse_mkdir_in": (MKDIR_IN, 8),
    "fuse_rename_in": (RENAME_IN, 8),
    "fuse_rename2_in": (RENAME2_IN, 16),
    "fuse_link_in": (LINK_IN, 8),
    "fuse_open_in": (OPEN_IN, 8),
    "fuse_create_in": (CREATE_IN, 16),
    "fuse_release_in": (RELEASE_IN, 24),
    "fuse_flush_in": (FLUSH_IN, 24),
    "fuse_read_in": (READ_IN, 40),
    "fuse_write_in": (WRITE_IN, 40),
    "fuse_write_out": (WRITE_OUT, 8),
    "fuse_fsync_in": (FSYNC_IN, 16),
    "fuse_setxattr_in": (SETXATTR_IN, 16),
    "fuse_getxattr_in": (GETXATTR_IN, 8),
    "fuse_getxattr_out": (GETXATTR_OUT, 8),
    "fuse_access_in": (ACCESS_IN, 8),
    "fuse_statfs_out": (STATFS_OUT, 80),
    "fuse_interrupt_in": (INTERRUPT_IN, 8),
    "fuse_fallocate_in": (FALLOCATE_IN, 32),
    "fuse_lseek_in": (LSEEK_IN, 24),
    "fuse_lseek_out": (LSEEK_OUT, 8),
    "fuse_copy_file_range_in": (COPY_FILE_RANGE_IN, 56),
    "fuse_copy_file_range_out": (COPY_FILE_RANGE_OUT, 8),
    "fuse_lk_in": (LK_IN, 48),
    "fuse_lk_out": (LK_OUT, 24),
    "fuse_ioctl_in": (IOCTL_IN, 32),
    "fuse_ioctl_out": (IOCTL_OUT, 16),
    "fuse_backing_map": (BACKING_MAP, 16),
    "fuse_notify_inval_inode_out": (NOTIFY_INVAL_INODE, 24),
    "fuse_notify_inval_entry_out": (NOTIFY_INVAL_ENTRY, 16),
}
for _name, (_struct, _size) in SIZES.items():
    assert _struct.size == _size, _name

IN_BYTES: Final = IN_HEADER.size
OUT_BYTES: Final = OUT_HEADER.size


def align8(size: int) -> int:
    """`size` rounded up to the 8 bytes that directory records are aligned to."""
    return (size + 7) & ~7


# How to pack a DIRENT, its name and their padding, by the length of the name.
DIRENTS: Final = [
    Struct(f"=QQII{align8(DIRENT.size + length) - DIRENT.size}s").pack for length in range(256)
]

# The same for a DIRENTPLUS: the entry and the dirent behind it, in one step. What is alike in all
# names comes as bytes: VALIDITY, behind the number of the node, and DEVICE, at the end of ATTR.
VALIDITY: Final = Struct("=QQQII")  # generation entry_valid attr_valid and their nanoseconds
DEVICE: Final = Struct("=III")  # rdev blksize flags
_VALID: Final = f"{VALIDITY.size}s"
_PLUS: Final = f"=Q{_VALID}QQQqqqIIIIIII{DEVICE.size}sQQII"
assert Struct(_PLUS).size == DIRENTPLUS.size
DIRENTS_PLUS: Final = [
    Struct(f"{_PLUS}{align8(DIRENTPLUS.size + length) - DIRENTPLUS.size}s").pack
    for length in range(256)
]

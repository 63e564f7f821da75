"""INIT: what the kernel offers, what we take, and why.

Called by the session once, before its workers start. `negotiate` is pure; reading and answering the
request is the session's. Everything newer than Linux 5.10 is taken only where the kernel offers it.

Taken when offered:
  ASYNC_READ                several reads of one file at once: read-ahead hides latency
  BIG_WRITES, MAX_PAGES     requests of 1 MiB instead of 128 KiB
  ATOMIC_O_TRUNC            O_TRUNC arrives with OPEN instead of as a SETATTR after it
  PARALLEL_DIROPS           lookups and listings of one directory don't wait for each other
  DO_READDIRPLUS, _AUTO     listings bring attributes when the reader is seen to want them: `ls -l`
                            of 5,000 files needs no lookups, `ls` and find(1) no attributes
  HANDLE_KILLPRIV_V2        the kernel asks for security.capability once per inode and not before
                            each write; we drop S_ISUID and S_ISGID where a request
                            says so, which it does for every chown of a file
  CACHE_SYMLINKS            targets never change
  SETXATTR_EXT, INIT_EXT    longer forms of two structs
  POSIX_ACL                 the kernel checks ACLs, which it asks for and keeps as attributes.
                            Not where the volume has none: of the root, which is there before INIT,
                            it keeps no ACL, and asks at each path walk by another than its owner
  DONT_MASK                 creations bring the umask along, which a default ACL makes void
  CREATE_SUPP_GROUP         creations name the caller's supplementary group that matches the
                            directory's, which S_ISGID rules need
  HAS_EXPIRE_ONLY           entries can be expired without tearing down what is below them
  DIRECT_IO_ALLOW_MMAP      mmap(2) keeps working on files opened for direct I/O
  ABORT_ERROR               an aborted connection says so
  POSIX_LOCKS, FLOCK_LOCKS  locks hold for all mounts; else the kernel keeps them to itself. Not
                            with zero-message opens: no FLUSH or RELEASE would say that they end
  AUTO_INVAL_DATA           with zero-message opens: a size or mtime that changed drops pages, as
                            open(2) has it elsewhere
  EXPORT_SUPPORT            inodes are found by their number when the kernel has dropped them, for
                            NFS and open_by_handle_at(2). Not where a directory of the volume is
                            mounted: a number may be of what is outside
Left: WRITEBACK_CACHE (close(2) must find our errors, and sizes are ours), SPLICE_* (Python
would copy anyway), ALLOW_IDMAP (requests then carry no uid). PASSTHROUGH only where it is asked
for, with a `max_stack_depth` of 1 (`backing`).
"""

from __future__ import annotations

from struct import Struct
from typing import Final, NamedTuple

from fsclient.fuse.wire.abi import INIT_IN, INIT_IN_OLD, INIT_OUT
from fsclient.fuse.wire.protocol import KERNEL_MAJOR, KERNEL_MINOR, KERNEL_MINOR_LEAST, Init

PAGE_BYTES: Final = 4096  # the kernel counts max_pages in its own pages; larger ones only add room
MAX_WRITE_BYTES: Final = 1 << 20  # fs.fuse.max_pages_limit is 256 pages by default
_KEPT: Final = Struct("=6Q")  # an Agreement

_ALWAYS: Final = (
    Init.ASYNC_READ
    | Init.BIG_WRITES
    | Init.MAX_PAGES
    | Init.ATOMIC_O_TRUNC
    | Init.PARALLEL_DIROPS
    | Init.HANDLE_KILLPRIV_V2
    | Init.CACHE_SYMLINKS
    | Init.SETXATTR_EXT
    | Init.INIT_EXT
    | Init.DONT_MASK
    | Init.CREATE_SUPP_GROUP
    | Init.HAS_EXPIRE_ONLY
    | Init.DIRECT_IO_ALLOW_MMAP
    | Init.ABORT_ERROR
    | Init.POSIX_LOCKS
    | Init.FLOCK_LOCKS
)


class KernelWants(NamedTuple):
    """What a mount asks of the kernel beyond what every mount does."""

    max_write_bytes: int = MAX_WRITE_BYTES
    max_readahead_bytes: int = 16 << 20  # a ceiling; the bdi's read_ahead_kb decides below it
    max_background: int = 64  # read-ahead and direct I/O requests under way; the kernel's own is 12
    readdirplus: bool = True
    readdirplus_auto: bool = True  # else every listing brings attributes
    auto_inval_data: bool = False  # drop pages when a changed mtime is seen
    explicit_inval_data: bool = False  # keep pages when a changed size is seen
    acl: bool = False  # let the kernel check ACLs
    export: bool = False  # inodes may be looked up by number
    passthrough: bool = False  # open files may be backed by files of a local disk
    zero_message: bool = False  # `dispatch/zero_message`: no open asks us

    def flags(self) -> Init:
        """The flags to take where the kernel offers them."""
        wanted = _ALWAYS
        if self.readdirplus:
            wanted |= Init.DO_READDIRPLUS
            if self.readdirplus_auto:
                wanted |= Init.READDIRPLUS_AUTO
        if self.auto_inval_data:
            wanted |= Init.AUTO_INVAL_DATA
        if self.explicit_inval_data:
            wanted |= Init.EXPLICIT_INVAL_DATA
        if self.acl:
            wanted |= Init.POSIX_ACL
        if self.export:
            wanted |= Init.EXPORT_SUPPORT
        if self.passthrough:
            wanted |= Init.PASSTHROUGH
        if self.zero_message:
            wanted |= Init.NO_OPEN_SUPPORT | Init.NO_OPENDIR_SUPPORT | Init.AUTO_INVAL_DATA
            wanted &= ~(Init.POSIX_LOCKS | Init.FLOCK_LOCKS)
        return wanted


class InitRequest(NamedTuple):
    """What the kernel offers."""

    major: int
    minor: int
    max_readahead_bytes: int
    flags: Init


class Agreement(NamedTuple):
    """What both sides will do."""

    minor: int
    flags: Init
    max_readahead_bytes: int
    max_write_bytes: int
    max_background: int
    max_stack_depth: int = 0  # 1 where passthrough is taken


def parse_init(body: memoryview) -> InitRequest:
    """The request behind the header, in either of its lengths."""
    if len(body) < INIT_IN.size:
        major, minor, readahead, flags = INIT_IN_OLD.unpack_from(body)
        return InitRequest(major, minor, readahead, Init(flags))
    major, minor, readahead, low, high = INIT_IN.unpack_from(body)
    flags = low | high << 32 if low & Init.INIT_EXT else low
    return InitRequest(major, minor, readahead, Init(flags))


def negotiate(offer: InitRequest, wants: KernelWants) -> Agreement | None:
    """What to agree on; None where the kernel is too old for us."""
    if offer.major < KERNEL_MAJOR or offer.minor < KERNEL_MINOR_LEAST:
        return None
    flags = offer.flags & wants.flags()
    return Agreement(
        minor=min(offer.minor, KERNEL_MINOR),
        flags=flags,
        max_readahead_bytes=min(offer.max_readahead_bytes, wants.max_readahead_bytes),
        max_write_bytes=wants.max_write_bytes,
        max_background=wants.max_background,
        max_stack_depth=1 if flags & Init.PASSTHROUGH else 0,
    )


def pack_init(agreed: Agreement) -> bytes:
    """The answer behind the header."""
    return INIT_OUT.pack(
        KERNEL_MAJOR,
        agreed.minor,
        agreed.max_readahead_bytes,
        agreed.flags & 0xFFFFFFFF,
        agreed.max_background,
        agreed.max_background * 3 // 4,  # where the kernel calls us congested; its own ratio
        agreed.max_write_bytes,
        1,  # time_gran: we keep nanoseconds
        agreed.max_write_bytes // PAGE_BYTES,
        0,  # map_alignment: for DAX only
        agreed.flags >> 32,
        agreed.max_stack_depth,
    )


def pack_kept(agreed: Agreement) -> bytes:
    """An agreement, for the next process that serves the mount."""
    return _KEPT.pack(*map(int, agreed))


def kept_agreement(value: bytes) -> Agreement:
    """What `pack_kept` has packed."""
    minor, flags, *numbers = _KEPT.unpack(value)
    return Agreement(minor, Init(flags), *numbers)

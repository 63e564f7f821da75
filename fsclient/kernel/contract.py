"""The contract between a kernel transport and the file system behind it.

`VFS` implements it, the session on `/dev/fuse` calls it. Methods carry the names of the system
calls, take plain values and raise `OSError` or a `StoreError`; only the transport knows what a FUSE
struct looks like, and only its dispatcher turns an exception into an errno.

Threading: any method may be called from any thread, several at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol, TypeAlias

from fsclient.kernel.later import Later
from fsclient.kernel.listed import Entries, EntryOut
from fsmeta.types import Attr, Caller, Dentry, Ino, SetAttr, StatFs

__all__ = [
    "LASTING_S",
    "LEASED_S",
    "PLAIN_WRITE",
    "Buffer",
    "CopyRange",
    "DirectoryCalls",
    "Entries",
    "EntryOut",
    "FileLock",
    "FileSystem",
    "Fits",
    "LockCalls",
    "LockReplies",
    "Notifier",
    "OpenOut",
    "RangeCalls",
    "SetAttr",
    "Stat",
    "WriteHow",
    "XattrCalls",
]

Buffer: TypeAlias = bytes | bytearray | memoryview
LEASED_S: Final = 3600.0  # how long the kernel may cache what is invalidated in time
# so much where no open asks anew, and where nothing ever changes; an end for what is not foreseen
LASTING_S: Final = 7 * 86400.0


class Stat(NamedTuple):
    """Attributes and how many seconds the kernel may cache them."""

    attr: Attr
    ttl: float


class OpenOut(NamedTuple):
    """An open file or directory, and what the kernel may do with its pages."""

    fh: int
    keep_cache: bool = False  # pages read before this open are still true
    direct_io: bool = False  # every read and write comes to us
    cache_dir: bool = False  # the kernel may keep this listing
    no_flush: bool = False  # close(2) need not tell us
    backing: int = 0  # of `fuse/session/backing`: the kernel reads and writes that file itself


class WriteHow(NamedTuple):
    """What the kernel says of a write beside its place and bytes."""

    kill_suid: bool = False  # S_ISUID and S_ISGID are dropped, as for all without CAP_FSETID
    append: bool = False  # O_APPEND: the offset is what the kernel takes for the end
    past_pages: bool = False  # the kernel keeps nothing of the bytes


PLAIN_WRITE: Final = WriteHow()


class CopyRange(NamedTuple):
    """Where copy_file_range(2) reads, in the file of the request, and where it writes."""

    fh: int
    offset: int
    ino_out: Ino
    fh_out: int
    offset_out: int
    length: int


class FileLock(NamedTuple):
    """A range of a file that a lock owner holds or wants, for reading or for writing too."""

    write: bool
    begin: int
    end: int
    pid: int


class LockReplies(Protocol):
    """How requests are answered that have waited for a lock."""

    def answer(self, request: int, code: int) -> None:
        """It is over: 0, or an errno. From any thread."""

    def interrupted(self) -> bool:
        """Whether the request that the calling thread serves is to end with EINTR."""


Fits: TypeAlias = Callable[[Sequence[Dentry]], int]
"""How many of some names the answer has room for."""

FIRST_VIRTUAL_INO: Final = 1 << 62  # far above any id a volume hands out


class RangeCalls(Protocol):
    """What the kernel can ask about ranges of open files."""

    def fallocate(
        self, caller: Caller, ino: Ino, fh: int, mode: int, offset: int, length: int
    ) -> None: ...
    def lseek(
        self, caller: Caller, ino: Ino, fh: int, offset: int, whence: int
    ) -> int | Later[int]:
        """SEEK_DATA and SEEK_HOLE; the kernel does the others itself."""

    def copy_file_range(self, caller: Caller, ino: Ino, copy: CopyRange) -> int:
        """How many bytes of `ino` were copied; fewer than `length` is no error."""


class LockCalls(Protocol):
    """What the kernel can ask about file locks."""

    def getlk(self, ino: Ino, owner: int, lock: FileLock) -> FileLock | None:
        """F_GETLK: what keeps `owner` from having an fcntl lock."""

    def setlk(
        self, fh: int, owner: int, lock: FileLock, flock: bool, request: int, wait: bool
    ) -> bool:
        """Lock a range. False: the answer to `request` will come through `LockReplies`."""

    def unlock(self, fh: int, owner: int, lock: FileLock, flock: bool) -> Later[None] | None: ...
    def cancel(self, request: int) -> bool:
        """INTERRUPT of a request that `setlk` has parked; False where it does not wait."""


class DirectoryCalls(Protocol):
    """What the kernel can ask about open directories."""

    def opendir(self, caller: Caller, ino: Ino) -> OpenOut: ...
    def readdir(
        self, caller: Caller, ino: Ino, fh: int, cookie: int, at_most: int
    ) -> tuple[Sequence[Dentry], Sequence[int]]:
        """Some of the names behind `cookie`, `.` and `..` included, and their cookies.

        0 is the beginning; at the end there are none. A cookie is positive, and holds until the
        handle is closed.
        """

    def readdirplus(
        self, caller: Caller, ino: Ino, fh: int, cookie: int, fits: Fits
    ) -> tuple[Sequence[Dentry], Sequence[int], Entries]:
        """`readdir` of as many names as `fits` says, with what they lead to, each a lookup.

        Nothing of `.` and `..`, of what the kernel holds already and of what has gone.
        """

    def fsyncdir(self, caller: Caller, ino: Ino, fh: int) -> None: ...
    def releasedir(self, ino: Ino, fh: int) -> None: ...


class XattrCalls(Protocol):
    """What the kernel can ask about extended attributes and flags."""

    def setxattr(
        self,
        caller: Caller,
        ino: Ino,
        name: bytes,
        value: bytes,
        flags: int,
        kill_sgid: bool = False,
    ) -> None:
        """`kill_sgid`: the caller is not in the group of the file whose ACL this is."""

    def question(self, caller: Caller, ino: Ino, name: bytes) -> Later[bytes] | None:
        """getxattr(2) of a name that asks the mount something which takes a while; else None, and
        `getxattr` has the answer."""

    def getxattr(self, caller: Caller, ino: Ino, name: bytes) -> bytes: ...
    def listxattr(self, caller: Caller, ino: Ino) -> list[bytes]: ...
    def removexattr(self, caller: Caller, ino: Ino, name: bytes) -> None: ...
    def getflags(self, caller: Caller, ino: Ino) -> int:
        """The flags of chattr(1), FS_*_FL of linux/fs.h."""

    def setflags(self, caller: Caller, ino: Ino, flags: int) -> None: ...


class FileSystem(Protocol):
    """What the kernel can ask of us: names, attributes and files; and, of each part, the rest."""

    @property
    def ranges(self) -> RangeCalls: ...
    @property
    def locks(self) -> LockCalls: ...
    @property
    def directories(self) -> DirectoryCalls: ...
    @property
    def xattrs(self) -> XattrCalls: ...
    def lookup(self, caller: Caller, parent: Ino, name: bytes) -> EntryOut: ...
    def forget(self, ino: Ino, lookups: int) -> None: ...
    def getattr(self, caller: Caller, ino: Ino, fh: int | None) -> Stat: ...
    def setattr(self, caller: Caller, ino: Ino, want: SetAttr, fh: int | None) -> Stat: ...
    def readlink(self, caller: Caller, ino: Ino) -> bytes: ...
    def mknod(
        self, caller: Caller, parent: Ino, name: bytes, mode: int, rdev: int, umask: int = 0
    ) -> EntryOut:
        """`umask` counts where the directory has no default ACL, here, in mkdir and in create."""

    def mkdir(
        self, caller: Caller, parent: Ino, name: bytes, mode: int, umask: int = 0
    ) -> EntryOut: ...
    def symlink(self, caller: Caller, parent: Ino, name: bytes, target: bytes) -> EntryOut: ...
    def link(self, caller: Caller, ino: Ino, parent: Ino, name: bytes) -> EntryOut: ...
    def unlink(self, caller: Caller, parent: Ino, name: bytes) -> None: ...
    def rmdir(self, caller: Caller, parent: Ino, name: bytes) -> None: ...
    def rename(
        self,
        caller: Caller,
        parent: Ino,
        name: bytes,
        new_parent: Ino,
        new_name: bytes,
        flags: int,
    ) -> None:
        """`flags` are those of renameat2(2)."""

    def create(
        self,
        caller: Caller,
        parent: Ino,
        name: bytes,
        mode: int,
        flags: int,
        kill_suid: bool = False,
        umask: int = 0,
    ) -> tuple[EntryOut, OpenOut]:
        """open(2) with O_CREAT; `flags` are open's.

        Raises: ESTALE where the kernel must look the name up and try again.
        """

    def open(self, caller: Caller, ino: Ino, flags: int, kill_suid: bool = False) -> OpenOut:
        """`kill_suid`: O_TRUNC drops S_ISUID and S_ISGID, as it does for all without CAP_FSETID."""

    def begin_open(
        self, caller: Caller, ino: Ino, flags: int, kill_suid: bool = False
    ) -> OpenOut | Later[OpenOut]:
        """As `open`, but that a long wait comes later."""

    def read(
        self, caller: Caller, ino: Ino, fh: int, offset: int, size: int, past_pages: bool = False
    ) -> Sequence[Buffer]:
        """At most `size` bytes as pieces in order; fewer only at the end of the file.

        `past_pages`: the kernel keeps nothing of them.
        """

    def read_virtual(
        self, ino: Ino, fh: int, offset: int, size: int
    ) -> Sequence[Buffer] | Later[Sequence[Buffer]]:
        """`read` of an inode from FIRST_VIRTUAL_INO on, which may have to wait for bytes."""

    def write(
        self,
        caller: Caller,
        ino: Ino,
        fh: int,
        offset: int,
        data: memoryview,
        how: WriteHow = PLAIN_WRITE,
    ) -> int:
        """How many bytes were taken. `data` is only valid during the call."""

    def written_past_pages(
        self, ino: Ino, fh: int, offset: int, size: int, o_direct: bool
    ) -> Later[None] | None:
        """`write` has taken bytes past the kernel's pages; None where that may be answered now.

        `o_direct`: the program asked for it, and the kernel drops the range by itself.
        """

    def flush(self, caller: Caller, ino: Ino, fh: int, owner: int = 0) -> Later[None] | None:
        """close(2) of one descriptor: report what could not be stored.

        `owner`, a process, loses its fcntl locks of the file. None where it is done.
        """

    def fsync(self, caller: Caller, ino: Ino, fh: int, data_only: bool) -> None: ...
    def release(self, ino: Ino, fh: int) -> None: ...
    def tmpfile(
        self, caller: Caller, parent: Ino, mode: int, flags: int, umask: int = 0
    ) -> tuple[EntryOut, OpenOut]:
        """open(2) with O_TMPFILE: a file without a name."""

    def syncfs(self) -> Later[None]:
        """syncfs(2), where the kernel tells of it: it does so to fuseblk and virtiofs only."""

    def statfs(self, caller: Caller, ino: Ino) -> StatFs: ...
    def access(self, caller: Caller, ino: Ino, mask: int) -> None: ...


class QuickAnswers(Protocol):
    """Requests that may be answered without asking the file system: see `vfs/fast_lane`.

    Each says no where it can't tell; the request then goes to the file system.
    """

    def is_absent(self, parent: Ino, name: bytes) -> bool:
        """LOOKUP of a name that leads nowhere, which the kernel may cache for LEASED_S."""

    def stat(self, ino: Ino) -> Stat | None:
        """GETATTR."""

    def open(self, ino: Ino, flags: int) -> OpenOut | None:
        """OPEN of a file for reading; `flags` are those of open(2)."""

    def flush(self, ino: Ino, fh: int) -> bool:
        """FLUSH of a handle with nothing to be stored, of a file without locks."""

    def release(self, ino: Ino, fh: int) -> bool:
        """RELEASE of such a handle: it is closed."""


class Notifier(Protocol):
    """How the file system tells the kernel that something it caches has changed.

    Never called from a thread that serves a request: the kernel may be waiting for that very one.
    Only `inval_attr` may be, of the inode that the request is about: it takes no lock that is held
    while the kernel waits for us.
    """

    def inval_inode(self, ino: Ino) -> None:
        """Forget attributes and pages of `ino`."""

    def reload(self, ino: Ino) -> None:
        """`inval_inode`, and have it ask anew at once: else O_APPEND goes by the size it knew."""

    def inval_pages(self, ino: Ino, begin: int, end: int) -> None:
        """Forget attributes of `ino`, and its pages with these bytes."""

    def inval_attr(self, ino: Ino) -> None:
        """Forget attributes of `ino`; its pages are true."""

    def inval_entry(self, parent: Ino, name: bytes) -> None:
        """Forget where `name` leads."""

    def inval_all(self) -> bool:
        """Forget every name; False where the kernel can't do that in one step."""

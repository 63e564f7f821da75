"""The contract between a kernel transport and the file system behind it.

`VFS` implements it, the session on `/dev/fuse` calls it. Methods carry the names of the system
calls, take plain values and raise `OSError` or a `StoreError`; only the transport knows what a FUSE
struct looks like, and only its dispatcher turns an exception into an errno.

Threading: any method may be called from any thread, several at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias

from fsmeta.types import Attr, Caller, Dentry, Ino, SetAttr, StatFs

__all__ = [
    "Buffer",
    "Entry",
    "FileSystem",
    "Notifier",
    "Opened",
    "SetAttr",
    "Stat",
]

Buffer: TypeAlias = bytes | bytearray | memoryview


class Entry(NamedTuple):
    """What a name leads to, and how many seconds the kernel may believe it.

    A lookup that finds nothing raises ENOENT, or answers an Entry without `attr` where the absence
    itself may be believed for `entry_ttl`.
    """

    attr: Attr | None
    entry_ttl: float
    attr_ttl: float


class Stat(NamedTuple):
    """Attributes and how many seconds the kernel may believe them."""

    attr: Attr
    ttl: float


class Opened(NamedTuple):
    """An open file or directory, and what the kernel may do with its pages."""

    fh: int
    keep_cache: bool = False  # pages read before this open are still true
    direct_io: bool = False  # every read and write comes to us
    cache_dir: bool = False  # the kernel may keep this listing
    no_flush: bool = False  # close(2) need not tell us


class FileSystem(Protocol):
    """What the kernel can ask of us."""

    def lookup(self, caller: Caller, parent: Ino, name: bytes) -> Entry: ...
    def forget(self, ino: Ino, lookups: int) -> None: ...
    def getattr(self, caller: Caller, ino: Ino, fh: int | None) -> Stat: ...
    def setattr(self, caller: Caller, ino: Ino, want: SetAttr, fh: int | None) -> Stat: ...
    def readlink(self, caller: Caller, ino: Ino) -> bytes: ...
    def mknod(self, caller: Caller, parent: Ino, name: bytes, mode: int, rdev: int) -> Entry: ...
    def mkdir(self, caller: Caller, parent: Ino, name: bytes, mode: int) -> Entry: ...
    def symlink(self, caller: Caller, parent: Ino, name: bytes, target: bytes) -> Entry: ...
    def link(self, caller: Caller, ino: Ino, parent: Ino, name: bytes) -> Entry: ...
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
    ) -> tuple[Entry, Opened]:
        """open(2) with O_CREAT; `flags` are open's. The umask has been applied to `mode`.

        Raises: ESTALE where the kernel must look the name up and try again.
        """

    def open(self, caller: Caller, ino: Ino, flags: int, kill_suid: bool = False) -> Opened:
        """`kill_suid`: O_TRUNC drops S_ISUID and S_ISGID, as it does for all without CAP_FSETID."""

    def read(self, caller: Caller, ino: Ino, fh: int, offset: int, size: int) -> Sequence[Buffer]:
        """At most `size` bytes as pieces in order; fewer only at the end of the file."""

    def write(
        self, caller: Caller, ino: Ino, fh: int, offset: int, data: memoryview, kill_suid: bool
    ) -> int:
        """`data` is only valid during the call."""

    def flush(self, caller: Caller, ino: Ino, fh: int) -> None:
        """close(2) of one descriptor: report what could not be stored."""

    def fsync(self, caller: Caller, ino: Ino, fh: int, data_only: bool) -> None: ...
    def release(self, ino: Ino, fh: int) -> None: ...
    def opendir(self, caller: Caller, ino: Ino) -> Opened: ...
    def readdir(
        self, caller: Caller, ino: Ino, fh: int, begin: int, at_most: int
    ) -> Sequence[Dentry]:
        """Some of the names behind the first `begin`, `.` and `..` included; none at the end."""

    def entries(self, ino: Ino, names: Sequence[Dentry]) -> Sequence[Entry | None]:
        """What names in directory `ino` lead to (readdirplus); each entry counts as a lookup.

        None for `.` and `..`, for what the kernel holds already and for what has gone.
        """

    def fsyncdir(self, caller: Caller, ino: Ino, fh: int) -> None: ...
    def releasedir(self, ino: Ino, fh: int) -> None: ...
    def statfs(self, caller: Caller, ino: Ino) -> StatFs: ...
    def access(self, caller: Caller, ino: Ino, mask: int) -> None: ...
    def setxattr(self, caller: Caller, ino: Ino, name: bytes, value: bytes, flags: int) -> None: ...
    def getxattr(self, caller: Caller, ino: Ino, name: bytes) -> bytes: ...
    def listxattr(self, caller: Caller, ino: Ino) -> list[bytes]: ...
    def removexattr(self, caller: Caller, ino: Ino, name: bytes) -> None: ...


class Notifier(Protocol):
    """How the file system tells the kernel that what it believes has changed.

    Never called from a thread that serves a request: the kernel may be waiting for that very one.
    """

    def inval_inode(self, ino: Ino) -> None:
        """Forget attributes and pages of `ino`."""

    def inval_attr(self, ino: Ino) -> None:
        """Forget attributes of `ino`; its pages are true."""

    def inval_entry(self, parent: Ino, name: bytes) -> None:
        """Forget where `name` leads."""

    def inval_all(self) -> bool:
        """Forget every name; False where the kernel can't do that in one step."""

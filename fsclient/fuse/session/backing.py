"""Passthrough (Linux 6.9): the kernel reads and writes files of a local disk in our files' stead.

Called by `kernel/passthrough`, which answers an open for reading with `OpenOut.backing`
(docs/design/write-back-speed says why not for writing). INIT must have agreed on PASSTHROUGH, and
we have to be root (CAP_SYS_ADMIN). While a file is open in passthrough

- read(2), write(2), splice(2) and mmap(2) never reach us; every other request does, among them
  SETATTR of the size, FALLOCATE, LSEEK, COPY_FILE_RANGE, FSYNC and FLUSH, and it is on us to do the
  same to the backing file;
- GETATTR is asked after each write: the answer takes size and times from the backing file;
- each open of the inode names the same backing file: one that names another or none fails with EIO,
  and so does the first one while the inode is open in the usual way. `keep_cache` is EIO as well.

An id may be closed once the open that names it is answered *and taken*, so with the last RELEASE.
Threading: any thread.
"""

from __future__ import annotations

import fcntl

from fsclient.fuse.wire import abi
from fsclient.kernel.passthrough import Backings


def open_backing(session_fd: int, fd: int) -> int:
    """An id of the connection `session_fd` for the plain file that `fd` is open on; never 0.

    The kernel opens the file anew with the flags of each open, as the caller of this function: `fd`
    itself may be closed. Raises: EPERM without CAP_SYS_ADMIN or without an agreement; ELOOP for a
    file of a file system on top of others (overlayfs); ENOTTY before Linux 6.9.
    """
    asked = bytearray(abi.BACKING_MAP.pack(fd))  # bytes would be what ioctl() returns
    backing: int = fcntl.ioctl(session_fd, abi.DEV_IOC_BACKING_OPEN, asked)
    return backing


def close_backing(session_fd: int, backing: int) -> None:
    """Give an id back. Raises: ENOENT where there is no such id."""
    fcntl.ioctl(session_fd, abi.DEV_IOC_BACKING_CLOSE, abi.BACKING_ID.pack(backing))


class SessionBackings:
    """`Backings` of the connection `session_fd`."""

    def __init__(self, session_fd: int) -> None:
        self._session_fd = session_fd

    def open(self, fd: int) -> int:
        return open_backing(self._session_fd, fd)

    def close(self, backing: int) -> None:
        close_backing(self._session_fd, backing)


_CONFORMS: type[Backings] = SessionBackings

"""Tells the kernel that something it caches has changed: the Notifier on `/dev/fuse`.

Called by `CacheLeases` in a thread of its own. A notification is a write whose header has unique id
0 and the code in place of the errno; the kernel acts on it inside that write.

Deadlocks. The write takes kernel locks that a process may hold while it waits for an answer of
ours: `inval_entry` takes the directory's lock (held across create, unlink, rename, a lookup on
older kernels), `inval_inode` waits for pages that a read is filling; `inval_attr` waits for
neither, but keeps to the same rule. Therefore:
  - never notify from a thread that serves a request, nor while holding a lock that serving one may
    need: notify from a thread of your own that holds nothing;
  - a notification may last as long as the slowest request: queue them, don't wait for them;
  - don't notify about what the kernel has just asked for: its answer tells it already, except
    where it has no room for what changed.

What is not cached is not an error (ENOENT). Where the kernel can expire an entry (Linux 6.2) it is
expired, not torn down: it is asked for again at its next use, and what is below or mounted on it
stays. `inval_all`, for lost invalidations, needs FUSE_NOTIFY_INC_EPOCH (Linux 6.16): every name is
looked up again, which brings fresh attributes; attributes and pages of files that are open stay
until `inval_inode`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from functools import partial
from typing import Final

from fsclient.fuse.session.detached_calls import Call
from fsclient.fuse.session.reload_attrs import Reloader
from fsclient.fuse.wire import abi, protocol
from fsclient.kernel.contract import Notifier
from fsmeta.types import Ino

_NOT_CACHED: Final = frozenset((errno.ENOENT, errno.ENOTDIR))
_GONE: Final = frozenset((errno.ENODEV, errno.ENOTCONN, errno.EBADF))  # no kernel left to tell
_ALL: Final = 0  # a length that reaches to the end of the file
_NO_PAGES: Final = -1  # an offset that spares the pages: fuse_reverse_inval_inode()


def _here(call: Call) -> None:
    """In the calling thread."""
    call()


class KernelNotifier:
    """Notifications of one mount. Any thread may call that serves no request."""

    def __init__(
        self,
        fd: int,
        expire_only: bool = False,
        mountpoint: str = "",
        run: Callable[[Call], None] = _here,
    ) -> None:
        """`expire_only`: the kernel said HAS_EXPIRE_ONLY. `mountpoint`: for `reload`. `run`: what
        may wait for requests of the kernel is called by it.
        """
        self._fd = fd
        self._run = run
        self._reloader = Reloader(mountpoint, run)
        self._entry_flags = protocol.EXPIRE_ONLY if expire_only else 0
        self._has_epoch = True  # until the kernel says otherwise

    def inval_inode(self, ino: Ino) -> None:
        self._send_and_wait(protocol.NOTIFY_INVAL_INODE, abi.NOTIFY_INVAL_INODE.pack(ino, 0, _ALL))

    def inval_pages(self, ino: Ino, begin: int, end: int) -> None:
        body = abi.NOTIFY_INVAL_INODE.pack(ino, begin, end - begin)
        self._send_and_wait(protocol.NOTIFY_INVAL_INODE, body)

    def reload(self, ino: Ino) -> None:
        self.inval_inode(ino)
        self._reloader.reload(ino)

    def inval_attr(self, ino: Ino) -> None:
        self._send(protocol.NOTIFY_INVAL_INODE, abi.NOTIFY_INVAL_INODE.pack(ino, _NO_PAGES, _ALL))

    def inval_entry(self, parent: Ino, name: bytes) -> None:
        head = abi.NOTIFY_INVAL_ENTRY.pack(parent, len(name), self._entry_flags)
        self._send_and_wait(protocol.NOTIFY_INVAL_ENTRY, head + name + b"\0")

    def inval_all(self) -> bool:
        if not self._has_epoch:
            return False
        try:
            self._send(protocol.NOTIFY_INC_EPOCH, b"")
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOSYS):
                raise
            self._has_epoch = False
        return self._has_epoch

    def resend(self) -> bool:
        """Have all requests sent again that have no answer (Linux 6.9); False where it can't be.

        Their ids have `RESENT` set then. Call before any request is read.
        """
        try:
            self._send(protocol.NOTIFY_RESEND, b"")
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOSYS):
                raise
            return False
        return True

    def _send_and_wait(self, code: int, body: bytes) -> None:
        self._run(partial(self._send, code, body))

    def _send(self, code: int, body: bytes) -> None:
        try:
            os.write(self._fd, abi.OUT_HEADER.pack(abi.OUT_BYTES + len(body), code, 0) + body)
        except OSError as error:
            if error.errno not in _NOT_CACHED and error.errno not in _GONE:
                raise


_CONFORMS: type[Notifier] = KernelNotifier

"""The Notifier through pyfuse3.

libfuse has no notification for a range of pages, nor one for all names: the whole file is dropped,
and each name is told by itself. For deadlocks see `fuse/session/notify`: the same rules hold.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any, Final

from fsclient.fuse.session.reload_attrs import Reloader
from fsclient.kernel.contract import Notifier
from fsmeta.types import Ino

# not cached; no kernel left to tell
_IGNORED: Final = frozenset(
    (errno.ENOENT, errno.ENOTDIR, errno.ENODEV, errno.ENOTCONN, errno.EBADF, errno.EINVAL)
)


class Pyfuse3Notifier:
    """Notifications of the mount. Any thread may call that serves no request."""

    def __init__(self, fuse: Any, mountpoint: str) -> None:
        self._fuse = fuse
        self._reloader = Reloader(mountpoint, _here)

    def inval_inode(self, ino: Ino) -> None:
        _tell(self._fuse.invalidate_inode, ino)

    def inval_pages(self, ino: Ino, begin: int, end: int) -> None:
        del begin, end
        self.inval_inode(ino)

    def reload(self, ino: Ino) -> None:
        self.inval_inode(ino)
        self._reloader.reload(ino)

    def inval_attr(self, ino: Ino) -> None:
        _tell(self._fuse.invalidate_inode, ino, True)

    def inval_entry(self, parent: Ino, name: bytes) -> None:
        _tell(self._fuse.invalidate_entry, parent, name)

    def inval_all(self) -> bool:
        return False


def _here(call: Callable[[], None]) -> None:
    call()


def _tell(notify: Callable[..., None], *about: object) -> None:
    try:
        notify(*about)
    except OSError as error:
        if error.errno not in _IGNORED:
            raise


_CONFORMS: type[Notifier] = Pyfuse3Notifier

"""Extended attributes as a mount shows them: ACLs only where the kernel judges by them.

Where it does not, they are neither told nor set, as other file systems do without `-o acl`.

ls(1) asks for the label of each file, and the kernel keeps no answer. It asks no more about a file
system that says ENOTSUP, so that is what a file without a label says. A kernel with SELinux has the
labels of FUSE from its policy and never asks us.

What is asked *of the mount* through xattrs is in `control/control_xattrs`. Called by `VFS`.
Threading: any thread.
"""

from __future__ import annotations

import errno
from typing import Final

from fsmeta.meta.meta import Meta
from fsmeta.schema.acl import XATTRS as ACL_XATTRS
from fsmeta.types import Caller, Ino

SELINUX_XATTR: Final = b"security.selinux"


class Xattrs:
    """The attributes that are in the metadata."""

    def __init__(self, meta: Meta) -> None:
        self._meta = meta
        self.acls = True  # set before anything is served: whether ACLs are judged by, and shown

    def setxattr(
        self, caller: Caller, ino: Ino, name: bytes, value: bytes, flags: int, kill_sgid: bool
    ) -> None:
        """Raises: ENOTSUP, and what `Meta` does."""
        self._require_shown(name)
        self._meta.setxattr(caller, ino, name, value, flags, kill_sgid)

    def getxattr(self, caller: Caller, ino: Ino, name: bytes) -> bytes:
        """Raises: ENOTSUP, ENODATA."""
        self._require_shown(name)
        try:
            return self._meta.getxattr(caller, ino, name)
        except OSError as error:
            if name == SELINUX_XATTR and error.errno == errno.ENODATA:
                raise OSError(errno.ENOTSUP, "no labels here") from error
            raise

    def listxattr(self, caller: Caller, ino: Ino) -> list[bytes]:
        """The names of those that are shown."""
        names = self._meta.listxattr(caller, ino)
        return names if self.acls else [name for name in names if name not in ACL_XATTRS]

    def removexattr(self, caller: Caller, ino: Ino, name: bytes) -> None:
        """Raises: ENOTSUP, ENODATA."""
        self._require_shown(name)
        self._meta.removexattr(caller, ino, name)

    def _require_shown(self, name: bytes) -> None:
        if not self.acls and name in ACL_XATTRS:
            raise OSError(errno.ENOTSUP, "to have ACLs, mount with `-o acl`")

"""Extended attributes as a mount shows them: ACLs only where the kernel judges by them.

Where it does not, they are neither told nor set, as other file systems do without `-o acl`. What is
asked *of the mount* through xattrs is in `questions`. Called by `VFS`. Threading: any thread.
"""

from __future__ import annotations

import errno

from fsmeta.acl import XATTRS as ACL_XATTRS
from fsmeta.engine import Meta
from fsmeta.types import Caller, Ino


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
        return self._meta.getxattr(caller, ino, name)

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

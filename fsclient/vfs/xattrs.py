"""Extended attributes and flags as a mount shows them: ACLs only where the kernel checks them.

Where it does not, they are neither shown nor set, as other file systems do without `-o acl`.

ls(1) asks for the label of each file, and the kernel keeps no answer. It asks no more about a file
system that says ENOTSUP, so that is what a file without a label says. A kernel with SELinux has the
labels of FUSE from its policy and never asks us.

What is asked *of the mount* through xattrs is in `control/control_xattrs`. Called through
`VFS.xattrs`. Threading: any thread.
"""

from __future__ import annotations

import errno
from typing import Final

from fsclient.control.compact_xattr import COMPACT_XATTR
from fsclient.control.control_xattrs import ControlXattrs
from fsclient.kernel.contract import XattrCalls
from fsclient.kernel.kernel_notices import KernelNotices
from fsclient.kernel.later import Later
from fsclient.kernel.virtual import VirtualFiles
from fsclient.vfs.mount_rules import MountRules
from fsmeta.meta.meta import Meta
from fsmeta.schema.acl import XATTRS as ACL_XATTRS
from fsmeta.types import Caller, Ino

SELINUX_XATTR: Final = b"security.selinux"


class Xattrs:
    """Attributes that are in the metadata, and what is asked of the mount through others."""

    def __init__(
        self,
        meta: Meta,
        rules: MountRules,
        questions: ControlXattrs,
        virtual: VirtualFiles,
        notices: KernelNotices,
    ) -> None:
        self._meta = meta
        self._rules = rules
        self._questions = questions
        self._virtual = virtual
        self._notices = notices
        self.acls = True  # set before anything is served: whether ACLs are checked, and shown

    def setxattr(
        self,
        caller: Caller,
        ino: Ino,
        name: bytes,
        value: bytes,
        flags: int,
        kill_sgid: bool = False,
    ) -> None:
        """Raises: ENOTSUP, and what `Meta` does."""
        self._rules.require_changeable(ino)
        view = self._rules.root, self._rules.durable is not None
        if not self._questions.ask(caller, view, ino, name, value):
            self._require_shown(name)
            self._meta.setxattr(caller, ino, name, value, flags, kill_sgid)

    def question(self, caller: Caller, ino: Ino, name: bytes) -> Later[bytes] | None:
        if self._virtual.owns(ino):
            return None
        if name == COMPACT_XATTR:
            self._rules.require_changeable(ino)
        return self._questions.later(caller, ino, name, self._rules.durable)

    def getxattr(self, caller: Caller, ino: Ino, name: bytes) -> bytes:
        """Raises: ENOTSUP, ENODATA."""
        if self._virtual.owns(ino):
            raise OSError(errno.ENODATA, "a virtual file has no attributes")
        answer = self._questions.answer(caller, ino, name, self._rules.durable)
        if answer is not None:
            return answer
        self._require_shown(name)
        try:
            return self._meta.getxattr(caller, ino, name)
        except OSError as error:
            if name == SELINUX_XATTR and error.errno == errno.ENODATA:
                raise OSError(errno.ENOTSUP, "no labels here") from error
            raise

    def listxattr(self, caller: Caller, ino: Ino) -> list[bytes]:
        """The names of those that are shown."""
        if self._virtual.owns(ino):
            return []
        names = self._meta.listxattr(caller, ino)
        return names if self.acls else [name for name in names if name not in ACL_XATTRS]

    def removexattr(self, caller: Caller, ino: Ino, name: bytes) -> None:
        """Raises: ENOTSUP, ENODATA."""
        self._rules.require_changeable(ino)
        self._require_shown(name)
        self._meta.removexattr(caller, ino, name)

    def getflags(self, caller: Caller, ino: Ino) -> int:
        return 0 if self._virtual.owns(ino) else self._meta.getflags(caller, ino)

    def setflags(self, caller: Caller, ino: Ino, flags: int) -> None:
        self._rules.require_changeable(ino)
        if self._virtual.owns(ino):
            raise OSError(errno.EOPNOTSUPP, "a virtual file has no flags")
        self._meta.setflags(caller, ino, flags)
        self._notices.stale(ino)  # the answer to an ioctl has no room for a ctime

    def _require_shown(self, name: bytes) -> None:
        if not self.acls and name in ACL_XATTRS:
            raise OSError(errno.ENOTSUP, "to have ACLs, mount with `-o acl`")


_CONFORMS: type[XattrCalls] = Xattrs

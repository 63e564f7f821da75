"""open(2) with O_CREAT of a name that another client made since the kernel looked.

The kernel has checked the directory, not this file. Where we can't check it, ESTALE makes the
kernel look the name up and check what it finds. Threading: any method from any thread.
"""

from __future__ import annotations

import errno

from fsclient.files.file_io import FileIO
from fsclient.kernel.contract import EntryOut, OpenOut
from fsclient.vfs.attr_view import AttrView
from fsmeta.meta.meta import Meta
from fsmeta.types import Caller, FileType, Ino


class ExistingFiles:
    """Opens what is there by its name."""

    def __init__(self, meta: Meta, io: FileIO, shown: AttrView) -> None:
        self._meta = meta
        self._io = io
        self._shown = shown

    def open(
        self, caller: Caller, parent: Ino, name: bytes, flags: int, kill_suid: bool
    ) -> tuple[EntryOut, OpenOut]:
        """Raises: EISDIR, ESTALE, and what open(2) does."""
        attr = self._meta.lookup(caller, parent, name)
        if attr.type is FileType.DIR:
            raise OSError(errno.EISDIR, "is a directory")
        if attr.type is not FileType.REG:
            raise OSError(errno.ESTALE, "is no plain file")
        try:
            opened = self._io.open(caller._replace(checked=False), attr.ino, flags, kill_suid)
        except PermissionError as error:
            if not caller.checked:
                raise
            raise OSError(errno.ESTALE, "the caller may have more groups") from error
        try:
            return self._shown.entry(parent, name, self._meta.getattr(caller, attr.ino)), opened
        except BaseException:
            self._io.release(opened.fh)
            raise

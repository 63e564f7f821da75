"""What one mount lets be changed: its root, its own names, the trash, and nothing once frozen.

Called by `VFS` and its parts. Threading: any method from any thread.
"""

from __future__ import annotations

import errno

from fsclient.files.handles.open_files import OpenFiles
from fsclient.kernel import trash_view
from fsclient.kernel.virtual import VirtualFiles
from fsclient.writeback.writeback import WriteBack
from fsmeta.errors import StoreError
from fsmeta.schema.trash import TRASH_INO, TRASH_NAME
from fsmeta.types import ROOT_INO, Ino


class MountRules:
    """See the module."""

    def __init__(self, files: OpenFiles, virtual: VirtualFiles, durable: WriteBack | None) -> None:
        """`durable`: of a mount that writes back."""
        self._files = files
        self._virtual = virtual
        self.durable = durable
        self._corrupt: StoreError | None = None  # set once; everything that writes is EROFS then
        self.root = ROOT_INO  # of the mount; set before anything is served

    def freeze(self, error: StoreError) -> None:
        """The metadata is corrupt, or has gone back: change nothing any more."""
        self._corrupt = error

    def is_frozen(self) -> bool:
        """Whether `freeze` was called."""
        return self._corrupt is not None

    def require_writable(self) -> None:
        """Raises: EROFS."""
        if self._corrupt is not None:
            raise OSError(errno.EROFS, f"read-only since {self._corrupt}")

    def require_changeable(self, ino: Ino) -> None:
        """Raises: EROFS; EPERM in the trash."""
        self.require_writable()
        trash_view.require_changeable(ino)

    def require_whole(self, ino: Ino) -> None:
        """Raises: EIO where a mount that writes back has lost what it had accepted."""
        if self.durable is not None:
            self.durable.require_whole(ino)

    def begin_change(self, parent: Ino, name: bytes, code: int = errno.EPERM) -> None:
        """A name is about to be made or taken away. Raises: EROFS; `code` for a virtual file's."""
        if self._corrupt is not None:
            self.require_writable()
        if parent == self.root and (
            self._virtual.has(name) or (name == TRASH_NAME and parent == ROOT_INO)
        ):
            raise OSError(code, f"{name.decode()} is SliceFS's own")
        if parent >= TRASH_INO:
            trash_view.require_name(parent, making=code == errno.EEXIST)
        self._files.changes_names(parent)

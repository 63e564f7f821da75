"""What commands ask a mount through xattrs of its own: `user.slicefs.…`, not stored and not listed.

Called by the VFS, whose other xattrs are the metadata's. Each question has a room of its own.

Threading: any method from any thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from fsclient.control.clone_jobs import CLONE_XATTR, Cloner
from fsclient.control.compact_xattr import COMPACT_XATTR, Compaction
from fsclient.control.durable_xattr import DURABLE_XATTR, Durable
from fsclient.control.info_xattr import describe, page_of
from fsclient.control.warmup_server import WARM_XATTR, Warmer
from fsclient.kernel import snapshot_view
from fsclient.kernel.contract import REMOUNTED_XATTR
from fsclient.kernel.later import Later
from fsclient.writeback.writeback import WriteBack
from fsmeta.meta.meta import Meta
from fsmeta.types import Caller, Ino

OWN_XATTRS: Final = b"user.slicefs."


class ControlXattrs:
    """Who answers which."""

    def __init__(
        self, meta: Meta, cloner: Cloner, durable: Durable, compaction: Compaction
    ) -> None:
        self._meta = meta
        self._compaction = compaction
        self.durable = durable
        self.cloner = cloner
        self.warmer: Warmer | None = None  # set before anything is served
        self.on_remount: Callable[[], object] = bool  # the kernel's flags of the mount have changed

    def close(self) -> None:
        """End what was asked for and is under way."""
        self.cloner.close()
        self.durable.close()
        self._compaction.close()

    def ask(self, caller: Caller, root: Ino, ino: Ino, name: bytes, value: bytes) -> bool:
        """Whether who sets `name` asks for something. Raises: as the one who does it."""
        if not name.startswith(CLONE_XATTR):
            return False
        self.cloner.ask(caller, root, ino, name, value)
        return True

    def later(
        self, caller: Caller, ino: Ino, name: bytes, durable: WriteBack | None
    ) -> Later[bytes] | None:
        """What is asked with `name`, where the answer takes a while; else None: `answer` has it.

        Raises: as `answer`.
        """
        if name == COMPACT_XATTR:
            return self._compaction.later(caller, ino)
        if not name.startswith(DURABLE_XATTR):
            return None
        return self.durable.later(durable, ino, name)

    def answer(
        self, caller: Caller, ino: Ino, name: bytes, durable: WriteBack | None
    ) -> bytes | None:
        """What is asked with `name`; None where that is an attribute of the file.

        Raises: as the one who answers.
        """
        if not name.startswith(OWN_XATTRS):
            return None
        if name.startswith(CLONE_XATTR):
            return self.cloner.tell(caller, name)
        if name.startswith(DURABLE_XATTR):
            return self.durable.tell(durable, ino, name)
        if name.startswith(WARM_XATTR) and self.warmer is not None:
            return self.warmer.answer(caller, ino, name)
        if name == snapshot_view.SNAPSHOT_XATTR:
            return snapshot_view.describe(self._meta, ino)
        if name == REMOUNTED_XATTR:
            self.on_remount()
            return b""
        page = page_of(name)
        return None if page is None else describe(self._meta, self._meta.getattr(caller, ino), page)

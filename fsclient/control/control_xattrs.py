"""What commands ask a mount through xattrs of its own: `user.slicefs.…`, not stored and not listed.

Called by the VFS, whose other xattrs are the metadata's. Each kind of request has a module of its
own.

Threading: any method from any thread.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Final, NamedTuple

from fsclient.control.attach_xattr import Attacher
from fsclient.control.clone_jobs import CLONE_XATTR, Cloner
from fsclient.control.compact_xattr import COMPACT_XATTR, Compaction
from fsclient.control.durable_xattr import DURABLE_XATTR, Durable
from fsclient.control.info_xattr import describe, page_of
from fsclient.control.warmup_server import WARM_XATTR, Warmer
from fsclient.files.data_services import DataServices
from fsclient.files.file_io import FileIO
from fsclient.files.handles.open_files import OpenFiles
from fsclient.kernel import snapshot_view
from fsclient.kernel.cache_leases import CacheLeases
from fsclient.kernel.later import Later
from fsclient.kernel.xattr_names import (
    ATTACH_XATTR,
    ATTACHED_XATTR,
    REMOUNTED_XATTR,
    STREAMS_XATTR,
)
from fsclient.writeback.writeback import WriteBack
from fsmeta.meta.meta import Meta
from fsmeta.runtime import Runtime
from fsmeta.types import Caller, Ino
from fsmeta.user_namespace import own_uid

OWN_XATTRS: Final = b"user.slicefs."


class ControlPorts(NamedTuple):
    """What requests lead to outside of this room."""

    end_streams: Callable[[], int]
    remounted: Callable[[], object]  # the kernel's flags of the mount have changed
    durable: WriteBack | None  # of a mount that writes back


class ControlXattrs:
    """Gives each request to the object that answers it."""

    def __init__(
        self,
        meta: Meta,
        io: FileIO,
        data: DataServices,
        files: OpenFiles,
        coherence: CacheLeases,
        runtime: Runtime,
        ports: ControlPorts,
    ) -> None:
        self._meta = meta
        self._io = io
        self._compaction = Compaction(meta, io, data.blocks, files, runtime)
        self._ports = ports
        self._attacher = Attacher(meta, coherence)
        self.durable = Durable(meta, io, runtime, ports.durable)
        self.cloner = Cloner(meta, io, coherence, runtime)
        if ports.durable is not None:
            self.cloner.tree = ports.durable.published
        self.warmer: Warmer | None = None  # set before anything is served
        self.confined = False  # root takes and deletes no snapshots, and attaches nothing

    def confine(self, confined: bool) -> None:
        """Whether root of this mount is not root of the volume. Before anything is served."""
        self.confined = self.cloner.confined = confined

    def require_unconfined(self) -> None:
        """Raises: EPERM where root of this mount is not root of the volume."""
        if self.confined:
            raise OSError(errno.EPERM, "this mount neither attaches nor deletes snapshots")

    def close(self) -> None:
        """End what was asked for and is under way."""
        self.cloner.close()
        self.durable.close()
        self._compaction.close()
        self._io.attached.close()

    def ask(
        self, caller: Caller, view: tuple[Ino, bool], ino: Ino, name: bytes, value: bytes
    ) -> bool:
        """Whether setting `name` is a request. Raises: as the object that does it.

        `view`: the root of the mount, and whether it writes back.
        """
        root, holds_back = view
        if name == ATTACH_XATTR:
            self.require_unconfined()
            self._attacher.attach(caller, ino, value, holds_back)
            return True
        if not name.startswith(CLONE_XATTR):
            return False
        self.cloner.ask(caller, root, ino, name, value)
        return True

    def later(
        self, caller: Caller, ino: Ino, name: bytes, durable: WriteBack | None
    ) -> Later[bytes] | None:
        """The answer to `name`, where it takes a while; else None: `answer` has it.

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
        """The answer to `name`; None where that is an attribute of the file.

        Raises: as the object that answers.
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
        if name == ATTACHED_XATTR:
            return self._attacher.tell(caller, ino)
        if name == STREAMS_XATTR and caller.uid in (0, own_uid()):
            return b"%d" % self._ports.end_streams()
        if name == REMOUNTED_XATTR:
            self._ports.remounted()
            return b""
        page = page_of(name)
        return None if page is None else describe(self._meta, self._meta.getattr(caller, ino), page)

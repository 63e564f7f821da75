"""Copy-up: an attached file gets bytes of its own before it is changed.

open(2) for writing and truncate(2) come here. The object is copied into slices, then one commit
makes them the file's: until then every mount shows the object, from then on the slices. A mount
that writes back stores the slices first, as the journal names none of them.

Called by `FileIO`. Threading: any method from any thread; `_cond` is a leaf.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from functools import partial
from typing import Final

from fsdata.attached.copying import LOOK_S, ObjectCopier
from fsdata.attached.objects import AttachedObjects
from fsdata.blocks.blocks import BlockStore
from fsdata.files.upload_pool import UploadPool
from fsmeta.meta.meta import Meta
from fsmeta.ops.data.copy_up import CopiedObject, copy_up
from fsmeta.rules.context import Changed, require_unsealed
from fsmeta.runtime import Runtime
from fsmeta.types import CHUNK_BYTES, FLAG_ATTACHED, ROOT_CALLER, AttachedObject, Ino, Slice

CHUNKS_MAX: Final = 1000  # records of one commit; 62 GiB

RequireSpace = Callable[[Ino, int], None]
"""Raises: ENOSPC, EDQUOT where there is no room for so many bytes in a file."""


def never() -> bool:
    """No request is interrupted."""
    return False


class CopyUp:
    """Gives attached files their bytes."""

    def __init__(
        self,
        meta: Meta,
        blocks: BlockStore,
        uploads: UploadPool,
        objects: AttachedObjects,
        runtime: Runtime,
        require_space: RequireSpace,
    ) -> None:
        self._meta = meta
        self._blocks = blocks
        self._uploads = uploads
        self._objects = objects
        self._runtime = runtime
        self._require_space = require_space
        self._cond = runtime.condition()
        self._busy: set[Ino] = set()  # one thread copies a file, others wait; guarded by _cond
        self.interrupted = never  # whether the calling thread's request is to end with EINTR

    def run(
        self, ino: Ino, keep: int | None = None, stopped: Callable[[], bool] | None = None
    ) -> Changed | None:
        """Let a file hold its bytes, `keep` of them at most; None where it does already.

        `stopped` tells that it is to end with EINTR; by default the calling thread's request does.
        Raises: ESTALE where the object has changed, EFBIG, EDQUOT, ENOSPC, EINTR, EIO, EROFS.
        """
        stopped = stopped or self.interrupted
        self._begin(ino, stopped)
        try:
            return self._run(ino, keep, stopped)
        finally:
            with self._cond:
                self._busy.discard(ino)
                self._cond.notify_all()

    def _begin(self, ino: Ino, stopped: Callable[[], bool]) -> None:
        with self._cond:
            while ino in self._busy:
                self._cond.wait(LOOK_S)
                if stopped():
                    raise OSError(errno.EINTR, "interrupted")
            self._busy.add(ino)

    def _run(self, ino: Ino, keep: int | None, stopped: Callable[[], bool]) -> Changed | None:
        require_unsealed(ino)
        attr = self._meta.getattr(ROOT_CALLER, ino)
        if not attr.flags & FLAG_ATTACHED:
            return None
        size = attr.size if keep is None else min(keep, attr.size)
        chunks = -(-size // CHUNK_BYTES)
        if chunks > CHUNKS_MAX:
            raise OSError(errno.EFBIG, f"an object of {size} bytes is not copied in one commit")
        self._meta.refresh_settings()  # a quota may just have been set
        self._require_space(ino, size)  # before a byte is copied
        try:
            found, get = self._objects.source(ino)
        except OSError as error:
            if error.errno == errno.ENODATA:
                return None  # another client was quicker
            raise
        ids = [self._meta.new_slice_id() for _ in range(chunks)]
        lengths = [min(CHUNK_BYTES, size - at * CHUNK_BYTES) for at in range(chunks)]
        slices = [
            Slice(0, slice_id, length, 0, length)
            for slice_id, length in zip(ids, lengths, strict=True)
        ]
        try:
            copier = ObjectCopier(self._runtime, self._blocks, self._uploads.submit, get, stopped)
            return self._copy(ino, found, copier, slices)
        finally:
            self._meta.give_up_slices(ids)

    def _copy(
        self,
        ino: Ino,
        found: AttachedObject,
        copier: ObjectCopier,
        slices: list[Slice],
    ) -> Changed | None:
        copier.copy(slices)
        ids = [piece.id for piece in slices]
        size = sum(piece.length for piece in slices)
        copied = CopiedObject(found, slices, size, partial(self._meta.sessions.fence_for, ids))
        # where this raises, the objects are left to gc: a commit whose answer was lost may have
        # made them part of the file
        with self._meta.slices.committing(ids):
            changed = self._meta.run(copy_up, ROOT_CALLER, ino, copied)
        if changed is None:
            copier.remove()
        return changed

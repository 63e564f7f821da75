"""write(2) refuses what the commit or the store would refuse, and takes what fits.

What there is room for is known as it was a moment ago, less what has been written here since and is
not committed. While that is more than half of it, nothing is asked. Otherwise what is pending is
committed first, and then the room is known exactly: so a disk would behave. Of what other mounts
write at the same time the commit learns, which keeps what fits, too.

The volume's limit and the disks behind the store hold for all that this mount writes; a quota is
asked for by file, and what other files below it have pending is left to the commit.

Called by `FileIO` and `FileRanges`. Threading: any method from any thread. `_judging` is held
across requests and while files are flushed; `_cond` is a leaf. Lock order: `_judging`, then those
of the writers, which are never held when one of these is taken.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from typing import Final

from fsclient.files.handles.open_files import OpenFile
from fsdata.files.upload_pool import UploadPool
from fsdata.format.geometry import chunk_ranges
from fsmeta.meta.meta import Meta
from fsmeta.runtime import Runtime
from fsmeta.slices import fitting, growth
from fsmeta.types import ROOT_CALLER, Ino, Slice, SliceId, StatFs, space_room

ROOM_TTL_S: Final = 1.0  # how old what is known of limits may be when a write is let pass
ROOMS_MAX: Final = 10_000  # owners and directories; then all are asked for anew
MARGIN_BYTES: Final = (
    1 << 20
)  # of a disk: for heads of objects, directories, and what is rounded up
ENTERING_S: Final = 1.0  # a writer that waits for memory is not waited for any longer
_Place = tuple[Ino, int, int]  # files of one directory and owner have the same quotas
DiskRoom = Callable[[], float]
"""How many bytes the disks behind the object store have free; `inf` where that is not known."""


def unlimited() -> float:
    """A store that says nothing of its room."""
    return inf


class QuotaPrecheck:
    """How much the volume, its disks and its quotas leave."""

    def __init__(self, meta: Meta, uploads: UploadPool, runtime: Runtime) -> None:
        self._meta = meta
        self._uploads = uploads
        self._clock = runtime.monotonic
        self.disks: DiskRoom = unlimited
        self._judging = runtime.lock()
        self._cond = runtime.condition()
        self._left = 0.0  # may be written until then without asking; guarded by _cond, as below
        self._until = 0.0
        self._entering = 0  # bytes let pass that no writer has yet
        self._rooms: dict[_Place, tuple[float, int | None]] = {}  # until when, how much

    # --- writes ----------------------------------------------------------------------------------

    def admit(self, file: OpenFile, offset: int, size: int) -> int:
        """How many of `size` bytes at `offset` may be written, at least one; then `entered`.

        Raises: ENOSPC, EDQUOT where there is no room for any.
        """
        if self._meta.has_quotas:
            size = self._within_quota(file, offset, size)
        if self._is_limited() and not self._take(size):
            size = self._judge(file, offset, size)
        return size

    def entered(self, size: int) -> None:
        """So many bytes that were admitted are a writer's by now, or will not be."""
        if self._entering:
            with self._cond:
                self._entering = max(0, self._entering - size)
                if not self._entering:
                    self._cond.notify_all()

    def require_space(self, ino: Ino, size: int) -> None:
        """Raises: ENOSPC, EDQUOT where volume, disks or quotas have no room for `size` bytes in a
        file, wherever in it those lie that it has.
        """
        if self._is_limited() or self._meta.has_quotas:
            with self._judging:
                self._require_room(ino, size)

    @contextmanager
    def reserving(self, ino: Ino, size: int) -> Iterator[None]:
        """Have `size` bytes of a file reserved inside, by a commit that is exact.

        What has been admitted is committed first where both might not fit, and what is admitted
        from then on finds what is left.
        Raises: ENOSPC, EDQUOT where volume, disks or quotas have no room, wherever in the file
        those bytes lie that it has.
        """
        if not self._is_limited() and not self._meta.has_quotas:
            yield
            return
        with self._judging:
            self._require_room(ino, size)
            with self._cond:
                self._left = 0.0
                self._entering += size
        try:
            yield
        finally:
            self._rooms.clear()
            self.entered(size)

    def _require_room(self, ino: Ino, size: int) -> None:
        """Raises: ENOSPC, EDQUOT. The caller holds `_judging`."""
        space, disk = self._ask()
        room = self._meta.free_space(ino) if self._meta.has_quotas else None
        pending = self._entering + self._uploads.pending_bytes()
        if pending and pending + size > min(space, disk, inf if room is None else room):
            self._settle()
            space, disk = self._ask()
            room = self._meta.free_space(ino) if self._meta.has_quotas else None
        growth = size - self._meta.getattr(ROOT_CALLER, ino).space
        if min(space, disk) < growth:
            raise OSError(errno.ENOSPC, "the volume or its disk is full")
        if room is not None and room < growth:
            raise OSError(errno.EDQUOT, "a quota is full")

    def statfs(self, ino: Ino) -> StatFs:
        """statfs(2): of limits and disks the one that leaves least."""
        usage = self._meta.statfs(ino)
        free = self.disks()
        if free >= _free(usage):
            return usage
        return usage._replace(space_limit=max(1, usage.space_used + int(free)))

    # --- the volume and its disks ----------------------------------------------------------------

    def _is_limited(self) -> bool:
        return self._meta.format.capacity != 0 or self.disks is not unlimited

    def _take(self, size: int) -> bool:
        """Let `size` bytes pass if that is within what is known."""
        with self._cond:
            if size > self._left or self._clock() > self._until:
                return False
            self._left -= size
            self._entering += size
            return True

    def _judge(self, file: OpenFile, offset: int, size: int) -> int:
        """`admit` by what the volume and its disks have room for now. Raises: ENOSPC."""
        with self._judging:
            if self._take(size):
                return size  # another thread has asked
            with self._cond:
                self._left = 0.0  # the others wait for `_judging`
                pending = self._entering
            pending += self._uploads.pending_bytes()
            space, disk = self._ask()
            if 2 * (pending + size) > min(space, disk):
                if pending:
                    self._settle()
                    space, disk = self._ask()
                pending = 0
                size = self._fitting(file, offset, size, space, disk)
            with self._cond:
                self._left = max(0.0, min(space, disk) / 2 - pending - size)
                self._until = self._clock() + ROOM_TTL_S
                self._entering += size
        if not size:
            raise OSError(errno.ENOSPC, "the volume or its disk is full")
        return size

    def _ask(self) -> tuple[float, float]:
        """What the volume's limit and its disks leave."""
        space = _free(self._meta.statfs()) if self._meta.format.capacity else inf
        return space, self.disks() - MARGIN_BYTES

    def _settle(self) -> None:
        """Have all committed that this mount has let pass."""
        with self._cond:
            deadline = self._clock() + ENTERING_S
            while self._entering and (left := deadline - self._clock()) > 0:
                self._cond.wait(left)
        self._uploads.flush_dirty()

    def _fitting(
        self, file: OpenFile, offset: int, size: int, space: float, disk: float = inf
    ) -> int:
        """How many of `size` bytes fit, where a limit leaves `space` and the disks `disk`.

        What is written over takes no space of a limit, but on a disk.
        """
        size = int(max(0, min(size, disk)))
        if size <= space:
            return size
        room = space_room(self._meta.getattr(ROOT_CALLER, file.ino), space)
        taken = 0
        for index, begin, length in chunk_ranges(offset, size):
            old, new = file.slices(index), Slice(begin, SliceId(0), length, 0, length)
            fits = fitting(old, new, room)
            taken += fits
            if fits < length:
                break
            room -= growth(old, new)
        return taken

    # --- quotas ----------------------------------------------------------------------------------

    def _within_quota(self, file: OpenFile, offset: int, size: int) -> int:
        """How many of `size` bytes the quotas of a file leave room for. Raises: EDQUOT."""
        writer = file.writer
        pending, end = (writer.pending_bytes, writer.end) if writer is not None else (0, 0)
        growth = min(pending + size, max(offset + size, end) - file.length)
        if growth <= 0:
            return size
        attr = self._meta.getattr(ROOT_CALLER, file.ino)
        place = attr.parent or file.ino, attr.uid, attr.gid
        now = self._clock()
        until, room = self._rooms.get(place, (0.0, None))
        if now >= until or (room is not None and 2 * growth > room):
            room = self._ask_quota(file, place)
        if room is None or 2 * growth <= room:
            return size
        if writer is not None and pending:
            writer.flush_idle(wait=True)
            room = self._ask_quota(file, place)
        taken = size if room is None else self._fitting(file, offset, size, room)
        if not taken:
            raise OSError(errno.EDQUOT, "a quota is full")
        return taken

    def _ask_quota(self, file: OpenFile, place: _Place) -> int | None:
        room = self._meta.free_space(file.ino)
        if len(self._rooms) >= ROOMS_MAX:
            self._rooms.clear()
        self._rooms[place] = self._clock() + ROOM_TTL_S, room
        return room


def _free(usage: StatFs) -> float:
    """How much space a limit leaves."""
    return usage.space_limit - usage.space_used if usage.space_limit else inf

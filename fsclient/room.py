"""write(2) refuses early what the commit would refuse: the volume or a quota is full.

For a quota it never refuses what the commit would take: growth is judged by the smaller of two
estimates, and a refusal asks the store anew first. For the volume all that is written counts as
growth, above what was used a second ago at the most. What it lets pass too much, the commit
refuses.

Called by `FileIO` and `FileRanges`. Threading: any method from any thread; entries are replaced
whole.
"""

from __future__ import annotations

import errno
from typing import Final

from fsclient.open_files import OpenFile
from fsdata.budget import Budget
from fsmeta.engine import Meta
from fsmeta.runtime import Runtime
from fsmeta.types import ROOT_CALLER, Ino, StatFs

USAGE_TTL_S: Final = 1.0  # how old the volume's usage may be when a write is measured against it
ROOM_TTL_S: Final = 1.0  # how old what is known of a quota may be when a write is let pass
ROOMS_MAX: Final = 10_000  # owners and directories; then all are asked for anew
_Place = tuple[Ino, int, int]  # files of one directory and owner have the same quotas


class Room:
    """How much the volume leaves, and quotas: by where files are and whose they are."""

    def __init__(self, meta: Meta, budget: Budget, runtime: Runtime) -> None:
        self._meta = meta
        self._budget = budget
        self._clock = runtime.monotonic
        self._usage = StatFs(0, 0, 0, 0)  # replaced whole
        self._usage_at = 0.0
        self._rooms: dict[_Place, tuple[float, int | None]] = {}  # until when, how much

    def require(self, file: OpenFile, offset: int, size: int) -> None:
        """Raises: ENOSPC, EDQUOT where `size` bytes more at `offset` can't be committed."""
        if self._meta.format.capacity:
            self._require_space(size)
        if self._meta.has_quotas:
            self._require_quota(file, offset, size)

    def require_space(self, size: int) -> None:
        """Raises: ENOSPC where the volume has no room for so many bytes more."""
        if self._meta.format.capacity:
            self._require_space(size)

    def _require_space(self, size: int) -> None:
        now = self._clock()
        if now - self._usage_at > USAGE_TTL_S:
            self._usage, self._usage_at = self._meta.statfs(), now
        pending = self._budget.gauges().writing
        if self._usage.space_used + pending + size > self._usage.space_limit:
            self._usage_at = 0.0
            raise OSError(errno.ENOSPC, "the volume is full")

    def _require_quota(self, file: OpenFile, offset: int, size: int) -> None:
        writer = file.writer
        pending, end = (writer.pending_bytes, writer.end) if writer is not None else (0, 0)
        growth = min(pending + size, max(offset + size, end) - file.length)
        if growth <= 0:
            return
        attr = self._meta.getattr(ROOT_CALLER, file.ino)
        place = attr.parent or file.ino, attr.uid, attr.gid
        now = self._clock()
        until, room = self._rooms.get(place, (0.0, None))
        if now >= until or (room is not None and growth > room):
            room = self._ask(file, place)
        if room is not None and growth > room:
            raise OSError(errno.EDQUOT, "a quota is full")

    def _ask(self, file: OpenFile, place: _Place) -> int | None:
        room = self._meta.free_space(file.ino)
        if len(self._rooms) >= ROOMS_MAX:
            self._rooms.clear()
        self._rooms[place] = self._clock() + ROOM_TTL_S, room
        return room

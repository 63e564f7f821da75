"""The slices of one file that are not committed, in order of creation, and where they end.

Pure bookkeeping for `FileWriter`, whose lock is held around every call. A write goes into a slice
that is open; a sealed one takes no more. Appends have a place for readers; their commit gives them
the final one, so the file's end is counted again when some of them are committed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fsdata.files.write_buffer import PendingBlock, PendingSlice
from fsmeta.types import FILE_SIZE_MAX, SliceId

OPEN_MAX: Final = 16  # unsealed slices of a file: as many streams into it stay whole
FIND_MAX: Final = OPEN_MAX  # slices looked at for one that a write fits in: the latest are open


class PendingSlices:
    """Where the pending writes of one file are."""

    def __init__(self) -> None:
        self.all: list[PendingSlice] = []  # in order of creation
        self.by_id: dict[SliceId, PendingSlice] = {}
        self.end = 0  # where in the file the last of them ends; 0 where there are none
        self.append_from = FILE_SIZE_MAX  # where the appends among them begin
        self.misplaced = False  # appends are not where readers would look for them
        self._open = 0  # how many are not sealed
        self._moved_to: int | None = None  # the size after other clients' appends

    def find(self, chunk: int, begin: int, end: int, append: bool) -> PendingSlice | None:
        """The slice that can take a write, given that nothing newer may be hidden by it."""
        for piece in self.all[: -FIND_MAX - 1 : -1]:
            if piece.chunk != chunk:
                continue
            if piece.append is append and piece.accepts(begin):
                return piece
            if piece.pos < end and begin < piece.end:
                return None
        return None

    def add(self, piece: PendingSlice) -> None:
        """A slice takes writes from now on."""
        self.all.append(piece)
        self.by_id[piece.id] = piece
        self._open += 1
        if piece.append:
            self.append_from = min(self.append_from, piece.file_end)

    def insert(self, at: int, piece: PendingSlice) -> None:
        """A part of a sealed slice becomes a slice of its own."""
        assert piece.sealed, "else it has to be counted"
        self.all.insert(at, piece)
        self.by_id[piece.id] = piece

    def seal(self, piece: PendingSlice) -> list[PendingBlock]:
        """No more into this slice; the block that is to be uploaded now, if any."""
        if piece.sealed:
            return []
        self._open -= 1
        return piece.seal()

    def seal_oldest(self) -> list[PendingBlock]:
        """Make room for one more open slice."""
        if self._open < OPEN_MAX:
            return []
        return self.seal(next(piece for piece in self.all if not piece.sealed))

    def seal_all(self) -> list[PendingBlock]:
        """No more into any slice."""
        return [block for piece in self.all for block in self.seal(piece)]

    def complete(self, limit: int) -> list[PendingSlice]:
        """The first slices, at most `limit`, that are sealed and stored."""
        count = 0
        for piece in self.all[:limit]:
            if not piece.sealed or piece.unstored:
                break
            count += 1
        return self.all[:count]

    def complete_to(self, last: SliceId) -> list[PendingSlice]:
        """The slices as far as that one, all of which are sealed and stored."""
        if last not in self.by_id:
            return []
        ready = self.complete(len(self.all))
        return ready[: 1 + [piece.id for piece in ready].index(last)]

    def relocated(self, size: int) -> None:
        """Appends of the commit under way go elsewhere than readers were told; it makes the file
        `size` bytes long."""
        self._moved_to = size

    def committed(self, batch: Sequence[PendingSlice]) -> int:
        """The first slices are committed; bytes of the budget that are free now."""
        del self.all[: len(batch)]
        held = sum([self.by_id.pop(piece.id).held for piece in batch if piece.id in self.by_id])
        if self.append_from < FILE_SIZE_MAX:
            self._appends_left()
        if not self.misplaced:
            self.end = max([piece.file_end for piece in self.all], default=0)
        return held

    def _appends_left(self) -> None:
        """Appends have been committed, perhaps all."""
        left = [piece for piece in self.all if piece.append]
        self.append_from = min([piece.file_begin for piece in left], default=FILE_SIZE_MAX)
        self.misplaced = bool(left) and (self.misplaced or self._moved_to is not None)
        if self._moved_to is not None:
            others = [piece.file_end for piece in self.all if not piece.append]
            self.end = max([self._moved_to, *others]) + sum([piece.left for piece in left])
            self._moved_to = None

    def clear(self) -> None:
        """Forget all."""
        self.all.clear()
        self.by_id.clear()
        self.end = 0

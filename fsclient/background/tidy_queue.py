"""What commits leave to be tidied: chunks that may be scattered, and small files to be packed.

`SliceCommitter` reports each commit here, or the publisher of a mount that writes back; the worker
of `Background` takes what waits. Made before both.

Threading: any method from any thread. `cond` guards the fields, and what else the worker waits for.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from fsmeta.ops.data.packing import Small
from fsmeta.runtime import Runtime
from fsmeta.types import Ino, Slice, SliceKind

COMMITS_BEFORE_LOOK: Final = 16  # commits to one chunk before its slices are counted
WATCHED_CHUNKS_MAX: Final = 20_000
CHUNKS_MAX: Final = 1_000  # that wait; those beyond are looked at after later commits
FILES_MAX: Final = 50_000  # that wait, 300 bytes each; the oldest are left as they are
MEMBERS_MIN: Final = 4  # of a segment; fewer save too few requests for what packing costs


class WaitingFile(NamedTuple):
    """The slice of a small file, and since when it waits."""

    piece: Slice
    since: float


class TidyQueue:
    """See the module."""

    def __init__(self, runtime: Runtime, below: int = 0, block_bytes: int = 0) -> None:
        """Files of at most `below` bytes are small, if several fit into a block; 0: none is."""
        self._monotonic = runtime.monotonic
        self._below = min(below, block_bytes // MEMBERS_MIN)
        self.cond = runtime.condition()
        self._commits: dict[tuple[Ino, int], int] = {}  # guarded by cond, as all below
        self.scattered: deque[tuple[Ino, int]] = deque(maxlen=CHUNKS_MAX)
        self.files: OrderedDict[Ino, WaitingFile] = OrderedDict()  # oldest first

    def committed(self, ino: Ino, index: int, batch: Sequence[tuple[int, Slice]]) -> None:
        """A chunk has got new slices, those of `batch` that went there."""
        key = (ino, index)
        with self.cond:
            count = self._commits.get(key, 0) + 1
            if count < COMMITS_BEFORE_LOOK:
                if len(self._commits) >= WATCHED_CHUNKS_MAX:
                    self._commits.clear()
                self._commits[key] = count
            else:
                self._commits.pop(key, None)
                if key not in self.scattered:
                    self.scattered.append(key)
                    self.cond.notify()
        if index == 0 and len(batch) == 1 and batch[0][0] == 0 and self.is_single(batch[0][1]):
            self._enter(ino, batch[0][1])

    def look_again(self, ino: Ino, index: int, commits: int) -> None:
        """Looking takes longer the more slices there are: do so after as many more commits."""
        if commits > COMMITS_BEFORE_LOOK:
            with self.cond:
                if len(self._commits) < WATCHED_CHUNKS_MAX:
                    self._commits[ino, index] = COMMITS_BEFORE_LOOK - commits

    def is_single(self, piece: Slice) -> bool:
        """Whether this slice of a first chunk makes a file a small one that is not packed."""
        single = piece.kind is SliceKind.BLOCKS  # else it has come packed
        return single and piece.pos == 0 and 0 < piece.length <= self._below

    def again(self, files: Iterable[Small]) -> None:
        """What is left of a segment, or could not be packed yet."""
        if self._below:
            for each in files:
                self._enter(each.ino, each.piece)

    def _enter(self, ino: Ino, piece: Slice) -> None:
        with self.cond:
            self.files[ino] = WaitingFile(piece, self._monotonic())
            self.files.move_to_end(ino)
            if len(self.files) > FILES_MAX:
                self.files.popitem(last=False)

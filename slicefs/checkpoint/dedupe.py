"""A file of a save takes what did not change from the same file of an earlier step.

The stream is cut into pieces of `PIECE_BYTES`, and each is digested. A piece whose digest the
earlier file has at the same place is not written: the store shows the earlier bytes in the new
file, which in a volume, and on a mount of one, changes metadata alone. Tensors of one size lie at
one place in each step, so those that did not change cost nothing.

Called by `Saving`. A new step shares the fate of those bytes: where they are damaged, both are, and
reading says so. Threading: a file is written by one thread.
"""

from __future__ import annotations

import hashlib
from typing import Final, NamedTuple

from slicefs.checkpoint.manifest import PIECE_BYTES, FileEntry
from slicefs.stores.tree import Buffer, RangeWriter

_DIGEST_BYTES: Final = 16


class DedupeBase(NamedTuple):
    """A file of an earlier step."""

    path: str  # in the tree
    entry: FileEntry


class DedupingWriter:
    """Writes to `writer`, or has it show a piece of `base`."""

    def __init__(self, writer: RangeWriter, base: DedupeBase | None) -> None:
        self._writer = writer
        self._known: tuple[bytes, ...] = ()
        if base is not None and writer.begin_copies(base.path, base.entry.size):
            self._known = base.entry.pieces
        self._held = bytearray()  # a piece that is not full
        self._same = 0  # pieces before the current one that the base has, and are not copied yet
        self.pieces: list[bytes] = []
        self.reused_bytes = 0

    def write(self, data: memoryview) -> None:
        """Take all of `data`."""
        while len(data):
            if not self._held and len(data) >= PIECE_BYTES:
                piece, data = data[:PIECE_BYTES], data[PIECE_BYTES:]
                self._take(piece)
                continue
            room = PIECE_BYTES - len(self._held)
            self._held += data[:room]
            data = data[room:]
            if len(self._held) == PIECE_BYTES:
                self._flush()

    def _flush(self) -> None:
        piece, self._held = self._held, bytearray()
        self._take(piece)

    def _take(self, piece: Buffer) -> None:
        digest = hashlib.blake2b(piece, digest_size=_DIGEST_BYTES).digest()
        index = len(self.pieces)
        self.pieces.append(digest)
        if index < len(self._known) and self._known[index] == digest:
            self._same += len(piece)
            return
        self._copy(index * PIECE_BYTES)
        self._writer.write(piece)

    def _copy(self, end: int) -> None:
        """Show what the base has before `end`, as far as it is not there yet."""
        if self._same:
            self._writer.copy_range(end - self._same, end)
            self.reused_bytes += self._same
            self._same = 0

    def finish(self) -> None:
        """Everything was written."""
        size = len(self.pieces) * PIECE_BYTES
        if self._held:
            size += len(self._held)
            self._flush()
        self._copy(size)

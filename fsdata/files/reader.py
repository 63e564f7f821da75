"""Reading a file: its slices' visible view, put together from buffers, cache and store.

One `FileReader` per open handle, because read-ahead is the handle's. It asks a callable for the
slices of a chunk: what is committed, cached or pending is the caller's business. The answer is a
list of views: nothing is copied, holes are views of one page of zeros.

The caller's `slices(chunk)` must take the writer's `pending` *before* it looks at the committed
slices. A slice committed in between is then listed twice, which is harmless; the other way round it
could be missed.

Threading: one lock for the window, the runs and the last view; not held across store I/O.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from typing import TypeAlias

from fsdata.blocks.blocks import BlockStore
from fsdata.blocks.read_plan import RANDOM, STREAM, Access, range_reads
from fsdata.files.prefetch import Prefetcher
from fsdata.files.random_readahead import RandomReadahead
from fsdata.files.readahead import Readahead, Ticket
from fsdata.format.geometry import chunk_ranges
from fsmeta.errors import ObjectMissing
from fsmeta.runtime import Runtime
from fsmeta.slices import ChunkView, Extent, resolve
from fsmeta.types import CHUNK_BYTES, Slice, SliceId

Buffer: TypeAlias = bytes | bytearray | memoryview
Slices: TypeAlias = Callable[[int], Sequence[Slice]]
Peek: TypeAlias = Callable[[SliceId, int, int], "list[Buffer] | None"]

ZEROS_BYTES = 1 << 20  # the largest piece of zeros: as long as the kernel's largest read
STALE_RETRIES = 3  # compaction and writing both move bytes; neither can overtake us so often


def _in_place(data: bytes) -> memoryview:
    """`data`, with all of its pages in place: a process that is being killed gets none any more,
    and an answer that the kernel can't copy is EIO for its reader."""
    view = memoryview(data)
    bytes(view[:: mmap.PAGESIZE]), view[-1]  # which may be one page further
    return view


_ZEROS = _in_place(bytes(ZEROS_BYTES))


def peek_nothing(_slice_id: SliceId, _off: int, _length: int) -> list[Buffer] | None:
    """For files that this client does not write."""
    return None


class FileReader:
    """Reads of one open handle."""

    def __init__(
        self,
        runtime: Runtime,
        blocks: BlockStore,
        slices: Slices,
        peek: Peek = peek_nothing,
        prefetcher: Prefetcher | None = None,
    ) -> None:
        self._blocks = blocks
        self._slices = slices
        self._peek = peek
        self._prefetcher = prefetcher
        self._lock = runtime.lock()
        self._window = Readahead()  # guarded by _lock
        self._runs = RandomReadahead(blocks.block_bytes)  # guarded by _lock
        self._seen: list[Slice] = []  # of the last chunk; guarded by _lock, as is _view
        self._view = ChunkView()  # of _seen

    def read(self, offset: int, size: int, length: int) -> list[Buffer]:
        """Bytes from `offset` on of a file of `length` bytes: `size` of them or up to its end.

        Raises: ObjectMissing, ObjectDamaged, Unavailable.
        """
        size = min(size, length - offset)
        if size <= 0:
            return []
        with self._lock:
            sequential = self._window.note(offset, size, length)
            more = self._runs.note(offset, size)
            ahead = self._window.advance(length) if self._prefetcher else []
            ticket, strided = self._window.ticket, self._window.is_strided
        for begin, end in ahead:
            self._read_ahead(begin, end, ticket, strided)
        out: list[Buffer] = []
        for chunk, pos, part in chunk_ranges(offset, size):
            out += self._read_chunk(chunk, pos, part, sequential, more)
        return out

    def close(self) -> None:
        """Stop reading ahead."""
        with self._lock:
            self._window.ticket.live = False

    def _shown(self, chunk: int, pos: int, end: int) -> list[Extent]:
        """What shows at `pos..end` of a chunk: whole segments, with the holes before them."""
        slices = self._slices(chunk)
        if len(slices) <= 1:
            return resolve(slices)
        with self._lock:
            laid = len(self._seen)
            # mostly there are more slices than before: those are laid over the view that there is
            if laid > len(slices) or slices[:laid] != self._seen:
                self._view, laid = ChunkView(), 0
            for piece in slices[laid:]:
                self._view.lay(piece)
            self._seen = list(slices)
            return self._view.between(pos, end)

    def _read_chunk(self, chunk: int, pos: int, size: int, whole: bool, more: int) -> list[Buffer]:
        """`size` bytes at `pos` of a chunk. Objects that went away make us look at it again."""
        shown = self._shown(chunk, pos, pos + size)
        for _ in range(STALE_RETRIES):
            try:
                return self._read_shown(shown, pos, size, whole, more)
            except ObjectMissing:
                fresh = self._shown(chunk, pos, pos + size)
                if fresh == shown:
                    raise
                shown = fresh
        return self._read_shown(shown, pos, size, whole, more)

    def _read_shown(
        self, shown: list[Extent], pos: int, size: int, whole: bool, more: int
    ) -> list[Buffer]:
        out: list[Buffer] = []
        access = STREAM if whole else RANDOM
        block_bytes, read = self._blocks.block_bytes, self._blocks.read
        for part in range_reads(shown, pos, size, access, more, block_bytes):
            if isinstance(part, int):
                _add_zeros(out, part)
                continue
            (slice_id, block), _, begin, end, _, _ = part
            pending = self._peek(slice_id, block * block_bytes + begin, end - begin)
            if pending is None:
                out.append(read(part))
            else:
                out += pending
        return out

    def _read_ahead(self, begin: int, end: int, ticket: Ticket, strided: bool) -> None:
        """Ask for the blocks of file range `begin..end`, as far as the slices are known.

        `strided`: for that range alone, not for all of the blocks it is in.
        """
        assert self._prefetcher is not None, "checked by the caller"
        access = Access.STRIDE if strided else Access.AHEAD
        block_bytes = self._blocks.block_bytes
        for chunk, pos, size in chunk_ranges(begin, end - begin):
            shown = self._shown(chunk, pos, pos + size)
            at = chunk * CHUNK_BYTES + pos
            for part in range_reads(shown, pos, size, access, 0, block_bytes):
                if isinstance(part, int):
                    at += part
                    continue
                at += part.end - part.begin
                slice_id, block = part.key
                if self._peek(slice_id, block * block_bytes + part.begin, 1) is not None:
                    continue
                if not self._prefetcher.submit(part, ticket, at):
                    return


def _add_zeros(out: list[Buffer], size: int) -> None:
    """Append `size` bytes of zeros."""
    while size > 0:
        part = min(size, ZEROS_BYTES)
        out.append(_ZEROS[:part])
        size -= part


assert CHUNK_BYTES % ZEROS_BYTES == 0, "a hole of a whole chunk is whole pieces"

"""A small data stack over memory: everything a file needs but the metadata, which is a dict."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from errno import EDQUOT

from fsdata.blocks.blocks import BlockStore
from fsdata.blocks.layout import BlockLayout
from fsdata.files.prefetch import Prefetcher
from fsdata.files.reader import FileReader
from fsdata.files.upload_pool import UploadPool
from fsdata.files.write_services import WriteServices
from fsdata.files.writer import FileWriter
from fsdata.format.block_v1 import Codec
from fsdata.format.encryption import Sealer
from fsdata.objects.mem import MemObjects
from fsdata.resources.block_cache import BlockCache
from fsdata.resources.memory_budget import BUFFER_BYTES_MIN, MemoryBudget
from fsdata.resources.worker_pool import WorkerPool
from fsmeta.runtime import SystemRuntime
from fsmeta.types import CHUNK_BYTES, Ino, Slice, SliceId
from tests.fsdata.faults import FaultyObjects

BLOCK = 128 << 10  # small blocks make many of them out of little data


class Sink:
    """Metadata: the slices of each chunk, checked against the store when they are committed."""

    def __init__(self, objects: FaultyObjects) -> None:
        self._objects = objects
        self.ids = 0
        self.given_up: list[SliceId] = []
        self.chunks: dict[tuple[Ino, int], list[Slice]] = {}
        self.lengths: dict[Ino, int] = {}
        self.mtimes: list[int] = []
        self.order: list[SliceId] = []
        self.commits = 0
        self.errors: list[Exception] = []  # the next commits raise these
        self.room: int | None = None  # bytes that a limit lets be committed; None: any
        self.on_commit: Callable[[], object] = list

    def new_slice_id(self) -> SliceId:
        self.ids += 1
        return SliceId(self.ids)

    def give_up_slices(self, ids: Iterable[SliceId]) -> None:
        self.given_up += ids

    def fitting(self, ino: Ino, batch: Sequence[tuple[int, Slice]]) -> int:
        del ino
        size = sum(piece.length for _, piece in batch)
        return size if self.room is None else min(self.room, size)

    def commit(
        self, ino: Ino, batch: Sequence[tuple[int, Slice]], length: int, mtime_ns: int
    ) -> None:
        if self.errors:
            raise self.errors.pop(0)
        size = sum(piece.length for _, piece in batch)
        if self.room is not None:
            if size > self.room:
                raise OSError(EDQUOT, "quota")
            self.room -= size
        self.commits += 1
        stored = "\n".join(info.key for info in self._objects.inner.list(""))
        for index, piece in batch:
            chunk = index
            if index < 0:  # appends
                end = self.lengths.get(ino, 0)
                chunk, piece = 0, piece._replace(pos=end)
                length = max(length, end + piece.length)
                self.lengths[ino] = end + piece.length
            for block in range(-(-piece.size // BLOCK)):  # blocks first, metadata last
                assert f"/{piece.id}_{block}_" in stored, (piece, block)
            assert piece.end <= CHUNK_BYTES, piece
            self.chunks.setdefault((ino, chunk), []).append(piece)
            self.order.append(piece.id)
        self.lengths[ino] = max(length, self.lengths.get(ino, 0))
        self.mtimes.append(mtime_ns)
        self.on_commit()


class World:
    """One mount's data side."""

    def __init__(
        self,
        codec: Codec = Codec.NONE,
        limit: int = BUFFER_BYTES_MIN,
        idle_s: float = 3600.0,
        threads: int = 2,
        locked: bool = False,
        file_bytes_max: int | None = None,
    ) -> None:
        self.runtime = SystemRuntime()
        self.objects = FaultyObjects(self.runtime, MemObjects(self.runtime))
        self.budget = MemoryBudget(self.runtime, limit)
        self.sink = Sink(self.objects)
        self.codec = codec
        self.cache = BlockCache(self.runtime, self.budget, BLOCK)
        self.sealer = Sealer(self.runtime, bytes(32)) if locked else None
        self.blocks = self._blocks(self.cache)
        self.pool = UploadPool(
            self.runtime, self.budget, threads, idle_s, file_bytes_max=file_bytes_max
        )
        self.side = WriteServices(self.runtime, self.blocks, self.budget, self.pool, self.sink)
        self.readers = WorkerPool(self.runtime, "ahead", 2)

    def _blocks(self, cache: BlockCache) -> BlockStore:
        layout = BlockLayout(self.codec, BLOCK, self.sealer)
        return BlockStore(self.runtime, self.objects, cache, layout)

    def writer(self, ino: int = 7) -> FileWriter:
        return FileWriter(self.side, Ino(ino))

    def length(self, writer: FileWriter, ino: int = 7) -> int:
        """How long a file is, with what `writer` has pending."""
        return max(writer.end, self.sink.lengths.get(Ino(ino), 0))

    def reader(self, ino: int = 7, writer: FileWriter | None = None) -> FileReader:
        """A reader of what is committed and what `writer` has pending."""

        def slices(chunk: int) -> list[Slice]:
            pending = [] if writer is None else writer.pending(chunk)
            return self.sink.chunks.get((Ino(ino), chunk), []) + pending

        ahead = Prefetcher(self.readers, self.budget, self.blocks)
        if writer is None:
            return FileReader(self.runtime, self.blocks, slices, prefetcher=ahead)
        return FileReader(self.runtime, self.blocks, slices, writer.peek, ahead)

    def content(self, ino: int = 7) -> bytes:
        """What another mount sees of the file."""
        cache = BlockCache(self.runtime, MemoryBudget(self.runtime, BUFFER_BYTES_MIN), BLOCK)
        blocks = self._blocks(cache)
        length = self.sink.lengths.get(Ino(ino), 0)
        chunks = self.sink.chunks
        reader = FileReader(self.runtime, blocks, lambda chunk: chunks.get((Ino(ino), chunk), []))
        return b"".join(reader.read(0, length, length))

    def close(self) -> None:
        """End the threads; nothing may be left in write buffers."""
        self.pool.close()
        self.readers.close()
        assert self.budget.gauges().writing == 0
        assert self.budget.gauges().ahead == 0
        assert self.pool.dirty() == 0
        assert self.pool.uploads() == 0


def pattern(size: int, seed: int = 1) -> bytes:
    """`size` bytes without structure, the same for each seed."""
    state = (seed * 2654435761 + 12345) & 0xFFFFFFFF
    out = bytearray()
    while len(out) < size:
        state = (state * 1664525 + 1013904223) & 0xFFFFFFFF
        out += state.to_bytes(4, "little") * 3 + (state >> 7).to_bytes(4, "big")
    return bytes(out[:size])

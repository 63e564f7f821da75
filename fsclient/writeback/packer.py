"""Packing small files before they are stored: docs/design/packing.

A mount that writes back has small files in its journal before any other client can see them. So
their bytes go to the store as one object, a segment, and the published slices are parts of it. The
segment is open (`fsmeta/ops/data/segments`) until the last of them is published, and their staged
blocks stay on the disk until that survives a loss of power: a client that dies before leaves a
journal that names no segments but has all the data.

Threading: `pack` from the threads that upload, `held` under the lock of `StagedStore`,
`writeback/published_view` and `voided` from the publisher, `reap` from any; one lock, `_lock`, a
leaf, and `_reaping`, which is only tried for and held while the stores are asked.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Final, NamedTuple

from fsclient.background.tidy_queue import MEMBERS_MIN
from fsclient.files.data_services import DataServices
from fsclient.files.handles.open_files import OpenFiles
from fsdata.format.block_v1 import decode
from fsdata.format.object_keys import parse_key
from fsdata.resources.block_cache import BlockCache
from fsdata.staging.coalesce import Coalescer
from fsdata.staging.staged_objects import StagedObjects
from fsmeta.errors import ObjectDamaged, ObjectMissing, StoreError
from fsmeta.meta.meta import Meta
from fsmeta.ops.data.packing import part
from fsmeta.runtime import Runtime
from fsmeta.schema import keys as schema, slices
from fsmeta.schema.segments import OpenSegment
from fsmeta.store.contract import Store
from fsmeta.store.writes import Put
from fsmeta.types import Slice, SliceKind
from fsmeta.writeback.entries.intents import WriteIntent
from fsmeta.writeback.entries.log_entry import LogEntry, Moved
from fsmeta.writeback.held_commits import HeldCommits
from fsmeta.writeback.overlay.overlay import exchanged

log = logging.getLogger(__name__)

READS_END_S: Final = 5.0  # for reads of what was staged; later ones look at the file once more


class _Member(NamedTuple):
    """A file in a segment that is being made."""

    key: str
    entry: LogEntry
    piece: Slice  # what it lists until then
    off: int


class _Pack:
    """A segment, and the entries that are yet to be published."""

    __slots__ = ("closed", "keys", "segment", "waiting")

    def __init__(self, segment: OpenSegment) -> None:
        self.segment = segment
        self.waiting: dict[str, LogEntry] = {}
        self.keys: list[str] = []  # of those that are published
        self.closed = False


class PackedLayers(NamedTuple):
    """What is held back by a mount, and its stores."""

    held: HeldCommits
    inner: Store
    objects: StagedObjects


class SmallFiles(NamedTuple):
    """What is packed: files of at most `below` bytes, most of which are in `memory` still."""

    memory: BlockCache
    below: int


class StagedPacker:
    """Packs what waits in the journal of one mount."""

    def __init__(
        self,
        meta: Meta,
        data: DataServices,
        files: OpenFiles,
        layers: PackedLayers,
        runtime: Runtime,
        small: SmallFiles,
        finished: Callable[[], object],
    ) -> None:
        """`finished` is told when there is something to reap."""
        self._meta = meta
        self._blocks = data.blocks
        self._epoch = data.epoch
        self._files = files
        self._held, self._inner, self._objects = layers
        self._memory = small.memory
        self._tell_finished = finished
        self._below = min(small.below, data.blocks.block_bytes // MEMBERS_MIN)
        self._lock = runtime.lock()
        self._reaping = runtime.lock()
        self._entries: dict[str, LogEntry] = {}  # by object; guarded by _lock, as below
        self._packs: dict[int, _Pack] = {}  # of which not all is published
        self._finished: list[_Pack] = []
        self.packed = 0  # files
        self.segments = 0

    # --- what StagedStore and StagedObjects say and ask ------------------------------------------

    def held(self, entry: LogEntry) -> None:
        """An entry waits; if it makes a file a small one, that can be packed."""
        intent = entry.intent
        if isinstance(intent, WriteIntent) and len(entry.needs) == len(intent.batch) == 1:
            ((index, piece),) = intent.batch
            whole = piece.pos == piece.off == 0 and piece.length == piece.size
            if index == 0 and whole and piece.kind is SliceKind.BLOCKS:
                with self._lock:
                    self._entries[entry.needs[0].key] = entry

    def size_of(self, key: str) -> int:
        """See `Coalescer`."""
        name = parse_key(key)
        small = name is not None and name.block == 0 and name.length <= self._below
        return name.length if name is not None and small else 0

    def pack(self, keys: Sequence[str]) -> Collection[str]:
        """See `Coalescer`."""
        with self._lock:
            known = [(key, self._entries[key]) for key in keys if key in self._entries]
        if len(known) < MEMBERS_MIN:
            return ()
        block = self._memory.take_spare() or bytearray(self._blocks.block_bytes)
        try:
            return self._pack_into(memoryview(block), known)
        finally:
            self._memory.pass_by(block)

    def _pack_into(
        self, block: memoryview, known: Sequence[tuple[str, LogEntry]]
    ) -> Collection[str]:
        """As `pack`, of objects that entries name."""
        found: list[_Member] = []
        off = 0
        for key, entry in known:
            piece = entry.piece
            if self._read(key, piece, block[off : off + piece.length]):
                found.append(_Member(key, entry, piece, off))
                off += piece.length
        return () if len(found) < MEMBERS_MIN else self._pack(found, block[:off])

    def make_room(self) -> None:
        """See `Coalescer`."""
        self._objects.flush_now()
        self.reap()

    def _read(self, key: str, piece: Slice, into: memoryview) -> bool:
        """Bring what was written; False where it can't be had: its own upload reports that."""
        written = self._memory.get((piece.id, 0), 0, piece.length)
        if written is None:
            try:
                written = decode(self._objects.get(key), self._blocks.opener(piece.id, 0))
            except (ObjectMissing, ObjectDamaged) as error:
                log.debug("%s is not packed: %s", key, error)
                return False
        if len(written) != piece.length:
            return False
        into[:] = written
        return True

    def _pack(self, found: Sequence[_Member], block: memoryview) -> Collection[str]:
        """Store a segment and let its files be published in it. Raises: StoreError, OSError."""
        segment = self._open(block)
        pack = _Pack(segment)
        with self._lock:
            self._packs[segment.id] = pack
        for each in found:
            piece = part(segment.id, segment.size, each.off, each.piece)
            if self._held.move(each.entry, Moved(piece, segment)):
                pack.waiting[each.key] = each.entry
                self._show(each.entry, slices.pack_slices([each.piece]))
                self._memory.drop((each.piece.id, 0))  # it is not read by that name any more
        if not pack.waiting:
            self._finish(pack)
        self.packed += len(pack.waiting)
        self.segments += 1
        return set(pack.waiting)

    def _open(self, block: memoryview) -> OpenSegment:
        """Store a segment; it is ours to give. Raises: StoreError, OSError."""
        session = self._meta.session
        assert session is not None, "only a client that has joined writes a journal"
        segment = OpenSegment(self._meta.new_slice_id(), len(block), session.id)
        self._meta.slices.keep((segment.id,), True)  # gc is not to come before the last file
        try:
            self._blocks.put_block(segment.id, 0, block, rewritten=True)
            self._meta.packing.open_segment(segment)
        except (OSError, StoreError):
            self._meta.give_up_slices((segment.id,))
            self._discard(segment)
            self._finish(_Pack(segment))  # it may be open all the same
            raise
        return segment

    def _discard(self, segment: OpenSegment) -> None:
        try:
            self._blocks.delete([(segment.id, segment.size)])
        except (OSError, StoreError):
            pass  # gc will: nothing refers to it

    def _show(self, entry: LogEntry, before: bytes) -> None:
        """Let this mount read where the bytes are now; the chunk has listed `before` for them."""
        cache = self._meta.cache
        ino = entry.write.ino
        key = schema.inode_row(ino), schema.chunk_field(0)
        mark = cache.mark()
        known = cache.get(*key, need_vouched=False)
        if isinstance(known, bytes):
            now = exchanged(known, before, entry.record)
            cache.settle(mark, (), [Put(*key, now)], leased=False)
        opened = self._files.get(ino)
        if opened is not None:
            opened.forget_chunks()

    # --- what the publisher says and asks --------------------------------------------------------

    def last_ones(self, run: Sequence[LogEntry]) -> list[bool]:
        """For each of the entries, published in this order: whether it is the last one that lists
        the segment that it moved to."""
        segments = [None if each.moved is None else each.moved.segment.id for each in run]
        with self._lock:
            left = {each: len(self._packs[each].waiting) for each in segments if each is not None}
        lasts = []
        for segment in segments:
            if segment is not None:
                left[segment] -= 1
            lasts.append(segment is not None and not left[segment])
        return lasts

    def published(self, entry: LogEntry, as_meant: bool) -> None:
        """An entry is dealt with."""
        for need in entry.needs:
            with self._lock:
                self._entries.pop(need.key, None)
        if entry.moved is None:
            return
        key = entry.needs[0].key
        with self._lock:
            pack = self._packs[entry.moved.segment.id]
            del pack.waiting[key]
            pack.keys.append(key)
            if pack.waiting:
                return
            pack.closed = as_meant  # it was the last one, and has joined
        self._finish(pack)

    def _finish(self, *packs: _Pack) -> None:
        """Let these be reaped."""
        with self._lock:
            for pack in packs:
                self._packs.pop(pack.segment.id, None)
            self._finished += packs
        self._tell_finished()

    def voided(self, entry: LogEntry) -> None:
        """Another client has ended the session that an entry's segment was opened in.

        All that should have joined it is stored anew.
        """
        assert entry.moved is not None, "else it would be left out"
        with self._lock:
            pack = self._packs[entry.moved.segment.id]
            waiting, pack.waiting = pack.waiting, {}
        for each in waiting.values():
            before = each.record
            self._held.move(each, None)
            self._show(each, before)
        self._finish(pack)
        for key in waiting:
            self._objects.unpack(key)
        self._objects.flush_now()  # they have waited once

    # --- afterwards ------------------------------------------------------------------------------

    def reap(self) -> None:
        """Let go of what was staged of segments that are published, and will be after a crash."""
        if not self._reaping.acquire(blocking=False):
            self._tell_finished()  # the thread that does may have begun before the last one was
            return
        try:
            with self._lock:
                packs, self._finished = self._finished, []
            if packs and not self._close(packs):
                self._finish(*packs)
        finally:
            self._reaping.release()

    def _close(self, packs: Sequence[_Pack]) -> bool:
        """As `reap`; False where the store is to be asked again."""
        try:
            for pack in packs:
                if not pack.closed:
                    self._meta.packing.close_segment(pack.segment)
                    pack.closed = True
            self._inner.sync()
        except (OSError, StoreError) as error:
            log.info("packed files stay on the staging disk for now: %s", error)
            return False
        self._epoch.advance(READS_END_S)
        for pack in packs:
            self._objects.release(pack.keys)
            self._meta.slices.keep((pack.segment.id,), False)
        return True

    def numbers(self) -> dict[str, float]:
        """What `.stats` says of it."""
        return {"staging_packed_total": self.packed, "staging_segments_total": self.segments}


def _conforms(packer: StagedPacker) -> Coalescer:
    return packer

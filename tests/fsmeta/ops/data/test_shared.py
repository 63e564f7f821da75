"""T2, P4: who uses a slice, and what is reserved. A Hypothesis machine copies, overwrites, punches,
reserves, cuts, compacts, deletes.

After each step the counts are exact; nothing that a file shows is ever given to deletion; what was
reserved and not given back is covered; after all files are gone nothing is left.
"""

from __future__ import annotations

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fsdata.format.geometry import reservations
from fsmeta.admin.quota_admin import change_settings
from fsmeta.check.check import Examination, check
from fsmeta.meta.meta import Meta
from fsmeta.ops.data.ranges import KEEP_SIZE as KEEP, PUNCH_HOLE, ZERO_RANGE, Span
from fsmeta.rules.settings import VolumeFormat
from fsmeta.slices import ChunkView, resolve
from fsmeta.store.mem import MemBackend, MemStore
from fsmeta.types import AT_END, CHUNK_BYTES, ROOT_CALLER, ROOT_INO, Ino, SetAttr, Slice, SliceId
from tests.fsmeta.engines import RUNTIME, make_volume

ROOT = ROOT_CALLER
FILES = 3
EDGE = CHUNK_BYTES - 50  # the action is around the end of the first chunk
OFFSETS = st.integers(0, 200).map(lambda at: EDGE + at)
LENGTHS = st.integers(1, 120)
NUMBERS = st.integers(0, FILES - 1)
END = EDGE + 400
RESERVING = (0, KEEP, ZERO_RANGE, ZERO_RANGE | KEEP)
Shown = dict[int, tuple[SliceId, int]]  # offset → slice and place in it


class Sharing(RuleBasedStateMachine):
    """Files whose every byte is known by the slice that it comes from."""

    def __init__(self) -> None:
        super().__init__()
        store = MemStore(MemBackend(RUNTIME))
        make_volume(store, RUNTIME)
        self.meta = Meta(store, RUNTIME)
        self.meta.sessions.open({"host": "test"})
        assert self.meta.deletion.take_lead()
        self.files: list[Ino] = []
        self.shown: list[Shown] = []
        self.reserved: list[set[int]] = [set() for _ in range(FILES)]  # and not written
        change_settings(self.meta, VolumeFormat.with_reserved)
        self.meta.refresh_settings()
        self.deleted: set[SliceId] = set()
        for number in range(FILES):
            self.files.append(self._create(number))
            self.shown.append({})

    def _create(self, number: int) -> Ino:
        return self.meta.create(ROOT, ROOT_INO, b"%d" % number, 0o100644).ino

    def _size(self, number: int) -> int:
        return self.meta.getattr(ROOT, self.files[number]).size

    @rule(number=NUMBERS, at=OFFSETS, length=LENGTHS)
    def write(self, number: int, at: int, length: int) -> None:
        sid = self.meta.new_slice_id()
        index, pos = divmod(at, CHUNK_BYTES)
        length = min(length, CHUNK_BYTES - pos)
        piece = Slice(pos, sid, length, 0, length)
        self.meta.write_slices(self.files[number], [(index, piece)], at + length, 1)
        self.shown[number].update({at + each: (sid, each) for each in range(length)})
        self.reserved[number].difference_update(range(at, at + length))

    @rule(number=NUMBERS, length=LENGTHS)
    def append(self, number: int, length: int) -> None:
        at = self._size(number)
        if at > END:
            return
        sid = self.meta.new_slice_id()
        piece = Slice(0, sid, length, 0, length)
        self.meta.write_slices(self.files[number], [(AT_END, piece)], 0, 1)
        self.shown[number].update({at + each: (sid, each) for each in range(length)})
        self.reserved[number].difference_update(range(at, at + length))

    @rule(source=NUMBERS, into=NUMBERS, begin=OFFSETS, at=OFFSETS, length=LENGTHS)
    def copy(self, source: int, into: int, begin: int, at: int, length: int) -> None:
        length = min(length, self._size(source) - begin)
        overlap = source == into and abs(begin - at) < length
        if length <= 0 or overlap:
            return
        span = Span(self.files[source], begin, begin + length)
        assert self.meta.ranges.copy_file_range(span, self.files[into], at).end == at + length
        new = {at + each: self.shown[source].get(begin + each) for each in range(length)}
        for offset, what in new.items():
            self.shown[into].pop(offset, None)
            self.reserved[into].discard(offset)
            if what is not None:
                self.shown[into][offset] = what

    @rule(number=NUMBERS, at=OFFSETS, length=LENGTHS)
    def punch(self, number: int, at: int, length: int) -> None:
        self.meta.ranges.fallocate(self.files[number], PUNCH_HOLE | KEEP, at, at + length)
        for offset in range(at, at + length):
            self.shown[number].pop(offset, None)
        self.reserved[number].difference_update(range(at, at + length))

    @rule(number=NUMBERS, at=OFFSETS, length=LENGTHS, mode=st.sampled_from(RESERVING))
    def reserve(self, number: int, at: int, length: int, mode: int) -> None:
        size = self._size(number)
        self.meta.ranges.fallocate(self.files[number], mode, at, at + length)
        assert self._size(number) == (size if mode & KEEP else max(size, at + length))
        for offset in range(at, at + length):
            if mode & ZERO_RANGE:
                self.shown[number].pop(offset, None)
            if offset not in self.shown[number]:
                self.reserved[number].add(offset)

    @rule(number=NUMBERS, size=OFFSETS | st.just(0))
    def truncate(self, number: int, size: int) -> None:
        if size <= self._size(number):
            self.reserved[number] = {at for at in self.reserved[number] if at < size}
        self.meta.setattr(ROOT, self.files[number], SetAttr(size=size))
        self.shown[number] = {at: what for at, what in self.shown[number].items() if at < size}

    @rule(number=NUMBERS)
    def replace(self, number: int) -> None:
        self.meta.unlink(ROOT, ROOT_INO, b"%d" % number)
        self.files[number], self.shown[number] = self._create(number), {}
        self.reserved[number].clear()

    @rule(number=NUMBERS, index=st.integers(0, 1))
    def compact(self, number: int, index: int) -> None:
        """Records that show the same with one slice, or with those that are seen."""
        ino = self.files[number]
        old = self.meta.read_chunk(ino, index)
        parts = [part for part in resolve(old) if part.slice is not None]
        if not parts:
            return
        sid = self.meta.new_slice_id()
        size = parts[-1].end - parts[0].pos
        kept = reservations(ChunkView(old), [])
        new = [Slice(p.pos, sid, size, p.pos - parts[0].pos, p.length) for p in parts]
        new = [*kept, *new]
        assert self.meta.compact_chunk(ino, index, old, new)
        for part in parts:
            for pos in range(part.pos, part.end):
                self.shown[number][index * CHUNK_BYTES + pos] = (sid, pos - parts[0].pos)

    @rule()
    def delete_what_is_dead(self) -> None:
        number = self.meta.deletion.next_round()
        assert number is not None
        self.meta.deletion.purge(self.meta.deletion.orphans(100))
        noted = self.meta.deletion.dead_slices(1000)
        uses = self.meta.deletion.last_uses(number, noted)
        assert uses is not None
        self.deleted.update(sid for sid, _ in uses.gone)
        self.meta.deletion.forget_dead(noted, uses.shared)

    @invariant()
    def is_clean(self) -> None:
        with Examination(self.meta.store) as examination:
            assert examination.run().problems == []
            assert self.deleted.isdisjoint(sid for sid, _ in examination.slices())

    @invariant()
    def shows_what_it_should(self) -> None:
        for number, ino in enumerate(self.files):
            seen: Shown = {}
            for index in (0, 1, 2):
                for part in resolve(self.meta.read_chunk(ino, index)):
                    if part.slice is not None:
                        base = index * CHUNK_BYTES + part.pos
                        sid = part.slice.id
                        seen.update({base + n: (sid, part.off + n) for n in range(part.length)})
            assert seen == self.shown[number]
            used = self.meta.getattr(ROOT, ino).used
            assert used == len(self.shown[number]) + len(self.reserved[number])

    def teardown(self) -> None:
        for number in range(FILES):
            self.meta.unlink(ROOT, ROOT_INO, b"%d" % number)
        self.delete_what_is_dead()
        found = check(self.meta.store)
        assert (found.problems, found.slices, found.dead) == ([], 0, 0)
        assert self.meta.store.read_rows([b"R", b"X"]) == [{}, {}]


TestSharing = Sharing.TestCase
TestSharing.settings = settings(max_examples=60, stateful_step_count=30)

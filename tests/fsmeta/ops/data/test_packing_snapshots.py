"""O6, T2: snapshots of files that are packed, packed anew and deleted; references stay exact."""

from __future__ import annotations

import random

import pytest

from fsmeta.admin import clones, snapshots
from fsmeta.admin.clones import CloneBuilder
from fsmeta.admin.snapshots import Taker
from fsmeta.check.check import check
from fsmeta.meta.meta import Meta
from fsmeta.ops.data.packing import Small
from fsmeta.schema import keys
from fsmeta.schema.segments import PACKED
from fsmeta.schema.snapshot_inos import snapshot_dir_of
from fsmeta.schema.snapshots import Snapshot
from fsmeta.types import ROOT_CALLER, ROOT_INO, Ino, SetAttr, Slice, SliceId
from tests.fsmeta.check.test_check import Tree
from tests.fsmeta.engines import RUNTIME, Engine
from tests.fsmeta.ops.data.test_packing import BYTES, gone, pack, round_of

ROOT = ROOT_CALLER


def _files(meta: Meta, parent: Ino, count: int) -> list[Small]:
    """Files of one slice each."""
    made = []
    for number in range(count):
        ino = meta.create(ROOT, parent, b"%d" % number, 0o100644).ino
        piece = Slice(0, meta.new_slice_id(), BYTES, 0, BYTES)
        meta.write_slices(ino, [(0, piece)], BYTES, 1)
        made.append(Small(ino, piece))
    return made


def _taker(meta: Meta) -> Taker:
    return Taker(meta, ROOT, RUNTIME.now_ns, lambda: False)


def _delete(meta: Meta, snapshot: Snapshot) -> None:
    """What its owner and the leader do."""
    snapshots.remove(meta, ROOT, snapshot_dir_of(snapshot.source), snapshot.name)
    _discard(meta)


def _discard(meta: Meta) -> None:
    for each in clones.abandoned(meta):
        assert clones.discard(meta, each)


def _gone(meta: Meta) -> set[SliceId]:
    """What rounds delete until nothing is left to do."""
    found: set[SliceId] = set()
    while meta.deletion.orphans(1) or meta.deletion.dead_slices(1):
        found |= gone(round_of(meta))
    return found


def _listed(meta: Meta, directory: Ino) -> dict[bytes, list[Slice]]:
    names, cursor = meta.names(directory)
    assert cursor is None
    return {each.name: meta.read_chunk(each.ino, 0) for each in names}


@pytest.mark.parametrize("first", ["source", "snapshot"])
def test_o6_t2_a_segment_stays_until_both_are_gone(engine: Engine, first: str) -> None:
    meta = engine.meta()
    assert meta.deletion.take_lead()
    top = meta.create(ROOT, ROOT_INO, b"top", 0o40755).ino
    files = _files(meta, top, 8)
    segment, _ = pack(meta, files)
    assert gone(round_of(meta)) == {each.piece.id for each in files}
    made = _taker(meta).take(top, b"snap")
    assert made.changed == 0
    shown = _listed(meta, made.root)
    assert shown == _listed(meta, top)
    assert check(engine.first).problems == []

    def unlink() -> None:
        for number in range(8):
            meta.unlink(ROOT, top, b"%d" % number)

    def delete() -> None:
        _delete(meta, made)

    early, late = (unlink, delete) if first == "source" else (delete, unlink)
    early()
    assert gone(round_of(meta)) == set()
    assert check(engine.first).problems == []
    if first == "source":
        assert _listed(meta, made.root) == shown
    late()
    assert _gone(meta) == {segment}
    assert engine.first.read([(PACKED, keys.pack_u64(segment))]) == [None]
    assert engine.first.read([(keys.SHARED_SLICES, keys.pack_u64(segment))]) == [None]
    assert check(engine.first).problems == []


def test_o6_t2_packing_leaves_a_snapshot_alone(engine: Engine) -> None:
    """Files that are packed, and packed anew, behind a snapshot: it shows what it showed."""
    meta = engine.meta()
    assert meta.deletion.take_lead()
    top = meta.create(ROOT, ROOT_INO, b"top", 0o40755).ino
    files = _files(meta, top, 4)
    alone = _taker(meta).take(top, b"alone")
    old, inos = pack(meta, files)
    assert inos == [each.ino for each in files]
    assert gone(round_of(meta)) == set(), "the snapshot has them"
    assert check(engine.first).problems == []
    assert _listed(meta, alone.root) == {
        b"%d" % number: [each.piece] for number, each in enumerate(files)
    }
    packed = _taker(meta).take(top, b"packed")
    shown = _listed(meta, packed.root)
    again = [Small(each.ino, meta.read_chunk(each.ino, 0)[0]) for each in files]
    new, inos = pack(meta, again)
    assert inos == [each.ino for each in files]
    assert gone(round_of(meta)) == set(), "the snapshot has it"
    assert _listed(meta, packed.root) == shown
    _delete(meta, alone)
    assert _gone(meta) == {each.piece.id for each in files}
    _delete(meta, packed)
    assert _gone(meta) == {old}
    assert _live(meta) == {new}
    assert check(engine.first).problems == []


def _live(meta: Meta) -> set[SliceId]:
    """What is counted as used by several."""
    (shared,) = meta.store.read_rows([keys.SHARED_SLICES])
    return {SliceId(keys.id_of(field)) for field in shared}


def test_o6_t2_what_is_sealed_is_never_packed(engine: Engine) -> None:
    meta = engine.meta()
    top = meta.create(ROOT, ROOT_INO, b"top", 0o40755).ino
    _files(meta, top, 4)
    made = _taker(meta).take(top, b"snap")
    before = _listed(meta, made.root)
    sealed = [Small(each.ino, meta.read_chunk(each.ino, 0)[0]) for each in meta.names(made.root)[0]]
    assert meta.packing.unchanged(sealed) == []
    assert pack(meta, sealed)[1] == []
    assert _listed(meta, made.root) == before
    assert check(engine.first).problems == []


def test_o6_t2_few_that_are_left_beside_a_snapshot(engine: Engine) -> None:
    """A snapshot counts as a user; those left are packed anew, and it keeps the old segment."""
    meta = engine.meta()
    assert meta.deletion.take_lead()
    top = meta.create(ROOT, ROOT_INO, b"top", 0o40755).ino
    sub = meta.create(ROOT, ROOT_INO, b"sub", 0o40755).ino
    files = [*_files(meta, top, 7), *_files(meta, sub, 1)]
    segment, _ = pack(meta, files)
    round_of(meta)
    made = _taker(meta).take(sub, b"snap")
    for each in files[:5]:  # 3 and the snapshot are half
        meta.setattr(ROOT, each.ino, SetAttr(size=0))
    assert meta.packing.thin(meta.deletion.dead_slices(1000), [segment]) == []
    meta.setattr(ROOT, files[5].ino, SetAttr(size=0))
    (thin,) = meta.packing.thin(meta.deletion.dead_slices(1000), [segment])
    left = meta.packing.still_in(thin)
    assert [each.ino for each in left] == [each.ino for each in files[6:]]
    round_of(meta)
    new, inos = pack(meta, left)
    assert len(inos) == 2
    assert gone(round_of(meta)) == set()
    (piece,) = _listed(meta, made.root)[b"0"]
    assert (piece.id, piece.off) == (segment, 7 * BYTES)
    assert check(engine.first).problems == []
    _delete(meta, made)
    assert _gone(meta) == {segment}
    assert _live(meta) == {new}
    assert check(engine.first).problems == []


def test_t2_packing_is_no_change(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is packed between copying and comparing is as it was; what is written then is not."""
    meta, other = engine.meta(), engine.meta()
    top = meta.create(ROOT, ROOT_INO, b"top", 0o40755).ino
    files = _files(meta, top, 4)
    copy = CloneBuilder.copy

    def packs(name: bytes, written: int) -> int:
        def copy_then_pack(self: CloneBuilder, directories: list[tuple[Ino, Ino]]) -> None:
            copy(self, directories)
            if written:
                piece = Slice(0, other.new_slice_id(), BYTES, 0, BYTES)
                other.setattr(ROOT, files[0].ino, SetAttr(size=0))
                other.write_slices(files[0].ino, [(0, piece)], BYTES, 1)
            small = [Small(each.ino, other.read_chunk(each.ino, 0)[0]) for each in files]
            assert len(pack(other, small)[1]) == 4

        with monkeypatch.context() as patched:
            patched.setattr(CloneBuilder, "copy", copy_then_pack)
            return _taker(meta).take(top, name).changed

    assert packs(b"packed", 0) == 0
    assert packs(b"packed anew", 0) == 0
    assert packs(b"written, and packed", 1) == 1
    assert check(engine.first).problems == []


class _World:
    """Files, clones and snapshots that list slices and parts of segments.

    Each slice that is written is a text of its own; `meaning` says which text a part shows.
    """

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.meta = Tree().meta
        assert self.meta.deletion.take_lead()
        self.top = self.meta.create(ROOT, ROOT_INO, b"top", 0o40755).ino
        self.meaning: dict[tuple[SliceId, int], SliceId] = {}
        self.dead: set[SliceId] = set()
        self.segments = 0
        self.kept: dict[Ino, dict[bytes, list[SliceId]]] = {}  # by root of a snapshot or a clone
        self._snapshots: dict[Ino, Snapshot] = {}
        self._count = 0
        round_of(self.meta)

    def texts(self, directory: Ino) -> dict[bytes, list[SliceId]]:
        listed = _listed(self.meta, directory)
        assert self.dead.isdisjoint(each.id for all_ in listed.values() for each in all_)
        return {
            name: [self.meaning[each.id, each.off] for each in slices]
            for name, slices in listed.items()
        }

    def write(self) -> None:
        self._count += 1
        name = b"%d" % (self._count if self.dice.random() < 0.7 else self.dice.randrange(20))
        try:
            ino = self.meta.lookup(ROOT, self.top, name).ino
            self.meta.setattr(ROOT, ino, SetAttr(size=0))
        except FileNotFoundError:
            ino = self.meta.create(ROOT, self.top, name, 0o100644).ino
        sid = self.meta.new_slice_id()
        self.meta.write_slices(ino, [(0, Slice(0, sid, BYTES, 0, BYTES))], BYTES, 1)
        self.meaning[sid, 0] = sid

    def unlink(self) -> None:
        names = [each.name for each in self.meta.names(self.top)[0]]
        for name in self.dice.sample(names, len(names) // 2):
            self.meta.unlink(ROOT, self.top, name)

    def pack(self) -> None:
        """Some of what is anywhere, sealed or not."""
        inos = [
            each.ino
            for root in (self.top, *self.kept)
            for each in self.meta.names(root)[0]
            if self.dice.random() < 0.6
        ]
        self._pack([Small(ino, slices[0]) for ino in inos if (slices := self._single(ino))][:100])

    def _single(self, ino: Ino) -> list[Slice]:
        slices = self.meta.read_chunk(ino, 0)
        return slices if len(slices) == 1 else []

    def _pack(self, files: list[Small]) -> None:
        if not files:
            return
        segment, inos = pack(self.meta, files)
        self.segments += bool(inos)
        for number, each in enumerate(files):
            self.meaning[segment, number * BYTES] = self.meaning[each.piece.id, each.piece.off]
        if not inos:
            self.dead.add(segment)

    def copy(self) -> None:
        self._count += 1
        name = b"copy %d" % self._count
        shown = self.texts(self.top)
        if self.dice.random() < 0.7:
            made = _taker(self.meta).take(self.top, name)
            assert made.changed == 0
            root = made.root
            self._snapshots[root] = made
        else:
            builder = CloneBuilder(self.meta, ROOT, True, lambda: False)
            root = builder.build(self.top, ROOT_INO, name).ino
        self.kept[root] = shown

    def delete(self) -> None:
        if not self.kept:
            return
        root = self.dice.choice(sorted(self.kept))
        del self.kept[root]
        made = self._snapshots.pop(root, None)
        if made is not None:
            _delete(self.meta, made)
            return
        for each in self.meta.names(root)[0]:
            self.meta.unlink(ROOT, root, each.name)

    def collect(self) -> None:
        """A deletion round; what is thin is packed anew."""
        self.meta.deletion.purge(self.meta.deletion.orphans(100))
        noted = self.meta.deletion.dead_slices(1000)
        thin = self.meta.packing.thin(noted, sorted(_live(self.meta)))
        self.dead |= gone(round_of(self.meta))
        left = [file for each in thin for file in self.meta.packing.still_in(each)]
        self._pack(left)

    def judge(self) -> None:
        for root, texts in self.kept.items():
            assert self.texts(root) == texts
        self.texts(self.top)
        assert check(self.meta.store).problems == []


@pytest.mark.parametrize("seed", range(12))
def test_o6_t2_in_any_order(seed: int) -> None:
    """Whatever is packed, copied and deleted when, all show what they showed; nothing is left."""
    world = _World(seed)
    acts = [world.write] * 6 + [world.pack] * 2 + [world.copy, world.delete, world.collect]
    for _ in range(60):
        world.dice.choice([*acts, world.unlink])()
        world.judge()
    assert world.segments
    while world.kept:
        world.delete()
    for each in world.meta.names(world.top)[0]:
        world.meta.unlink(ROOT, world.top, each.name)
    world.dead |= _gone(world.meta)
    world.judge()
    assert _live(world.meta) == set()
    assert {sid for sid, _ in world.meaning} <= world.dead

"""O6: small files in one segment, as the metadata see it, on every engine."""

from __future__ import annotations

import pytest

from fsmeta.check.check import check
from fsmeta.meta.meta import Meta
from fsmeta.ops.data.deletion import LastUses
from fsmeta.ops.data.packing import MEMBERS_MAX, PackedSlices, Small, Thin, part
from fsmeta.ops.data.ranges import Span
from fsmeta.schema import keys, slices
from fsmeta.schema.segments import PACKED, pack_members, unpack_members
from fsmeta.store.writes import Delete, Put
from fsmeta.types import ROOT_CALLER, ROOT_INO, Ino, SetAttr, Slice, SliceId, SliceKind
from tests.fsmeta.check.test_check import Tree
from tests.fsmeta.engines import Engine, change

BYTES = 1000


def create(meta: Meta, name: str, length: int = BYTES) -> Small:
    """A file of one slice."""
    ino = meta.create(ROOT_CALLER, ROOT_INO, name.encode(), 0o100644).ino
    piece = Slice(0, meta.new_slice_id(), length, 0, length)
    meta.write_slices(ino, [(0, piece)], length, 1)
    return Small(ino, piece)


def pack(meta: Meta, files: list[Small]) -> tuple[SliceId, list[Ino]]:
    """A segment of `files` in their order, and who is in it now."""
    segment = meta.new_slice_id()
    size = sum(each.piece.length for each in files)
    members, off = [], 0
    for each in files:
        members.append(PackedSlices(each, part(segment, size, off, each.piece)))
        off += each.piece.length
    return segment, meta.packing.pack(segment, members)


def round_of(meta: Meta) -> LastUses:
    """Delete what is dead, as the leader does."""
    number = meta.deletion.next_round()
    assert number is not None
    meta.deletion.purge(meta.deletion.orphans(100))
    noted = meta.deletion.dead_slices(1000)
    uses = meta.deletion.last_uses(number, noted)
    assert uses is not None
    meta.deletion.forget_dead(noted, uses.shared)
    return uses


def gone(uses: LastUses) -> set[SliceId]:
    return {sid for sid, _ in uses.gone}


def test_golden_bytes() -> None:
    """O6."""
    packed = pack_members([Ino(1), Ino(0x0102030405060708)])
    assert (PACKED, packed.hex()) == (b"P", "00000000000000010102030405060708")
    assert unpack_members(b"", packed) == [1, 0x0102030405060708]
    piece = part(SliceId(7), 3000, 1000, Slice(0, SliceId(3), BYTES, 0, BYTES))
    assert slices.pack_slices([piece]).hex() == (
        "12" "00000000" "0000000000000007" "00000bb8" "000003e8" "000003e8"
    )  # fmt: skip


def test_files_change_hands_in_one_commit(engine: Engine) -> None:
    """O6: what they listed dies; attributes stay; the segment dies with its last file."""
    meta = engine.meta()
    assert meta.deletion.take_lead()
    files = [create(meta, f"f{number}", BYTES + number) for number in range(4)]
    before = [meta.getattr(ROOT_CALLER, each.ino) for each in files]
    segment, inos = pack(meta, files)
    assert inos == [each.ino for each in files]
    assert [meta.getattr(ROOT_CALLER, each.ino) for each in files] == before
    records = [meta.read_chunk(each.ino, 0) for each in files]
    assert [len(each) for each in records] == [1, 1, 1, 1]
    assert {each[0].kind for each in records} == {SliceKind.SEGMENT}
    assert [each[0].off for each in records] == [0, 1000, 2001, 3003]
    assert check(engine.first).problems == []
    assert gone(round_of(meta)) == {each.piece.id for each in files}
    for number in range(3):
        meta.unlink(ROOT_CALLER, ROOT_INO, b"f%d" % number)
    round_of(meta)
    assert gone(round_of(meta)) == set()
    assert check(engine.first).problems == []
    assert engine.first.read([(PACKED, keys.pack_u64(segment))]) == [None]
    meta.setattr(ROOT_CALLER, files[3].ino, SetAttr(size=0))
    assert gone(round_of(meta)) == {segment}


def test_who_was_changed_meanwhile_is_left_out(engine: Engine) -> None:
    """O6: written, cut, deleted by another client."""
    meta, other = engine.meta(), engine.meta()
    files = [create(meta, f"f{number}") for number in range(6)]
    more = Slice(10, other.new_slice_id(), 5, 0, 5)
    other.write_slices(files[0].ino, [(0, more)], BYTES, 1)
    other.setattr(ROOT_CALLER, files[1].ino, SetAttr(size=10))
    other.setattr(ROOT_CALLER, files[2].ino, SetAttr(size=0))
    other.unlink(ROOT_CALLER, ROOT_INO, b"f3")
    other.deletion.purge([files[3].ino])
    assert meta.packing.unchanged(files) == files[4:]
    _, inos = pack(meta, files)
    assert inos == [files[4].ino, files[5].ino]
    assert meta.read_chunk(files[0].ino, 0) == [files[0].piece, more]
    assert check(engine.first).problems == []


def test_whose_bytes_others_use_as_well(engine: Engine) -> None:
    """O6: a clone's, and then not any more."""
    meta = engine.meta()
    assert meta.deletion.take_lead()
    files = [create(meta, f"f{number}") for number in range(3)]
    clone = meta.create(ROOT_CALLER, ROOT_INO, b"clone", 0o100644).ino
    meta.ranges.copy_file_range(Span(files[1].ino, 0, BYTES), clone, 0)
    assert meta.packing.unshared(files) == [files[0], files[2]]
    meta.setattr(ROOT_CALLER, clone, SetAttr(size=0))
    round_of(meta)
    assert meta.packing.unshared(files) == files


def test_one_file_is_no_segment(engine: Engine) -> None:
    """O6: nothing is changed where only one is as it was."""
    meta = engine.meta()
    files = [create(meta, "a"), create(meta, "b")]
    meta.setattr(ROOT_CALLER, files[0].ino, SetAttr(size=0))
    segment, inos = pack(meta, files)
    assert inos == []
    assert meta.read_chunk(files[1].ino, 0) == [files[1].piece]
    assert check(engine.first).slices == 1
    assert meta.slices.floor(1 << 40) > segment, "it holds gc up no longer"


def test_few_that_are_left_are_packed_anew(engine: Engine) -> None:
    """O6: less than half of a segment, and a clone that counts; then nothing is left of it."""
    meta = engine.meta()
    assert meta.deletion.take_lead()
    files = [create(meta, f"f{number}") for number in range(8)]
    segment, _ = pack(meta, files)
    round_of(meta)
    clone = meta.create(ROOT_CALLER, ROOT_INO, b"clone", 0o100644).ino
    meta.ranges.copy_file_range(Span(files[7].ino, 0, BYTES), clone, 0)
    inos = [each.ino for each in files]
    for number in range(5):  # 3 and the clone are half
        meta.setattr(ROOT_CALLER, files[number].ino, SetAttr(size=0))
    noted = meta.deletion.dead_slices(1000)
    assert meta.packing.thin(noted, [segment]) == []
    meta.setattr(ROOT_CALLER, files[5].ino, SetAttr(size=0))
    noted = meta.deletion.dead_slices(1000)
    (thin,) = meta.packing.thin(noted, [segment])
    assert thin == Thin(segment, inos)
    left = meta.packing.still_in(thin)
    assert [each.ino for each in left] == inos[6:]
    assert gone(round_of(meta)) == set()
    assert len(pack(meta, left)[1]) == 2
    assert gone(round_of(meta)) == set(), "the clone has it"
    assert check(engine.first).problems == []
    meta.setattr(ROOT_CALLER, clone, SetAttr(size=0))
    assert gone(round_of(meta)) == {segment}


@pytest.mark.parametrize("count", [2, MEMBERS_MAX])
def test_a_segment_is_one_request(count: int) -> None:
    """O6: what was just written is packed by the commit alone."""
    tree = Tree()
    files = [create(tree.meta, f"f{number}") for number in range(count)]
    before = tree.meta.store.round_trips
    _, inos = pack(tree.meta, files)
    assert len(inos) == count
    assert tree.meta.store.round_trips - before == 1


def test_check_knows_segments() -> None:
    """O6."""
    tree = Tree()
    segment, _ = pack(tree.meta, [create(tree.meta, "a"), create(tree.meta, "b")])
    assert tree.found() == []
    field = keys.pack_u64(segment)
    tree.plant(Put(PACKED, field, b"short"))
    tree.demand("length 5")
    tree.plant(Put(PACKED, field, pack_members([Ino(1)])))
    tree.store.commit(change(Put(PACKED, keys.pack_u64(900), pack_members([Ino(1)]))))
    tree.demand("has no file in it")
    tree.plant(Delete(PACKED, keys.pack_u64(900)))
    assert tree.found() == []

"""O6: segments that files come to list one after the other, on every engine."""

from __future__ import annotations

from itertools import count, pairwise

import pytest

from fsmeta.check.check import check
from fsmeta.errors import Fenced, Voided
from fsmeta.meta.meta import Meta
from fsmeta.ops.data import extent, segments
from fsmeta.ops.data.packing import part
from fsmeta.ops.data.ranges import Span
from fsmeta.rules.context import Env
from fsmeta.schema import keys
from fsmeta.schema.segments import PACKED, OpenSegment, is_open_segment, unpack_open
from fsmeta.store.writes import Delete, Put
from fsmeta.txn.txn import Txn
from fsmeta.types import ROOT_CALLER, ROOT_INO, Ino, SessionId, SetAttr, Slice, SliceId
from tests.fsmeta.check.test_check import Tree
from tests.fsmeta.engines import Engine
from tests.fsmeta.ops.data.test_packing import BYTES, create, gone, round_of

NAMES = count()


def open_one(meta: Meta, files: int) -> OpenSegment:
    """A segment that `files` files will come to list."""
    assert meta.session is not None
    segment = OpenSegment(meta.new_slice_id(), files * BYTES, meta.session.id)
    meta.packing.open_segment(segment)
    return segment


def join(
    meta: Meta, segment: OpenSegment, at: int, last: bool = False, ino: Ino | None = None
) -> Ino:
    """A file, new if none is named, gets the part `at` of a segment, as a publisher gives it."""
    if ino is None:
        ino = meta.create(ROOT_CALLER, ROOT_INO, b"f%d" % next(NAMES), 0o100644).ino
    file = ino
    piece = part(segment.id, segment.size, at * BYTES, Slice(0, SliceId(1), BYTES, 0, BYTES))

    def verb(txn: Txn) -> None:
        env = Env(ROOT_CALLER, 1, meta.format.limits)
        extent.write(txn, env, file, [(0, piece)], BYTES, 1, None)
        segments.join(txn, segment, file, last)

    meta.transactor.run(verb)
    return ino


def drop(meta: Meta, *inos: Ino) -> set[SliceId]:
    """These files list nothing any more; what is deleted therefore."""
    for ino in inos:
        meta.setattr(ROOT_CALLER, ino, SetAttr(size=0))
    return gone(round_of(meta))


def row(engine: Engine, name: bytes) -> dict[bytes, bytes]:
    return engine.first.read_rows([name])[0]


def clean(engine: Engine) -> None:
    assert check(engine.first).problems == []


def test_golden_bytes() -> None:
    """O6."""
    segment = OpenSegment(SliceId(7), 3000, SessionId(5))
    assert segment.field.hex() == "730000000000000007"
    assert segment.pack().hex() == "000000000000000500000bb8"
    assert is_open_segment(segment.field)
    assert unpack_open(segment.field, segment.pack()) == segment


@pytest.mark.parametrize("engine", ["mem"], indirect=True)
def test_a_file_that_was_written_before_is_checked_as_a_whole(engine: Engine) -> None:
    """O6: whether a segment is listed already is in the middle of the list, not at its end."""
    meta = engine.meta()
    segment = open_one(meta, 2)
    ino = meta.create(ROOT_CALLER, ROOT_INO, b"f", 0o100644).ino
    for number in range(8):
        piece = Slice(number * BYTES, meta.new_slice_id(), BYTES, 0, BYTES)
        meta.write_slices(ino, [(0, piece)], (number + 1) * BYTES, 1)
    piece = part(segment.id, segment.size, 0, Slice(0, SliceId(1), BYTES, 0, BYTES))
    tails: list[set[tuple[bytes, bytes]]] = []

    def verb(txn: Txn) -> None:
        extent.write(txn, Env(ROOT_CALLER, 1, meta.format.limits), ino, [(0, piece)], 0, 1, None)
        tails.append(set(txn.tails or ()))
        segments.join(txn, segment, ino, False)
        tails.append(set(txn.tails or ()))

    meta.transactor.run(verb)
    assert tails == [{(keys.inode_row(ino), keys.chunk_field(0))}, set()]
    join(meta, segment, 1, last=True)
    clean(engine)


def test_uses_are_counted_at_every_moment(engine: Engine) -> None:
    """O6: files come and go, and as long as one more will come the segment stays."""
    meta = engine.meta()
    assert meta.deletion.take_lead()
    segment = open_one(meta, 4)
    clean(engine)
    first = join(meta, segment, 0)
    clean(engine)
    assert drop(meta, first) == set(), "three will come"
    clean(engine)
    assert (row(engine, keys.SHARED_SLICES), row(engine, PACKED)) == ({}, {})
    second, third = join(meta, segment, 1), join(meta, segment, 2)
    clean(engine)
    last = join(meta, segment, 3, last=True)
    clean(engine)
    assert row(engine, keys.CLONES) == {}
    field = keys.pack_u64(segment.id)
    assert row(engine, keys.SHARED_SLICES) == {field: b"2"}
    assert row(engine, PACKED) == {field: b"".join(map(keys.pack_u64, (second, third, last)))}
    assert drop(meta, second, last) == set()
    clean(engine)
    assert drop(meta, third) == {segment.id}
    clean(engine)


def test_the_last_one_alone(engine: Engine) -> None:
    """O6: the others never came, or have gone again; nothing is counted above one use."""
    meta = engine.meta()
    assert meta.deletion.take_lead()
    segment = open_one(meta, 2)
    assert drop(meta, join(meta, segment, 0)) == set()
    last = join(meta, segment, 1, last=True)
    clean(engine)
    assert (row(engine, keys.SHARED_SLICES), row(engine, PACKED)) == ({}, {})
    assert drop(meta, last) == {segment.id}
    clean(engine)


def test_a_file_that_lists_it_twice_uses_it_once(engine: Engine) -> None:
    """O6: written over in the same segment, or copied to by others before it joins; found by
    `sim/test_staged_packing` with seed 9."""
    meta = engine.meta()
    assert meta.deletion.take_lead()
    segment = open_one(meta, 4)
    first = join(meta, segment, 0)
    clean(engine)
    join(meta, segment, 1, ino=first)
    clean(engine)
    copied = meta.create(ROOT_CALLER, ROOT_INO, b"copied", 0o100644).ino
    meta.ranges.copy_file_range(Span(first, 0, BYTES), copied, 0)
    join(meta, segment, 2, ino=copied)
    clean(engine)
    join(meta, segment, 3, last=True, ino=copied)
    clean(engine)
    assert drop(meta, first) == set()
    assert drop(meta, copied) == {segment.id}
    clean(engine)


def test_closed_where_the_last_one_does_not_come(engine: Engine) -> None:
    """O6: once only, however often."""
    meta = engine.meta()
    assert meta.deletion.take_lead()
    segment, unused = open_one(meta, 2), open_one(meta, 2)
    ino = join(meta, segment, 0)
    for each in (segment, segment, unused):
        meta.packing.close_segment(each)
    clean(engine)
    assert gone(round_of(meta)) == {unused.id}
    clean(engine)
    assert drop(meta, ino) == {segment.id}


def test_who_dies_leaves_its_segments_to_the_leader(engine: Engine) -> None:
    """O6: not while it can still commit; and it can't go on with them."""
    meta, other = engine.meta(), engine.meta()
    assert meta.deletion.take_lead()
    segment = open_one(other, 3)
    ino = join(other, segment, 0)
    meta.packing.close_abandoned()
    second = join(other, segment, 1)
    assert other.session is not None
    ended = other.session.id
    meta.sessions.end(ended)
    with pytest.raises(Fenced):
        join(other, segment, 2)
    meta.packing.close_abandoned()
    assert row(engine, keys.CLONES) == {}
    clean(engine)
    other.sessions.open({}, ended)
    with pytest.raises(Voided):
        join(other, segment, 2, last=True)
    assert drop(meta, ino) == set()
    assert drop(meta, second) == {segment.id}
    clean(engine)


def test_joining_is_part_of_the_commit() -> None:
    """O6: only the last one looks how the count is."""
    tree = Tree()
    create(tree.meta, "warm")
    store = tree.meta.store
    segment = open_one(tree.meta, 3)
    trips = [store.round_trips]
    create(tree.meta, "plain")
    trips.append(store.round_trips)
    for number in range(3):
        join(tree.meta, segment, number, last=number == 2)
        trips.append(store.round_trips)
    plain, first, second, last = (after - before for before, after in pairwise(trips))
    assert (first, second, last) == (plain, plain, plain + 1)


def test_check_knows_open_segments() -> None:
    """O6."""
    tree = Tree()
    segment = open_one(tree.meta, 2)
    join(tree.meta, segment, 0)
    assert tree.found() == []
    tree.plant(Delete(keys.CLONES, segment.field))
    tree.demand("are counted")
    tree.plant(Put(keys.CLONES, segment.field, b"short"))
    tree.demand("length 5", "are counted")
    tree.plant(Put(keys.CLONES, segment.field, segment.pack()))
    assert tree.found() == []

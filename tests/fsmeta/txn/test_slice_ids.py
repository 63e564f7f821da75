"""R1: floors: what a client may still commit, and what it must not commit any more."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, strategies as st

from fsclient.upkeep.slice_bitmap import PAGE_BYTES, SliceBitmap
from fsmeta.errors import Ambiguous, Doubt, Unavailable, Voided
from fsmeta.meta.ids.id_allocator import SLICE_BATCH
from fsmeta.meta.ids.slice_allocator import SliceAllocator
from fsmeta.meta.meta import Meta
from fsmeta.ops.data import gc
from fsmeta.rules.settings import create_volume, new_format
from fsmeta.runtime import SystemRuntime
from fsmeta.schema import keys
from fsmeta.store.mem import MemBackend, MemStore
from fsmeta.txn.retry import Transactor
from fsmeta.txn.row_cache import RowCache
from fsmeta.types import ROOT_CALLER, ROOT_INO, Slice, SliceId

RUNTIME = SystemRuntime()


class Supply:
    """Ids in batches of ten; who asks for a batch gets the next ten."""

    def __init__(self) -> None:
        self.handed_out = 1
        self._batch: list[int] = []
        self._idle = True

    def take(self) -> int:
        if not self._batch:
            self._batch = list(range(self.handed_out, self.handed_out + 10))
            self.handed_out += 10
        self._idle = False
        return self._batch.pop(0)

    def following(self) -> int | None:
        return self._batch[0] if self._batch else None

    def let_go_if_idle(self) -> None:
        if self._idle:
            self.let_go()
        self._idle = True

    def let_go(self) -> None:
        self._batch = []


class Waiting(Supply):
    """Asks a store, which waits for `told`."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.told = threading.Event(), threading.Event()

    def take(self) -> int:
        self.asked.set()
        assert self.told.wait(60)
        return super().take()


def test_what_is_held_back_is_told_while_an_id_is_taken() -> None:
    supply = Waiting()
    ids = SliceAllocator(RUNTIME, supply)
    taking = threading.Thread(target=ids.take)
    taking.start()
    assert supply.asked.wait(60)
    ids.keep([7], True)  # by a store that answers nobody meanwhile
    supply.told.set()
    taking.join()
    assert ids.floor(11) == 1
    ids.end([1], True)
    assert ids.floor(11) == 2


def test_the_floor_is_the_lowest_that_may_be_committed() -> None:
    supply = Supply()
    ids = SliceAllocator(RUNTIME, supply)
    assert ids.floor(1) == 1
    first, second = ids.take(), ids.take()
    assert (first, second, ids.floor(11)) == (1, 2, 1)
    with ids.committing([first]):
        assert ids.floor(11) == 1
    assert ids.floor(11) == 2
    ids.give_up([second])
    assert ids.floor(11) == 3, "the next of the batch"
    supply.handed_out = 500  # by others
    ids.let_go_if_idle()
    assert ids.floor(500) == 3
    ids.let_go_if_idle()
    assert ids.floor(500) == 500, "an idle client holds nobody up"
    assert ids.take() == 500


def test_a_commit_that_fails_leaves_its_slices_open() -> None:
    ids = SliceAllocator(RUNTIME, Supply())
    one = ids.take()
    with pytest.raises(Unavailable), ids.committing([one]):
        raise Unavailable("away")
    assert ids.floor(11) == 1


def test_what_is_given_up_in_the_midst_of_a_commit_waits_for_its_end() -> None:
    ids = SliceAllocator(RUNTIME, Supply())
    one, two = ids.take(), ids.take()

    def commit() -> None:
        with ids.committing([one]):
            ids.give_up([one])
            assert ids.floor(11) == one, "the commit may still work"
            raise Unavailable("away")

    with pytest.raises(Unavailable):
        commit()
    assert ids.floor(11) == two


def test_a_commit_of_unknown_outcome_keeps_its_slices_open_until_it_is_known() -> None:
    ids = SliceAllocator(RUNTIME, Supply())
    one, two, three = ids.take(), ids.take(), ids.take()
    doubts = [Doubt(b"s1", b"w1", number) for number in (1, 2)]
    for doubt, batch in zip(doubts, ([one], [two, three]), strict=True):
        with pytest.raises(Ambiguous), ids.committing(batch):
            raise Ambiguous("no answer", doubt)
    ids.give_up([one, two])
    assert ids.floor(11) == 1
    assert ids.settle([one], lambda doubt: doubt == doubts[1]) == set()
    assert ids.floor(11) == 2
    ids.settle_all(lambda doubt: doubt == doubts[1])
    assert ids.floor(11) == 4
    assert ids.settle([two, three], _never_asked) == {three}, "its owner has yet to hear of it"
    ids.give_up([three])
    assert ids.settle([three], _never_asked) == set()


def test_a_commit_without_a_session_is_in_doubt_for_good() -> None:
    ids = SliceAllocator(RUNTIME, Supply())
    one = ids.take()
    with pytest.raises(Ambiguous), ids.committing([one]):
        raise Ambiguous("no answer")
    ids.give_up([one])
    ids.settle_all(_never_asked)
    assert ids.floor(11) == 1


def _never_asked(doubt: Doubt) -> bool:
    raise AssertionError(doubt)


@given(st.lists(st.tuples(st.sampled_from(["take", "commit", "give_up", "beat"]), st.integers(0))))
def test_no_floor_ever_passes_what_is_committed_later(steps: list[tuple[str, int]]) -> None:
    supply = Supply()
    ids = SliceAllocator(RUNTIME, supply)
    open_: list[SliceId] = []
    floor = 0
    for verb, which in steps:
        if verb == "take":
            open_.append(ids.take())
            assert open_[-1] >= floor
        elif verb == "beat":
            ids.let_go_if_idle()
            shown = ids.floor(supply.handed_out)
            assert shown >= floor, "floors only rise"
            floor = shown
            assert not open_ or floor <= min(open_)
        elif open_:
            each = open_.pop(which % len(open_))
            assert each >= floor
            if verb == "commit":
                with ids.committing([each]):
                    pass
            else:
                ids.give_up([each])


def volume() -> tuple[MemBackend, Meta]:
    backend = MemBackend(RUNTIME)
    settings = new_format("test", "mem", "")
    transactor = Transactor(MemStore(backend), RUNTIME, RowCache(RUNTIME))
    transactor.run(lambda txn: create_volume(txn, settings, (0, 0), 0))
    return backend, Meta(MemStore(backend), RUNTIME)


def test_sessions_show_their_floors() -> None:
    _, meta = volume()
    assert meta.sessions.open({}).floor == 1
    taken = meta.new_slice_id()
    _, floor = meta.sessions.round_and_floor()
    meta.sessions.beat(0, floor)
    assert [each.floor for each in meta.sessions.all()] == [taken]
    file = meta.create(ROOT_CALLER, ROOT_INO, b"f", 0o100644)
    piece = Slice(0, taken, 10, 0, 10)
    meta.write_slices(file.ino, [(0, piece)], 10, 1)
    meta.sessions.round_and_floor()
    _, floor = meta.sessions.round_and_floor()
    assert floor == 1 + SLICE_BATCH


def test_who_joins_again_after_gc_must_not_commit_what_it_had() -> None:
    """Its objects may be gone; what it takes from then on is fine."""
    backend, meta = volume()
    meta.sessions.open({})
    file = meta.create(ROOT_CALLER, ROOT_INO, b"f", 0o100644)
    before = Slice(0, meta.new_slice_id(), 10, 0, 10)
    other = Meta(MemStore(backend), RUNTIME)
    assert meta.session is not None
    other.sessions.end(meta.session.id)
    _, floor = other.sessions.round_and_floor()
    other.transactor.run(lambda txn: gc.begin(txn, floor, b"run"))
    record = meta.sessions.open({}, meta.session.id)
    assert record.floor == before.id, "what it has open it shows at once"
    with pytest.raises(Voided, match="gc has run"):
        meta.write_slices(file.ino, [(0, before)], 10, 1)
    assert not meta.read_chunk(file.ino, 0)
    after = Slice(0, meta.new_slice_id(), 10, 0, 10)
    meta.write_slices(file.ino, [(0, after)], 10, 1)
    assert meta.read_chunk(file.ino, 0) == [after]


def test_who_joins_again_and_gc_sees_it_may_commit() -> None:
    backend, meta = volume()
    meta.sessions.open({})
    file = meta.create(ROOT_CALLER, ROOT_INO, b"f", 0o100644)
    piece = Slice(0, meta.new_slice_id(), 10, 0, 10)
    other = Meta(MemStore(backend), RUNTIME)
    assert meta.session is not None
    other.sessions.end(meta.session.id)
    meta.sessions.open({}, meta.session.id)
    assert [each.floor for each in other.sessions.all()] == [piece.id]
    meta.write_slices(file.ino, [(0, piece)], 10, 1)
    assert meta.read_chunk(file.ino, 0) == [piece]


def test_slices_that_are_shared_while_gc_reads_are_noted() -> None:
    _, meta = volume()
    meta.transactor.run(lambda txn: gc.note_shared(txn, [SliceId(5)]))
    assert not meta.store.scan(keys.SHARED).items, "gc does not run"
    meta.transactor.run(lambda txn: gc.begin(txn, 7, b"run"))
    meta.transactor.run(lambda txn: gc.note_shared(txn, [SliceId(5)]))
    noted = [field for field, _ in meta.store.scan(keys.SHARED).items]
    assert noted == [keys.pack_u64(5)]
    assert not meta.transactor.run(lambda txn: gc.end(txn, b"another", noted, last=True))
    assert meta.store.scan(keys.SHARED).items, "whoever took its place needs them"
    assert meta.transactor.run(lambda txn: gc.end(txn, b"run", noted, last=False))
    assert meta.transactor.run(gc.collecting), "some notes may still be needed"
    assert meta.transactor.run(lambda txn: gc.end(txn, b"run", [], last=True))
    assert meta.transactor.run(gc.collecting) is None
    assert not meta.store.scan(keys.SHARED).items
    meta.transactor.run(lambda txn: gc.begin(txn, 3, b"next"))
    assert meta.transactor.view(gc.void_below) == 7, "it never goes back"


@given(st.lists(st.integers(0, 40 * 8 * PAGE_BYTES) | st.integers(0, 2**63)))
def test_a_set_of_ids_in_little_memory(numbers: list[int]) -> None:
    ids = SliceBitmap(pages_max=3)
    for number in numbers:
        ids.add(number)
    assert ids.count == len(set(numbers))
    assert all(number in ids for number in numbers)
    assert all((n + 1 in ids) == (n + 1 in set(numbers)) for n in numbers)
    ids.close()


def test_w2_what_is_held_back_holds_the_floor() -> None:
    """Write-back commits a slice long before the store has it; gc must not take it for leaked."""
    supply = Supply()
    ids = SliceAllocator(RUNTIME, supply)
    first, second = ids.take(), ids.take()
    with ids.committing([first, second]):
        ids.keep([first, second], True)
    assert ids.floor(11) == first
    ids.keep([first], False)
    assert ids.floor(11) == second
    ids.keep([second], False)
    assert ids.floor(11) == 3

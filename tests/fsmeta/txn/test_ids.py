"""W1: numbers of inodes and slices that a journal names are not handed out again."""

from __future__ import annotations

from functools import partial

from fsmeta.meta.meta import Meta
from fsmeta.ops.sessions import ids
from fsmeta.rules.settings import create_volume, new_format
from fsmeta.runtime import SystemRuntime
from fsmeta.store.contract import Applied, Commit
from fsmeta.store.mem import MemBackend, MemStore
from fsmeta.txn.retry import Transactor
from fsmeta.txn.row_cache import RowCache
from fsmeta.writeback.backlog.held_room import HeldRoom

RUNTIME = SystemRuntime()


class Watched(MemStore):
    """Notes which commits are durable."""

    def __init__(self) -> None:
        super().__init__(MemBackend(RUNTIME))
        self.durable: list[bool] = []

    def commit(self, commit: Commit) -> Applied | None:
        self.durable.append(commit.durable)
        return super().commit(commit)


def volume() -> tuple[Watched, Transactor]:
    """A new volume."""
    store = Watched()
    run = Transactor(store, RUNTIME, RowCache(RUNTIME))
    settings = new_format("ids", "mem", "unused")
    run.run(lambda txn: create_volume(txn, settings, (0, 0), RUNTIME.now_ns()))
    store.durable.clear()
    return store, run


def test_w1_a_batch_is_durable_before_its_first_number_is_used() -> None:
    store, _ = volume()
    meta = Meta(store, RUNTIME)
    meta.new_ino()
    meta.slices.take()
    meta.new_ino()
    assert store.durable == [True, True]


def test_w1_numbers_that_a_journal_names_are_left_out() -> None:
    """The metadata came from a backup, and a journal of later knows more numbers."""
    store, run = volume()
    assert run.run(partial(ids.raise_above, ino=5000, slice_id=7000))
    assert store.durable == [True]
    assert not run.run(partial(ids.raise_above, ino=5000, slice_id=6999))
    meta = Meta(store, RUNTIME)
    assert meta.new_ino() == 5001
    assert meta.slices.take() == 7001


def test_w4_held_changes_are_bounded_in_bytes() -> None:
    """4,000 values of 64 KiB were 495 MiB of memory: only changes were counted."""
    room = HeldRoom(RUNTIME.condition(), RUNTIME)
    for sequence in range(511):
        room.add(sequence, 64 << 10, ())
    assert not room.is_full()
    room.add(511, 64 << 10, ())
    assert room.is_full()
    room.remove(3)
    assert not room.is_full()


def test_w4_a_domain_fills_its_share_of_what_may_be_held() -> None:
    """A directory that was stuck took all of it, and every other directory waited."""
    room = HeldRoom(RUNTIME.condition(), RUNTIME)
    for sequence in range(384):
        room.add(sequence, 64 << 10, (7,))
    assert room.is_full((7,))
    assert room.is_full((5, 7))
    assert not room.is_full((5,))
    room.remove(0)
    assert not room.is_full((7,))

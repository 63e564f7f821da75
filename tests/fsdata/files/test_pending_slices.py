"""Slices that are pending: which one takes a write, which may be committed, where they end."""

from __future__ import annotations

from fsdata.files.pending_slices import OPEN_MAX, PendingSlices
from fsdata.files.write_buffer import PendingSlice
from fsmeta.types import CHUNK_BYTES, FILE_SIZE_MAX, SliceId
from tests.fsdata.world import BLOCK


def added(slices: PendingSlices, pos: int, size: int, append: bool = False) -> PendingSlice:
    """A slice with bytes from `pos` of chunk 0, which is in `slices`."""
    piece = PendingSlice(SliceId(100 + len(slices.all)), 0, pos, BLOCK, append)
    slices.add(piece)
    piece.write(pos, memoryview(bytes(size)), lambda: None)
    slices.end = max(slices.end, piece.file_end)
    return piece


def stored(slices: PendingSlices, piece: PendingSlice) -> None:
    slices.seal(piece)
    for block in piece.blocks:
        block.stored()


def test_a_write_does_not_go_below_a_newer_slice() -> None:
    slices = PendingSlices()
    first = added(slices, 0, 100)
    second = added(slices, 200, 100)
    assert slices.find(0, 100, 150, False) is first
    assert slices.find(0, 300, 310, False) is second
    assert slices.find(0, 100, 250, False) is None, "the second would hide it, and is older"
    slices.seal(first)
    assert slices.find(0, 100, 150, False) is None
    assert slices.find(1, 100, 150, False) is None, "of another chunk"
    assert slices.find(0, 300, 310, True) is None, "an append has a slice of its own"


def test_the_oldest_open_slice_makes_room() -> None:
    slices = PendingSlices()
    for number in range(OPEN_MAX - 1):
        added(slices, 1000 * number, 10)
    assert slices.seal_oldest() == []
    added(slices, 1 << 20, 10)
    assert slices.seal_oldest() == slices.all[0].blocks
    assert slices.all[0].sealed
    assert slices.seal_oldest() == [], "there is room now"


def test_what_is_complete_has_nothing_open_before_it() -> None:
    slices = PendingSlices()
    pieces = [added(slices, 1000 * number, 10) for number in range(3)]
    stored(slices, pieces[0])
    stored(slices, pieces[2])
    assert slices.complete(9) == pieces[:1]
    stored(slices, pieces[1])
    assert slices.complete(2) == pieces[:2]
    assert slices.complete_to(pieces[1].id) == pieces[:2]
    assert slices.complete_to(SliceId(5)) == [], "it is not pending"


def test_a_commit_gives_back_memory_and_counts_the_end_again() -> None:
    slices = PendingSlices()
    first, second = added(slices, 5000, 10), added(slices, 0, 10)
    first.held, second.held = 7, 9
    assert slices.end == 5010
    assert slices.committed([first]) == 7
    assert (slices.end, slices.all, list(slices.by_id)) == (10, [second], [second.id])
    assert slices.committed([second]) == 9
    assert slices.end == 0


def test_appends_that_went_elsewhere_are_misplaced_until_all_are_committed() -> None:
    slices = PendingSlices()
    first, second = added(slices, 100, 10, True), added(slices, 110, 10, True)
    assert slices.append_from == 100
    slices.relocated(5000)
    slices.committed([first])
    assert (slices.misplaced, slices.append_from) == (True, second.file_begin)
    assert slices.end == 5000 + 10
    slices.committed([second])
    assert (slices.misplaced, slices.append_from) == (False, FILE_SIZE_MAX)
    assert slices.end == 0


def test_clear_forgets_all() -> None:
    slices = PendingSlices()
    added(slices, CHUNK_BYTES - 10, 10)
    slices.clear()
    assert (slices.all, slices.by_id, slices.end) == ([], {}, 0)

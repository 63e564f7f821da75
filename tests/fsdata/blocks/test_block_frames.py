"""C3, O4: blocks in frames of any size, read in ranges, in runs and as a whole."""

from __future__ import annotations

import pytest

from fsdata.blocks.blocks import BlockStore
from fsdata.blocks.layout import BlockLayout
from fsdata.format.block_v1 import head_bytes
from fsmeta.errors import ObjectDamaged
from fsmeta.types import FRAME_BYTES, FRAME_BYTES_MAX, FRAME_BYTES_MIN, SliceId
from tests.fsdata.blocks.test_blocks import BLOCK, DATA, HEAD, ONE, RUNTIME, Store
from tests.fsdata.reads import read_block


def put_in_frames(store: Store, frame_bytes: int, slice_id: SliceId) -> None:
    """A block as a volume has it that was made, or changed, to have other frames."""
    layout = BlockLayout(block_bytes=BLOCK, frame_bytes=lambda: frame_bytes)
    other = BlockStore(RUNTIME, store.objects, store.cache, layout)
    other.put_block(slice_id, 0, bytearray(DATA[:BLOCK]))


@pytest.mark.parametrize("frame", [FRAME_BYTES_MIN, FRAME_BYTES_MAX])
def test_c3_any_frames_are_read_in_their_size(frame: int) -> None:
    """O4: the first block with other frames costs a request or two more, the next none."""
    store = Store()
    at = 700_000
    for number in (77, 78):
        put_in_frames(store, frame, SliceId(number))
        before = len(store.objects.gets)
        assert read_block(store.blocks, SliceId(number), BLOCK, 0, at, at + 9) == DATA[at : at + 9]
        fetched = [(end or 0) - begin for _, begin, end in store.objects.gets[before:]]
    assert fetched == [head_bytes(BLOCK, frame), frame]
    at += 2 * FRAME_BYTES_MAX
    assert read_block(store.blocks, SliceId(77), BLOCK, 0, at, at + 9) == DATA[at : at + 9]
    _, begin, stop = store.objects.gets[-1]
    assert (stop or 0) - begin == frame, "by its own head"


@pytest.mark.parametrize("frame", [FRAME_BYTES_MIN, FRAME_BYTES_MAX])
def test_whole_blocks_of_any_frames(frame: int) -> None:
    """O4: each in one request; once frames are known straight into a buffer of ours."""
    store = Store()
    for number, reused in ((77, False), (78, True)):
        put_in_frames(store, frame, SliceId(number))
        spare = bytearray(BLOCK)
        store.cache.pass_by(spare)
        before = len(store.objects.gets)
        view = read_block(store.blocks, SliceId(number), BLOCK, 0, 0, BLOCK, True)
        assert view == DATA[:BLOCK]
        assert len(store.objects.gets) == before + 1
        assert (view.obj is spare) is reused
    assert store.read(0, 0, BLOCK, whole=True) == DATA[:BLOCK]
    store.objects.flip_at = 8 * 70_000
    for number in (77, 78):
        with pytest.raises(ObjectDamaged):
            read_block(store.blocks, SliceId(number), BLOCK, 0, 0, BLOCK, True)


def test_c3_what_is_expected_is_fetched_at_once() -> None:
    """With the head: one request for all pages of a value; of a page behind it, one frame."""
    store = Store()
    begin, size = 5 * FRAME_BYTES + 4096, 6 * FRAME_BYTES
    for at in range(begin, begin + size, 4096):
        more = begin + size - at - 4096
        view = read_block(store.blocks, ONE, len(DATA), 1, at, at + 4096, more=more)
        assert view == DATA[BLOCK + at : BLOCK + at + 4096]
    assert store.objects.together == [2]
    assert [(end or 0) - begin for _, begin, end in store.objects.gets] == [HEAD, 7 * FRAME_BYTES]
    end = BLOCK - 4096
    view = read_block(store.blocks, ONE, len(DATA), 1, end - 4096, end, more=FRAME_BYTES)
    assert view == DATA[BLOCK + end - 4096 : BLOCK + end]
    assert store.objects.gets[-1][2] == HEAD + BLOCK, "no more than there is"

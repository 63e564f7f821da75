"""The object format: golden bytes, round trips, and every damaged byte is noticed."""

from __future__ import annotations

import hashlib
from struct import Struct

import pytest
from crc32c import crc32c
from hypothesis import given, strategies as st

from fsdata.format.block_v1 import (
    Codec,
    decode,
    decode_range,
    encode,
    frame_range,
    head_bytes,
    parse_head,
)
from fsmeta.errors import ObjectDamaged
from fsmeta.types import FRAME_BYTES_MAX, FRAME_BYTES_MIN
from tests.fsdata.world import pattern

CODECS = st.sampled_from(list(Codec))
FRAMES = st.sampled_from([FRAME_BYTES_MAX >> by for by in range(5)])


def test_golden_bytes() -> None:
    assert (
        b"".join(encode([b"slice", b"fs"])).hex()
        == ("534653420100001007000000070000000b0c9f30afe484d8") + b"slicefs".hex()
    )
    assert head_bytes(7) == 24


def test_golden_bytes_of_small_frames() -> None:
    """Each CRC is of everything up to the end of its frame."""
    block = pattern(FRAME_BYTES_MIN + 9)
    whole = b"".join(encode([block], frame_bytes=FRAME_BYTES_MIN))
    assert whole[:28].hex() == "534653420300000c091000000910000047e89e39e2f203dcf02ca76f"
    assert whole[28:] == block
    (whole_crc,) = Struct("<I").unpack_from(whole, 24)
    assert whole_crc == crc32c(block)
    assert head_bytes(len(block), FRAME_BYTES_MIN) == 28


@given(st.lists(st.binary(max_size=200), min_size=1).filter(any), CODECS)
def test_round_trip(pieces: list[bytes], codec: Codec) -> None:
    assert decode(b"".join(encode(pieces, codec))) == b"".join(pieces)


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("frame", [FRAME_BYTES_MAX, FRAME_BYTES_MIN])
@pytest.mark.parametrize("frames", [(0, 1), (1, 0), (1, 1), (5, -3)])
def test_round_trip_of_many_frames(codec: Codec, frame: int, frames: tuple[int, int]) -> None:
    size = frames[0] * frame + frames[1]
    for data in (pattern(size), b"ab" * size):
        cut = len(data) // 3
        whole = b"".join(encode([data], codec, frame_bytes=frame))
        halves = encode([data[:cut], data[cut:]], codec, frame_bytes=frame)
        assert whole == b"".join(halves), "pieces don't matter"
        assert decode(whole) == data


def test_uncompressed_payload_is_not_copied() -> None:
    data = bytearray(pattern(1000))
    assert encode([data])[1] is data
    whole = b"".join(encode([data]))
    assert decode(whole).obj is whole


@pytest.mark.parametrize("codec", [Codec.LZ4, Codec.ZSTD])
def test_incompressible_data_is_stored_as_it_is(codec: Codec) -> None:
    dense = b"".join(encode([b"\x00" * 9999], codec))
    assert parse_head(dense).codec is codec
    assert len(dense) < 999
    noise = b"".join(hashlib.sha256(bytes([n])).digest() for n in range(200))
    assert parse_head(b"".join(encode([noise], codec))).codec is Codec.NONE


@given(st.integers(0, 10**9), CODECS, FRAMES)
def test_every_flipped_bit_is_noticed(where: int, codec: Codec, frame: int) -> None:
    whole = bytearray(b"".join(encode([b"some words " * 9], codec, frame_bytes=frame)))
    whole[where // 8 % len(whole)] ^= 1 << where % 8
    with pytest.raises(ObjectDamaged):
        decode(whole)


@given(st.integers(0, 10**9), CODECS, FRAMES)
def test_every_torn_object_is_noticed(where: int, codec: Codec, frame: int) -> None:
    whole = b"".join(encode([b"some words " * 900], codec, frame_bytes=frame))
    with pytest.raises(ObjectDamaged):
        decode(whole[: where % len(whole)])
    with pytest.raises(ObjectDamaged):
        decode(whole + b"x")


@given(st.data(), FRAMES)
def test_ranges(data: st.DataObject, frame: int) -> None:
    block = pattern(3 * FRAME_BYTES_MAX + 77)
    whole = b"".join(encode([block], frame_bytes=frame))
    begin = data.draw(st.integers(0, len(block) - 1))
    end = data.draw(st.integers(begin + 1, len(block)))
    first, last = frame_range(begin, end, len(block), frame)
    assert last - first < end - begin + 2 * frame
    head = parse_head(whole[: head_bytes(len(block), frame)])
    assert head.span(begin, end) == (first, first, last)
    part = bytearray(whole[head.size + first : head.size + last])
    assert decode_range(head, first, part)[begin - first : end - first] == block[begin:end]
    part[data.draw(st.integers(0, len(part) - 1))] ^= 4
    with pytest.raises(ObjectDamaged):
        decode_range(head, first, part)


@given(st.data(), FRAMES)
def test_a_range_from_elsewhere_is_noticed(data: st.DataObject, frame: int) -> None:
    """Frames that are right, in a place that is not theirs."""
    block = pattern(3 * FRAME_BYTES_MAX)
    head = parse_head(b"".join(encode([block], frame_bytes=frame)))
    count = len(block) // frame
    there, here = data.draw(
        st.lists(st.integers(0, count - 1), min_size=2, max_size=2, unique=True)
    )
    with pytest.raises(ObjectDamaged):
        decode_range(head, here * frame, block[there * frame : (there + 1) * frame])


@pytest.mark.parametrize("log2", [0, 11, 16, 17, 255])
def test_other_frames_are_damage(log2: int) -> None:
    """Whatever their checksum says: no version of slicefs has stored them."""
    whole = bytearray(b"".join(encode([b"words"], frame_bytes=FRAME_BYTES_MIN)))
    whole[7] = log2
    whole[16:20] = Struct("<I").pack(crc32c(whole[20:24], crc32c(whole[:16])))
    with pytest.raises(ObjectDamaged, match="frame"):
        decode(whole)
